"""Tiles and blocks of a volume, and the weight of each tile at each voxel.  Pure.

The network sees overlapping tiles.  State is kept in blocks, which do not overlap.  Both are indexed in C order.
"""

import itertools
import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from numbers import Real
from typing import Any, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import ConfigError
from vesuvius.runlog.units import format_sizes
from vesuvius.volumes.box import Box, box_at, chunk_box, chunk_ranges, grid_shape, intersection, slices, triple

Window = Literal["sin4", "gaussian", "linear", "constant", "crop"]
"""Weight of a tile along each axis, largest in its middle; `crop` takes each voxel from the tile with the nearest
center."""

_LONGEST = 10_000_000
_MAX_OVERLAP = 0.75
_LEAST_OVERLAP = 4  # voxels
_LEAST_GAUSSIAN = 1e-3  # weight at the corners of a tile, as in MONAI's sliding window


@dataclass(frozen=True)
class BlockGrid:
    """Blocks of one size that cover a volume; the last one along an axis may be cut."""

    shape_zyx: Triple  # of the volume
    block_zyx: Triple

    @property
    def block_grid(self) -> Triple:
        return grid_shape(self.shape_zyx, self.block_zyx)

    @property
    def blocks(self) -> int:
        return math.prod(self.block_grid)

    def block_index(self, block: int) -> Triple:
        return _grid_index(block, self.block_grid)

    def block_box(self, block: int) -> Box:
        return chunk_box(self.block_index(block), self.block_zyx, self.shape_zyx)

    def blocks_over(self, box: Box) -> list[int]:
        """Return the blocks that share a voxel with a box, which may reach outside the volume."""
        _, ny, nx = self.block_grid
        inner = intersection(box, ((0, 0, 0), self.shape_zyx))
        return [(z * ny + y) * nx + x for z, y, x in itertools.product(*chunk_ranges(inner, self.block_zyx))]


@dataclass(frozen=True)
class Tiling(BlockGrid):
    """Tiles that cover a volume, from `even_tiling` or `sliding_tiling`, and its blocks."""

    patch_zyx: Triple  # of a tile
    starts: tuple[tuple[int, ...], ...]  # of tiles, along each axis; tiles may reach outside the volume
    window: Window = "sin4"

    @property
    def tile_grid(self) -> Triple:
        return triple(map(len, self.starts))

    @property
    def tiles(self) -> int:
        return math.prod(self.tile_grid)

    def tile_box(self, tile: int) -> Box:
        index = _grid_index(tile, self.tile_grid)
        return box_at(triple(starts[i] for starts, i in zip(self.starts, index, strict=True)), self.patch_zyx)

    def tiles_over(self, box: Box) -> list[int]:
        per_axis = [
            [i for i, start in enumerate(starts) if lo - patch < start < hi]
            for starts, patch, lo, hi in zip(self.starts, self.patch_zyx, *box, strict=True)
        ]
        _, ny, nx = self.tile_grid
        return [(z * ny + y) * nx + x for z, y, x in itertools.product(*per_axis)]

    def scaled(self, factor: Fraction, chunk: int) -> Self:
        """Return the tiles of a network's output, with `factor` voxels per voxel, in blocks of at most `chunk`."""
        shape = triple(math.ceil(size * factor) for size in self.shape_zyx)
        return replace(
            self,
            shape_zyx=shape,
            block_zyx=triple(min(size, chunk) for size in shape),
            patch_zyx=triple(int(size * factor) for size in self.patch_zyx),
            starts=tuple(tuple(int(start * factor) for start in starts) for starts in self.starts),
        )

    @cached_property
    def axis_weights(self) -> tuple[NDArray[np.float64], ...]:
        """Weights of each tile at each of its voxels along each axis: [tiles, patch]; they sum to 1 over tiles, except
        those of "gaussian".  As the tiles form a grid, the weight of a tile is the product of three of these.
        """
        axis_weights = []
        for patch, starts in zip(self.patch_zyx, self.starts, strict=True):
            places = [slice(start - starts[0], start - starts[0] + patch) for start in starts]
            total = np.zeros(places[-1].stop)
            if self.window == "crop":
                centers = np.array(starts)[:, None] - starts[0] + patch / 2
                nearest = np.abs(np.arange(len(total)) + 0.5 - centers).argmin(0)
                axis_weights.append(np.array([nearest[place] == i for i, place in enumerate(places)], np.float64))
                continue
            window = _axis_window(self.window, patch)
            for place in places:
                total[place] += window
            if self.window == "gaussian":
                total[:] = 1
            axis_weights.append(np.array([window / total[place] for place in places]))
        return tuple(axis_weights)

    def weight(self, tile: int, box: Box) -> NDArray[np.float32]:
        """Return the weight of a tile in the mean, over a box inside it: float32 [Z, Y, X]."""
        origin = self.tile_box(tile)[0]
        index = _grid_index(tile, self.tile_grid)
        z, y, x = (each[i][cut] for each, i, cut in zip(self.axis_weights, index, slices(box, origin), strict=True))
        weight: NDArray[np.float32] = (z[:, None, None] * y[:, None] * x).astype(np.float32)
        return np.maximum(weight, np.float32(_LEAST_GAUSSIAN), out=weight) if self.window == "gaussian" else weight

    def add_tile(
        self,
        tile: int,
        values: NDArray[np.float32],
        box: Box,
        total: NDArray[np.float32],
        weights: NDArray[np.float32] | None = None,
    ) -> None:
        """Add a tile's weighted values to the sums over a box; total / weights is the mean once all tiles are added.

        Args:
            values: of the tile, [..., Z, Y, X].
            total: sum of the weighted values, in the shape of the box with the same leading axes.
            weights: sum of the weights, in the shape of the box; may be None for windows that sum to 1.
        """
        shared, there, here = overlap_slices(self.tile_box(tile), box)
        weight = self.weight(tile, shared)
        total[(..., *here)] += weight * values[(..., *there)]
        if weights is not None:
            weights[here] += weight


def even_tiling(shape_zyx: Triple, patch_zyx: Triple, overlap: float) -> Tiling:
    """Return evenly spaced tiles from end to end, with at least this overlap of neighbors (a share of a patch), and
    blocks of their size.  Raises ConfigError.

    The window is sin^4; with sin^2 (Hann) the faces of tiles are more visible.
    """
    if any(size < patch for size, patch in zip(shape_zyx, patch_zyx, strict=True)):
        raise ConfigError(
            f"A volume of {format_sizes(shape_zyx)} is smaller than a training patch "
            f"({format_sizes(patch_zyx)}); increase --shape"
        )
    if max(shape_zyx) > _LONGEST:
        raise ConfigError(f"A volume of {format_sizes(shape_zyx)} has an axis above {_LONGEST} voxels; reduce --shape")
    if not 0 <= overlap <= _MAX_OVERLAP:
        raise ConfigError(
            f"--overlap {overlap:g} is not between 0 and {_MAX_OVERLAP} (the share of a tile "
            "that its neighbor covers); try 0.25"
        )
    axes = zip(shape_zyx, patch_zyx, strict=True)
    return Tiling(shape_zyx, patch_zyx, patch_zyx, tuple(tile_starts(size, patch, overlap) for size, patch in axes))


def sliding_tiling(
    shape_zyx: Triple, patch_zyx: Triple, overlap: float, window: Window = "gaussian", multiple: int = 1
) -> Tiling:
    """Return tiles at 0, s, 2s, ... with s = int(patch * (1 - overlap)), the last one shifted to end with the volume:
    those of MONAI's sliding window and of nnU-Net.  Blocks have the size of a patch.  Raises ConfigError.

    Starts are multiples of `multiple` (the last tile may then reach past the volume).  Along an axis shorter than a
    patch, one tile is centered.  Voxels outside the volume repeat those at its faces (`overhang`).
    """
    if not isinstance(overlap, Real) or not 0 <= overlap < 1:
        raise ConfigError(
            f"overlap {overlap} is not at least 0 and below 1 (the share of a tile that its neighbor covers); try 0.25"
        )
    starts = []
    for size, patch in zip(shape_zyx, patch_zyx, strict=True):
        room, step = size - patch, max(int(patch * (1 - overlap)) // multiple, 1) * multiple
        last = -(-room // multiple) if room > 0 else -(-room // 2 // multiple)
        starts.append((*range(0, last * multiple, step), last * multiple))
    return Tiling(shape_zyx, patch_zyx, patch_zyx, tuple(starts), window)


def check_blend(blend: Any) -> None:
    """Raise ConfigError unless users can choose this window."""
    if blend not in (known := [window for window in get_args(Window) if window != "sin4"]):
        raise ConfigError(f"blend {blend!r} does not exist; choose {', '.join(known)}")


def tile_starts(size: int, patch: int, overlap: float) -> tuple[int, ...]:
    """Return the starts of tiles along an axis, from 0 to size - patch, at most (1 - overlap) patch apart.

    Overlapping tiles share at least 4 voxels or half a patch: with 2, their centers are visible (docs/sampling.md).
    """
    last, most = size - patch, int(patch * (1 - overlap))
    if overlap > 0:
        most = min(most, patch - min(_LEAST_OVERLAP, patch // 2))
    gaps = -(-last // max(1, most))
    return tuple(i * last // gaps for i in range(gaps + 1)) if gaps else (0,)


def overhang(box: Box, shape_zyx: Triple) -> tuple[Box, list[tuple[int, int]]]:
    """Return the part of a box inside a volume, and along each axis the voxels before and after it, for `np.pad`."""
    inner = intersection(box, ((0, 0, 0), shape_zyx))
    return inner, [(a - lo, hi - b) for lo, hi, a, b in zip(*box, *inner, strict=True)]


def overlap_slices(a: Box, b: Box) -> tuple[Box, tuple[slice, slice, slice], tuple[slice, slice, slice]]:
    """Return the intersection of two boxes, and the slices that cut it out of each."""
    shared = intersection(a, b)
    return shared, slices(shared, a[0]), slices(shared, b[0])


def _axis_window(window: Window, patch: int) -> NDArray[np.float64]:
    at = np.arange(patch) + 0.5
    match window:
        case "sin4":
            weights = np.sin(np.pi * at / patch) ** 4
        case "gaussian":
            weights = np.exp(-0.5 * ((at - patch / 2) / (patch / 8)) ** 2)
        case "linear":
            weights = 1 - np.abs(2 * at / patch - 1)
        case _:
            weights = np.ones(patch)
    return weights


def _grid_index(number: int, grid: Triple) -> Triple:
    """Return the grid index of a flat index in C order.  (`np.unravel_index` is ten times slower.)"""
    rest, x = divmod(number, grid[2])
    return (*divmod(rest, grid[1]), x)
