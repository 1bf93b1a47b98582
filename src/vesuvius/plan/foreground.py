"""Finds the starts with enough foreground on a map of the volume, without reading it.  Pure.

The foreground of a patch is its number of foreground voxels.  If the map has only cells, it is counted in 255ths of a
voxel, sum(fraction x overlap of patch and map cell), an integer below 2^52, so float64 sums it without rounding.

Qualifying starts are drawn by rejection sampling from the blocks of starts that may hold one; blocks without one only
cost time.
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
from vesuvius.volumes.box import Box, box_at, grid_shape, shape_of, triple
from vesuvius.volumes.occupancy import ForegroundMap

_FULL = 255
_DRAWS_MAX = 2**20
_COUNTS_MAX = 2**16  # the same where each draw counts voxels, which takes about 1 ms; at most a 16th in the plan
# The list of blocks is refined until this share of its starts qualifies, while it has at most `_REFINED_MAX` blocks;
# longer lists are those of large volumes, in which most blocks are entirely foreground.
_ACCEPTED = 1 / 8
_TRIALS = 256
_COUNTED_MAX = 2**12  # single starts that are all tested
_REFINED_MAX = 200_000
_GATHERED_MAX = 2**22  # map values that a refinement gathers at once: 32 MiB


@dataclass(frozen=True, eq=False)
class QualifyingStarts:
    """The starts in a box whose patch holds at least `min_fraction` of foreground."""

    map: ForegroundMap
    patch_zyx: Triple
    min_fraction: float
    starts: Box
    edge_zyx: Triple  # of a block of starts; blocks at the end of an axis extend beyond the box
    # ascending indices of the blocks that may hold a qualifying start; x varies fastest
    blocks: NDArray[np.unsignedinteger[Any]] = field(repr=False)
    also: QualifyingStarts | None = None  # a patch that starts here must qualify there, too

    @cached_property
    def num_positions(self) -> int:
        """Number of starts in the blocks, including those that do not qualify."""
        return len(self.blocks) * math.prod(self.edge_zyx)

    @property
    def nbytes(self) -> int:
        voxels = self.map.voxels.bits.nbytes if self.map.voxels else 0
        return self.map.fraction.nbytes + voxels + self.blocks.nbytes

    @cached_property
    def hash(self) -> str:
        """Digest that changes if another start could qualify."""
        text = f"{self.map.hash} {self.patch_zyx} {self.min_fraction} {self.starts} {self.edge_zyx} {len(self.blocks)}"
        text += f" {self.also.hash}" if self.also else ""
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def qualifies(self, start_zyx: Triple) -> bool:
        """Whether the patch at a start inside the volume holds enough foreground."""
        enough = patch_sum(self.map, start_zyx, self.patch_zyx) >= self._least
        return enough and (self.also is None or self.also.qualifies(start_zyx))

    def at(self, position: int) -> Triple | None:
        """Return the start at position 0 <= p < `num_positions` if it qualifies, else None."""
        block_index, within = divmod(position, math.prod(self.edge_zyx))
        block = np.unravel_index(int(self.blocks[block_index]), self._counts)
        offset = np.unravel_index(within, self.edge_zyx)
        start = triple(
            int(lo + b * edge + o) for lo, b, edge, o in zip(self.starts[0], block, self.edge_zyx, offset, strict=True)
        )
        inside = all(s < stop for s, stop in zip(start, self.starts[1], strict=True))
        return start if inside and self.qualifies(start) else None

    def draw(self, rng: np.random.Generator, share: int = 1) -> Triple:
        """Draw a start, uniformly from those that qualify.  Raises DataError after many failures."""
        most = _COUNTS_MAX // share if self.map.voxels else _DRAWS_MAX
        for _ in range(most):
            start = self.at(int(rng.integers(self.num_positions)))
            if start is not None:
                return start
        raise DataError(
            f"No patch with data.min_foreground={self.min_fraction:g} of foreground was found in {most} draws; lower it"
        )

    @cached_property
    def _least(self) -> int:
        return _least_sum(self.min_fraction, self.patch_zyx)

    @cached_property
    def _counts(self) -> Triple:
        return grid_shape(shape_of(self.starts), self.edge_zyx)

    def refined(self) -> QualifyingStarts:
        """Return the same starts in blocks of half the edge lengths, without those that cannot hold one."""
        edges = triple(max(edge // 2, 1) for edge in self.edge_zyx)
        finer = replace(self, edge_zyx=edges, blocks=self.blocks[:0])
        splits = [range(old // new) for old, new in zip(self.edge_zyx, edges, strict=True)]
        coarse = np.array(np.unravel_index(self.blocks, self._counts)).T
        kept = []
        for offset in itertools.product(*splits):
            block = coarse * np.array([len(split) for split in splits]) + np.array(offset)
            block = block[(block < finer._counts).all(axis=1)]
            if block.size:
                block = block[finer._may_qualify(block)]
                kept.append(np.ravel_multi_index(tuple(block.T), finer._counts).astype(_index_type(finer._counts)))
        return replace(finer, blocks=np.sort(np.concatenate(kept)) if kept else self.blocks[:0])

    def accepts_enough(self) -> bool:
        """Whether an eighth of some random positions qualify; tests no more than it takes to know."""
        drawn = np.random.default_rng(0).integers(self.num_positions, size=_TRIALS).tolist()
        enough = int(_TRIALS * _ACCEPTED)
        return sum(1 for _ in itertools.islice(filter(self.at, drawn), enough)) == enough

    def _may_qualify(self, blocks: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Whether a start in each block (n, 3) may qualify."""
        enough: NDArray[np.bool_] = self._bounds(blocks) >= self._least
        if self.also is not None:
            enough &= replace(self.also, starts=self.starts, edge_zyx=self.edge_zyx)._may_qualify(blocks)
        return enough

    def _bounds(self, blocks: NDArray[np.intp]) -> NDArray[np.float64]:
        """Upper bound, for each block (n, 3), on the foreground of patches that start in it, in 255ths of a voxel.

        Each map cell counts with its largest overlap with any of those patches: its share of it, or, if its foreground
        may lie anywhere in it, all up to that.
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
            if self.map.voxels:
                overlap = _FULL * np.einsum("nz,ny,nx->nzyx", wz, wy, wx)
                found = np.minimum(shares * float(math.prod(self.map.cell_zyx)), overlap).sum((1, 2, 3))
            else:
                found = np.einsum("nzyx,nz,ny,nx->n", shares, wz, wy, wx, optimize=True)
            bounds[first : first + batch] = found
        return bounds


def patch_sum(foreground: ForegroundMap, start_zyx: Triple, patch_zyx: Triple) -> int:
    """Return the foreground of the patch at `start_zyx`, inside the volume, in 255ths of a voxel.

    Counted if the map has voxels; else the sum of its cells' shares, which is exact for stored chunks.
    """
    if foreground.voxels is not None:
        return _FULL * foreground.voxels.count(box_at(start_zyx, patch_zyx))
    cells, overlap = zip(*map(_overlap, start_zyx, patch_zyx, foreground.cell_zyx), strict=True)
    z, y, x = overlap
    total: float = foreground.fraction[cells] @ x @ y @ z
    return int(total)


def qualifying_starts(
    foreground: ForegroundMap,
    starts: Box,
    patch_zyx: Triple,
    min_fraction: float,
    cell_zyx: Triple,
    also: QualifyingStarts | None = None,
) -> QualifyingStarts | None:
    """Return the qualifying starts of a box; None if there are none, or so few that drawing finds none.

    Blocks are about as large as `cell_zyx`, the largest cell of the plan.  `also` as in `QualifyingStarts`.
    """
    bright = 1 if foreground.voxels else -(-_least_sum(min_fraction, patch_zyx) // math.prod(patch_zyx))
    edges = triple(2 ** (edge.bit_length() - 1) for edge in cell_zyx)  # powers of 2, to be halved
    brightest = foreground.fraction
    for axis, (lo, hi, edge, patch, cell) in enumerate(
        zip(*starts, edges, patch_zyx, foreground.cell_zyx, strict=True)
    ):
        first = np.arange(lo, hi, edge)
        cells, last = first // cell, (np.minimum(first + edge, hi) + patch - 2) // cell
        reached = [brightest.take(np.minimum(cells + n, last), axis) for n in range(int((last - cells).max()) + 1)]
        brightest = np.maximum.reduce(reached)
    # A patch qualifies only if at least one of its map cells is this bright.
    blocks = np.flatnonzero(brightest >= bright).astype(_index_type(brightest.shape))
    qualifying = QualifyingStarts(foreground, patch_zyx, min_fraction, starts, edges, blocks, also)
    while len(qualifying.blocks) and not qualifying.accepts_enough():
        single = max(qualifying.edge_zyx) == 1
        if single and len(qualifying.blocks) <= _COUNTED_MAX:
            counted = [position for position in range(len(qualifying.blocks)) if qualifying.at(position)]
            return replace(qualifying, blocks=qualifying.blocks[counted]) if counted else None
        if single or len(qualifying.blocks) > _REFINED_MAX:
            try:
                qualifying.draw(np.random.default_rng(0), 16)  # so that later ones do not fail
            except DataError:
                return None
            return qualifying
        qualifying = qualifying.refined()
    return qualifying if len(qualifying.blocks) else None


@lru_cache(maxsize=256)
def starts_within(qualifying: QualifyingStarts, cell: Box) -> QualifyingStarts | None:
    """Return those of the starts in a cell, in blocks small enough for fast draws; None if there are none."""
    patch, share = qualifying.patch_zyx, qualifying.min_fraction
    return qualifying_starts(qualifying.map, cell, patch, share, shape_of(cell), qualifying.also)


def _index_type(counts: Sequence[int]) -> type[np.unsignedinteger[Any]]:
    """Smallest dtype for the indices of this many blocks: the list is long."""
    return np.uint32 if math.prod(counts) <= 2**32 else np.uint64


def _reach(
    lo: int, hi: int, edge: int, patch: int, cell: int, counted: int
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return, for each block along an axis, the map cells that its patches touch and the maximum overlap with each.

    Both have shape (blocks, maximum cells touched); cells that are not touched have overlap 0.
    """
    first = np.arange(lo, hi, edge)
    last = np.minimum(first + edge, hi) - 1  # last start
    cells = (first // cell)[:, None] + np.arange(int(((last + patch - 1) // cell - first // cell).max()) + 1)
    overlap = np.minimum(last[:, None] + patch - cells * cell, (cells + 1) * cell - first[:, None])
    return np.minimum(cells, counted - 1), overlap.clip(0, min(patch, cell)).astype(np.float64)


def _overlap(start: int, patch: int, cell: int) -> tuple[slice, NDArray[np.float64]]:
    """Return the map cells that a patch touches along one axis, and how many of its voxels lie in each."""
    first, last = start // cell, (start + patch - 1) // cell
    voxels = [cell] * (last - first + 1)
    voxels[0] -= start - first * cell
    voxels[-1] -= (last + 1) * cell - (start + patch)
    return slice(first, last + 1), np.array(voxels, np.float64)


def _least_sum(min_fraction: float, patch_zyx: Triple) -> int:
    """Smallest foreground in 255ths of a voxel whose share of the patch, as a float, is at least `min_fraction`."""
    assert 0 < min_fraction <= 1, min_fraction
    full = _FULL * math.prod(patch_zyx)
    assert full < 2**52, "sums must be exact in float64"
    least = int(min_fraction * full)
    while least / full < min_fraction:
        least += 1
    return least
