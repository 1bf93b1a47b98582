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
from vesuvius.volumes.box import Box, box_along, chunk_ranges, format_box, intersection, moved, slices, triple
from vesuvius.volumes.chunks import ChunkGrid
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.staged import StagedStore
from vesuvius.volumes.store.source import Source

# Metadata are looked at no more often than this, and for no more than one part in so many of the time.
_CHECK_EVERY_S = 1.0
_CHECK_SHARE = 50
# Per axis of a chunk, where it is looked for voxels that are not air.
_SAMPLES = 3


@dataclass(frozen=True, eq=False)
class StoredChunks:
    """The chunks that a listing has found, one bit each; `chunk in stored`.  Picklable."""

    bits: NDArray[np.uint8]  # in C order, eight to a byte
    counts_zyx: Triple  # chunks along each axis

    @classmethod
    def of(cls, occupancy: NDArray[np.bool_]) -> StoredChunks:
        """From bool over the chunk grid (z, y, x)."""
        return cls(np.packbits(occupancy), triple(occupancy.shape))

    def __contains__(self, chunk: Triple) -> bool:
        z, y, x = chunk
        place = (z * self.counts_zyx[1] + y) * self.counts_zyx[2] + x
        return bool(self.bits[place >> 3] >> (7 - (place & 7)) & 1)


class MetadataCheck:
    """Whether a volume is still there, and still the same: its metadata are compared with those of the start."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._known: bytes | None = None
        self._due = 0.0

    def note(self, key: str, stored: bytes) -> None:
        """Remember the object that holds the metadata, and its bytes."""
        self._source.metadata_key, self._known = key, stored

    def check(self, at_once: bool) -> None:
        """Raises DataError where the volume is gone, or is another one; looks no more often than costs nothing."""
        started, key = time.monotonic(), self._source.metadata_key
        if self._known is None or key is None or (started < self._due and not at_once):
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
        staged: where its chunks are fetched ahead; None on disk.
        metadata: looked at before a chunk is called gone.
        air: what voxels of floats are given in absent chunks.
        treatment: `data.missing_chunk`.

    Attributes:
        stored: the chunks that a listing has found, where one was made: one of them that is absent is damaged, not air.
    """

    def __init__(
        self,
        name: str,
        grid: ChunkGrid,
        staged: StagedStore | None,
        metadata: MetadataCheck,
        air: float,
        treatment: Literal["air", "error"],
    ) -> None:
        self.stored: StoredChunks | None = None
        self._name = name
        self._grid = grid
        self._source = grid.source
        self._staged = staged
        self._metadata = metadata
        self._air = air
        self._treatment = treatment
        self._seen = np.zeros(grid.counts_zyx, bool)  # takes memory only where something was read

    def check_present(self, box: Box) -> None:
        """Raises DataError where a chunk of a box is absent and must not be; what `ChunkGrid.absent` raises.

        Of what is staged the store has told already.
        """
        if self._treatment != "error":
            return
        remote = self._staged is not None
        absent = [c for c in self._grid.chunks_of(box) if self._is_absent(c)] if remote else self._grid.absent(box)
        if absent:
            raise DataError(
                f"every chunk must be stored with data.missing_chunk=error; got {len(absent)} absent, the first "
                f"{list(absent[0])}, in volume {self._name}, region {format_box(box)}; restore it, or set "
                "data.missing_chunk=air"
            )

    def treat(self, box: Box, out: NDArray[Any]) -> None:
        """Tell air from what is gone, among the chunks of a box that seem to have come as nothing but the fill value.

        Costs a few samples of each chunk, and a look at the store for those whose samples are all fill.
        """
        fill = self._grid.array.fill_value
        stored = _some_differ(out, 0 if fill is None else fill, box, self._grid.chunk_zyx)
        chunks = box_along((r.start, r.stop) for r in chunk_ranges(box, self._grid.chunk_zyx))
        seen = self._seen[slices(chunks)]
        for place in np.argwhere(~stored).tolist():
            chunk = moved(chunks[0], place)
            if not self._is_absent(chunk):
                stored[tuple(place)] = True
                continue
            known = "read before" if seen[tuple(place)] else "listed as stored"
            gone = seen[tuple(place)] or (self.stored is not None and chunk in self.stored)
            self._metadata.check(at_once=bool(gone))
            if gone:
                whole_shard = not self._source.exists(self._grid.key_of(chunk))
                damaged = self._grid.object_box(chunk) if whole_shard else self._grid.box_of(chunk)
                raise UnreadableChunkError(self._name, box, chunk, damaged, f"{known}, but missing")
            if out.dtype.kind == "f":
                out[slices(intersection(self._grid.box_of(chunk), box), box[0])] = self._air
        seen |= stored

    def _is_absent(self, chunk: Triple) -> bool:
        """Whether no bytes are stored for a chunk.  Raises as `Source.get`, and what `ChunkGrid.shard_index` raises."""
        grid, key = self._grid, self._grid.key_of(chunk)
        absent = None
        if self._staged is not None:
            absent = self._staged.found_absent(key, None)
            absent = self._staged.found_absent(key, grid.index_range) if absent is None else absent
        if absent is None:
            absent = not self._source.exists(key)
        return absent or (grid.shard_zyx is not None and bool(grid.absent(grid.box_of(chunk))))


def _some_differ(voxels: NDArray[Any], fill: Any, box: Box, chunk_zyx: Triple) -> NDArray[np.bool_]:
    """In which chunks of a box a few samples hold another value than one: bool over the chunks that it touches."""
    places, shape = [], []
    for lo, hi, edge in zip(*box, chunk_zyx, strict=True):
        firsts = np.arange(lo // edge, -(-hi // edge)) * edge
        starts, lasts = np.maximum(firsts, lo) - lo, np.minimum(firsts + edge, hi) - lo - 1
        places.append(np.stack([starts + (lasts - starts) * k // (_SAMPLES - 1) for k in range(_SAMPLES)], 1).ravel())
        shape += [len(firsts), _SAMPLES]
    samples = voxels[np.ix_(*places)]
    differs = ~np.isnan(samples) if fill != fill else samples != fill  # NaN does not equal itself
    return np.asarray(differs.reshape(shape).any((1, 3, 5)))


def _essential(metadata: bytes) -> Any:
    """Metadata without attributes, which may be edited at any time."""
    try:
        found = json.loads(metadata)
    except ValueError:
        return metadata
    return {key: value for key, value in found.items() if key != "attributes"} if isinstance(found, dict) else found
