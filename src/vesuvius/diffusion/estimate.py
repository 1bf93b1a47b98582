"""Network prediction -> estimate of x_0 and eps for the sampler, with guidance, clipping and thresholding."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from vesuvius.config import DiffusionConfig
from vesuvius.diffusion.condition import NO_CONDITION, Condition
from vesuvius.diffusion.levels import NoiseLevel
from vesuvius.diffusion.schedule import x_0_and_eps

# (x_t, t, condition) -> prediction of the kind `diffusion.prediction`, BCZYX like x_t, any float dtype.  t is int64
# [B], or float32 [B] for values between two timesteps.  Autocast is up to this function.
Denoise = Callable[[Tensor, Tensor, Condition], Tensor]


class NetworkEstimate:
    """Estimates x_0 and eps with a network, for one batch and its condition.

    Computes in the dtype of x (float32 or float64) outside the network.  Uses `prediction`, `sampler_guidance`,
    `sampler_clip` and `sampler_quantile` of the config.  x_0 is standardised with the data's mean and std, in model
    values, as are the clipping limits.  `evaluations` counts network calls, two per estimate if guidance is neither 0
    nor 1.
    """

    def __init__(
        self,
        denoise: Denoise,
        config: DiffusionConfig,
        condition: Condition = NO_CONDITION,
        mean: float = 0.0,
        std: float = 1.0,
    ) -> None:
        self.evaluations = 0
        self._mean, self._std = mean, std
        self._denoise, self._config, self._condition = denoise, config, condition
        assert not condition.empty or config.sampler_guidance == 1, "guidance other than 1 needs a condition"

    def __call__(self, x: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor]:
        """Return (x_0, eps) in the shape and dtype of x, for x BCZYX at a `level` with sigma > 0."""
        config = self._config
        x_0, eps = x_0_and_eps(config.prediction, self._guided(x, level), x, level.alpha, level.sigma)
        if config.sampler_clip is None:
            return x_0, eps
        clipped = limited(x_0 * self._std + self._mean, config.sampler_clip, config.sampler_quantile)
        # recompute eps, so that x = alpha x_0 + sigma eps still holds
        return x_0_and_eps("x_0", (clipped - self._mean) / self._std, x, level.alpha, level.sigma)

    def _guided(self, x: Tensor, level: NoiseLevel) -> Tensor:
        """Return the prediction with classifier-free guidance: p_u + scale (p_c - p_u).

        Source: Ho & Salimans 2022, eq. 6, for eps, with w = scale - 1.  Both terms share x, so the same rule holds for
        the other predictions.
        """
        scale = self._config.sampler_guidance
        if scale == 1:
            return self._evaluated(x, level, self._condition)
        without = self._evaluated(x, level, self._condition.left_out())
        if scale == 0:
            return without
        return without + scale * (self._evaluated(x, level, self._condition) - without)

    def _evaluated(self, x: Tensor, level: NoiseLevel, condition: Condition) -> Tensor:
        self.evaluations += 1
        dtype = torch.int64 if float(level.t).is_integer() else torch.float32
        t = torch.full((len(x),), level.t, dtype=dtype, device=x.device)
        return self._denoise(x, t, condition).to(x.dtype)


def limited(x_0: Tensor, clip: float, quantile: float | None) -> Tensor:
    """Return x_0, BCZYX, with |x_0| at most `clip`.

    Without `quantile`, x_0 is clamped.  With it, each sample is clamped to s, the larger of `clip` and the quantile of
    its own |x_0|, and scaled by clip / s (dynamic thresholding, Saharia et al. 2022, section 2.3, where clip is 1).
    The quantile is the smallest |x_0| that this share of voxels does not exceed, without interpolation.  Pure.
    """
    if quantile is None:
        return x_0.clamp(-clip, clip)
    size = x_0.abs().flatten(1)
    rank = max(1, math.ceil(quantile * size.shape[1]))
    # topk: torch.quantile is limited to 16 M voxels, and kthvalue is not deterministic on CUDA.
    largest = size.topk(size.shape[1] - rank + 1, dim=1).values  # descending: the last is the rank-th smallest
    limit = largest[:, -1].clamp(min=clip).view(-1, *[1] * (x_0.ndim - 1))
    return x_0.clamp(-limit, limit) * (clip / limit)
