"""Preconditioning: with a known data spectrum, the network corrects the best linear denoiser.

In Karras et al. 2022 the network corrects c_skip x_t, the best linear estimate for white data.  CT patches are not
white, so here c_skip is a filter with one value per frequency, and the estimate is the Wiener filter's.  A network that
returns 0 is the best linear denoiser at every noise level; training adds only what the spectrum does not contain.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.spectrum import AXES

# What the network is shown beside x_t: float32 [B, C, Z, Y, X], joined to x_t by channel; the last channel is the
# presence flag, 1.  Where a condition is left out, for classifier-free guidance, all channels are 0 (Ho & Salimans
# 2022: a null token takes its place).  None = the network has none.
Condition = Tensor | None
# (x, t) -> output, as `UNet.forward`.
Network = Callable[[Tensor, Tensor], Tensor]


def kept(condition: Tensor, keep: Tensor) -> Tensor:
    """Return the condition with those samples left out for which `keep`, bool [B] on the device, is false.  Pure."""
    return torch.where(keep.view(-1, 1, 1, 1, 1), condition, 0.0)  # a product with 0 would leak NaN


def predict(network: Network, schedule: Schedule, x_t: Tensor, t: Tensor, condition: Condition = None) -> Tensor:
    """Return the prediction for x_t, of the kind `diffusion.prediction`: BCZYX, float32 or the network's dtype.

    If the schedule has a spectrum, the result is the v of the linear denoiser plus the network's output times the
    standard deviation of that v's error.  The network then sees the two channels of `split` instead of x_t.

    Args:
        x_t: BCZYX, C = 1.
        t: int64 [B], or float32 [B] for values between two timesteps.
    """

    def joined(x: Tensor) -> Tensor:
        return x if condition is None else torch.cat([x, condition], dim=1)

    if schedule.spectrum is None:
        return network(joined(x_t), t)
    shown, v, deviation = split(schedule, x_t.float(), *schedule.alpha_and_sigma(t))
    return v + deviation * network(joined(shown), t).float()


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
