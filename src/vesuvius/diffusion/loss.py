"""The training loss: one value per sample, so that the caller can average over any split of a batch."""

from __future__ import annotations

from torch import Tensor

from vesuvius.config import DiffusionConfig, Prediction
from vesuvius.diffusion.schedule import Schedule


def min_snr_weight(kind: Prediction, snr: Tensor, gamma: float) -> Tensor:
    """Return the min-SNR-gamma weight of a squared error in this kind of prediction, float32 like `snr`.

    min(snr, gamma) for x_0; the same divided by snr for eps, by snr + 1 for v (without the + 1 it is the bug of
    diffusers #5654), and by (sqrt(snr) + 1)^2 for flow.  The paper defines the weight for an error in x_0; an error in
    eps is sqrt(snr) times, one in v sqrt(snr + 1) and one in flow sqrt(snr) + 1 times as large, hence the divisions.
    At snr 0 (pure noise) only the weight of eps is above 0.  Pure.

    Source: Hang et al. 2023.
    """
    capped = snr.clamp(max=gamma)
    match kind:
        case "x_0":
            return capped
        case "eps":
            return capped / snr
        case "v":
            return capped / (snr + 1)
        case "flow":
            return capped / (snr.sqrt() + 1).square()


def loss_per_sample(
    prediction: Tensor, x_0: Tensor, eps: Tensor, t: Tensor, schedule: Schedule, config: DiffusionConfig
) -> Tensor:
    """Return the weighted mean squared error of each sample over its voxels: float32 [B].

    The weight is the schedule's if it has one (edm), else min-SNR with `config.min_snr_gamma`, or 1 if that is None.
    Pure; float32 also inside an autocast region.

    Args:
        prediction: network output for `schedule.q_sample(x_0, eps, t)`, BCZYX, any float dtype.
        x_0, eps: the shape of `prediction`.
        t: int64 [B].
    """
    assert prediction.shape == x_0.shape == eps.shape, (prediction.shape, x_0.shape, eps.shape)
    target = schedule.target(config.prediction, x_0, eps, t)
    mean = (prediction.float() - target).square().mean(dim=(1, 2, 3, 4))
    if schedule.loss_weight is not None:
        return mean * schedule.loss_weight.index_select(0, t)
    if config.min_snr_gamma is None:
        return mean
    return mean * min_snr_weight(config.prediction, schedule.snr(t), config.min_snr_gamma)
