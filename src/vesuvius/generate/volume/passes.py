"""Sampling as passes over a volume: what each computes in a block from the blended estimates of x_0.  Pure.

A pass takes one sampler step in each block.  Noise is drawn per block and depends only on (seed, stream, pass, grid
index of the block).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vesuvius.config import SamplerMethod
from vesuvius.diffusion.randomness import Purpose, torch_generator
from vesuvius.diffusion.sampler import Coefficients, NoiseLevel, combined, step_table
from vesuvius.diffusion.schedule import x_0_and_eps
from vesuvius.predict.tasks import Job
from vesuvius.predict.tiling import BlockGrid
from vesuvius.volumes.box import Box, shape_of
from vesuvius.volumes.context import ContextAlignment

Fields = dict[str, Tensor]
"""Voxels of a block by name, each in the shape of its box."""
Read = Callable[[str], Tensor]
"""Reads a field of the block's state, or of what the job is given."""

START, STEP, CONTEXT = 0, 1, 2
"""Noise streams: of the first state, of a sampler step, and on the condition around the patches."""

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

    The corrector of heun is a pass of its own.  All but the last of the `rounds` of a step only correct the noise of
    known voxels.
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
    """Return one relaxation factor per round, which together minimize the error of known voxels.

    A round with factor p multiplies an error to which the network responds with r by 1 - p r.  The product over all
    rounds is smallest on a range of r if it is a Chebyshev polynomial, with roots at 1 / p.  The range begins at 0.4 /
    rounds.
    """
    low, high = _RESPONSES[0] / rounds, _RESPONSES[1]
    roots = (math.cos(math.pi * (2 * k + 1) / (2 * rounds)) for k in range(rounds))
    return [2 / (high + low + (high - low) * root) for root in roots]


def _heun_corrector(here: NoiseLevel, there: NoiseLevel) -> Pass:
    """Return the second half of a heun step, from the predictor's state x' and the estimates x_0 and x_0'.

    `sampler.heun_correction` becomes x' + c (x_0' - x_0) with c = (alpha' sigma - alpha sigma') / (2 sigma').
    """
    share = (there.alpha * here.sigma - here.alpha * there.sigma) / (2 * there.sigma)
    return Pass(there, Coefficients(x=1.0, x_0=share, x_0_before=-share))


def correct_known(step: Pass, x: Tensor, x_0: Tensor, known: Tensor) -> Tensor:
    """Correct the noise of known voxels so that the network estimates them better; `known` is NaN where unknown.

    With independent noise the network sees only what the noise does not hide, and fills gaps inconsistently.  For
    Gaussian data the estimate in the gaps becomes E[x_0 | state in the gaps, known voxels] once the estimate at the
    known voxels equals their value: x_0(x + d) = x_0 + C d alpha / sigma^2, where C is the covariance of x_0 given x.
    This is one step of the fixed-point iteration d = relaxation * alpha * (known - x_0).
    """
    return torch.where(known.isnan(), x, x + step.relaxation * step.level.alpha * (known - x_0))


def advance(step: Pass, x: Tensor, x_0: Tensor, x_0_before: Tensor | None, noise: Tensor | None) -> Tensor:
    """Return the next state of a block, float32 in the shape of `x`; voxels are independent.  `noise` is normal."""
    row = step.row
    assert row is not None
    eps = x_0_and_eps("x_0", x_0, x, step.level.alpha, step.level.sigma)[1] if row.eps != 0 else None
    return combined(row, x, x_0, x if eps is None else eps, x_0_before, noise)


def block_noise(seed: int, stream: int, pass_index: int, grid: BlockGrid, block: int) -> Tensor:
    """Return standard normal noise of a block, float32 in the shape of its box."""
    generator = torch_generator(seed, Purpose.VOLUME, stream, pass_index, *grid.block_index(block))
    noise = torch.empty(grid.block_zyx, dtype=torch.float32).normal_(generator=generator)
    return noise[tuple(map(slice, shape_of(grid.block_box(block))))]


@dataclass(frozen=True)
class SamplingJob(Job):
    """Sampling; states have `x`, which is x_t, and, if a later step needs it, `x_0` of the step before."""

    seed: int
    levels: tuple[NoiseLevel, ...]  # decreasing noise
    method: SamplerMethod
    rounds: int = 1  # passes per step, see `make_passes`
    inpaint: bool = False  # some voxels are known: standardized values in `known`, NaN in the gaps
    condition: str | None = None  # dtype
    context: ContextAlignment | None = None  # where the windows of the condition lie, in generated voxels
    condition_noise: float = 0.0  # standard deviation of the noise on a condition with context

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        return make_passes(self.levels, self.method, self.rounds)

    @property
    def steps(self) -> int:
        return len(self.passes)

    @property
    def given(self) -> dict[str, str]:
        """Names and dtypes of the arrays that exist in the folder from the start."""
        known = {"known": "float32"} if self.inpaint else {}
        return known if self.condition is None or self.context else known | {"condition": self.condition}

    @cached_property
    def context_box(self) -> Box:
        """The condition's voxels in the windows of all tiles, which may reach outside it."""
        assert self.context is not None
        return self.context.cover(((0, 0, 0), self.tiling.shape_zyx))

    @cached_property
    def context_grid(self) -> BlockGrid:
        """The blocks in which they are staged."""
        return BlockGrid(shape_of(self.context_box), self.tiling.patch_zyx)

    def first(self, block: int, read: Read) -> Fields:
        """Return noise, or known voxels with the same level of noise."""
        x = block_noise(self.seed, START, 0, self.tiling, block)
        if self.inpaint:
            known, level = read("known"), self.levels[0]
            x = torch.where(known.isnan(), x, level.alpha * known + level.sigma * x)
        return {"x": x}

    def next(self, step: int, block: int, read: Read, blended: Tensor | None) -> Fields:
        """Return the next state of a block from the blended results of the tiles over it; None = it is not active."""
        this, x = self.passes[step], read("x")
        x_0 = torch.zeros_like(x) if blended is None else blended
        if self.inpaint:
            known = read("known")
            if blended is not None:
                x = correct_known(this, x, x_0, known)
            x_0 = torch.where(known.isnan(), x_0, known)
        if (row := this.row) is not None:
            before = read("x_0") if row.x_0_before != 0 else None
            noise = block_noise(self.seed, STEP, step, self.tiling, block) if row.noise != 0 else None
            x = advance(this, x, x_0, before, noise)
        elif this.keeps_x_0:
            x_0 = read("x_0")
        return {"x_0": x_0, "x": x} if this.keeps_x_0 else {"x": x}
