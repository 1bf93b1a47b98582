"""Samplers against diffusers, against the papers' formulas, and against closed forms of known distributions."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vesuvius.config import DiffusionConfig, Prediction, SamplerMethod
from vesuvius.diffusion.estimate import Condition, NetworkEstimate
from vesuvius.diffusion.sampler import (
    CLEAN,
    Estimate,
    NoiseLevel,
    ddim_step,
    sample,
    step_table,
    trailing_levels,
)
from vesuvius.diffusion.schedule import Schedule

SHAPE = (2, 1, 4, 5, 6)
METHODS: tuple[SamplerMethod, ...] = get_args(SamplerMethod)
KINDS: dict[Prediction, str] = {"v": "v_prediction", "eps": "epsilon", "x_0": "sample"}
SCHEDULES = {"linear": "linear", "cosine": "squaredcos_cap_v2"}
PLAIN = Schedule.from_config(DiffusionConfig(noise="cosine"))

angles = st.floats(1e-2, 1.56)


def _noise(number: int = 0) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3 + number))


def _wavy(x_t: Tensor, t: Tensor, condition: Condition | None = None) -> Tensor:
    """A smooth denoiser that depends on both arguments and is right for nothing in particular."""
    phase = t.view(-1, 1, 1, 1, 1).float() / 1000
    return torch.sin(2 * x_t) * (1 - phase) + 0.3 * x_t * phase - 0.1


def _at(angle: float) -> NoiseLevel:
    """The level with alpha = cos(angle): t is continuous."""
    return NoiseLevel(angle, math.cos(angle), math.sin(angle))


pairs = st.tuples(angles, angles).filter(lambda pair: abs(pair[0] - pair[1]) > 1e-3)
falling = pairs.map(lambda pair: (_at(max(pair)), _at(min(pair))))


def _size(x: Tensor) -> float:
    """Return the scale of a deviation: 1, or the largest value if the nonsense denoiser returns huge ones."""
    return max(1.0, x.abs().max().item())


# --- DDIM ------------------------------------------------------------------------------------------------------------


@given(falling, st.floats(0, 1))
def test_ddim_step_parity_with_equations_12_and_16(levels: tuple[NoiseLevel, NoiseLevel], eta: float) -> None:
    here, there = levels
    row = ddim_step(here, there, eta)
    ab, ab_there = here.alpha**2, there.alpha**2
    r = eta * math.sqrt((1 - ab_there) / (1 - ab)) * math.sqrt(1 - ab / ab_there)
    assert row.x_0 == there.alpha
    # 1e-9: the reference loses digits where alpha_bar is near 1 (1e-4) and where the levels are close (2e-5).
    assert row.noise == pytest.approx(r, rel=1e-9, abs=1e-12)
    assert row.eps == pytest.approx(math.sqrt(max(0.0, 1 - ab_there - r**2)), rel=1e-9, abs=1e-9)
    assert step_table(levels, "ddpm") == (ddim_step(here, there, 1.0),), "DDPM's own posterior"


# --- DPM-Solver++(2M) ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers with numpy 2
@pytest.mark.sample(5)
@pytest.mark.parametrize("steps", [2, 20])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_dpmpp2m_parity_with_diffusers(kind: Prediction, name: str, steps: int) -> None:
    from diffusers import DPMSolverMultistepScheduler

    oracle = DPMSolverMultistepScheduler(
        num_train_timesteps=1000,
        beta_schedule=SCHEDULES[name],
        prediction_type=KINDS[kind],
        algorithm_type="dpmsolver++",
        solver_order=2,
        timestep_spacing="trailing",
        final_sigmas_type="zero",
    )
    oracle.set_timesteps(steps)
    expected = _noise()
    for t in oracle.timesteps:
        expected = oracle.step(_wavy(expected, t.expand(len(expected))), t, expected).prev_sample
    config = DiffusionConfig(prediction=kind, noise=name)
    ours = sample(
        NetworkEstimate(_wavy, config, PLAIN), trailing_levels(Schedule.from_config(config), steps), _noise(), "dpmpp2m"
    )
    # 1e-4 of the size: diffusers' levels are float32.
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 * _size(expected))


# --- all methods -----------------------------------------------------------------------------------------------------


def _gaussian(mean: float, std: float) -> Estimate:
    """E[x_0 | x] and the eps that goes with it when every voxel of x_0 is N(mean, std^2)."""

    def estimate(x: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor]:
        gain = level.alpha * std**2 / (level.alpha**2 * std**2 + level.sigma**2)
        x_0 = mean + gain * (x - level.alpha * mean)
        return x_0, (x - level.alpha * x_0) / level.sigma

    return estimate


def _gaussian_flow(mean: float, std: float, x: Tensor, here: NoiseLevel, there: NoiseLevel) -> Tensor:
    """Where the probability-flow ODE takes x: it keeps the distance from the mean in standard deviations."""

    def spread(level: NoiseLevel) -> float:
        return math.sqrt(level.alpha**2 * std**2 + level.sigma**2)

    return there.alpha * mean + spread(there) / spread(here) * (x - here.alpha * mean)


# Not with N(0, 1), where the leading terms of the error cancel: Heun is of third order there.
@pytest.mark.parametrize(("mean", "std"), [(0.4, 0.3), (-0.8, 2.0)])
@pytest.mark.parametrize(("method", "order"), [("ddim", 1), ("dpmpp2m", 2), ("heun", 2)])
def test_order_of_convergence_on_a_gaussian(method: SamplerMethod, order: int, mean: float, std: float) -> None:
    x = torch.linspace(-3, 3, 7, dtype=torch.float64)
    counts = [40, 80, 160, 320, 640]
    errors = []
    for steps in counts:
        levels = [_at(angle) for angle in np.linspace(1.5, 0.1, steps + 1)]
        end = sample(_gaussian(mean, std), levels, x, method)
        assert end.dtype == torch.float64
        errors.append((end - _gaussian_flow(mean, std, x, levels[0], levels[-1])).abs().max().item())
    slope = -np.polyfit(np.log(counts), np.log(errors), 1)[0]
    # 0.2: terms of the next order at 40 steps; a method of another order is 1 away.
    assert slope == pytest.approx(order, abs=0.2)


@pytest.mark.parametrize("method", ["ddim", "dpmpp2m", "heun"])
def test_a_known_sample_is_reached_exactly_from_any_noise_and_levels(method: SamplerMethod) -> None:
    known = _noise(9).double()

    def estimate(x: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor]:
        return known, (x - level.alpha * known) / level.sigma

    levels = [*(_at(angle) for angle in (1.55, 1.2, 1.1, 0.3)), CLEAN]
    # a few ulp of float64
    torch.testing.assert_close(sample(estimate, levels, _noise().double(), method), known, rtol=0, atol=1e-13)
    middle = sample(estimate, levels[:3], levels[0].alpha * known + levels[0].sigma * _noise().double(), method)
    expected = levels[2].alpha * known + levels[2].sigma * _noise().double()
    torch.testing.assert_close(middle, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["v", "x_0"])
@pytest.mark.parametrize("method", METHODS)
def test_all_methods_start_from_pure_noise(method: SamplerMethod, kind: Prediction) -> None:
    config = DiffusionConfig(noise="cosine", prediction=kind)
    levels = (NoiseLevel(999, 0.0, 1.0), *trailing_levels(Schedule.from_config(config), 10)[1:])
    rows = step_table(levels, method)
    assert all(math.isfinite(number) for row in rows for number in vars(row).values())
    assert rows[1].x_0_before == 0  # the step before was infinitely long: no slope to take from it
    states: list[Tensor] = []
    sample(
        NetworkEstimate(_wavy, config, PLAIN),
        levels,
        _noise(),
        method,
        step_noise=_noise,
        on_step=lambda k, x: states.append(x),
    )
    assert all(state.isfinite().all() for state in states)


@pytest.mark.parametrize("method", METHODS)
def test_network_calls_and_noise_draws_per_step_match_the_method(
    method: SamplerMethod,
) -> None:
    asked, noisy = list[NoiseLevel](), list[int]()

    def step_noise(k: int) -> Tensor:
        noisy.append(k)
        return _noise(k)

    def estimate(x: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor]:
        asked.append(level)
        return _gaussian(0.1, 0.5)(x, level)

    levels = [_at(1.5), _at(1.0), _at(0.5), CLEAN]
    sample(estimate, levels, _noise(), method, step_noise=step_noise)
    assert noisy == ([1, 2] if method == "ddpm" else []), "none for the last step"
    first, second, third, _ = levels
    assert asked == ([first, second, second, third, third] if method == "heun" else [first, second, third])
    asked.clear()
    sample(estimate, levels[:2], _noise(), method, step_noise=_noise)
    assert asked == ([first, second] if method == "heun" else [first])


@pytest.mark.parametrize("method", METHODS)
def test_the_sampler_state_stays_float32_without_gradients_around_a_bf16_network(method: SamplerMethod) -> None:
    scale = torch.ones((), requires_grad=True)

    def denoise(x_t: Tensor, t: Tensor, condition: Condition) -> Tensor:
        assert x_t.dtype == torch.float32
        return (scale * x_t).bfloat16()

    config = DiffusionConfig(noise="cosine")
    levels = trailing_levels(Schedule.from_config(config), 4)

    def run() -> Tensor:
        return sample(NetworkEstimate(denoise, config, PLAIN), levels, _noise().bfloat16(), method, step_noise=_noise)

    outside = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run()
    assert inside.dtype == torch.float32
    assert not inside.requires_grad
    assert torch.equal(inside, outside)


# --- noise levels ----------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(["linear", "cosine"]),
    st.integers(2, 1200).flatmap(lambda t: st.tuples(st.just(t), st.integers(1, t))),
)
def test_trailing_levels_decrease_from_the_noisiest_to_a_clean_sample(name: str, sizes: tuple[int, int]) -> None:
    timesteps, steps = sizes
    schedule = Schedule.from_config(DiffusionConfig(noise=name, timesteps=timesteps, sampler_steps=1))
    *levels, last = trailing_levels(schedule, steps)
    times = [int(level.t) for level in levels]
    assert last == CLEAN == NoiseLevel(-1, 1.0, 0.0)
    assert (len(times), times[0]) == (steps, timesteps - 1)
    assert times[-1] >= 0
    assert all(a > b for a, b in pairwise(times))
    for level in levels:
        assert isinstance(level.t, int)
        # a few ulp: a square of a square root
        assert level.alpha**2 == pytest.approx(schedule.alpha_bar_64[level.t], rel=1e-15)
        assert level.alpha**2 + level.sigma**2 == pytest.approx(1, rel=1e-15)
