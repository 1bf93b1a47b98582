"""Tiles and blocks of a volume, and the weight of each tile at each voxel.  Pure.

The network sees overlapping tiles.  State is kept in blocks, which have the same size and do not overlap.  Both are
indexed in C order.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import ConfigError
from vesuvius.runlog.units import format_sizes
from vesuvius.volumes.box import (
    Box,
    box_at,
    chunk_box,
    chunk_ranges,
    grid_shape,
    intersection,
    slices,
    triple,
)

_MAX_OVERLAP = 0.75
_LEAST_OVERLAP = 4  # voxels


@dataclass(frozen=True)
class Tiling:
    shape_zyx: Triple  # of the volume
    patch_zyx: Triple  # of a tile and of a block
    overlap: float  # least overlap of neighboring tiles, as a share of a patch; see `tile_starts`

    def check(self) -> None:
        if any(size < patch for size, patch in zip(self.shape_zyx, self.patch_zyx, strict=True)):
            raise ConfigError(
                f"A volume of {format_sizes(self.shape_zyx)} is smaller than a training patch "
                f"({format_sizes(self.patch_zyx)}); increase --shape"
            )
        if not 0 <= self.overlap <= _MAX_OVERLAP:
            raise ConfigError(
                f"--overlap {self.overlap:g} is not between 0 and {_MAX_OVERLAP} (the share of a tile "
                "that its neighbor covers); try 0.25"
            )

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """Starts of tiles along each axis, evenly spaced from end to end."""
        return tuple(
            tile_starts(size, patch, self.overlap) for size, patch in zip(self.shape_zyx, self.patch_zyx, strict=True)
        )

    @property
    def tile_grid(self) -> Triple:
        return triple(map(len, self.starts))

    @property
    def tiles(self) -> int:
        return math.prod(self.tile_grid)

    @property
    def block_grid(self) -> Triple:
        """Number of blocks along each axis; the last one may be cut."""
        return grid_shape(self.shape_zyx, self.patch_zyx)

    @property
    def blocks(self) -> int:
        return math.prod(self.block_grid)

    def tile_box(self, tile: int) -> Box:
        index = _grid_index(tile, self.tile_grid)
        return box_at(triple(starts[i] for starts, i in zip(self.starts, index, strict=True)), self.patch_zyx)

    def block_index(self, block: int) -> Triple:
        return _grid_index(block, self.block_grid)

    def block_box(self, block: int) -> Box:
        return chunk_box(self.block_index(block), self.patch_zyx, self.shape_zyx)

    def tiles_over(self, box: Box) -> list[int]:
        per_axis = [
            [i for i, start in enumerate(starts) if lo - patch < start < hi]
            for starts, patch, lo, hi in zip(self.starts, self.patch_zyx, *box, strict=True)
        ]
        _, ny, nx = self.tile_grid
        return [(z * ny + y) * nx + x for z, y, x in itertools.product(*per_axis)]

    def blocks_over(self, box: Box) -> list[int]:
        _, ny, nx = self.block_grid
        return [(z * ny + y) * nx + x for z, y, x in itertools.product(*chunk_ranges(box, self.patch_zyx))]

    @cached_property
    def axis_weights(self) -> tuple[NDArray[np.float64], ...]:
        """Weights of each tile at each of its voxels along each axis: [tiles, patch]; they sum to 1 over tiles.

        The window is sin^4; with sin^2 (Hann) the faces of tiles are more visible.  As the tiles form a grid, the
        weight of a tile is the product of three of these.
        """
        axis_weights = []
        for size, patch, starts in zip(self.shape_zyx, self.patch_zyx, self.starts, strict=True):
            window, total = np.sin(np.pi * (np.arange(patch) + 0.5) / patch) ** 4, np.zeros(size)
            for start in starts:
                total[start : start + patch] += window
            axis_weights.append(np.array([window / total[start : start + patch] for start in starts]))
        return tuple(axis_weights)

    def weight(self, tile: int, box: Box) -> NDArray[np.float32]:
        """Return the weight of a tile in the mean, over a box inside it: float32 [Z, Y, X]."""
        origin = self.tile_box(tile)[0]
        index = _grid_index(tile, self.tile_grid)
        z, y, x = (
            weights[i][cut] for weights, i, cut in zip(self.axis_weights, index, slices(box, origin), strict=True)
        )
        weight: NDArray[np.float32] = (z[:, None, None] * y[:, None] * x).astype(np.float32)
        return weight


def tile_starts(size: int, patch: int, overlap: float) -> tuple[int, ...]:
    """Return the starts of tiles along an axis, from 0 to size - patch, at most (1 - overlap) patch apart.

    Overlapping tiles share at least 4 voxels or half a patch: with 2, their centers are visible (docs/sampling.md).
    """
    last, most = size - patch, int(patch * (1 - overlap))
    if overlap > 0:
        most = min(most, patch - min(_LEAST_OVERLAP, patch // 2))
    gaps = -(-last // max(1, most))
    return tuple(i * last // gaps for i in range(gaps + 1)) if gaps else (0,)


def overlap_slices(a: Box, b: Box) -> tuple[Box, tuple[slice, slice, slice], tuple[slice, slice, slice]]:
    """Return the intersection of two boxes, and the slices that cut it out of each."""
    shared = intersection(a, b)
    return shared, slices(shared, a[0]), slices(shared, b[0])


def _grid_index(number: int, grid: Triple) -> Triple:
    """Return the grid index of a flat index in C order.  (`np.unravel_index` is ten times slower.)"""
    rest, x = divmod(number, grid[2])
    return (*divmod(rest, grid[1]), x)
