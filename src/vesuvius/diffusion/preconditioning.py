"""What stands around the network where the spectrum of the data is known: it corrects the best linear denoiser.

Karras et al. 2022 let a network correct c_skip x_t, the best linear guess for white data.  CT patches are not white:
here c_skip is a filter, a number for each frequency, and the guess is that of Wiener.  So a network that gives 0 is the
best linear denoiser at every noise level, and all that it is trained on is what the spectrum does not say.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vesuvius.diffusion.condition import NO_CONDITION, Condition
from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.spectrum import AXES

# (x, t, scalars) -> output, as `UNet.forward`.
Network = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def predict(
    network: Network, schedule: Schedule, x_t: Tensor, t: Tensor, condition: Condition = NO_CONDITION
) -> Tensor:
    """Return what the network says about x_t, of the kind `diffusion.prediction`: float32 or as the network gives it.

    Where the schedule knows a spectrum, v is that of the linear denoiser plus the network's output times the deviation
    of its error; in place of x_t the network is shown two channels of variance 1, `split` says which.

    Args:
        x_t: BCZYX, C = 1.
        t: int64 [B], or float32 [B] between two timesteps.
    """
    if schedule.spectrum is None:
        return network(condition.joined(x_t), t, condition.scalars)
    shown, v, deviation = split(schedule, x_t.float(), *schedule.alpha_and_sigma(t))
    return v + deviation * network(condition.joined(shown), t, condition.scalars).float()


def split(schedule: Schedule, x_t: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the network is shown, the v of the best linear denoiser, and the deviation of that v's error.

    x_t is the sum of what the denoiser takes for signal and what it takes for noise.  These are the two channels,
    float32 [B, 2, Z, Y, X], each scaled to variance 1: where there is little noise it is shown as large as the signal.
    For a frequency of power P the variance of x_t is D = alpha^2 P + sigma^2, of which alpha^2 P / D is taken for
    signal and sigma^2 / D for noise; v is alpha sigma (1 - P) / D of x_t, and its error has variance P / D.  Pure.

    Args:
        x_t: float32 [B, 1, Z, Y, X], standardised.
        alpha, sigma: [B, 1, 1, 1, 1], alpha^2 + sigma^2 = 1.
    """
    power, mode_weight = schedule.power, schedule.mode_weight
    assert power is not None
    assert mode_weight is not None
    variance = alpha.square() * power + sigma.square()
    frequencies = torch.fft.rfftn(x_t, dim=AXES)

    def filtered(gain: Tensor) -> Tensor:
        out: Tensor = torch.fft.irfftn(gain * frequencies, s=x_t.shape[-3:], dim=AXES)
        return out

    def mean_over_modes(values: Tensor) -> Tensor:
        return (values * mode_weight).mean(dim=AXES, keepdim=True)

    signal, noise = alpha.square() * power / variance, sigma.square() / variance
    shown = [filtered(gain) * mean_over_modes(gain.square() * variance).rsqrt() for gain in (signal, noise)]
    v = filtered(alpha * sigma * (1 - power) / variance)
    return torch.cat(shown, dim=1), v, mean_over_modes(power / variance).sqrt()
