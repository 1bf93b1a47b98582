"""Where a volume holds foreground: a coarse map, so that the plan chooses patches without reading voxels.  Pure.

The foreground of a patch is counted in 255ths of a voxel, sum(fraction x overlap of patch and cell), a whole number
below 2^52: float64 sums it without rounding.  As the patch moves along one axis, its overlap with every cell is linear
between breakpoints (an edge of the patch meets a boundary of cells), so the sum is multilinear in the start and
greatest where each axis is at a breakpoint or at the region's own first or last start.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.volumes.box import Box

Intervals = Sequence[tuple[int, int]]

_FULL = 255
_DRAWS = 64
_VALUES_MAX = 2**16  # float64 values in a batch of regions: 512 KiB, so that a batch stays in the cache


@dataclass(frozen=True, eq=False)
class ForegroundMap:
    """Share of each cell of a volume that is foreground.  Compared by identity; compare `hash` for content.

    fraction: uint8 (nz, ny, nx), 0 none ... 255 all of the cell.
    cell_zyx: edge lengths of a cell in voxels.
    shape_zyx: voxels of the volume.  The last cell of an axis may stick out of it; its fraction is that of its inside.
    """

    fraction: NDArray[np.uint8]
    cell_zyx: Triple
    shape_zyx: Triple

    def __post_init__(self) -> None:
        cells = tuple(-(-size // cell) for size, cell in zip(self.shape_zyx, self.cell_zyx, strict=True))
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

    def patch_fraction(self, start_zyx: Triple, patch_zyx: Triple) -> float:
        """Foreground share, 0..1, of the patch at `start_zyx`: the mean over its voxels of their cell's fraction."""
        sizes = zip(start_zyx, patch_zyx, self.shape_zyx, strict=True)
        if any(start < 0 or patch < 1 or start + patch > size for start, patch, size in sizes):
            raise ValueError(f"a patch must lie inside the volume; got {patch_zyx} at {start_zyx} in {self.shape_zyx}")
        return self._sum(start_zyx, patch_zyx) / (_FULL * math.prod(patch_zyx))

    def eligible_regions(
        self, intervals_zyx: Sequence[Intervals], patch_zyx: Triple, min_fraction: float
    ) -> NDArray[np.uint32]:
        """Sorted numbers (as `PlanVolume.region` counts) of the regions with a patch of at least `min_fraction`.

        Exact: a region is among them if and only if `patch_fraction` >= `min_fraction` for a patch inside it.  Takes
        one interval of z at a time.  A cell of the least fraction that suffices, or more, is bright: a region of only
        bright cells is in, one without any is out, and only the others are evaluated.
        """
        z, y, x = map(_axis, intervals_zyx, patch_zyx, self.cell_zyx, self.shape_zyx)
        plane = y.count * x.count
        assert z.count * plane < 2**32, "region numbers must fit uint32"
        least = _least_sum(min_fraction, patch_zyx)
        bright = -(-least // math.prod(patch_zyx))
        most_values = math.prod(max(len(axis.starts), len(axis.cells)) for axis in (z, y, x))
        batch = max(1, _VALUES_MAX // most_values)
        found = []
        for iz in range(z.count):
            slab = self.fraction[z.cells[0, iz] : z.cells[-1, iz] + 1]
            eligible = _filter(np.minimum, slab, y, x) >= bright
            mixed = np.flatnonzero((_filter(np.maximum, slab, y, x) >= bright) & ~eligible)
            for first in range(0, mixed.size, batch):
                some = mixed[first : first + batch]
                sums = _sums_at_breakpoints(slab, z, y, x, iz, *np.divmod(some, x.count))
                eligible[some] = sums.max(axis=(0, 1, 2)) >= least
            found.append(np.flatnonzero(eligible).astype(np.uint32) + np.uint32(iz * plane))
        return np.concatenate(found)

    def draw_start(self, rng: np.random.Generator, region: Box, patch_zyx: Triple, min_fraction: float) -> Triple:
        """A patch start inside `region`, uniform over those of at least `min_fraction`.

        `region` is one of the plan's: inside the volume, no smaller than a patch.  Draws positions until one suffices;
        after 64 in vain takes the position with the most foreground, which suffices if the region is eligible.  So
        where a share p of the positions suffices, that one comes up with probability (1 - p)^64 on top of its due.
        """
        least = _least_sum(min_fraction, patch_zyx)
        last = np.subtract(region[1], patch_zyx)
        for z, y, x in rng.integers(region[0], last, size=(_DRAWS, 3), endpoint=True).tolist():
            if self._sum((z, y, x), patch_zyx) >= least:
                return z, y, x
        return self._best_start(region, patch_zyx)

    def _sum(self, start_zyx: Triple, patch_zyx: Triple) -> int:
        """Foreground of one patch in 255ths of a voxel."""
        where, overlap = zip(*map(_overlap, start_zyx, patch_zyx, self.cell_zyx), strict=True)
        z, y, x = overlap
        foreground: float = self.fraction[where] @ x @ y @ z
        return int(foreground)

    def _best_start(self, region: Box, patch_zyx: Triple) -> Triple:
        """The start inside the region of the patch with the most foreground; the first one of equals."""
        z, y, x = map(
            _axis, [[extent] for extent in zip(*region, strict=True)], patch_zyx, self.cell_zyx, self.shape_zyx
        )
        slab = self.fraction[z.cells[0, 0] : z.cells[-1, 0] + 1]
        only = np.zeros(1, np.intp)
        sums = _sums_at_breakpoints(slab, z, y, x, 0, only, only)[..., 0]
        iz, iy, ix = np.unravel_index(int(sums.argmax()), sums.shape)
        return int(z.starts[iz, 0]), int(y.starts[iy, 0]), int(x.starts[ix, 0])


@dataclass(frozen=True)
class _Axis:
    """The R intervals of one axis, each with up to B breakpoints and C cells; shorter lists repeat their last entry."""

    starts: NDArray[np.int64]  # (B, R)
    cells: NDArray[np.int64]  # (C, R)
    overlap: NDArray[np.float64]  # (B, C, R), voxels of the patch at the breakpoint inside the cell; 0 for repetitions

    @property
    def count(self) -> int:
        return int(self.starts.shape[1])


def _axis(intervals: Intervals, patch: int, cell: int, size: int) -> _Axis:
    if any(lo < 0 or lo + patch > hi or hi > size for lo, hi in intervals):
        raise ValueError(f"regions must lie inside the volume and hold a patch; got {intervals} in {size} for {patch}")
    breakpoints = [_breakpoints(lo, hi, patch, cell) for lo, hi in intervals]
    longest = max(len(found) for found in breakpoints)
    starts = np.array([found + found[-1:] * (longest - len(found)) for found in breakpoints]).T
    first, last = np.array([(lo // cell, (hi - 1) // cell) for lo, hi in intervals]).T
    cells = first + np.arange(np.max(last - first) + 1)[:, None]
    overlap = np.minimum(starts[:, None] + patch, (cells + 1) * cell) - np.maximum(starts[:, None], cells * cell)
    return _Axis(starts, np.minimum(cells, last), np.maximum(overlap, 0).astype(np.float64))


def _breakpoints(lo: int, hi: int, patch: int, cell: int) -> list[int]:
    """The starts in lo..hi-patch between which the overlap with every cell is linear, both ends included."""
    last = hi - patch
    at_start = range(-(-lo // cell) * cell, last + 1, cell)
    at_stop = range(-(-(lo + patch) // cell) * cell - patch, last + 1, cell)
    return sorted({lo, last, *at_start, *at_stop})


def _filter(extreme: np.ufunc, slab: NDArray[np.uint8], y: _Axis, x: _Axis) -> NDArray[np.uint8]:
    """Minimum or maximum of the cells of each region of a slab, counted along x first."""
    plane: NDArray[np.uint8] = extreme.reduce(slab, axis=0)
    for axis in (y, x):  # the second turn of the plane brings y back in front
        plane = extreme.reduce([plane.take(cells, axis=0) for cells in axis.cells], axis=0).T.copy()
    return plane.ravel()


def _sums_at_breakpoints(
    slab: NDArray[np.uint8], z: _Axis, y: _Axis, x: _Axis, iz: int, iy: NDArray[np.intp], ix: NDArray[np.intp]
) -> NDArray[np.float64]:
    """Foreground (Bz, By, Bx, n) in 255ths of a voxel of the patches at all breakpoints of n regions (iz, iy, ix)."""
    where = y.cells[:, None, iy] * slab.shape[2] + x.cells[None, :, ix]
    sums: NDArray[np.float64] = slab.reshape(len(slab), -1).take(where, axis=1).astype(np.float64)
    sums = np.tensordot(z.overlap[:, : len(slab), iz], sums, axes=1)
    sums = _contract(y.overlap[:, :, iy], sums)
    return _contract(x.overlap[:, :, ix], sums.swapaxes(1, 2)).swapaxes(1, 2)


def _contract(weights: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """sum_c weights[b, c, n] values[a, c, d, n] as (a, b, d, n): an einsum, 3 times as fast as numpy's."""
    total: NDArray[np.float64] = weights[:, 0, None] * values[:, 0, None]
    for c in range(1, weights.shape[1]):
        total += weights[:, c, None] * values[:, c, None]
    return total


def _overlap(start: int, patch: int, cell: int) -> tuple[slice, NDArray[np.float64]]:
    """The cells that a patch touches along one axis, and how many of its voxels lie in each."""
    first, last = start // cell, (start + patch - 1) // cell
    voxels = [cell] * (last - first + 1)
    voxels[0] -= start - first * cell
    voxels[-1] -= (last + 1) * cell - (start + patch)
    return slice(first, last + 1), np.array(voxels, np.float64)


def _least_sum(min_fraction: float, patch_zyx: Triple) -> int:
    """The least foreground in 255ths of a voxel whose share of the patch, as a float, is at least `min_fraction`."""
    if not 0 < min_fraction <= 1:
        raise ValueError(f"min_fraction must be above 0 and at most 1; got {min_fraction}")
    full = _FULL * math.prod(patch_zyx)
    assert full < 2**52, "sums must be exact in float64"
    least = int(min_fraction * full)
    while least / full < min_fraction:
        least += 1
    return least
