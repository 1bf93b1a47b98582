"""Makes the foreground map of a volume, without reading its voxels.

From the list of its stored chunks (or its `.chunk_occupancy.npz` sidecar), a coarse level above a threshold, or a mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, DataConfig, Triple, VolumeConfig
from vesuvius.plan.foreground import ForegroundMap
from vesuvius.runlog.progress import with_progress
from vesuvius.volumes.box import Box, chunk_box, chunk_ranges, grid_shape, times, triple
from vesuvius.volumes.coarser import Upsampling
from vesuvius.volumes.listing import Bools, chunk_occupancy
from vesuvius.volumes.missing import StoredChunks
from vesuvius.volumes.volume import Volume, open_volume

_CELLS_MAX = 64_000_000
_BLOCK_BYTES = 64 * 2**20


def foreground_map(volume: Volume, spec: VolumeConfig, config: DataConfig) -> ForegroundMap | None:
    """The map that `data.min_foreground` is measured on; None where that is 0.  Reads, and logs progress.

    A list of stored chunks is also given to the volume.

    Raises:
        DataError: the listing, the coarse level or the mask cannot be read, or does not fit the volume.
    """
    if config.min_foreground == 0:
        return None
    if spec.mask is not None:
        mask = open_volume(spec.mask, config.store)
        return coarse_map(volume, mask, None, config.patch_size)
    if config.foreground.source == "level":
        coarse_spec = ArrayConfig(path=spec.path, level=config.foreground.level, select=spec.select)
        return coarse_map(
            volume, open_volume(coarse_spec, config.store), config.foreground.threshold, config.patch_size
        )
    occupancy = chunk_occupancy(volume, config.max_quarantined)
    if occupancy.shape == volume.grid.counts_zyx:  # of a stored shard any chunk may be absent
        volume.missing.stored = StoredChunks.of(occupancy)
    return occupancy_map(volume, occupancy)


def occupancy_map(volume: Volume, occupancy: Bools) -> ForegroundMap:
    """The map whose cells are chunks (or shards), all foreground where they are stored."""
    cell = volume.chunk_zyx if occupancy.shape == volume.grid.counts_zyx else volume.grid.shard_zyx
    assert cell is not None
    return ForegroundMap(np.where(occupancy, np.uint8(255), np.uint8(0)), cell, volume.shape_zyx)


def coarse_map(volume: Volume, coarse: Volume, threshold: float | None, patch_zyx: Triple) -> ForegroundMap:
    """The map of a coarser array's voxels above a threshold (None = that are not 0).  Streams the array once.

    Cells are a quarter of a patch or one coarse voxel, whichever is larger, or larger to stay below 64 million.

    Raises:
        DataError: the array is not coarser by whole factors, or cannot be read.
    """
    factors = Upsampling.between(volume, coarse, "a mask or coarse level").factors
    merged = [max(p // (4 * f), 1) for p, f in zip(patch_zyx, factors, strict=True)]
    while np.prod([-(-n // m) for n, m in zip(coarse.shape_zyx, merged, strict=True)]) > _CELLS_MAX:
        finest = min(range(3), key=lambda axis: merged[axis] * factors[axis])
        merged[finest] *= 2
    cell = times(triple(merged), factors)
    fraction = np.zeros(grid_shape(volume.shape_zyx, cell), np.uint8)
    boxes = list(_blocks(coarse, merged))
    what = f"reading {coarse.name} for the foreground of {volume.name}"
    with closing(coarse):
        for number, box in enumerate(with_progress(boxes, what, len(boxes))):
            for near in boxes[number : number + 2]:
                coarse.stage(near)
            voxels = coarse.read(box)
            share = _share_of_cells(voxels != 0 if threshold is None else voxels > threshold, merged)
            fraction[np.ix_(*chunk_ranges(box, triple(merged)))] = share
    return ForegroundMap(fraction, cell, volume.shape_zyx)


def _blocks(coarse: Volume, merged: list[int]) -> Iterator[Box]:
    """Boxes of some 64 MiB that cover an array; edges are multiples of `merged`, and of its chunks where possible."""
    edge = int((_BLOCK_BYTES / coarse.dtype.itemsize) ** (1 / 3))
    whole = [math.lcm(m, chunk) for m, chunk in zip(merged, coarse.chunk_zyx, strict=True)]
    units = [unit if unit <= edge else m for unit, m in zip(whole, merged, strict=True)]
    steps = triple(max(edge // unit, 1) * unit for unit in units)
    for index in np.ndindex(grid_shape(coarse.shape_zyx, steps)):
        yield chunk_box(triple(index), steps, coarse.shape_zyx)


def _share_of_cells(foreground: Bools, merged: list[int]) -> NDArray[np.uint8]:
    """Foreground share of each cell, 0..255; the last cells may be smaller."""
    total: NDArray[Any] = foreground.astype(np.uint32)
    voxels: NDArray[Any] = np.ones((1, 1, 1), np.uint32)
    for axis, m in enumerate(merged):
        starts = np.arange(0, foreground.shape[axis], m)
        total = np.add.reduceat(total, starts, axis=axis)
        sizes = np.diff(np.append(starts, foreground.shape[axis]))
        voxels = voxels * sizes.reshape([-1 if a == axis else 1 for a in range(3)])
    share: NDArray[np.uint8] = ((255 * total.astype(np.uint64) + voxels // 2) // voxels).astype(np.uint8)
    return share
