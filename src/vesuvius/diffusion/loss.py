"""What the network is trained on: one number per sample, so that the caller can average over any split of a batch."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from vesuvius.config import DiffusionConfig, Prediction
from vesuvius.diffusion.schedule import Schedule


def min_snr_weight(kind: Prediction, snr: Tensor, gamma: float) -> Tensor:
    """Return the min-SNR-gamma weight of a squared error in this kind of prediction, float32 like `snr`.

    min(snr, gamma) for x_0, that divided by snr for eps, by snr + 1 for v.  Source: Hang et al. 2023.  Their weight is
    for an error in x_0; an error in eps is sqrt(snr) times one in x_0 and one in v sqrt(snr + 1) times, hence the
    divisions; leaving out the 1 is the mistake of diffusers #5654.  At snr 0, pure noise, the weight of v and x_0 is 0.
    Pure.
    """
    capped = snr.clamp(max=gamma)
    match kind:
        case "x_0":
            return capped
        case "eps":
            return capped / snr
        case "v":
            return capped / (snr + 1)


def loss_per_sample(
    prediction: Tensor, x_0: Tensor, eps: Tensor, t: Tensor, schedule: Schedule, config: DiffusionConfig
) -> Tensor:
    """Return the weighted mean error of each sample, over all its voxels: float32 [B].

    l2 is the squared error; huber is half of it up to `huber_delta` and linear beyond (Huber 1964).  `prediction` is
    what the network said about `schedule.q_sample(x_0, eps, t)`, any float dtype; `prediction`, `x_0` and `eps` are
    BCZYX of one shape, `t` is int64 [B].  The weight is that of the schedule where it has one (edm), else min-SNR with
    `config.min_snr_gamma`, or 1 where that is None.  Pure; float32 inside an autocast region too.
    """
    assert prediction.shape == x_0.shape == eps.shape, (prediction.shape, x_0.shape, eps.shape)
    target = schedule.target(config.prediction, x_0, eps, t)
    match config.loss:
        case "l2":
            error = (prediction.float() - target).square()
        case "huber":
            error = F.huber_loss(prediction.float(), target, reduction="none", delta=config.huber_delta)
    mean = error.mean(dim=(1, 2, 3, 4))
    if schedule.loss_weight is not None:
        return mean * schedule.loss_weight.index_select(0, t)
    if config.min_snr_gamma is None:
        return mean
    return mean * min_snr_weight(config.prediction, schedule.snr(t), config.min_snr_gamma)
