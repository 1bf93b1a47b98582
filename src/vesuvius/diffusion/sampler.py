"""Noise -> sample: DDIM, ancestral DDPM, DPM-Solver++(2M) and Heun along any decreasing list of noise levels.

Each method is a table of coefficients, one row per step, computed in float64 on the host; `sample` applies it.  An
`Estimate` returns x_0 and eps at a level; it may be a network (`estimate.py`), a closed form, or tiles of a larger
volume.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from vesuvius.config import DiffusionConfig, SamplerMethod
from vesuvius.diffusion.schedule import Schedule


@dataclass(frozen=True)
class NoiseLevel:
    """The noise level of x = alpha x_0 + sigma eps; computing one factor from the other would lose precision."""

    t: float  # input of the network; an integer is a timestep of the schedule, other values lie between two timesteps
    alpha: float  # sqrt(alpha_bar), 0 for pure noise
    sigma: float  # sqrt(1 - alpha_bar), 0 for a clean sample


_RHO = 7.0
CLEAN = NoiseLevel(t=-1, alpha=1.0, sigma=0.0)  # never evaluated; its t is outside every table


def log_snr_gain(here: NoiseLevel, there: NoiseLevel) -> float:
    """Return h = lambda(there) - lambda(here) with lambda = log(alpha/sigma); infinite at the ends."""
    if here.alpha == 0 or there.sigma == 0:
        return math.inf
    return math.log(there.alpha / here.alpha) + math.log(here.sigma / there.sigma)


def trailing_levels(schedule: Schedule, steps: int) -> tuple[NoiseLevel, ...]:
    """Return steps + 1 levels in float64, from the schedule's noisiest to `CLEAN`.

    t is round(T k / S) - 1 for k = S ... 1 (Lin et al. 2023, table 2, "trailing").
    """
    table = schedule.alpha_bar_64
    times = np.round(schedule.timesteps * np.arange(steps, 0, -1) / steps).astype(np.int64) - 1
    return (*(NoiseLevel(t, math.sqrt(table[t]), math.sqrt(1 - table[t])) for t in times.tolist()), CLEAN)


def rho_levels(schedule: Schedule, steps: int) -> tuple[NoiseLevel, ...]:
    """Return steps + 1 levels: sigma/alpha from the schedule's highest to its lowest, then `CLEAN`.

    The seventh root of sigma/alpha decreases in equal steps (Karras et al. 2022, eq. 5, rho = 7); t is interpolated.
    """
    table = np.sqrt((1 - schedule.alpha_bar_64) / schedule.alpha_bar_64)
    roots = np.linspace(table[-1] ** (1 / _RHO), table[0] ** (1 / _RHO), steps)
    noise = np.clip(roots**_RHO, table[0], table[-1])
    times = np.interp(np.log(noise), np.log(table), np.arange(schedule.timesteps))
    times[0], times[-1] = schedule.timesteps - 1, 0 if steps > 1 else schedule.timesteps - 1
    levels = [
        NoiseLevel(float(t), 1 / math.sqrt(1 + s**2), s / math.sqrt(1 + s**2))
        for t, s in zip(times.tolist(), noise.tolist(), strict=True)
    ]
    return (*levels, CLEAN)


def sampling_levels(schedule: Schedule, config: DiffusionConfig) -> tuple[NoiseLevel, ...]:
    """Return the sampling levels for `noise` and `sampler_steps` of the config.  Pure."""
    levels = rho_levels if config.noise == "spectral" else trailing_levels
    return levels(schedule, config.sampler_steps)


# (x, level) -> estimates of (x_0, eps) with x = alpha x_0 + sigma eps, in the shape and dtype of x.
Estimate = Callable[[Tensor, NoiseLevel], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Coefficients:
    """Weights of the next state: of the state, of the estimates, of x_0 one step earlier, and of new Gaussian noise."""

    x: float = 0.0
    x_0: float = 0.0
    eps: float = 0.0
    x_0_before: float = 0.0
    noise: float = 0.0


def ddim_step(here: NoiseLevel, there: NoiseLevel, eta: float) -> Coefficients:
    """Return the DDIM step: x' = alpha' x_0 + sqrt(sigma'^2 - r^2) eps + r z.

    Source: Song et al. 2021, eq. 12 and 16, written with h, which avoids cancellation.  At eta 1, r^2 is the variance
    of the posterior q(x' | x, x_0) (Ho et al. 2020, eq. 7; "fixed small"): the step of ancestral DDPM.
    """
    h = log_snr_gain(here, there)
    return Coefficients(
        x_0=there.alpha,
        eps=there.sigma * math.sqrt(1 - eta**2 + eta**2 * math.exp(-2 * h)),
        noise=there.sigma * eta * math.sqrt(-math.expm1(-2 * h)),
    )


def dpmpp2m_step(before: NoiseLevel | None, here: NoiseLevel, there: NoiseLevel) -> Coefficients:
    """Return the DPM-Solver++(2M) step: x' = (sigma'/sigma) x - alpha' expm1(-h) D.

    Source: Lu et al. 2022b (DPM-Solver++), algorithm 2: D = x_0 + (x_0 - x_0_before) / (2r), r = h_before / h.  First
    order (D = x_0) in the first step, to a clean sample, and after a step from pure noise.
    """
    h = log_snr_gain(here, there)
    gain = -there.alpha * math.expm1(-h)
    slope = 0.0 if before is None or there.sigma == 0 else h / (2 * log_snr_gain(before, here))
    return Coefficients(x=there.sigma / here.sigma, x_0=gain * (1 + slope), x_0_before=-gain * slope)


def heun_correction(here: NoiseLevel, there: NoiseLevel) -> Coefficients:
    """Return the Heun step; the weights of x_0 and eps apply to the sums of the estimates at both ends.

    x' = x + (alpha' - alpha) mean(x_0) + (sigma' - sigma) mean(eps): the trapezoidal rule on the probability-flow
    ODE written as dx = x_0 d alpha + eps d sigma (Song et al. 2021b, eq. 13); its Euler step is DDIM's.  Karras et al.
    2022, algorithm 1, use x/alpha and sigma/alpha, which are unstable on schedules that begin at almost pure noise.
    """
    return Coefficients(x=1.0, x_0=(there.alpha - here.alpha) / 2, eps=(there.sigma - here.sigma) / 2)


def step_table(levels: Sequence[NoiseLevel], method: SamplerMethod) -> tuple[Coefficients, ...]:
    """Return one row per step between decreasing `levels`; for heun, the predictor's row."""
    pairs = list(pairwise(levels))
    assert pairs, "sampling needs at least two noise levels"
    assert all(a.sigma > b.sigma and a.alpha <= b.alpha for a, b in pairs), f"noise levels do not decrease: {levels}"
    if method == "dpmpp2m":
        return tuple(dpmpp2m_step(before, a, b) for before, (a, b) in zip([None, *levels[:-2]], pairs, strict=True))
    return tuple(ddim_step(a, b, 1.0 if method == "ddpm" else 0.0) for a, b in pairs)


@torch.no_grad()
def sample(
    estimate: Estimate,
    levels: Sequence[NoiseLevel],
    x: Tensor,
    method: SamplerMethod,
    *,
    step_noise: Callable[[int], Tensor] | None = None,
    on_step: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Denoise `x` from the first of `levels` to the last: float32 (float64 if x is float64), in the shape of x.

    `estimate` is called once per step, never at a clean sample; by heun twice, except for a step to a clean sample.
    step_noise(k) is the noise of step k = 1, 2, ..., like x, and required by ddpm; on_step(k, x) is called after step
    k.  The result is the same inside an autocast region.
    """
    x = x if x.dtype == torch.float64 else x.float()
    x_0_before = None
    rows = step_table(levels, method)
    for k, (row, (here, there)) in enumerate(zip(rows, pairwise(levels), strict=True), start=1):
        x_0, eps = estimate(x, here)
        noise = None
        if row.noise != 0:
            assert step_noise is not None, f"{method} needs step_noise"
            noise = step_noise(k).to(x.dtype)
        after = combined(row, x, x_0, eps, x_0_before, noise)
        if method == "heun" and there.sigma > 0:
            x_0_there, eps_there = estimate(after, there)
            after = combined(heun_correction(here, there), x, x_0 + x_0_there, eps + eps_there)
        x, x_0_before = after, x_0
        if on_step is not None:
            on_step(k, x)
    return x


def combined(
    row: Coefficients,
    x: Tensor,
    x_0: Tensor,
    eps: Tensor,
    x_0_before: Tensor | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """Return the weighted sum of `row`.

    Products are rounded one by one: a fused multiply-add for parts of a tensor would make a sample depend on its
    position in the batch.
    """
    weights = (row.x, row.x_0, row.eps, row.x_0_before, row.noise)
    terms = zip(weights, (x, x_0, eps, x_0_before, noise), strict=True)
    return reduce(torch.add, [weight * tensor for weight, tensor in terms if weight != 0 and tensor is not None])
