"""Noise levels: the points between pure noise and a clean sample at which a sampler needs an estimate.

`Schedule` has one level per t.  A sampler takes a decreasing list of levels, which need not be levels of a schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vesuvius.config import DiffusionConfig
from vesuvius.diffusion.schedule import Schedule


@dataclass(frozen=True)
class NoiseLevel:
    """The noise level of x = alpha x_0 + sigma eps.

    Both factors are stored: computing one from the other loses precision where it is small.
    """

    t: float  # input of the network; an integer is a timestep of the schedule, other values lie between two timesteps
    alpha: float  # sqrt(alpha_bar), 0 for pure noise
    sigma: float  # sqrt(1 - alpha_bar), 0 for a clean sample


_RHO = 7.0
CLEAN = NoiseLevel(t=-1, alpha=1.0, sigma=0.0)  # never evaluated; every table refuses its t


def log_snr_gain(here: NoiseLevel, there: NoiseLevel) -> float:
    """Return h = lambda(there) - lambda(here) with lambda = log(alpha/sigma), half the log of the SNR.

    Positive if the noise decreases; infinite from pure noise or to a clean sample.  Pure.
    """
    if here.alpha == 0 or there.sigma == 0:
        return math.inf
    return math.log(there.alpha / here.alpha) + math.log(here.sigma / there.sigma)


def trailing_timesteps(timesteps: int, steps: int) -> npt.NDArray[np.int64]:
    """Return the t of each sampling step: int64 [steps], strictly decreasing from `timesteps - 1`.

    round(T k / S) - 1 for k = S ... 1 (Lin et al. 2023, table 2, "trailing").  It starts at the noisiest timestep of
    training; "leading" and "linspace" do not (diffusers #12633).
    """
    return np.round(timesteps * np.arange(steps, 0, -1) / steps).astype(np.int64) - 1


def trailing_levels(schedule: Schedule, steps: int) -> tuple[NoiseLevel, ...]:
    """Return steps + 1 levels in float64: those of `trailing_timesteps`, then `CLEAN`.  Pure."""
    table = schedule.alpha_bar_64
    times = trailing_timesteps(schedule.timesteps, steps).tolist()
    return (*(NoiseLevel(t, math.sqrt(table[t]), math.sqrt(1 - table[t])) for t in times), CLEAN)


def rho_levels(schedule: Schedule, steps: int) -> tuple[NoiseLevel, ...]:
    """Return steps + 1 levels: sigma/alpha from the schedule's highest to its lowest, then `CLEAN`.  Pure.

    The seventh root of sigma/alpha decreases in equal steps (Karras et al. 2022, eq. 5, rho = 7).  The t of a level is
    interpolated between timesteps in log sigma/alpha.
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
    levels = rho_levels if config.noise == "edm" else trailing_levels
    return levels(schedule, config.sampler_steps)
