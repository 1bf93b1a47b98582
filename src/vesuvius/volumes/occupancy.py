"""Where a volume holds something: its foreground map, made without reading its voxels.

From the list of its stored chunks (or its `.chunk_occupancy.npz` sidecar), a coarse level above a threshold, or a mask.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, DataConfig, Triple, VolumeConfig
from vesuvius.runlog.progress import with_progress
from vesuvius.volumes.alignment import Alignment, log_alignment
from vesuvius.volumes.box import Box, box_along, grid_shape, triple
from vesuvius.volumes.listing import chunk_occupancy
from vesuvius.volumes.missing import StoredChunks
from vesuvius.volumes.volume import Volume, open_volume
from vesuvius.volumes.voxels import Nan

_CELLS_MAX = 64_000_000
_BLOCK_BYTES = 8 * 2**20


@dataclass(frozen=True, eq=False)
class ForegroundMap:
    """The foreground share of each map cell of a volume.  Compared by identity; compare `hash` for content."""

    fraction: NDArray[np.uint8]  # (nz, ny, nx), 0 none ... 255 all of the cell
    cell_zyx: Triple  # voxels of a cell
    shape_zyx: Triple  # of the volume; the last cell of an axis may stick out of it: its fraction is that of its inside
    within: Box | None = None  # the part of the volume that the map knows; None = all
    listed: bool = False  # whether its cells are the chunks (or shards) that a listing has found

    def __post_init__(self) -> None:
        cells = grid_shape(self.shape_zyx, self.cell_zyx)
        if self.fraction.dtype != np.uint8 or self.fraction.shape != cells:
            raise ValueError(
                f"a foreground map must be uint8 {cells}; got {self.fraction.dtype} {self.fraction.shape} for cells of "
                f"{self.cell_zyx} in a volume of {self.shape_zyx}; make the map again for this volume"
            )

    @cached_property
    def hash(self) -> str:
        """Changes with any cell, the cells' size or the volume's shape."""
        digest = hashlib.sha256(np.array([self.cell_zyx, self.shape_zyx], "<i8").tobytes())
        digest.update(np.ascontiguousarray(self.fraction).data)
        return digest.hexdigest()[:16]

    def stored(self, chunk_zyx: Triple) -> StoredChunks | None:
        """The chunks that the listing has found; None without one, or one of shards: any chunk of these may be
        absent."""
        return StoredChunks.of(self.fraction > 0) if self.listed and self.cell_zyx == chunk_zyx else None


def foreground_map(volume: Volume, spec: VolumeConfig, config: DataConfig) -> ForegroundMap | None:
    """The map that `data.min_foreground` is measured on; None where that is 0.  Reads, and logs progress.

    Raises:
        DataError: the listing, the coarse level or the mask cannot be read, or does not fit the volume.
    """
    if config.min_foreground == 0:
        return None
    nan: Nan = "error" if config.nan == "error" else "keep"  # whatever NaN is read as, it is no foreground
    if spec.mask is not None:
        mask = open_volume(spec.mask, config.store, nan=nan)
        return coarse_map(volume, mask, None, config.patch_size)
    if config.foreground.source == "level":
        coarse_spec = ArrayConfig(path=spec.path, level=config.foreground.level, select=spec.select)
        coarse = open_volume(coarse_spec, config.store, nan=nan)
        return coarse_map(volume, coarse, config.foreground.threshold, config.patch_size, "the foreground level")
    occupancy = chunk_occupancy(volume, config.max_quarantined)
    cell = volume.chunk_zyx if occupancy.shape == volume.grid.counts_zyx else volume.grid.object_zyx
    fraction = np.where(occupancy, np.uint8(255), np.uint8(0))
    return ForegroundMap(fraction, cell, volume.shape_zyx, listed=True)


def coarse_map(
    volume: Volume, coarse: Volume, threshold: float | None, patch_zyx: Triple, what: str = "the mask"
) -> ForegroundMap:
    """The map of an array's voxels above a threshold (None = that are not 0), where it lies.  NaN and
    infinity are not.  Streams the array once.

    Cells are a quarter of a patch or one voxel of the array, whichever is larger, or larger to stay below 64 million.

    Raises:
        DataError: the array does not lie in the volume, or cannot be read.
    """
    alignment = log_alignment(volume, coarse, what)
    merged = [int(max(p // (4 * f), 1)) for p, f in zip(patch_zyx, alignment.factors, strict=True)]
    while True:
        cell = triple(math.ceil(m * f) for m, f in zip(merged, alignment.factors, strict=True))
        counts = grid_shape(volume.shape_zyx, cell)
        if math.prod(counts) <= _CELLS_MAX:
            break
        merged[cell.index(min(cell))] *= 2
    fraction = np.zeros(counts, np.uint8)
    steps = [step // m for step, m in zip(_block_edges(coarse, merged), merged, strict=True)]
    blocks = list(itertools.product(*(_spans(alignment, axis, cell[axis], steps[axis]) for axis in range(3))))
    boxes = [box_along(voxels for voxels, _, _ in block) for block in blocks]
    reading = f"reading {coarse.name} for the foreground of {volume.name}"
    with closing(coarse):
        for number, block in enumerate(with_progress(blocks, reading, len(blocks))):
            for near in boxes[number : number + 2]:
                coarse.stage(near)
            voxels = coarse.read(boxes[number])
            foreground = (voxels != 0 if threshold is None else voxels > threshold) & np.isfinite(voxels)
            shown, sizes = foreground.astype(np.float64), np.ones((1, 1, 1))
            for *_, places in block:  # the first axis goes to the end, three times
                shown, sizes = np.tensordot(shown, places, (0, 1)), sizes[0, ..., None] * places.sum(1)
            fraction[tuple(cells for _, cells, _ in block)] = (255 * shown + sizes // 2) // sizes
    return ForegroundMap(fraction, cell, volume.shape_zyx, alignment.covered)


def _spans(
    alignment: Alignment, axis: int, cell: int, step: int
) -> Iterator[tuple[tuple[int, int], slice, NDArray[np.float64]]]:
    """`step` cells at a time along an axis, where the array lies; its last voxels count as a whole.

    Yields:
        The array's voxels (first and stop) that these cells are shown, the cells, and [cells, voxels]: at how many
        places of a cell the volume is shown a voxel.
    """
    first, stop = alignment.shown(axis)
    for begin in range(first // cell, -(-stop // cell), step):
        lo, hi = max(begin * cell, first), min((begin + step) * cell, stop)
        voxels, cells = alignment.indices(axis, lo, hi), np.arange(lo, hi) // cell
        places = np.zeros((cells[-1] + 1 - cells[0], voxels[-1] + 1 - voxels[0]))
        np.add.at(places, (cells - cells[0], voxels - voxels[0]), 1)
        yield (int(voxels[0]), int(voxels[-1]) + 1), slice(int(cells[0]), int(cells[-1]) + 1), places


def _block_edges(coarse: Volume, merged: list[int]) -> Triple:
    """Edges of boxes of some 8 million voxels; multiples of `merged`, and of chunks where possible."""
    edge = int((_BLOCK_BYTES / coarse.dtype.itemsize) ** (1 / 3))
    whole = [math.lcm(m, chunk) for m, chunk in zip(merged, coarse.chunk_zyx, strict=True)]
    units = [unit if unit <= edge else m for unit, m in zip(whole, merged, strict=True)]
    return triple(max(edge // unit, 1) * unit for unit in units)
