"""Noise -> sample: deterministic DDIM around any function that predicts v.  Knows neither the network nor amp."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import ConfigError


def trailing_timesteps(timesteps: int, steps: int) -> npt.NDArray[np.int64]:
    """Return the t of each sampling step: int64 [steps], strictly falling from `timesteps - 1`.

    Source: Lin et al. 2023, table 2, "trailing": round(T k / S) - 1 for k = S ... 1.  It starts where training is
    noisiest; "leading" and "linspace" do not (diffusers #12633).  Raises ConfigError unless 1 <= steps <= timesteps.
    """
    if not 1 <= steps <= timesteps:
        raise ConfigError(
            f"sampler steps must be between 1 and timesteps; got {steps} of {timesteps}; change diffusion.sampler_steps"
        )
    return np.round(timesteps * np.arange(steps, 0, -1) / steps).astype(np.int64) - 1


@torch.no_grad()
def ddim_sample(
    denoise: Callable[[Tensor, Tensor], Tensor],
    schedule: Schedule,
    noise: Tensor,
    steps: int,
    *,
    clip: tuple[float, float] | None = None,
    on_step: Callable[[int, Tensor], None] | None = None,
) -> Tensor:
    """Turn `noise` into samples with `steps` evaluations of `denoise`: float32 BCZYX.

    `denoise(x_t, t)` takes float32 BCZYX and int64 [B] and returns v, any float dtype; it alone decides on autocast.
    `noise` is standard normal BCZYX on the schedule's device.  With `clip`, each predicted x_0 is limited to that
    range and eps is derived anew from it, so that the two still explain x_t.  `on_step(k, x)` is called after step
    k = 1 ... steps with the state x, the sample itself after the last.  Pure but for what the two functions do.
    Raises ConfigError unless 1 <= steps <= timesteps.

    Source: Song et al. 2021, eq. 12 with sigma = 0; trailing spacing; the last step goes to alpha_bar = 1, that is
    to the predicted x_0.
    """
    times = [int(t) for t in trailing_timesteps(schedule.timesteps, steps)]
    x = noise.float()
    for k, (now, after) in enumerate(zip(times, [*times[1:], None], strict=True), start=1):
        t = torch.full((len(x),), now, dtype=torch.int64, device=x.device)
        v = denoise(x, t)
        x_0 = schedule.x_0_from_v(x, v, t)
        if clip is None:
            eps = schedule.eps_from_v(x, v, t)
        else:
            x_0 = x_0.clamp(*clip)
            eps = schedule.eps_from_x_0(x, x_0, t)
        x = x_0 if after is None else schedule.q_sample(x_0, eps, torch.full_like(t, after))
        if on_step is not None:
            on_step(k, x)
    return x
