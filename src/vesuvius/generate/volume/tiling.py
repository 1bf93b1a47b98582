"""Where the tiles and blocks of a volume lie, the weight of each tile at each voxel, and the passes over them.  Pure.

The network sees tiles, which have the size of a training patch and overlap.  State and noise are kept in blocks, which
also have the size of a patch and do not overlap.  Both are numbered in C order.  A pass evaluates the network on all
tiles, blends their estimates of x_0, and takes one sampler step in each block.  Noise is drawn per block, from (seed,
stream, pass, place of the block) alone.
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
    """Tiles and blocks of a volume."""

    shape_zyx: Triple  # of the volume
    patch_zyx: Triple  # of a tile and of a block
    overlap: float  # of neighbouring tiles, as a share of a patch; at least that much, see `axis_starts`

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
                f"{_MAX_OVERLAP}; try 0.25"
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
    """Where tiles begin along an axis: 0 and size - patch included, at most (1 - overlap) patch apart.

    Tiles that overlap at all do so by 4 voxels or half a patch: with 2, their middles show (docs/sampling.md).
    """
    last, most = size - patch, int(patch * (1 - overlap))
    if overlap > 0:
        most = min(most, patch - min(_LEAST_OVERLAP, patch // 2))
    gaps = -(-last // max(1, most))
    return tuple(i * last // gaps for i in range(gaps + 1)) if gaps else (0,)


def shared_part(a: Box, b: Box) -> tuple[Box, tuple[slice, slice, slice], tuple[slice, slice, slice]]:
    """The box that two boxes share, and the slices that cut it out of each."""
    shared = intersection(a, b)
    return shared, slices(shared, a[0]), slices(shared, b[0])


def _place(number: int, grid: Triple) -> Triple:
    """Place in a grid of what has a number in C order.  (`np.unravel_index` takes ten times as long.)"""
    rest, x = divmod(number, grid[2])
    return (*divmod(rest, grid[1]), x)


START, STEP = 0, 1
"""Streams of noise: of the first state, and of a sampler step."""

_RESPONSES = 0.4, 1.05
"""The responses of the network to known voxels that the rounds of a step are made for, see `_pulls`."""


@dataclass(frozen=True)
class Pass:
    """One pass."""

    level: NoiseLevel  # noise level of the state
    row: Coefficients | None  # the sampler step from it; None = the pass only corrects the noise of known voxels
    keeps_x_0: bool = False  # a later step needs the estimate of x_0 of the last step up to this pass
    pull: float = 1.0  # how far known voxels follow the error of their estimate, see `corrected`


def passes_of(levels: Sequence[NoiseLevel], method: SamplerMethod, rounds: int = 1) -> tuple[Pass, ...]:
    """The passes that take a volume from the first of `levels` to the last.

    The correction of heun is a pass of its own, at the level that its predictor has reached.

    Args:
        rounds: passes per step; all but the last of a step correct the noise of known voxels.
    """
    passes: list[Pass] = []
    rows, pulls = step_table(levels, method), _pulls(rounds)
    for step, row in enumerate(rows):
        keeps_before = row.x_0_before != 0
        keeps = step + 1 < len(rows) and rows[step + 1].x_0_before != 0
        corrector = []
        if method == "heun" and step + 1 < len(rows):
            corrector = [_heun_corrector(levels[step], levels[step + 1])]
        passes += [Pass(levels[step], None, keeps_before, pull) for pull in pulls[:-1]]
        passes += [Pass(levels[step], row, keeps or bool(corrector), pulls[-1]), *corrector]
    return tuple(passes)


def _pulls(rounds: int) -> list[float]:
    """One per round, so that together they leave the least error of known voxels.

    A round with pull p leaves the share 1 - p r of an error to which the network responds with r.  The product of all
    rounds is smallest over a range of r where it is a Chebyshev polynomial, with roots at 1 / p.  The range goes down
    to 0.4 / rounds; up to about its mirror image above 1 nothing grows.
    """
    low, high = _RESPONSES[0] / rounds, _RESPONSES[1]
    roots = (math.cos(math.pi * (2 * k + 1) / (2 * rounds)) for k in range(rounds))
    return [2 / (high + low + (high - low) * root) for root in roots]


def _heun_corrector(here: NoiseLevel, there: NoiseLevel) -> Pass:
    """The second half of a heun step, from the predictor's state x' and the estimates x_0 before it and x_0' of it.

    With x' = alpha' x_0 + sigma' eps and eps' = (x' - alpha' x_0') / sigma', the trapezoidal rule of
    `sampler.heun_correction` becomes x' + c (x_0' - x_0) with c = (alpha' sigma - alpha sigma') / (2 sigma'): the state
    before the predictor need not be kept.
    """
    share = (there.alpha * here.sigma - here.alpha * there.sigma) / (2 * there.sigma)
    return Pass(there, Coefficients(x=1.0, x_0=share, x_0_before=-share))


def corrected(step: Pass, x: Tensor, x_0: Tensor, known: Tensor) -> Tensor:
    """The state with the noise of known voxels changed, so that the network will estimate them better.

    With independent noise the network knows of them only what the noise lets through, and fills gaps that do not fit.
    For Gaussian data the estimate at the gaps becomes E[x_0 | state at the gaps, known voxels] once the estimate at the
    known voxels is their value: x_0(x + d) = x_0 + C d alpha / sigma^2, where C is the covariance of x_0 given x, and
    E[x_0 | x, known] = x_0 + C H^T (H C H^T)^-1 (known - H x_0) is of that form.  This is a step of the fixed-point
    iteration for it, d = pull * alpha * (known - x_0).

    Args:
        known: NaN where not known.
    """
    return torch.where(known.isnan(), x, x + step.pull * step.level.alpha * (known - x_0))


def advanced(step: Pass, x: Tensor, x_0: Tensor, x_0_before: Tensor | None, noise: Tensor | None) -> Tensor:
    """The next state of a block, float32 in the shape of `x`; each voxel from its own values alone.

    Args:
        noise: standard normal, where the step has use for it.
    """
    row = step.row
    assert row is not None
    eps = x_0_and_eps("x_0", x_0, x, step.level.alpha, step.level.sigma)[1] if row.eps != 0 else None
    return combined(row, x, x_0, x if eps is None else eps, x_0_before, noise)


def block_noise(seed: int, stream: int, number: int, tiling: Tiling, block: int) -> Tensor:
    """Standard normal noise of a block, float32 of the shape of its box."""
    generator = torch_generator(seed, Purpose.VOLUME, stream, number, *tiling.block_index(block))
    noise = torch.empty(tiling.patch_zyx, dtype=torch.float32).normal_(generator=generator)
    return noise[tuple(map(slice, shape_of(tiling.block_box(block))))]
