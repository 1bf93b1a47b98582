"""DDIM against diffusers, and against the closed form of a Gaussian."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vesuvius.config import DiffusionConfig
from vesuvius.diffusion.sampler import ddim_sample, trailing_timesteps
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import ConfigError

SHAPE = (2, 1, 4, 5, 6)


@pytest.fixture
def schedule() -> Schedule:
    return Schedule.from_config(DiffusionConfig())


def _noise() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))


def _wavy_v(x_t: Tensor, t: Tensor) -> Tensor:
    """A smooth denoiser that depends on both arguments and is right for nothing in particular."""
    phase = t.view(-1, 1, 1, 1, 1).float() / 1000
    return torch.sin(2 * x_t) * (1 - phase) + 0.3 * x_t * phase - 0.1


def _exact_v(schedule: Schedule, mean: float, std: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The v that a perfect network would predict when every voxel of x_0 is N(mean, std^2)."""

    def denoise(x_t: Tensor, t: Tensor) -> Tensor:
        alpha_bar = schedule.alpha_bar.double()[t].view(-1, 1, 1, 1, 1)
        a, b = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
        gain = a * std**2 / (alpha_bar * std**2 + 1 - alpha_bar)
        x_0 = mean + gain * (x_t.double() - a * mean)
        eps = (x_t.double() - a * x_0) / b
        return a * eps - b * x_0

    return denoise


# 1e-5: diffusers' alpha_bar is 1e-6 off (float32 product).  Over 1000 steps that adds up: against the same formulas in
# float64 diffusers was seen 5e-5 off and ours 2e-5.
@pytest.mark.parametrize(("steps", "tolerance"), [(10, 1e-5), (50, 1e-5), (1000, 1e-4)])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_ddim_parity_with_diffusers_trailing(
    schedule: Schedule, steps: int, tolerance: float, clip: float | None
) -> None:
    oracle = DDIMScheduler(
        num_train_timesteps=1000,
        beta_schedule="squaredcos_cap_v2",
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        set_alpha_to_one=True,
        clip_sample=clip is not None,
        clip_sample_range=clip or 1.0,
    )
    oracle.set_timesteps(steps)
    expected = _noise()
    for t in oracle.timesteps:
        v = _wavy_v(expected, t.expand(len(expected)))
        expected = oracle.step(v, t, expected, eta=0.0, use_clipped_model_output=clip is not None).prev_sample
    ours = ddim_sample(_wavy_v, schedule, _noise(), steps, clip=None if clip is None else (-clip, clip))
    torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance)


def _gaussian_moments(schedule: Schedule, steps: int, mean: float, std: float) -> tuple[float, float]:
    """Mean and standard deviation of what DDIM makes: for a linear denoiser the sample is mean + std * noise."""
    noise = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1, 1)
    at_0, at_1 = ddim_sample(_exact_v(schedule, mean, std), schedule, noise, steps).flatten().tolist()
    return at_0, at_1 - at_0


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.4, 0.25), (-0.8, 2.0)])
def test_ddim_from_the_exact_v_of_a_gaussian_reproduces_its_moments(
    schedule: Schedule, mean: float, std: float
) -> None:
    coarse, middle, fine = (np.array(_gaussian_moments(schedule, steps, mean, std)) for steps in (125, 250, 500))
    # DDIM is of first order: with twice the steps the spread's error halves, up to a second-order part of some 2 %.
    assert 0.45 < (middle[1] - std) / (coarse[1] - std) < 0.55
    assert 0.45 < (fine[1] - std) / (middle[1] - std) < 0.55
    # Extrapolated to infinitely many steps, what is left is that order's square (1e-4) and that x_T is taken as N(0, 1)
    # although its mean is sqrt(alpha_bar_T) mean = 5e-5 mean.
    np.testing.assert_allclose(2 * fine - middle, [mean, std], rtol=0, atol=1.5e-4)


@given(st.integers(1, 1200).flatmap(lambda timesteps: st.tuples(st.just(timesteps), st.integers(1, timesteps))))
def test_trailing_times_start_at_the_noisiest_and_fall_strictly(sizes: tuple[int, int]) -> None:
    timesteps, steps = sizes
    times = trailing_timesteps(timesteps, steps)
    assert len(times) == steps
    assert times[0] == timesteps - 1
    assert times[-1] >= 0
    assert (np.diff(times) < 0).all()


@pytest.mark.parametrize("steps", [0, 1001])
def test_impossible_step_counts_are_refused(schedule: Schedule, steps: int) -> None:
    with pytest.raises(ConfigError, match=rf"got {steps} of 1000"):
        ddim_sample(_wavy_v, schedule, _noise(), steps)


def test_sampling_is_pure_given_the_noise(schedule: Schedule) -> None:
    noise = _noise()
    first = ddim_sample(_wavy_v, schedule, noise, 5)
    assert torch.equal(noise, _noise())
    torch.manual_seed(99)
    assert torch.equal(first, ddim_sample(_wavy_v, schedule, noise, 5))


def test_clip_bounds_the_sample_and_on_step_sees_every_state(schedule: Schedule) -> None:
    seen: list[tuple[int, Tensor]] = []
    sample = ddim_sample(
        _wavy_v, schedule, 3 * _noise(), 7, clip=(-0.2, 0.3), on_step=lambda k, x: seen.append((k, x.clone()))
    )
    assert sample.min() >= -0.2
    assert sample.max() <= np.float32(0.3)
    assert [k for k, _ in seen] == list(range(1, 8))
    assert torch.equal(seen[-1][1], sample)


def test_state_outside_a_bf16_network_stays_float32_without_gradients(schedule: Schedule) -> None:
    scale = torch.ones((), requires_grad=True)

    def denoise(x_t: Tensor, t: Tensor) -> Tensor:
        assert x_t.dtype == torch.float32
        assert t.dtype == torch.int64
        assert t.shape == (len(x_t),)
        return (scale * x_t).bfloat16()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        sample = ddim_sample(denoise, schedule, _noise().bfloat16(), 4)
    assert sample.dtype == torch.float32
    assert not sample.requires_grad
