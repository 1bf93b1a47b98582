"""The schedule's tables and conversions, against diffusers and against closed forms."""

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from vesuvius.config import DiffusionConfig
from vesuvius.diffusion.schedule import Schedule, cosine_betas

SHAPE = (5, 1, 3, 4, 6)
TIMES = torch.tensor([0, 1, 500, 998, 999])


@pytest.fixture
def schedule() -> Schedule:
    return Schedule.from_config(DiffusionConfig())


def _oracle(timesteps: int) -> DDPMScheduler:
    return DDPMScheduler(num_train_timesteps=timesteps, beta_schedule="squaredcos_cap_v2")


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SHAPE, generator=generator), torch.randn(SHAPE, generator=generator)


@pytest.mark.parametrize("timesteps", [2, 10, 1000])
def test_betas_and_alpha_bar_parity_with_diffusers(timesteps: int) -> None:
    ours, theirs = Schedule.from_config(DiffusionConfig(timesteps=timesteps, sampler_steps=1)), _oracle(timesteps)
    # 1e-6: diffusers takes the cumulative product in float32, up to 1000 roundings of 6e-8 that partly cancel.
    torch.testing.assert_close(ours.betas, theirs.betas, rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.alpha_bar, theirs.alphas_cumprod, rtol=0, atol=1e-6)


def test_q_sample_and_velocity_parity_with_diffusers(schedule: Schedule) -> None:
    x_0, eps = _batch()
    theirs = _oracle(1000)
    # 1e-5: diffusers forms 1 - alpha_bar in float32, which at t = 0 costs 1e-7 / 4e-5 of it, times 0.006 and |x| < 5.
    torch.testing.assert_close(schedule.q_sample(x_0, eps, TIMES), theirs.add_noise(x_0, eps, TIMES), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        schedule.velocity(x_0, eps, TIMES), theirs.get_velocity(x_0, eps, TIMES), rtol=0, atol=1e-5
    )


def test_alpha_bar_follows_equation_17_where_beta_is_not_clipped() -> None:
    timesteps = 1000
    t = np.arange(1, timesteps)  # the last beta is clipped, all others are not

    def f(u: np.ndarray) -> np.ndarray:
        return np.cos((u / timesteps + 0.008) / 1.008 * np.pi / 2) ** 2

    betas = cosine_betas(timesteps)
    # 1e-12: both sides in float64, 1000 factors.
    np.testing.assert_allclose(np.cumprod(1 - betas)[:-1], f(t) / f(np.zeros(1)), rtol=0, atol=1e-12)
    assert betas[-1] == 0.999


@settings(deadline=None)
@given(st.integers(2, 2000))
def test_noise_grows_with_t_and_betas_stay_in_range(timesteps: int) -> None:
    schedule = Schedule.from_betas(cosine_betas(timesteps))
    assert schedule.timesteps == timesteps
    assert schedule.betas.min() > 0
    assert schedule.betas.max() <= np.float32(0.999)
    assert (schedule.alpha_bar.diff() < 0).all()
    assert (schedule.snr_table.diff() < 0).all()
    assert (schedule.sqrt_one_minus_alpha_bar > 0).all()


def test_conversions_invert_noising(schedule: Schedule) -> None:
    x_0, eps = _batch()
    x_t, v = schedule.q_sample(x_0, eps, TIMES), schedule.velocity(x_0, eps, TIMES)
    # 2e-6: four float32 roundings of numbers below 8.
    torch.testing.assert_close(schedule.x_0_from_v(x_t, v, TIMES), x_0, rtol=0, atol=2e-6)
    torch.testing.assert_close(schedule.eps_from_v(x_t, v, TIMES), eps, rtol=0, atol=2e-6)
    # 1e-4: x_t is rounded at 2e-7 and this conversion divides by sqrt(1 - alpha_bar) = 0.006 at t = 0.
    torch.testing.assert_close(schedule.eps_from_x_0(x_t, x_0, TIMES), eps, rtol=0, atol=1e-4)


def test_v_of_the_exact_pair_keeps_the_norm(schedule: Schedule) -> None:
    x_0, eps = _batch()
    x_t, v = schedule.q_sample(x_0, eps, TIMES), schedule.velocity(x_0, eps, TIMES)
    # (x_t, v) is (x_0, eps) turned by an angle; 1e-5: float32 squares of numbers below 8.
    torch.testing.assert_close(x_t**2 + v**2, x_0**2 + eps**2, rtol=1e-5, atol=1e-5)


def test_snr_is_signal_power_over_noise_power(schedule: Schedule) -> None:
    alpha_bar = np.cumprod(1 - cosine_betas(1000))[TIMES.numpy()]
    # 1e-6: one rounding from float64 to float32.
    np.testing.assert_allclose(schedule.snr(TIMES).numpy(), alpha_bar / (1 - alpha_bar), rtol=1e-6)


def test_everything_is_float32_and_unchanged_inside_bf16_autocast(schedule: Schedule) -> None:
    x_0, eps = _batch()
    functions = (
        schedule.q_sample,
        schedule.velocity,
        schedule.x_0_from_v,
        schedule.eps_from_v,
        schedule.eps_from_x_0,
    )
    outside = [function(x_0, eps, TIMES) for function in functions]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = [function(x_0, eps, TIMES) for function in functions]
        from_bf16 = schedule.q_sample(x_0.bfloat16(), eps.bfloat16(), TIMES)
    for a, b in zip(outside, inside, strict=True):
        assert b.dtype == torch.float32
        assert torch.equal(a, b)
    assert from_bf16.dtype == torch.float32
    assert torch.equal(from_bf16, schedule.q_sample(x_0.bfloat16().float(), eps.bfloat16().float(), TIMES))


@pytest.mark.parametrize("t", [-1, 1000])
def test_t_outside_the_schedule_is_refused_and_never_wraps(schedule: Schedule, t: int) -> None:
    x = torch.zeros(1, 1, 2, 2, 2)
    with pytest.raises(IndexError):
        schedule.q_sample(x, x, torch.tensor([t]))
    with pytest.raises(IndexError):
        schedule.snr(torch.tensor([t]))


def test_to_moves_every_table(schedule: Schedule) -> None:
    moved = schedule.to("meta")
    assert moved.device.type == "meta"
    assert {tensor.device.type for tensor in vars(moved).values()} == {"meta"}
    assert schedule.device.type == "cpu"
