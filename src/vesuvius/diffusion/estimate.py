"""Network -> prediction -> estimate of x_0 and eps, with guidance and clipping -> patch-sized samples.

With a known data spectrum, the network corrects the periodic stationary Wiener filter, the best filter with one gain
per frequency.  In Karras et al. 2022 it corrects c_skip x_t, the Wiener filter of white data.  CT patches are not
white, so here c_skip has one value per frequency.  A network that returns 0 is the filter at every noise level;
training adds only what the spectrum does not contain.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vesuvius.config import DiffusionConfig
from vesuvius.diffusion.randomness import Purpose, derive_seed, sample_noise
from vesuvius.diffusion.sampler import NoiseLevel, sample, sampling_levels
from vesuvius.diffusion.schedule import Schedule, x_0_and_eps
from vesuvius.diffusion.spectrum import AXES

# Input of the network in addition to x_t: float32 [B, C, Z, Y, X], concatenated to x_t by channel.  The last channel is
# the presence flag, 1.  A masked condition, for classifier-free guidance, is 0 in all channels (the null token of Ho &
# Salimans 2022).  None = the network has no condition.
Condition = Tensor | None
# (x, noise) -> output, as `UNet.forward`.
Network = Callable[[Tensor, Tensor], Tensor]


def mask_condition(condition: Tensor, keep: Tensor) -> Tensor:
    """Set the condition of the samples whose `keep`, bool [B] on the device, is false to 0.  Pure."""
    return torch.where(keep.view(-1, 1, 1, 1, 1), condition, 0.0)  # a product with 0 would leak NaN


def predict(network: Network, schedule: Schedule, x_t: Tensor, t: Tensor, condition: Condition = None) -> Tensor:
    """Return the prediction for x_t, of the kind `diffusion.prediction`: BCZYX, float32 or the network's dtype.

    If the schedule has a spectrum, the result is the v of the Wiener filter plus the network's output times the
    standard deviation of that v's error, and the network sees the two channels of `split_signal_noise`, not x_t.  `t`
    is int64 [B], or float32 [B] for values between two timesteps; the network gets `Schedule.network_input` of it.
    """
    noise = schedule.network_input(t)

    def with_condition(x: Tensor) -> Tensor:
        return x if condition is None else torch.cat([x, condition], dim=1)

    if schedule.spectrum is None:
        return network(with_condition(x_t), noise)
    channels, v, error_std = split_signal_noise(schedule, x_t.float(), *schedule.alpha_and_sigma(t))
    return v + error_std * network(with_condition(channels), noise).float()


def split_signal_noise(schedule: Schedule, x_t: Tensor, alpha: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the network input, the v of the stationary Wiener filter, and the standard deviation of that v's error.

    The filter splits x_t into a signal and a noise estimate, the two input channels, each scaled to variance 1.  At a
    frequency of power P the variance of x_t is D = alpha^2 P + sigma^2; the signal gets the share alpha^2 P / D and the
    noise sigma^2 / D. v is alpha sigma (1 - P) / D times x_t, with an error of variance P / D. x_t is standardized,
    float32 [B, 1, Z, Y, X]; alpha and sigma are [B, 1, 1, 1, 1] with alpha^2 + sigma^2 = 1.  Returns [B, 2, Z, Y, X],
    [B, 1, Z, Y, X] and [B, 1, 1, 1, 1].
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
    channels = [filtered(gain) * mean_over_modes(gain.square() * variance).rsqrt() for gain in (signal, noise)]
    v = filtered(alpha * sigma * (1 - power) / variance)
    return torch.cat(channels, dim=1), v, mean_over_modes(power / variance).sqrt()


# (x_t, t, condition) -> prediction of the kind `diffusion.prediction`, BCZYX like x_t, any float dtype.  t is int64
# [B], or float32 [B] for values between two timesteps.  This function controls autocast.
Denoise = Callable[[Tensor, Tensor, Condition], Tensor]


def has_residual_guidance(config: DiffusionConfig, level: NoiseLevel) -> bool:
    """Whether `residual_guidance` changes an estimate at this level.  Pure."""
    interval = config.residual_guidance_interval
    is_inside = interval is None or interval[0] * level.alpha <= level.sigma <= interval[1] * level.alpha
    return is_inside and config.residual_guidance != 1


class NetworkEstimate:
    """Estimates x_0 and eps with a network, for one batch and its condition.

    Computes in the dtype of x (float32 or float64) outside the network.  Uses `prediction`, `sampler_guidance`,
    `residual_guidance`, its interval and `sampler_clip` of the config.  x_0 is standardized; clipping limits are in
    model values.  `evaluations` counts network calls, those of the `guide` included, which replaces the Wiener filter.
    """

    def __init__(
        self,
        denoise: Denoise,
        config: DiffusionConfig,
        schedule: Schedule,
        condition: Condition = None,
        guide: Denoise | None = None,
    ) -> None:
        self.evaluations, self._schedule, self._guide = 0, schedule, guide
        self._denoise, self._config, self._condition = denoise, config, condition
        assert condition is not None or config.sampler_guidance == 1, "guidance other than 1 needs a condition"

    def __call__(self, x: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor]:
        """Return (x_0, eps) in the shape and dtype of x, for x BCZYX at a `level` with sigma > 0."""
        config = self._config
        prediction = self._corrected(self._guided(x, level), x, level)
        x_0, eps = x_0_and_eps(config.prediction, prediction, x, level.alpha, level.sigma)
        if config.sampler_clip is None:
            return x_0, eps
        mean, std = self._schedule.mean, self._schedule.std
        clipped = (x_0 * std + mean).clamp(-config.sampler_clip, config.sampler_clip)
        # recompute eps, so that x = alpha x_0 + sigma eps still holds
        return x_0_and_eps("x_0", (clipped - mean) / std, x, level.alpha, level.sigma)

    def calls(self, level: NoiseLevel) -> int:
        """Return the network calls of an estimate: two if guidance is neither 0 nor 1, one more with a guide.  Pure."""
        by_condition = self._condition is not None and self._config.sampler_guidance not in (0, 1)
        return 1 + by_condition + (self._guide is not None and has_residual_guidance(self._config, level))

    def _corrected(self, prediction: Tensor, x: Tensor, level: NoiseLevel) -> Tensor:
        """Scale the difference between the prediction and that of the Wiener filter, or guide, by `residual_guidance`.

        A briefly trained network corrects the Wiener filter too little.  Sources: guidance away from a weaker denoiser,
        Karras et al. 2024; within an interval of noise levels, Kynkaanniemi et al. 2024, arXiv 2404.07724.
        """
        guidance = self._config.residual_guidance
        if not has_residual_guidance(self._config, level):
            return prediction
        if self._guide is not None:
            condition = self._condition
            if condition is not None and self._config.sampler_guidance == 0:
                condition = torch.zeros_like(condition)
            weaker = self._evaluated(x, level, condition, self._guide)
            return weaker + guidance * (prediction - weaker)
        if self._schedule.spectrum is None:
            return prediction
        alpha, sigma = (x.new_full((len(x), 1, 1, 1, 1), value) for value in (level.alpha, level.sigma))
        _, wiener, _ = split_signal_noise(self._schedule, x.float(), alpha.float(), sigma.float())
        return wiener + guidance * (prediction - wiener)

    def _guided(self, x: Tensor, level: NoiseLevel) -> Tensor:
        """Return the prediction with classifier-free guidance: p_u + scale (p_c - p_u) (Ho & Salimans 2022, eq. 6)."""
        scale = self._config.sampler_guidance
        if scale == 1 or self._condition is None:
            return self._evaluated(x, level, self._condition)
        without = self._evaluated(x, level, torch.zeros_like(self._condition))
        return without + scale * (self._evaluated(x, level, self._condition) - without) if scale else without

    def _evaluated(self, x: Tensor, level: NoiseLevel, condition: Condition, denoise: Denoise | None = None) -> Tensor:
        self.evaluations += 1
        dtype = torch.int64 if float(level.t).is_integer() else torch.float32
        t = torch.full((len(x),), level.t, dtype=dtype, device=x.device)
        return (denoise or self._denoise)(x, t, condition).to(x.dtype)


def generate(
    denoise: Denoise,
    schedule: Schedule,
    config: DiffusionConfig,
    seed: int,
    sample_indices: Sequence[int],
    shape_czyx: tuple[int, int, int, int],
    device: torch.device | str,
    *,
    condition: Condition = None,
    guide: Denoise | None = None,
    purpose: Purpose = Purpose.SAMPLE,
    on_step: Callable[[int, Tensor], None] | None = None,
) -> tuple[Tensor, int]:
    """Generate samples as one batch, with the `sampler_*` keys of the config; return them and the number of network
    calls.

    Samples are model values, float32 [len(sample_indices), C, Z, Y, X].  The initial noise of a sample follows from
    (seed, purpose, index), that of step k from (seed, purpose, index, k), so a sample does not depend on the rest of
    its batch, unless `denoise` rounds differently for another batch size.  `condition` has one entry per sample, on
    `device`; on_step(k, x) is called after each sampling step, with the standardized state.
    """
    estimate = NetworkEstimate(denoise, config, schedule, condition, guide)

    def step_noise(k: int) -> Tensor:
        step_seed = derive_seed(seed, Purpose.SAMPLER_NOISE, k)
        return sample_noise(step_seed, sample_indices, shape_czyx, device, purpose=purpose)

    standardized = sample(
        estimate,
        sampling_levels(schedule, config),
        sample_noise(seed, sample_indices, shape_czyx, device, purpose=purpose),
        config.sampler,
        step_noise=step_noise,
        on_step=on_step,
    )
    return schedule.model_values(standardized), estimate.evaluations
