"""Finds the starts with enough foreground on a coarse map of the volume, without reading it.  Pure.

The foreground of a patch is counted in 255ths of a voxel, sum(fraction x overlap of patch and map cell), a whole number
below 2^52: float64 sums it without rounding.

Qualifying starts are drawn by rejection: from a list of all blocks of starts that may hold one, a random block and a
random start in it, until one qualifies.  Blocks that hold none cost time and change nothing: every qualifying start is
equally likely.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import DataError
from vesuvius.volumes.box import Box, grid_shape, shape_of, triple
from vesuvius.volumes.occupancy import ForegroundMap

_FULL = 255
_DRAWS_MAX = 2**20
# The list of blocks is refined until this share of its starts qualifies, while it has at most `_REFINED_MAX` blocks: a
# longer one is that of a large volume, in which most blocks are all foreground.
_ACCEPTED = 1 / 8
_TRIALS = 256
_REFINED_MAX = 200_000
_GATHERED_MAX = 2**22  # values of the map that a refinement looks at in one go: 32 MiB


@dataclass(frozen=True, eq=False)
class QualifyingStarts:
    """The starts of a box whose patch holds at least `min_fraction` of foreground."""

    map: ForegroundMap
    patch_zyx: Triple
    min_fraction: float
    starts: Box  # the box of starts that they are taken from
    edge_zyx: Triple  # of a block of starts; blocks at the end of an axis stick out of the box
    # rising numbers of the blocks that may hold a start that qualifies; x counts fastest
    blocks: NDArray[np.unsignedinteger[Any]] = field(repr=False)

    @cached_property
    def num_positions(self) -> int:
        """How many starts the blocks have, including those that do not qualify."""
        return len(self.blocks) * math.prod(self.edge_zyx)

    @property
    def nbytes(self) -> int:
        """Memory of the map and of the list of blocks."""
        return self.map.fraction.nbytes + self.blocks.nbytes

    @cached_property
    def hash(self) -> str:
        """Changes where another start could qualify."""
        text = f"{self.map.hash} {self.patch_zyx} {self.min_fraction} {self.starts} {self.edge_zyx} {len(self.blocks)}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def qualifies(self, start_zyx: Triple) -> bool:
        """Whether the patch at a start inside the volume holds enough foreground."""
        return patch_sum(self.map, start_zyx, self.patch_zyx) >= self._least

    def at(self, position: int) -> Triple | None:
        """The start at a position 0 <= p < `num_positions` if it qualifies, else None."""
        number, within = divmod(position, math.prod(self.edge_zyx))
        block = np.unravel_index(int(self.blocks[number]), self._counts)
        place = np.unravel_index(within, self.edge_zyx)
        start = triple(
            int(lo + b * edge + p) for lo, b, edge, p in zip(self.starts[0], block, self.edge_zyx, place, strict=True)
        )
        inside = all(s < stop for s, stop in zip(start, self.starts[1], strict=True))
        return start if inside and self.qualifies(start) else None

    def draw(self, rng: np.random.Generator) -> Triple:
        """A start, uniform over those that qualify.  Raises DataError: none in 2^20 draws."""
        for _ in range(_DRAWS_MAX):
            start = self.at(int(rng.integers(self.num_positions)))
            if start is not None:
                return start
        raise DataError(
            f"patches with enough foreground must be found by drawing; got none in {_DRAWS_MAX} draws for "
            f"data.min_foreground={self.min_fraction:g}; lower it"
        )

    @cached_property
    def _least(self) -> int:
        return _least_sum(self.min_fraction, self.patch_zyx)

    @cached_property
    def _counts(self) -> Triple:
        return grid_shape(shape_of(self.starts), self.edge_zyx)

    def refined(self) -> QualifyingStarts:
        """The same starts in blocks of half the edges, without those that cannot hold one."""
        edges = triple(max(edge // 2, 1) for edge in self.edge_zyx)
        finer = replace(self, edge_zyx=edges, blocks=self.blocks[:0])
        parts = [range(old // new) for old, new in zip(self.edge_zyx, edges, strict=True)]
        at = np.array(np.unravel_index(self.blocks, self._counts)).T
        found = []
        for part in itertools.product(*parts):
            block = at * np.array([len(p) for p in parts]) + np.array(part)
            block = block[(block < finer._counts).all(axis=1)]
            if block.size:
                block = block[finer._bounds(block) >= self._least]
                found.append(np.ravel_multi_index(tuple(block.T), finer._counts).astype(_number_type(finer._counts)))
        return replace(finer, blocks=np.sort(np.concatenate(found)) if found else self.blocks[:0])

    def accepted_share(self) -> float:
        """Estimate of how many of the positions qualify."""
        rng = np.random.default_rng(0)
        drawn = rng.integers(self.num_positions, size=_TRIALS).tolist()
        return sum(self.at(position) is not None for position in drawn) / _TRIALS

    def _bounds(self, blocks: NDArray[np.intp]) -> NDArray[np.float64]:
        """No patch that starts in a block (n, 3) holds more foreground than this, in 255ths of a voxel.

        Each map cell counts with its largest overlap with any of those patches.  Exact where a block is one start.
        """
        axes = [
            _reach(lo, hi, edge, patch, cell, counted)
            for lo, hi, edge, patch, cell, counted in zip(
                *self.starts, self.edge_zyx, self.patch_zyx, self.map.cell_zyx, self.map.fraction.shape, strict=True
            )
        ]
        batch = max(_GATHERED_MAX // math.prod(cells.shape[1] for cells, _ in axes), 1)
        bounds = np.empty(len(blocks))
        for first in range(0, len(blocks), batch):
            some = blocks[first : first + batch].T
            (z, wz), (y, wy), (x, wx) = ((cells[n], weight[n]) for (cells, weight), n in zip(axes, some, strict=True))
            shares = self.map.fraction[z[:, :, None, None], y[:, None, :, None], x[:, None, None, :]]
            bounds[first : first + batch] = np.einsum("nzyx,nz,ny,nx->n", shares, wz, wy, wx, optimize=True)
        return bounds


def patch_sum(foreground: ForegroundMap, start_zyx: Triple, patch_zyx: Triple) -> int:
    """Foreground of the patch at `start_zyx`, inside the volume, in 255ths of a voxel."""
    where, overlap = zip(*map(_overlap, start_zyx, patch_zyx, foreground.cell_zyx), strict=True)
    z, y, x = overlap
    total: float = foreground.fraction[where] @ x @ y @ z
    return int(total)


def qualifying_starts(
    foreground: ForegroundMap, starts: Box, patch_zyx: Triple, min_fraction: float, cell_zyx: Triple
) -> QualifyingStarts | None:
    """The starts of a box that qualify; None where none does, or so few that none is found.

    Args:
        cell_zyx: largest cell of the plan; blocks are about as large.

    """
    bright = -(-_least_sum(min_fraction, patch_zyx) // math.prod(patch_zyx))
    edges = triple(2 ** (edge.bit_length() - 1) for edge in cell_zyx)  # powers of 2, to be halved
    brightest = foreground.fraction
    for axis, (lo, hi, edge, patch, cell) in enumerate(
        zip(*starts, edges, patch_zyx, foreground.cell_zyx, strict=True)
    ):
        first = np.arange(lo, hi, edge)
        cells, last = first // cell, (np.minimum(first + edge, hi) + patch - 2) // cell
        reached = [brightest.take(np.minimum(cells + n, last), axis) for n in range(int((last - cells).max()) + 1)]
        brightest = np.maximum.reduce(reached)
    # A patch whose cells are all darker than that has too little: at least one of them must be so bright.
    blocks = np.flatnonzero(brightest >= bright).astype(_number_type(brightest.shape))
    found = QualifyingStarts(foreground, patch_zyx, min_fraction, starts, edges, blocks)
    while len(found.blocks) and found.accepted_share() < _ACCEPTED:
        if len(found.blocks) > _REFINED_MAX or max(found.edge_zyx) == 1:
            try:
                found.draw(np.random.default_rng(0))
            except DataError:
                return None
            return found
        found = found.refined()
    return found if len(found.blocks) else None


@lru_cache(maxsize=256)
def starts_within(found: QualifyingStarts, cell: Box) -> QualifyingStarts | None:
    """Those of the starts in a cell, in blocks small enough for fast draws; None where there are none."""
    return qualifying_starts(found.map, cell, found.patch_zyx, found.min_fraction, shape_of(cell))


def _number_type(counts: Sequence[int]) -> type[np.unsignedinteger[Any]]:
    """Of the numbers of so many blocks: the list is long, so it is as small as can be."""
    return np.uint32 if math.prod(counts) <= 2**32 else np.uint64


def _reach(
    lo: int, hi: int, edge: int, patch: int, cell: int, counted: int
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """For each block along an axis: the map cells that its patches touch, and the most that one overlaps with each.

    Both (blocks, cells touched at most); cells that are not touched have overlap 0.
    """
    first = np.arange(lo, hi, edge)
    last = np.minimum(first + edge, hi) - 1  # last start
    cells = (first // cell)[:, None] + np.arange(int(((last + patch - 1) // cell - first // cell).max()) + 1)
    overlap = np.minimum(last[:, None] + patch - cells * cell, (cells + 1) * cell - first[:, None])
    overlap = overlap.clip(0, min(patch, cell))
    return np.minimum(cells, counted - 1), overlap.astype(np.float64)


def _overlap(start: int, patch: int, cell: int) -> tuple[slice, NDArray[np.float64]]:
    """The map cells that a patch touches along one axis, and how many of its voxels lie in each."""
    first, last = start // cell, (start + patch - 1) // cell
    voxels = [cell] * (last - first + 1)
    voxels[0] -= start - first * cell
    voxels[-1] -= (last + 1) * cell - (start + patch)
    return slice(first, last + 1), np.array(voxels, np.float64)


def _least_sum(min_fraction: float, patch_zyx: Triple) -> int:
    """The least foreground in 255ths of a voxel whose share of the patch, as a float, is at least `min_fraction`."""
    assert 0 < min_fraction <= 1, min_fraction
    full = _FULL * math.prod(patch_zyx)
    assert full < 2**52, "sums must be exact in float64"
    least = int(min_fraction * full)
    while least / full < min_fraction:
        least += 1
    return least
