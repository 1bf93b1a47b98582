"""Partitions the starts of a volume's patches into cells.  Pure.

Along each axis the starts are divided into intervals of equal length, shorter at the ends; a cell is one interval per
axis.  Its region, what its patches cover, is the cell extended by patch - 1 voxels.  Each pass draws a new phase that
shifts the boundaries: only phases at which regions touch the fewest chunks (docs/plan.md).
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from vesuvius.config import Triple
from vesuvius.volumes.box import Box, box_along, triple

DENSITY = 16.5
"""Mixing within a cell: number of patches of one visit that cover a voxel in the middle of its region."""
_PHASES_AVERAGED = 16  # evenly spaced


@dataclass(frozen=True)
class AxisCells:
    first: int
    count: int  # the starts first <= s < first + count
    length: int  # starts per cell
    phases: tuple[int, ...]  # positions, modulo the length, at which a cell may begin

    def cell_of(self, start: int, phase: int) -> tuple[int, int]:
        """Return the cell that contains a start: (first start, one past the last)."""
        lo = start - (start - phase) % self.length
        return max(lo, self.first), min(lo + self.length, self.first + self.count)

    def cells(self, phase: int) -> Iterator[tuple[int, int]]:
        start = self.first
        while start < self.first + self.count:
            cell = self.cell_of(start, phase)
            yield cell
            start = cell[1]

    def decoded_voxels(self, patch: int, chunk: int) -> float:
        """Mean length of the chunks that a region touches along this axis, over all starts and phases."""
        total, phases = 0.0, self.phases[:: -(-len(self.phases) // _PHASES_AVERAGED)]
        for phase in phases:
            for lo, hi in self.cells(phase):
                total += (hi - lo) * chunk * _chunks_touched(lo, hi + patch - 1, chunk)
        return total / (self.count * len(phases))


@dataclass(frozen=True)
class Cells:
    axes: tuple[AxisCells, AxisCells, AxisCells]

    @cached_property
    def num_starts(self) -> int:
        return math.prod(axis.count for axis in self.axes)

    @cached_property
    def largest_zyx(self) -> Triple:
        """Number of starts of the largest cell along each axis."""
        return triple(min(axis.length, axis.count) for axis in self.axes)

    @property
    def largest(self) -> int:
        return math.prod(self.largest_zyx)

    def draw_phases(self, rng: np.random.Generator) -> Triple:
        return triple(axis.phases[int(rng.integers(len(axis.phases)))] for axis in self.axes)

    def cell_of(self, start_zyx: Triple, phases_zyx: Triple) -> Box:
        """Return the cell that contains a start: a box of starts."""
        return box_along(axis.cell_of(s, p) for axis, s, p in zip(self.axes, start_zyx, phases_zyx, strict=True))

    def cell_at(self, position: int, phases_zyx: Triple) -> Box:
        """Return the cell at position 0 <= p < `num_starts`; positions enumerate the starts cell by cell.

        Equidistant positions therefore hit cells in proportion to their numbers of starts.
        """
        remaining = [math.prod(axis.count for axis in self.axes[n + 1 :]) for n in range(3)]
        cell: list[tuple[int, int]] = []
        width = 1  # starts of the cell along the axes so far
        for axis, phase, rest in zip(self.axes, phases_zyx, remaining, strict=True):
            lo, hi = axis.cell_of(axis.first + position // (width * rest), phase)
            position -= (lo - axis.first) * width * rest
            width *= hi - lo
            cell.append((lo, hi))
        return box_along(cell)

    def decoded_voxels(self, patch_zyx: Triple, chunk_zyx: Triple) -> float:
        """Mean number of voxels in the chunks that a region touches, over all starts and phases."""
        return math.prod(axis.decoded_voxels(p, c) for axis, p, c in zip(self.axes, patch_zyx, chunk_zyx, strict=True))

    def region_zyx(self, patch_zyx: Triple) -> Triple:
        return triple(cell + patch - 1 for cell, patch in zip(self.largest_zyx, patch_zyx, strict=True))


def region_of(cell: Box, patch_zyx: Triple) -> Box:
    return cell[0], triple(hi + patch - 1 for hi, patch in zip(cell[1], patch_zyx, strict=True))


def lay_cells(
    train: Box, patch_zyx: Triple, chunk_zyx: Triple, region_voxels_max: int, cells_wanted: int, patches_max: int
) -> Cells:
    """Choose the cells in a box that decode the fewest voxels per patch; on a tie, the largest.

    Regions hold at most `region_voxels_max` voxels and give at most `patches_max` patches, and the volume has at least
    `cells_wanted` cells; if that is impossible, each start is a cell.
    """
    counts = [hi - lo - patch + 1 for lo, hi, patch in zip(*train, patch_zyx, strict=True)]
    longest = [region_voxels_max * patch // math.prod(patch_zyx) for patch in patch_zyx]
    axes = list(map(_lengths, train[0], counts, patch_zyx, chunk_zyx, longest))
    starts, voxels = math.prod(counts), math.prod(patch_zyx)
    best, least = tuple(axis[0] for axis in axes), (math.inf, 0)
    for z, y in itertools.product(*axes[:2]):
        region, largest, decoded = z.region * y.region, z.cells.length * y.cells.length, z.decoded * y.decoded
        for x in axes[2]:
            if region * x.region > region_voxels_max or (size := largest * x.cells.length) * cells_wanted > starts:
                break  # as would all longer ones
            cost = decoded * x.decoded / min(DENSITY * size / voxels, patches_max), -size
            if cost < least:
                best, least = (z, y, x), cost
    z, y, x = best
    return Cells((z.cells, y.cells, x.cells))


def patches_of(starts: int, patch_zyx: Triple) -> float:
    """Number of patches from a cell of this many starts for which those of a visit cover a voxel `DENSITY` times."""
    return DENSITY * starts / math.prod(patch_zyx)


class _Length(NamedTuple):
    """A candidate length for the cells of an axis."""

    cells: AxisCells
    region: int  # length of a region in voxels
    decoded: float  # mean length of the chunks that a region touches


@lru_cache(maxsize=64)
def _lengths(first: int, count: int, patch: int, chunk: int, region_max: int) -> list[_Length]:
    """Candidate lengths, ascending: multiples and fractions of a chunk, and fractions of the axis."""
    halves = range(count.bit_length())
    lengths = {1} | {-(-count >> n) for n in halves} | {chunk // n for n in range(2, chunk + 1) if chunk % n == 0}
    lengths |= {chunk << n for n in halves} | {3 * chunk << n for n in halves} | {-(-chunk >> n) for n in halves}
    possible = range(1, min(count, max(region_max - patch + 1, 1)) + 1)
    return [_of_length(first, count, patch, chunk, length) for length in sorted(lengths) if length in possible]


def _of_length(first: int, count: int, patch: int, chunk: int, length: int) -> _Length:
    """Return cells of a length, with the phases at which their regions touch the fewest chunks."""
    region = length + patch - 1
    if length == count:
        cells = AxisCells(first, count, count, (first,))
        return _Length(cells, region, chunk * _chunks_touched(first, first + region, chunk))
    # Cells begin at all positions in a chunk that equal the phase modulo this.
    period = math.gcd(length, chunk)
    touched = [
        sum(_chunks_touched(lo, lo + region, chunk) for lo in range(phase, chunk, period)) for phase in range(period)
    ]
    fewest = min(touched)
    phases = tuple(phase for phase in range(length) if touched[phase % period] == fewest)
    return _Length(AxisCells(first, count, length, phases), region, fewest * period)


def _chunks_touched(lo: int, hi: int, chunk: int) -> int:
    return (hi - 1) // chunk - lo // chunk + 1
