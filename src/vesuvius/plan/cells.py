"""How the starts of a volume's patches are partitioned into cells.  Pure.

A start is the first voxel of a patch.  Along each axis the starts are cut into intervals; a cell is one interval per
axis, so every start belongs to exactly one cell.  The region of a cell is what its patches cover: the cell and
patch - 1 voxels more.  Cuts repeat with a period and move by a phase, which is drawn anew for each pass over the volume.

Cuts follow the chunks, because a region is read as whole chunks: with chunks of 128 and patches of 136 voxels, the
starts 0..120 of each chunk need two chunks and the other seven need three.  So they are cells of their own, and as cells
are drawn in proportion to the starts they own, a region touches 2.06 chunks on average instead of 3.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from vesuvius.config import Triple
from vesuvius.volumes.box import Box

# Where cuts follow the chunks, a phase moves them by up to this share of a chunk: further would need more chunks.
_PHASE_SHARE = 16
# Phases that an average over all of them looks at, evenly spaced.
_PHASES_AVERAGED = 16


@dataclass(frozen=True)
class AxisCells:
    """Cells along one axis.

    Attributes:
        first, count: the starts first <= s < first + count.
        lengths: of the cells of one period, in starts.
        phases: a period may begin at each of them (modulo the period), in voxels of the volume.
    """

    first: int
    count: int
    lengths: tuple[int, ...]
    phases: range

    @cached_property
    def _cuts(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.lengths, initial=0))

    def cell_of(self, start: int, phase: int) -> tuple[int, int]:
        """The cell that owns a start: (first start, behind the last)."""
        period, within = divmod(start - phase, self._cuts[-1])
        number = bisect.bisect_right(self._cuts, within) - 1
        origin = phase + period * self._cuts[-1]
        return (
            max(origin + self._cuts[number], self.first),
            min(origin + self._cuts[number + 1], self.first + self.count),
        )

    def cells(self, phase: int) -> Iterator[tuple[int, int]]:
        """All cells, in rising order."""
        start = self.first
        while start < self.first + self.count:
            cell = self.cell_of(start, phase)
            yield cell
            start = cell[1]

    def decoded_voxels(self, patch: int, chunk: int) -> float:
        """Voxels along this axis of the chunks that a region touches, on average over all starts and phases."""
        total, phases = 0.0, self.phases[:: -(-len(self.phases) // _PHASES_AVERAGED)]
        for phase in phases:
            for lo, hi in self.cells(phase):
                total += (hi - lo) * chunk * _chunks_touched(lo, hi + patch - 1, chunk)
        return total / (self.count * len(phases))


@dataclass(frozen=True)
class Cells:
    """Cells of a volume: one of each axis."""

    axes: tuple[AxisCells, AxisCells, AxisCells]

    @cached_property
    def starts(self) -> int:
        """How many starts there are."""
        return math.prod(axis.count for axis in self.axes)

    @cached_property
    def longest_zyx(self) -> Triple:
        """Starts of the largest cell along each axis."""
        z, y, x = (min(max(axis.lengths), axis.count) for axis in self.axes)
        return z, y, x

    @property
    def largest(self) -> int:
        """Starts of the largest cell."""
        return math.prod(self.longest_zyx)

    def draw_phases(self, rng: np.random.Generator) -> Triple:
        """A phase for each axis."""
        z, y, x = (axis.phases[int(rng.integers(len(axis.phases)))] for axis in self.axes)
        return z, y, x

    def cell_of(self, start_zyx: Triple, phases_zyx: Triple) -> Box:
        """The cell that owns a start: a box of starts."""
        z, y, x = (axis.cell_of(s, p) for axis, s, p in zip(self.axes, start_zyx, phases_zyx, strict=True))
        return (z[0], y[0], x[0]), (z[1], y[1], x[1])

    def cell_at(self, position: int, phases_zyx: Triple) -> Box:
        """The cell that owns position 0 <= p < `starts`, where positions count through cell after cell.

        So positions at equal distances meet cells in proportion to the starts they own.
        """
        behind = [math.prod(axis.count for axis in self.axes[n + 1 :]) for n in range(3)]
        cell: list[tuple[int, int]] = []
        width = 1  # starts of the cell along the axes so far
        for axis, phase, rest in zip(self.axes, phases_zyx, behind, strict=True):
            lo, hi = axis.cell_of(axis.first + position // (width * rest), phase)
            position -= (lo - axis.first) * width * rest
            width *= hi - lo
            cell.append((lo, hi))
        z, y, x = cell
        return (z[0], y[0], x[0]), (z[1], y[1], x[1])

    def decoded_voxels(self, patch_zyx: Triple, chunk_zyx: Triple) -> float:
        """Voxels of the chunks that a region touches, on average over all starts and phases."""
        return math.prod(axis.decoded_voxels(p, c) for axis, p, c in zip(self.axes, patch_zyx, chunk_zyx, strict=True))

    def region_zyx(self, patch_zyx: Triple) -> Triple:
        """Voxels of the largest region along each axis."""
        z, y, x = (cell + patch - 1 for cell, patch in zip(self.longest_zyx, patch_zyx, strict=True))
        return z, y, x


def region_of(cell: Box, patch_zyx: Triple) -> Box:
    """The voxels that the patches of a cell cover."""
    z, y, x = (hi + patch - 1 for hi, patch in zip(cell[1], patch_zyx, strict=True))
    return cell[0], (z, y, x)


def lay_cells(
    train: Box, patch_zyx: Triple, chunk_zyx: Triple, voxel_bytes: int, region_bytes_max: int, cells_wanted: int
) -> Cells:
    """Cells that make reading cheap and batches varied.

    Per axis, of those cuts that follow the chunks or ignore them, the ones with the least (voxels decoded for a region)
    x (mean overlap of two patches of a cell), with cells no longer than a patch or a chunk.  Shorter ones where a region
    would exceed `region_bytes_max`, or a volume would have fewer than `cells_wanted` cells.

    Args:
        train: the voxels that patches may cover.
        voxel_bytes: bytes that a reader holds per voxel.
    """
    firsts = train[0]
    counts = [hi - lo - patch + 1 for lo, hi, patch in zip(*train, patch_zyx, strict=True)]
    limits = [max(patch, chunk) for patch, chunk in zip(patch_zyx, chunk_zyx, strict=True)]
    while True:
        axes = [
            _lay_axis(first, count, patch, chunk, limit)
            for first, count, patch, chunk, limit in zip(firsts, counts, patch_zyx, chunk_zyx, limits, strict=True)
        ]
        cells = Cells((axes[0], axes[1], axes[2]))
        small = voxel_bytes * math.prod(cells.region_zyx(patch_zyx)) <= region_bytes_max
        if small and cells.starts >= cells_wanted * cells.largest:
            return cells
        longest = cells.longest_zyx
        if max(longest) == 1:
            return cells
        axis = max(range(3), key=lambda a: (longest[a] > 1, longest[a] / patch_zyx[a]))
        limits[axis] = -(-longest[axis] // 2)


def cells_of_region_size(train: Box, patch_zyx: Triple, region_zyx: Triple) -> Cells:
    """Cells whose regions have a given size, at most; their cuts ignore the chunks."""
    axes = [
        _uniform(lo, hi - lo - patch + 1, min(region - patch + 1, hi - lo - patch + 1))
        for lo, hi, patch, region in zip(*train, patch_zyx, region_zyx, strict=True)
    ]
    return Cells((axes[0], axes[1], axes[2]))


def _uniform(first: int, count: int, length: int) -> AxisCells:
    """Cells of one length, at any phase."""
    return AxisCells(first, count, (length,), range(1) if length == 1 else range(first, first + length))


def _lay_axis(first: int, count: int, patch: int, chunk: int, limit: int) -> AxisCells:
    """The cheapest cells of at most `limit` starts."""
    if count <= limit:
        return AxisCells(first, count, (count,), range(first, first + 1))  # one cell holds all
    lengths, phases = _cheapest_cuts(patch, chunk, limit)
    return AxisCells(first, count, lengths, phases)


@lru_cache(maxsize=256)
def _cheapest_cuts(patch: int, chunk: int, limit: int) -> tuple[tuple[int, ...], range]:
    """Lengths of the cells of a period, and the phases that keep their regions cheap."""
    candidates: list[tuple[tuple[int, ...], range]] = [((limit,), range(limit))]
    for period in range(chunk, limit + 1, chunk):  # one length, and such phases that no further chunk is touched
        slack = -(period + patch - 1) % chunk
        candidates.append(((period,), range(slack + 1)))
    play = chunk // _PHASE_SHARE
    for chunks in range(-(-patch // chunk), -(-(patch + limit) // chunk) + 1):
        inside = chunks * chunk - patch + 1 - play  # starts whose patches lie within so many chunks, at any phase
        if inside >= 1:
            seam = -inside % chunk
            lengths = _parts(inside, limit) + _parts(seam, limit)
            candidates.append((lengths, range(play + 1)))
    return min(candidates, key=lambda cuts: _cost(cuts[0], cuts[1], patch, chunk))


def _parts(length: int, limit: int) -> tuple[int, ...]:
    """A length in the fewest equal parts of at most `limit`, one shorter than others where it must."""
    count = -(-length // limit)
    return tuple(length * (n + 1) // count - length * n // count for n in range(count))


def _cost(lengths: Sequence[int], phases: range, patch: int, chunk: int) -> float:
    """Voxels decoded for a region along the axis, times the share that two random patches of a cell overlap."""
    period, total = sum(lengths), 0.0
    free = period % chunk != 0  # over the volume, a period then begins anywhere in a chunk
    offsets = range(chunk) if free else phases
    for lo, length in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False):
        decoded = np.mean([chunk * _chunks_touched(o + lo, o + lo + length + patch - 1, chunk) for o in offsets])
        total += length / period * float(decoded) * _overlap(length, patch)
    return total


def _overlap(length: int, patch: int) -> float:
    """Mean share that two patches share whose starts are uniform in an interval."""
    if length <= patch:
        return 1 - length / (3 * patch)
    return patch / length - patch**2 / (3 * length**2)


def _chunks_touched(lo: int, hi: int, chunk: int) -> int:
    return (hi - 1) // chunk - lo // chunk + 1
