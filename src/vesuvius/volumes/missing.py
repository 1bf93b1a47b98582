"""What is not there: chunks that are air, chunks that are gone, and volumes that are gone.

zarr takes a chunk that is not stored for air, whatever the reason.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import DataError
from vesuvius.volumes.box import Box, box_along, chunk_ranges, format_box, slices, triple
from vesuvius.volumes.chunks import ChunkGrid
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.key_form import other_key
from vesuvius.volumes.store.source import Source

# Metadata are looked at no more often than this, and for no more than one part in so many of the time.
_CHECK_EVERY_S, _CHECK_SHARE = 1.0, 50
_LOOKS = 64  # absent objects of a volume for which a process looks by the other forms of key


@dataclass(frozen=True, eq=False)
class StoredChunks:
    """The chunks that a listing has found, one bit each.  Picklable."""

    bits: NDArray[np.uint8]  # in C order, eight to a byte
    counts_zyx: Triple  # chunks along each axis

    @classmethod
    def of(cls, occupancy: NDArray[np.bool_]) -> StoredChunks:
        """From bool over the chunk grid (z, y, x)."""
        return cls(np.packbits(occupancy), triple(occupancy.shape))

    def any_of(self, chunks: tuple[range, range, range]) -> bool:
        """Whether one of the chunks of a box of them is stored."""
        places = np.ravel_multi_index(np.ix_(*chunks), self.counts_zyx)
        return bool((self.bits[places >> 3] >> (7 - (places & 7)) & 1).any())


class MetadataCheck:
    """Whether a volume is still there, and still the same: its metadata are compared with those of the start.

    Args:
        key: the object that holds them; `stored` is what it held.
    """

    def __init__(self, source: Source, key: str, stored: bytes) -> None:
        self._source, self._key, self._known = source, key, stored
        self._due = 0.0

    def check(self, at_once: bool) -> None:
        """Raises DataError where the volume is gone, or is another one; looks no more often than costs nothing."""
        started, key = time.monotonic(), self._key
        if started < self._due and not at_once:
            return
        found = self._source.get(key, cached=False)
        now = time.monotonic()
        self._due = now + max(_CHECK_EVERY_S, _CHECK_SHARE * (now - started))
        if found is None:
            raise DataError(
                f"a volume must not move while it is read; got no {key} in {self._source.shown} any more: the volume "
                "is gone (deleted, or its file system is no longer mounted); restore it, then continue with --resume"
            )
        if found != self._known and _essential(found) != _essential(self._known):
            raise DataError(
                f"a volume must not change while it is read; got different metadata in {key} of "
                f"{self._source.shown} than at the start: it has been replaced; start a new run for another volume"
            )
        self._known = found


class MissingChunks:
    """The chunks of a volume that are not stored: told from those that are gone.

    Args:
        name: of the volume, for messages.
        metadata: looked at before a chunk is called gone.
        treatment: `data.missing_chunk`.
        stored: the chunks that a listing has found, where one was made: one of them that is absent is damaged, not air.
    """

    def __init__(
        self,
        name: str,
        grid: ChunkGrid,
        metadata: MetadataCheck,
        treatment: Literal["air", "error"],
        stored: StoredChunks | None,
    ) -> None:
        self._name, self._grid, self._metadata = name, grid, metadata
        self._treatment, self._stored = treatment, stored
        self._looked_for = set[Triple]()
        self._seen = np.zeros(grid.counts_zyx, bool)  # takes memory only where something was read

    def note_listed(self, stored: StoredChunks | None) -> None:
        """Take what a listing has found: one of these that is absent is damaged, not air."""
        self._stored = stored

    def note_present(self, chunk: Triple) -> None:
        """Remember that a chunk is stored."""
        self._seen[chunk] = True

    def check_absent(self, chunk: Triple, box: Box) -> None:
        """What follows from a chunk that is absent, met while reading a box; air if nothing is raised.

        Raises:
            UnreadableChunkError: it is gone.
            DataError: it must not be absent, or the volume as a whole is gone.
        """
        if self._treatment == "error":
            raise DataError(
                f"chunk {list(chunk)} of volume {self._name} is not stored, region {format_box(box)}, and "
                "data.missing_chunk=error; restore it, or set data.missing_chunk=air"
            )
        # All of a shard is damaged if it is gone with one chunk that was there: the same for every box that touches it.
        grid = self._grid
        whole = grid.is_absent_with_its_object(chunk)
        damaged = grid.object_box(chunk) if whole else grid.box_of(chunk)
        chunks = chunk_ranges(damaged, grid.chunk_zyx)
        seen = bool(self._seen[slices(box_along((r.start, r.stop) for r in chunks))].any())
        listed = self._stored is not None and self._stored.any_of(chunks)
        self._metadata.check(at_once=seen or listed)
        if seen or listed:
            cause = f"{'read before' if seen else 'listed as stored'}, but missing"
            raise UnreadableChunkError(self._name, box, chunk, damaged, cause)
        place = grid.object_index(chunk)
        if whole and place not in self._looked_for and len(self._looked_for) < _LOOKS:
            if (other := other_key(grid, place)) is not None:
                raise DataError(
                    f"Chunks of {self._name} are stored by two forms of key: {grid.key_of(chunk)} is absent, and "
                    f"{other} is there and would be read as air; rename those of one form"
                )
            self._looked_for.add(place)


def _essential(metadata: bytes) -> Any:
    """Metadata without attributes, which may be edited at any time."""
    try:
        found = json.loads(metadata)
    except ValueError:
        return metadata
    return {key: value for key, value in found.items() if key != "attributes"} if isinstance(found, dict) else found
