"""Where the tiles and blocks of a volume lie, and the weight of each tile at each voxel.  Pure.

The network sees tiles, which have the size of a training patch and overlap.  State and noise are kept in blocks, which
also have the size of a patch and do not overlap.  Both are numbered in C order.
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
from vesuvius.volumes.box import Box, box_at, chunk_box, chunk_ranges, grid_shape, intersection, slices, triple

_MAX_OVERLAP = 0.75


@dataclass(frozen=True)
class Tiling:
    """Tiles and blocks of a volume."""

    shape_zyx: Triple  # of the volume
    patch_zyx: Triple  # of a tile and of a block
    overlap: float  # of neighbouring tiles, as a share of a patch; at least that much

    def check(self) -> None:
        """Raises ConfigError where no tiles cover the volume."""
        if any(size < patch for size, patch in zip(self.shape_zyx, self.patch_zyx, strict=True)):
            raise ConfigError(
                f"A volume of {format_sizes(self.shape_zyx)} is smaller than a training patch "
                f"({format_sizes(self.patch_zyx)}); enlarge --shape"
            )
        if not 0 <= self.overlap <= _MAX_OVERLAP:
            raise ConfigError(
                f"--overlap {self.overlap:g}, the share of a tile that its neighbour covers, is not between 0 and "
                f"{_MAX_OVERLAP}; try 0.5"
            )

    @cached_property
    def starts(self) -> tuple[tuple[int, ...], ...]:
        """Along each axis, where tiles begin: evenly spaced from end to end."""
        return tuple(
            axis_starts(size, patch, self.overlap) for size, patch in zip(self.shape_zyx, self.patch_zyx, strict=True)
        )

    @property
    def tile_grid(self) -> Triple:
        """Tiles along each axis."""
        return triple(map(len, self.starts))

    @property
    def tiles(self) -> int:
        """Tiles in all."""
        return math.prod(self.tile_grid)

    @property
    def block_grid(self) -> Triple:
        """Blocks along each axis; the last one may be cut."""
        return grid_shape(self.shape_zyx, self.patch_zyx)

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        return math.prod(self.block_grid)

    def tile_box(self, tile: int) -> Box:
        """The voxels of a tile."""
        place = _place(tile, self.tile_grid)
        return box_at(triple(starts[i] for starts, i in zip(self.starts, place, strict=True)), self.patch_zyx)

    def block_index(self, block: int) -> Triple:
        """Place of a block in the grid."""
        return _place(block, self.block_grid)

    def block_box(self, block: int) -> Box:
        """The voxels of a block."""
        return chunk_box(self.block_index(block), self.patch_zyx, self.shape_zyx)

    def tiles_over(self, box: Box) -> list[int]:
        """The tiles that share a voxel with a box, in the order of their numbers."""
        per_axis = [
            [i for i, start in enumerate(starts) if lo - patch < start < hi]
            for starts, patch, lo, hi in zip(self.starts, self.patch_zyx, *box, strict=True)
        ]
        _, ny, nx = self.tile_grid
        return [(z * ny + y) * nx + x for z, y, x in itertools.product(*per_axis)]

    def blocks_over(self, box: Box) -> list[int]:
        """The blocks that share a voxel with a box, in the order of their numbers."""
        _, ny, nx = self.block_grid
        return [(z * ny + y) * nx + x for z, y, x in itertools.product(*chunk_ranges(box, self.patch_zyx))]

    @cached_property
    def shares(self) -> tuple[NDArray[np.float64], ...]:
        """Along each axis, the weight of each tile at each of its voxels: [tiles, patch]; sums over tiles are 1.

        The window is sin^4, positive everywhere; with sin^2 (Hann) the faces of tiles show more.  The sum over all
        tiles is the product of one sum per axis, because the tiles form a grid; so the weight of a tile in the mean is
        a product of three of these.
        """
        shares = []
        for size, patch, starts in zip(self.shape_zyx, self.patch_zyx, self.starts, strict=True):
            window, total = np.sin(np.pi * (np.arange(patch) + 0.5) / patch) ** 4, np.zeros(size)
            for start in starts:
                total[start : start + patch] += window
            shares.append(np.array([window / total[start : start + patch] for start in starts]))
        return tuple(shares)

    def weight(self, tile: int, box: Box) -> NDArray[np.float32]:
        """The weight of a tile in the mean, over a box inside it: float32 [Z, Y, X]."""
        origin = self.tile_box(tile)[0]
        places = _place(tile, self.tile_grid)
        z, y, x = (
            share[place][cut] for share, place, cut in zip(self.shares, places, slices(box, origin), strict=True)
        )
        weight: NDArray[np.float32] = (z[:, None, None] * y[:, None] * x).astype(np.float32)
        return weight


def axis_starts(size: int, patch: int, overlap: float) -> tuple[int, ...]:
    """Where tiles begin along an axis: 0 and size - patch included, at most (1 - overlap) patch apart."""
    last = size - patch
    gaps = -(-last // max(1, int(patch * (1 - overlap))))
    return tuple(i * last // gaps for i in range(gaps + 1)) if gaps else (0,)


def shared_part(a: Box, b: Box) -> tuple[Box, tuple[slice, slice, slice], tuple[slice, slice, slice]]:
    """The box that two boxes share, and the slices that cut it out of each."""
    shared = intersection(a, b)
    return shared, slices(shared, a[0]), slices(shared, b[0])


def _place(number: int, grid: Triple) -> Triple:
    """Place in a grid of what has a number in C order.  (`np.unravel_index` takes ten times as long.)"""
    rest, x = divmod(number, grid[2])
    return (*divmod(rest, grid[1]), x)
