"""Network prediction -> estimate of x_0 and eps, with guidance and clipping -> patch-sized samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vesuvius.config import DiffusionConfig
from vesuvius.diffusion.levels import NoiseLevel, sampling_levels
from vesuvius.diffusion.preconditioning import Condition
from vesuvius.diffusion.randomness import Purpose, derive_seed, sample_noise
from vesuvius.diffusion.sampler import sample
from vesuvius.diffusion.schedule import Schedule, x_0_and_eps

# (x_t, t, condition) -> prediction of the kind `diffusion.prediction`, BCZYX like x_t, any float dtype.  t is int64
# [B], or float32 [B] for values between two timesteps.  Autocast is up to this function.
Denoise = Callable[[Tensor, Tensor, Condition], Tensor]


class NetworkEstimate:
    """Estimates x_0 and eps with a network, for one batch and its condition.

    Computes in the dtype of x (float32 or float64) outside the network.  Uses `prediction`, `sampler_guidance`
    and `sampler_clip` of the config.  x_0 is standardised with the data's mean and std, in model
    values, as are the clipping limits.  `evaluations` counts network calls, two per estimate if guidance is neither 0
    nor 1.
    """

    def __init__(
        self,
        denoise: Denoise,
        config: DiffusionConfig,
        condition: Condition = None,
        mean: float = 0.0,
        std: float = 1.0,
    ) -> None:
        self.evaluations = 0
        self._mean, self._std = mean, std
        self._denoise, self._config, self._condition = denoise, config, condition
        assert condition is not None or config.sampler_guidance == 1, "guidance other than 1 needs a condition"

    def __call__(self, x: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor]:
        """Return (x_0, eps) in the shape and dtype of x, for x BCZYX at a `level` with sigma > 0."""
        config = self._config
        x_0, eps = x_0_and_eps(config.prediction, self._guided(x, level), x, level.alpha, level.sigma)
        if config.sampler_clip is None:
            return x_0, eps
        clipped = (x_0 * self._std + self._mean).clamp(-config.sampler_clip, config.sampler_clip)
        # recompute eps, so that x = alpha x_0 + sigma eps still holds
        return x_0_and_eps("x_0", (clipped - self._mean) / self._std, x, level.alpha, level.sigma)

    def _guided(self, x: Tensor, level: NoiseLevel) -> Tensor:
        """Return the prediction with classifier-free guidance: p_u + scale (p_c - p_u).

        Source: Ho & Salimans 2022, eq. 6, for eps, with w = scale - 1.  Both terms share x, so the same rule holds for
        the other predictions.
        """
        scale = self._config.sampler_guidance
        if scale == 1 or self._condition is None:
            return self._evaluated(x, level, self._condition)
        without = self._evaluated(x, level, torch.zeros_like(self._condition))
        return without + scale * (self._evaluated(x, level, self._condition) - without) if scale else without

    def _evaluated(self, x: Tensor, level: NoiseLevel, condition: Condition) -> Tensor:
        self.evaluations += 1
        dtype = torch.int64 if float(level.t).is_integer() else torch.float32
        t = torch.full((len(x),), level.t, dtype=dtype, device=x.device)
        return self._denoise(x, t, condition).to(x.dtype)


def generate(
    denoise: Denoise,
    schedule: Schedule,
    config: DiffusionConfig,
    seed: int,
    numbers: Sequence[int],
    shape_czyx: tuple[int, int, int, int],
    device: torch.device | str,
    *,
    condition: Condition = None,
    purpose: Purpose = Purpose.SAMPLE,
    on_step: Callable[[int, Tensor], None] | None = None,
) -> tuple[Tensor, int]:
    """Draw the samples with these `numbers` as one batch, with the `sampler_*` keys of the config.

    The initial noise of a sample follows from (seed, purpose, number), that of step k from (seed, purpose, number, k).
    A sample therefore does not depend on the rest of its batch, except where `denoise` rounds differently for another
    batch size.  Uses no global generator.  The condition has one entry per number, on `device`; on_step(k, x) is called
    after each sampling step, with the standardised state.

    Returns:
        The samples, float32 [len(numbers), C, Z, Y, X] in model values, and the network calls that they took.
    """
    estimate = NetworkEstimate(denoise, config, condition, schedule.mean, schedule.std)

    def step_noise(k: int) -> Tensor:
        step_seed = derive_seed(seed, Purpose.SAMPLER_NOISE, k)
        return sample_noise(step_seed, numbers, shape_czyx, device, purpose=purpose)

    standardised = sample(
        estimate,
        sampling_levels(schedule, config),
        sample_noise(seed, numbers, shape_czyx, device, purpose=purpose),
        config.sampler,
        step_noise=step_noise,
        on_step=on_step,
    )
    return schedule.model_values(standardised), estimate.evaluations
