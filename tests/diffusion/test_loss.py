"""The weighted loss of each prediction, against formulas written from the papers' other parametrisation."""

import numpy as np
import pytest
import torch

from vesuvius.config import DiffusionConfig, Prediction
from vesuvius.diffusion.loss import loss_per_sample, min_snr_weight
from vesuvius.diffusion.schedule import Schedule, cosine_betas

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
def test_min_snr_weights_parity_with_lucidrains_formula(kind: Prediction, gamma: float) -> None:
    # clip(snr, max gamma), then / snr for noise, as it is for x_0, / (snr + 1) for v.  flow is not there.
    alpha_bar = np.cumprod(1 - cosine_betas(1000))
    snr = alpha_bar / (1 - alpha_bar)
    divisor = {"eps": snr, "x_0": np.ones(1000), "v": snr + 1, "flow": (np.sqrt(snr) + 1) ** 2}[kind]
    ours = min_snr_weight(kind, Schedule.from_config(DiffusionConfig(noise="cosine")).snr_table, gamma)
    assert ours.dtype == torch.float32
    # 1e-6: the snr is rounded to float32 once, and so is the quotient.
    np.testing.assert_allclose(ours.numpy(), np.minimum(snr, gamma) / divisor, rtol=1e-6)


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


def test_weight_divides_by_snr_plus_one_for_v_on_both_sides_of_gamma() -> None:
    weights = min_snr_weight("v", torch.tensor([0.0, 1.0, 5.0, 20.0]), gamma=5.0)
    # exact in float32 but for one division
    torch.testing.assert_close(weights, torch.tensor([0.0, 1 / 2, 5 / 6, 5 / 21]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_no_gamma_is_the_plain_mean_squared_error(kind: Prediction) -> None:
    prediction, x_0, eps = _batch()
    config = DiffusionConfig(noise="cosine", prediction=kind, min_snr_gamma=None)
    target = Schedule.from_config(config).target(kind, x_0, eps, TIMES)
    expected = torch.nn.functional.mse_loss(prediction, target, reduction="none").flatten(1).mean(1)
    # 1e-6: the same float32 numbers, summed in another order.
    torch.testing.assert_close(_loss(config, prediction, x_0, eps), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_prediction_has_no_loss(kind: Prediction) -> None:
    _, x_0, eps = _batch()
    config = DiffusionConfig(noise="cosine", prediction=kind)
    target = Schedule.from_config(config).target(kind, x_0, eps, TIMES)
    assert torch.equal(_loss(config, target, x_0, eps), torch.zeros(len(TIMES)))


def test_each_samples_loss_is_its_own() -> None:
    prediction, x_0, eps = _batch()
    config = DiffusionConfig(noise="cosine")
    schedule = Schedule.from_config(config)
    together = _loss(config, prediction, x_0, eps)
    alone = [
        loss_per_sample(prediction[i : i + 1], x_0[i : i + 1], eps[i : i + 1], TIMES[i : i + 1], schedule, config)
        for i in range(len(TIMES))
    ]
    # 1e-6: the reduction over a sample may be vectorised differently with another batch size.
    torch.testing.assert_close(torch.cat(alone), together, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_float32_inside_autocast_and_from_a_bf16_prediction(kind: Prediction) -> None:
    prediction, x_0, eps = _batch()
    config = DiffusionConfig(noise="cosine", prediction=kind)
    outside = _loss(config, prediction.bfloat16().float(), x_0, eps)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = _loss(config, prediction.bfloat16(), x_0, eps)
    assert inside.dtype == outside.dtype == torch.float32
    assert torch.equal(inside, outside)
