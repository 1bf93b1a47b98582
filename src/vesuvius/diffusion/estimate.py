"""Network -> estimate of x_0 and eps: guidance, clipping and thresholding between the network and the sampler."""

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
# [B], or float32 [B] between two timesteps.  It alone decides on autocast.
Denoise = Callable[[Tensor, Tensor, Condition], Tensor]


class NetworkEstimate:
    """What a network says of x_0 and eps, for one batch and its condition.

    Everything outside the network is float32, or float64 where x is.  Uses `prediction`, `sampler_guidance`,
    `sampler_clip` and `sampler_quantile` of the config.

    Args:
        mean, std: of the data, in model values; x_0 is standardised by them, and the limits are model values.

    Attributes:
        evaluations: calls of the network so far; guidance other than 0 and 1 takes two per estimate.
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
        """BCZYX at `level`, noise above 0 -> (x_0, eps), both in the shape and dtype of x."""
        config = self._config
        x_0, eps = x_0_and_eps(config.prediction, self._guided(x, level), x, level.alpha, level.sigma)
        if config.sampler_clip is None:
            return x_0, eps
        within = limited(x_0 * self._std + self._mean, config.sampler_clip, config.sampler_quantile)
        # eps anew, so that the two still explain x
        return x_0_and_eps("x_0", (within - self._mean) / self._std, x, level.alpha, level.sigma)

    def _guided(self, x: Tensor, level: NoiseLevel) -> Tensor:
        """The prediction with classifier-free guidance: p_u + scale (p_c - p_u).

        Source: Ho & Salimans 2022, eq. 6, whose w is scale - 1 and which is about eps.  As x is the same in both, it
        is the same rule for v and for x_0.
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
    """Return BCZYX with |x_0| at most `clip`.

    Without `quantile` by clamping.  With it by dynamic thresholding (Saharia et al. 2022, section 2.3, where clip is
    1): each sample is clamped to s, the quantile of its own |x_0| or `clip` if that is more, and scaled by clip / s.
    The quantile is the smallest |x_0| that this share of voxels does not exceed, without interpolation.  topk has no
    limit on the number of voxels, torch.quantile has (16 M), and a deterministic form on CUDA, which kthvalue has not.
    Pure.
    """
    if quantile is None:
        return x_0.clamp(-clip, clip)
    size = x_0.abs().flatten(1)
    rank = max(1, math.ceil(quantile * size.shape[1]))
    largest = size.topk(size.shape[1] - rank + 1, dim=1).values  # in falling order: the last is the rank-th smallest
    limit = largest[:, -1].clamp(min=clip).view(-1, *[1] * (x_0.ndim - 1))
    return x_0.clamp(-limit, limit) * (clip / limit)
