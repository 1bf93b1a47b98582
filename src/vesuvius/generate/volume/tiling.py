"""Tiles and blocks of a volume, the weight of each tile at each voxel, and the passes over them.  Pure.

The network sees overlapping tiles of the size of a training patch.  State and noise are kept in blocks, which have the
same size and do not overlap.  Both are indexed in C order.  A pass evaluates the network on all tiles, blends their
estimates of x_0, and takes one sampler step in each block.  Noise is drawn per block and depends only on (seed, stream,
pass, grid index of the block).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.config import SamplerMethod, Triple
from vesuvius.diffusion.randomness import Purpose, torch_generator
from vesuvius.diffusion.sampler import Coefficients, NoiseLevel, combined, step_table
from vesuvius.diffusion.schedule import x_0_and_eps
from vesuvius.errors import ConfigError
from vesuvius.runlog.units import format_sizes
from vesuvius.volumes.box import (
    Box,
    box_at,
    chunk_box,
    chunk_ranges,
    grid_shape,
    intersection,
    shape_of,
    slices,
    triple,
)

_MAX_OVERLAP = 0.75
_LEAST_OVERLAP = 4  # voxels


@dataclass(frozen=True)
class Tiling:
    shape_zyx: Triple  # of the volume
    patch_zyx: Triple  # of a tile and of a block
    overlap: float  # least overlap of neighbouring tiles, as a share of a patch; see `tile_starts`

    def check(self) -> None:
        if any(size < patch for size, patch in zip(self.shape_zyx, self.patch_zyx, strict=True)):
            raise ConfigError(
                f"A volume of {format_sizes(self.shape_zyx)} is smaller than a training patch "
                f"({format_sizes(self.patch_zyx)}); increase --shape"
            )
        if not 0 <= self.overlap <= _MAX_OVERLAP:
            raise ConfigError(
                f"--overlap {self.overlap:g} is not between 0 and {_MAX_OVERLAP} (the share of a tile "
                "that its neighbour covers); try 0.25"
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

        The window is sin^4, which is positive everywhere; with sin^2 (Hann) the faces of tiles are more visible.  As
        the tiles form a grid, the sum over all tiles is the product of one sum per axis, and the weight of a tile is
        the product of three of these.
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

    Overlapping tiles share at least 4 voxels or half a patch: with 2, their centres are visible (docs/sampling.md).
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


START, STEP = 0, 1
"""Noise streams: of the first state, and of a sampler step."""

_RESPONSES = 0.4, 1.05
"""Range of the network's response to known voxels for which the rounds are tuned, see `_relaxation_factors`."""


@dataclass(frozen=True)
class Pass:
    level: NoiseLevel  # noise level of the state
    row: Coefficients | None  # the sampler step; None = the pass only corrects the noise of known voxels
    keeps_x_0: bool = False  # a later step needs the estimate of x_0 of the last step up to this pass
    relaxation: float = 1.0  # relaxation factor of `correct_known`


def make_passes(levels: Sequence[NoiseLevel], method: SamplerMethod, rounds: int = 1) -> tuple[Pass, ...]:
    """Return the passes that take a volume from the first of `levels` to the last.

    The corrector of heun is a separate pass, at the level of its predictor.  All but the last of the `rounds` of a step
    only correct the noise of known voxels.
    """
    passes: list[Pass] = []
    rows, relaxations = step_table(levels, method), _relaxation_factors(rounds)
    for step, row in enumerate(rows):
        keeps_before = row.x_0_before != 0
        keeps = step + 1 < len(rows) and rows[step + 1].x_0_before != 0
        corrector = []
        if method == "heun" and step + 1 < len(rows):
            corrector = [_heun_corrector(levels[step], levels[step + 1])]
        passes += [Pass(levels[step], None, keeps_before, relaxation) for relaxation in relaxations[:-1]]
        passes += [Pass(levels[step], row, keeps or bool(corrector), relaxations[-1]), *corrector]
    return tuple(passes)


def _relaxation_factors(rounds: int) -> list[float]:
    """Return one relaxation factor per round, which together minimise the error of known voxels.

    A round with factor p multiplies an error to which the network responds with r by 1 - p r.  The product over all
    rounds is smallest on a range of r if it is a Chebyshev polynomial, with roots at 1 / p.  The range begins at 0.4 /
    rounds; errors do not grow up to about its mirror image above 1.
    """
    low, high = _RESPONSES[0] / rounds, _RESPONSES[1]
    roots = (math.cos(math.pi * (2 * k + 1) / (2 * rounds)) for k in range(rounds))
    return [2 / (high + low + (high - low) * root) for root in roots]


def _heun_corrector(here: NoiseLevel, there: NoiseLevel) -> Pass:
    """Return the second half of a heun step, from the predictor's state x' and the estimates x_0 and x_0'.

    With x' = alpha' x_0 + sigma' eps and eps' = (x' - alpha' x_0') / sigma', the rule of
    `sampler.heun_correction` becomes x' + c (x_0' - x_0) with c = (alpha' sigma - alpha sigma') / (2 sigma').  The
    state before the predictor is not needed.
    """
    share = (there.alpha * here.sigma - here.alpha * there.sigma) / (2 * there.sigma)
    return Pass(there, Coefficients(x=1.0, x_0=share, x_0_before=-share))


def correct_known(step: Pass, x: Tensor, x_0: Tensor, known: Tensor) -> Tensor:
    """Correct the noise of known voxels so that the network estimates them better.

    With independent noise the network sees only what the noise does not hide, and fills gaps inconsistently.  For
    Gaussian data the estimate in the gaps becomes E[x_0 | state in the gaps, known voxels] once the estimate at the
    known voxels equals their value: x_0(x + d) = x_0 + C d alpha / sigma^2, where C is the covariance of x_0 given x,
    and E[x_0 | x, known] = x_0 + C H^T (H C H^T)^-1 (known - H x_0) has that form.  This is one step of the fixed-point
    iteration for it, d = relaxation * alpha * (known - x_0).  `known` is NaN where unknown.
    """
    return torch.where(known.isnan(), x, x + step.relaxation * step.level.alpha * (known - x_0))


def advance(step: Pass, x: Tensor, x_0: Tensor, x_0_before: Tensor | None, noise: Tensor | None) -> Tensor:
    """Return the next state of a block, float32 in the shape of `x`; voxels are independent.  `noise` is normal."""
    row = step.row
    assert row is not None
    eps = x_0_and_eps("x_0", x_0, x, step.level.alpha, step.level.sigma)[1] if row.eps != 0 else None
    return combined(row, x, x_0, x if eps is None else eps, x_0_before, noise)


def block_noise(seed: int, stream: int, pass_index: int, tiling: Tiling, block: int) -> Tensor:
    """Return standard normal noise of a block, float32 in the shape of its box."""
    generator = torch_generator(seed, Purpose.VOLUME, stream, pass_index, *tiling.block_index(block))
    noise = torch.empty(tiling.patch_zyx, dtype=torch.float32).normal_(generator=generator)
    return noise[tuple(map(slice, shape_of(tiling.block_box(block))))]
