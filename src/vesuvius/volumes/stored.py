"""Which chunks of a volume a listing has found, in one bit each, so that readers can tell what is gone from air."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple


@dataclass(frozen=True, eq=False)
class Stored:
    """The chunks that are stored, asked for by `chunk in stored`.  Picklable.

    Attributes:
        bits: one for each chunk in C order, eight to a byte.
        counts_zyx: chunks along each axis.
    """

    bits: NDArray[np.uint8]
    counts_zyx: Triple

    @classmethod
    def of(cls, occupancy: NDArray[np.bool_]) -> Stored:
        """From bool over the chunk grid (z, y, x)."""
        z, y, x = occupancy.shape
        return cls(np.packbits(occupancy), (z, y, x))

    def __contains__(self, chunk: Triple) -> bool:
        z, y, x = chunk
        place = (z * self.counts_zyx[1] + y) * self.counts_zyx[2] + x
        return bool(self.bits[place >> 3] >> (7 - (place & 7)) & 1)
