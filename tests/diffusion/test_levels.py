"""The noise levels of a sampling run."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vesuvius.config import DiffusionConfig
from vesuvius.diffusion.sampler import CLEAN, NoiseLevel, trailing_levels, trailing_timesteps
from vesuvius.diffusion.schedule import Schedule


@given(st.integers(1, 1200).flatmap(lambda timesteps: st.tuples(st.just(timesteps), st.integers(1, timesteps))))
def test_trailing_timesteps_start_at_the_noisiest_and_decrease(sizes: tuple[int, int]) -> None:
    timesteps, steps = sizes
    times = trailing_timesteps(timesteps, steps)
    assert len(times) == steps
    assert times[0] == timesteps - 1
    assert times[-1] >= 0
    assert (np.diff(times) < 0).all()


@given(st.sampled_from(["linear", "cosine"]), st.integers(1, 1000))
def test_levels_equal_the_schedule_in_float64_and_end_clean(name: str, steps: int) -> None:
    schedule = Schedule.from_config(DiffusionConfig(noise=name))
    levels = trailing_levels(schedule, steps)
    assert len(levels) == steps + 1
    assert levels[-1] == CLEAN == NoiseLevel(-1, 1.0, 0.0)
    assert [level.t for level in levels[:-1]] == trailing_timesteps(1000, steps).tolist()
    assert all(isinstance(level.t, int) for level in levels)
    for level in levels[:-1]:
        # a few ulp: a square of a square root
        assert level.alpha**2 == pytest.approx(schedule.alpha_bar_64[level.t], rel=1e-15)
        assert level.alpha**2 + level.sigma**2 == pytest.approx(1, rel=1e-15)
