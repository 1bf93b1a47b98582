"""The passes over a volume: the noise level of each, and the sampler step that follows it.  Pure.

A pass evaluates the network on all tiles, blends their estimates of x_0, and takes one sampler step in each block.
Noise is drawn per block, from (seed, stream, pass, place of the block) alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vesuvius.config import SamplerMethod
from vesuvius.diffusion.levels import NoiseLevel
from vesuvius.diffusion.randomness import Purpose, torch_generator
from vesuvius.diffusion.sampler import Coefficients, combined, step_table
from vesuvius.diffusion.schedule import x_0_and_eps
from vesuvius.generate.volume.tiling import Tiling
from vesuvius.volumes.box import shape_of

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
