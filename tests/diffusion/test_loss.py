"""The weighted loss of each prediction, against formulas written from the papers' other parametrization."""

import numpy as np
import pytest
import torch

from vesuvius.config import DiffusionConfig, Prediction
from vesuvius.diffusion.schedule import Schedule, cosine_betas, loss_per_sample

SHAPE = (6, 2, 3, 4, 5)
TIMES = torch.tensor([0, 100, 268, 500, 900, 999])
KINDS: tuple[Prediction, ...] = ("v", "eps", "x_0", "flow")


def _batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    prediction, x_0, eps = (torch.randn(SHAPE, generator=generator) for _ in range(3))
    return prediction, x_0, eps


def _loss(config: DiffusionConfig, prediction: torch.Tensor, x_0: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    return loss_per_sample(prediction, x_0, eps, TIMES, Schedule.from_config(config), config)


@pytest.mark.parametrize("gamma", [1.0, 5.0, 1e9])
@pytest.mark.parametrize("kind", KINDS)
def test_min_snr_loss_parity_with_the_papers_weight_on_x_0(kind: Prediction, gamma: float) -> None:
    # Hang et al. weight an error in x_0 with min(snr, gamma); the same loss must come out of any prediction's error.
    prediction, x_0, eps = _batch()
    alpha_bar = np.cumprod(1 - cosine_betas(1000))[TIMES.numpy()].reshape(-1, 1, 1, 1, 1)
    x_0_64, eps_64, prediction_64 = (tensor.double().numpy() for tensor in (x_0, eps, prediction))
    x_t = np.sqrt(alpha_bar) * x_0_64 + np.sqrt(1 - alpha_bar) * eps_64
    x_0_predicted = {
        "v": np.sqrt(alpha_bar) * x_t - np.sqrt(1 - alpha_bar) * prediction_64,
        "eps": (x_t - np.sqrt(1 - alpha_bar) * prediction_64) / np.sqrt(alpha_bar),
        "x_0": prediction_64,
        # x_0 where the straight path of rectified flow, (1 - s) x_0 + s eps, starts: x_s - s u.
        "flow": (x_t - np.sqrt(1 - alpha_bar) * prediction_64) / (np.sqrt(alpha_bar) + np.sqrt(1 - alpha_bar)),
    }[kind]
    weight = np.minimum(alpha_bar / (1 - alpha_bar), gamma)
    expected = (weight * (x_0_predicted - x_0_64) ** 2).mean(axis=(1, 2, 3, 4))
    ours = _loss(DiffusionConfig(noise="cosine", prediction=kind, min_snr_gamma=gamma), prediction, x_0, eps)
    # 1e-5: a float32 mean of 120 squares against float64.
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_float32_inside_autocast_and_from_a_bf16_prediction(kind: Prediction) -> None:
    prediction, x_0, eps = _batch()
    config = DiffusionConfig(noise="cosine", prediction=kind)
    outside = _loss(config, prediction.bfloat16().float(), x_0, eps)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = _loss(config, prediction.bfloat16(), x_0, eps)
    assert inside.dtype == outside.dtype == torch.float32
    assert torch.equal(inside, outside)
