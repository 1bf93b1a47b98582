"""What the network is trained on: one number per sample, so that the caller can average over any split of a batch."""

from __future__ import annotations

from torch import Tensor

from vesuvius.config import DiffusionConfig
from vesuvius.diffusion.schedule import Schedule


def min_snr_weight(snr: Tensor, gamma: float) -> Tensor:
    """Return the min-SNR-gamma weight of a squared error in v: min(snr, gamma) / (snr + 1), float32 like `snr`.

    Source: Hang et al. 2023 (min-SNR-gamma).  Their weight min(snr, gamma) is for an error in x_0, and an error in v is
    sqrt(snr + 1) times one in x_0, hence the division; leaving it out is the mistake of diffusers #5654.  Pure.
    """
    return snr.clamp(max=gamma) / (snr + 1)


def loss_per_sample(
    prediction: Tensor, x_0: Tensor, eps: Tensor, t: Tensor, schedule: Schedule, config: DiffusionConfig
) -> Tensor:
    """Return the weighted mean squared error of each sample, over all its voxels: float32 [B].

    `prediction` is what the network said about `schedule.q_sample(x_0, eps, t)`, any float dtype; `prediction`, `x_0`
    and `eps` are BCZYX of one shape, `t` is int64 [B].  `config.min_snr_gamma` None means weight 1.  Pure; float32
    inside an autocast region too.
    """
    assert prediction.shape == x_0.shape == eps.shape, (prediction.shape, x_0.shape, eps.shape)
    error = prediction.float() - schedule.velocity(x_0, eps, t)
    squared = error.square().mean(dim=(1, 2, 3, 4))
    if config.min_snr_gamma is None:
        return squared
    return squared * min_snr_weight(schedule.snr(t), config.min_snr_gamma)
