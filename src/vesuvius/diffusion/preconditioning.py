"""Preconditioning: with a known data spectrum, the network corrects the best linear denoiser.

In Karras et al. 2022 the network corrects c_skip x_t, the best linear estimate for white data.  CT patches are not
white, so here c_skip is a filter with one value per frequency, and the estimate is the Wiener filter's.  A network that
returns 0 is the best linear denoiser at every noise level; training adds only what the spectrum does not contain.
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
    """Return the prediction for x_t, of the kind `diffusion.prediction`: BCZYX, float32 or the network's dtype.

    If the schedule has a spectrum, the result is the v of the linear denoiser plus the network's output times the
    standard deviation of that v's error.  The network then sees the two channels of `split` instead of x_t.

    Args:
        x_t: BCZYX, C = 1.
        t: int64 [B], or float32 [B] for values between two timesteps.
    """
    if schedule.spectrum is None:
        return network(condition.joined(x_t), t, condition.scalars)
    shown, v, deviation = split(schedule, x_t.float(), *schedule.alpha_and_sigma(t))
    return v + deviation * network(condition.joined(shown), t, condition.scalars).float()


def split(schedule: Schedule, x_t: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the network input, the v of the best linear denoiser, and the standard deviation of that v's error.

    The denoiser splits x_t into a signal and a noise estimate, the two input channels.  Each is scaled to variance 1,
    so weak noise is as visible as the signal.  At a frequency of power P the variance of x_t is D = alpha^2 P +
    sigma^2; the signal gets the share alpha^2 P / D and the noise sigma^2 / D.  v is alpha sigma (1 - P) / D times x_t,
    with an error of variance P / D.  Pure.  x_t is float32 [B, 1, Z, Y, X], standardised, alpha and sigma are
    [B, 1, 1, 1, 1] with alpha^2 + sigma^2 = 1; the results [B, 2, Z, Y, X], [B, 1, Z, Y, X] and [B, 1, 1, 1, 1].
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
