"""The schedule's tables and conversions, against diffusers and closed forms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import REPOSITORY
from vesuvius.config import DiffusionConfig
from vesuvius.config.load import read_config
from vesuvius.diffusion.sampler import CLEAN, sampling_levels
from vesuvius.diffusion.schedule import (
    Prediction,
    Schedule,
    cosine_betas,
    linear_betas,
    loss_per_sample,
    x_0_and_eps,
)

if TYPE_CHECKING:
    from diffusers import DDPMScheduler

SHAPE = (5, 1, 3, 4, 6)
TIMES = torch.tensor([0, 1, 500, 998, 999])
KINDS: tuple[Prediction, ...] = ("v", "eps", "x_0", "flow")
BETAS = {"linear": linear_betas, "cosine": cosine_betas}


@pytest.fixture(params=["linear", "cosine"])
def schedule(request: pytest.FixtureRequest) -> Schedule:
    return Schedule.from_config(DiffusionConfig(noise=request.param))


def _oracle(name: str, timesteps: int = 1000, **options: object) -> DDPMScheduler:
    from diffusers import DDPMScheduler  # takes seconds, so where it is needed

    if name == "cosine":
        return DDPMScheduler(num_train_timesteps=timesteps, beta_schedule="squaredcos_cap_v2", **options)
    scale = 1000 / timesteps  # diffusers leaves it to the caller to keep the last t as noisy
    return DDPMScheduler(
        num_train_timesteps=timesteps,
        beta_schedule="linear",
        beta_start=scale * 1e-4,
        beta_end=scale * 0.02,
        **options,
    )


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SHAPE, generator=generator), torch.randn(SHAPE, generator=generator)


# Linear from 100 steps on: with fewer, ours clips betas at 0.999 where diffusers would let them pass 1.
@pytest.mark.parametrize(
    ("name", "timesteps"),
    [("cosine", 2), ("cosine", 10), ("cosine", 1000), ("linear", 100), ("linear", 1000), ("linear", 4000)],
)
def test_betas_and_alpha_bar_parity_with_diffusers(name: str, timesteps: int) -> None:
    config = DiffusionConfig(noise=name, timesteps=timesteps, sampler_steps=1)
    ours, theirs = Schedule.from_config(config), _oracle(name, timesteps)
    # 1e-6: diffusers takes the cumulative product in float32, up to 4000 roundings of 6e-8 that partly cancel.
    np.testing.assert_allclose(BETAS[name](timesteps), theirs.betas.numpy(), rtol=0, atol=1e-6)
    np.testing.assert_allclose(ours.alpha_bar_64, theirs.alphas_cumprod.numpy(), rtol=0, atol=1e-6)


@given(st.sampled_from(sorted(BETAS)), st.integers(2, 2000))
def test_noise_grows_with_t_and_betas_stay_in_range(name: str, timesteps: int) -> None:
    betas = BETAS[name](timesteps)
    schedule = Schedule.from_betas(betas)
    assert schedule.timesteps == timesteps
    assert betas.min() > 0
    assert betas.max() <= 0.999
    assert (np.diff(schedule.alpha_bar_64) < 0).all()
    assert (schedule.snr_table.diff() < 0).all()
    assert (schedule.sqrt_one_minus_alpha_bar > 0).all()


def test_the_ddpm_config_has_the_levels_of_ho_et_al() -> None:
    config = read_config(REPOSITORY / "configs" / "ddpm.yaml").diffusion
    classic = ("ddpm", None, "eps")
    found = (config.sampler, config.min_snr_gamma, config.prediction)
    assert found == classic
    # Section 4 of the paper: 1e-4 to 0.02 in 1000 equal steps, all of them sampled; about 4e-5 of the signal is left.
    alpha_bar = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    schedule = Schedule.from_config(config)
    np.testing.assert_allclose(schedule.alpha_bar_64, alpha_bar, rtol=1e-12)
    assert [level.t for level in sampling_levels(schedule, config)] == [*range(999, -1, -1), CLEAN.t]


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_q_sample_and_v_parity_with_diffusers(name: str) -> None:
    ours, theirs = Schedule.from_config(DiffusionConfig(noise=name)), _oracle(name)
    x_0, eps = _batch()
    # 1e-5 of what is compared, or of 1 where that is near 0: the oracle forms 1 - alpha_bar in float32, which at t = 0
    # costs 1e-7 / 4e-5 of it, times 0.006 and |x| < 5.
    x_t, v = ours.q_sample(x_0, eps, TIMES), ours.target("v", x_0, eps, TIMES)
    torch.testing.assert_close(x_t, theirs.add_noise(x_0, eps, TIMES), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(v, theirs.get_velocity(x_0, eps, TIMES), rtol=1e-5, atol=1e-5)


@given(st.floats(0.01, 1.56), st.floats(-5, 5), st.floats(-5, 5))
def test_conversions_between_predictions_round_trip(angle: float, x_0: float, eps: float) -> None:
    alpha, sigma = np.cos(angle), np.sin(angle)
    x_t, v = (
        torch.tensor(value, dtype=torch.float64) for value in (alpha * x_0 + sigma * eps, alpha * eps - sigma * x_0)
    )
    from_v = x_0_and_eps("v", v, x_t, alpha, sigma)
    # 1e-11: float64 divided by the least of alpha and sigma, 0.01.
    for again in (
        x_0_and_eps("eps", from_v[1], x_t, alpha, sigma),
        x_0_and_eps("x_0", from_v[0], x_t, alpha, sigma),
        x_0_and_eps("flow", from_v[1] - from_v[0], x_t, alpha, sigma),
    ):
        assert [float(part) for part in again] == pytest.approx([x_0, eps], abs=1e-11)


def test_everything_is_float32_and_unchanged_inside_bf16_autocast(schedule: Schedule) -> None:
    x_0, eps = _batch()

    def everything(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        targets = [schedule.target(kind, a, b, TIMES) for kind in KINDS]
        pairs = [part for kind in KINDS for part in schedule.x_0_and_eps(kind, a, b, TIMES)]
        return [schedule.q_sample(a, b, TIMES), *targets, *pairs]

    outside = everything(x_0.bfloat16().float(), eps.bfloat16().float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = everything(x_0.bfloat16(), eps.bfloat16())
    for a, b in zip(outside, inside, strict=True):
        assert b.dtype == torch.float32
        assert torch.equal(a, b)


@pytest.mark.parametrize("t", [-1, 1000])
def test_t_outside_the_schedule_is_refused_and_never_wraps(schedule: Schedule, t: int) -> None:
    x = torch.zeros(1, 1, 2, 2, 2)
    with pytest.raises(IndexError):
        schedule.q_sample(x, x, torch.tensor([t]))
    with pytest.raises(IndexError):
        schedule.snr(torch.tensor([t]))


def _loss(config: DiffusionConfig, prediction: torch.Tensor, x_0: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    return loss_per_sample(prediction, x_0, eps, TIMES, Schedule.from_config(config), config)


@pytest.mark.parametrize("gamma", [1.0, 5.0, 1e9])
@pytest.mark.parametrize("kind", KINDS)
def test_min_snr_loss_parity_with_the_papers_weight_on_x_0(kind: Prediction, gamma: float) -> None:
    # Hang et al. weight an error in x_0 with min(snr, gamma); the same loss must come out of any prediction's error.
    (x_0, eps), prediction = _batch(), torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
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
    (x_0, eps), prediction = _batch(), torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
    config = DiffusionConfig(noise="cosine", prediction=kind)
    outside = _loss(config, prediction.bfloat16().float(), x_0, eps)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = _loss(config, prediction.bfloat16(), x_0, eps)
    assert inside.dtype == outside.dtype == torch.float32
    assert torch.equal(inside, outside)
