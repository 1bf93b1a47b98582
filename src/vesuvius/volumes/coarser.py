"""How a coarse array lies in a fine one: each of its voxels covers a whole number of fine voxels along each axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import DataError
from vesuvius.volumes.box import Box, box_along, shape_of, triple
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.volume import Volume

_POWERS = tuple(2**n for n in range(16))


@dataclass(frozen=True)
class Upsampling:
    """Shows a coarse array in the voxels of a fine one.  Both begin at the same corner; factors of 1 change nothing."""

    fine_zyx: Triple
    coarse_zyx: Triple
    factors: Triple

    @classmethod
    def between(cls, volume: Volume, coarse: Volume, what: str) -> Self:
        """Raises DataError unless `coarse` has the shape of `volume`, or is smaller by a whole factor per axis.

        Args:
            what: the coarse array's name in the message.
        """
        factors = factors_between(volume.shape_zyx, coarse.shape_zyx)
        if factors is None:
            raise DataError(
                f"{what} must have the shape of its volume, or be smaller by a whole factor per axis; got "
                f"{coarse.shape_zyx} of {coarse.name} for {volume.shape_zyx} of {volume.name}; take another level, or "
                "resample it"
            )
        return cls(volume.shape_zyx, coarse.shape_zyx, factors)

    def coarse_box(self, box: Box) -> Box:
        """The coarse voxels that cover a box of fine ones.  Those beyond the coarse array are shown its last voxels."""
        ends = zip(*box, self.factors, self.coarse_zyx, strict=True)
        return box_along((min(lo // f, size - 1), min(-(-hi // f), size)) for lo, hi, f, size in ends)

    def fine_box(self, box: Box) -> Box:
        """All fine voxels that a box of coarse ones is shown in."""
        ends = zip(*box, self.factors, self.coarse_zyx, self.fine_zyx, strict=True)
        return box_along((lo * f, size if hi == last else min(hi * f, size)) for lo, hi, f, last, size in ends)

    def read(
        self, box: Box, read: Callable[[Box, NDArray[Any] | None], NDArray[Any]], out: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        """A box of fine voxels, the coarse ones repeated: their dtype, the shape of the box.

        Args:
            read: reads coarse voxels, e.g. `Volume.read`.
            out: as in `Volume.read`.

        Raises:
            UnreadableChunkError: with boxes in fine voxels.
        """
        if self.factors == (1, 1, 1):
            return read(box, out)
        start, stop = self.coarse_box(box)
        try:
            voxels = read((start, stop), None)
        except UnreadableChunkError as error:
            damaged = self.fine_box(error.box)
            raise UnreadableChunkError(error.volume, box, error.chunk, damaged, error.cause) from error
        out = np.empty(shape_of(box), voxels.dtype) if out is None else out
        z, y, x = (
            np.minimum(np.arange(lo, hi) // f, last - 1) - first
            for lo, hi, f, first, last in zip(*box, self.factors, start, stop, strict=True)
        )
        for number, plane in enumerate(voxels):  # plane by plane, so that what is repeated stays in the cache
            lo, hi = np.searchsorted(z, (number, number + 1))
            out[lo:hi] = plane.take(x, axis=1).take(y, axis=0)
        return out


def factors_between(fine_zyx: Triple, coarse_zyx: Triple) -> Triple | None:
    """Fine voxels per coarse voxel along each axis; None where these are no whole numbers.  Pure.

    Sizes are ambiguous: 100 voxels become 4 by any factor from 21 to 33.  As pyramids halve, a power of two is
    preferred, the same for all axes if possible.
    """
    sizes = list(zip(fine_zyx, coarse_zyx, strict=True))
    fitting = [{f for f in (*_POWERS, round(fine / size)) if f and fits(fine, size, f)} for fine, size in sizes]
    if not all(fitting):
        return None
    common = set.intersection(*fitting).intersection(_POWERS)
    return triple(min(common or factors.intersection(_POWERS) or factors) for factors in fitting)


def fits(fine: int, coarse: int, factor: int) -> bool:
    """Whether so many coarse voxels are what a pyramid makes of so many fine ones, rounded down or up."""
    return coarse in (fine // factor, -(-fine // factor))
