"""What a profile costs is found beside a drift of the machine, and not where there is nothing."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from tests.conftest import REPOSITORY
from vesuvius.benchmark.paired import median_interval

_SPEC = importlib.util.spec_from_file_location("profile_cost", REPOSITORY / "tools" / "bench" / "profile_cost.py")
assert _SPEC is not None
assert _SPEC.loader is not None
cost_of_profile = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(cost_of_profile)


@pytest.mark.parametrize("cost", [1.0, 1.1])
def test_the_cost_is_found_under_a_drift_of_half_the_speed(cost: float) -> None:
    pairs, turn_steps = 20, 10
    drift = np.linspace(1.0, 1.5, 2 * pairs * turn_steps)
    noise = np.random.default_rng(0).normal(1.0, 0.02, drift.shape)
    profiled = np.repeat([cost if cost_of_profile.is_profiled(turn) else 1.0 for turn in range(2 * pairs)], turn_steps)
    found = cost_of_profile.ratios(drift * noise * profiled, turn_steps, pairs)
    interval = median_interval(found.tolist())
    assert interval is not None
    assert interval.low < cost < interval.high
    assert interval.high - interval.low < 0.03
