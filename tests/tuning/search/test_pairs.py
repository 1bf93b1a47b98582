"""The interval of a comparison holds what it says, however the machine was disturbed and whenever the test stopped."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.tuning.simulated import BY_NAME, Disturbance, SimulatedLab
from vesuvius.tuning.search.pairs import LOOKS, compare

TRUTH = BY_NAME["data-bound on cores"]
FAST, SLOW = replace(TRUTH.source, workers=4), replace(TRUTH.source, workers=3)

DISTURBANCES = {
    "correlated": Disturbance(noise=0.1, correlated_steps=50),
    "drift": Disturbance(drift=0.05, drift_s=200.0),
    "more drift": Disturbance(drift=0.10, drift_s=200.0, noise=0.05),
    "stalls": Disturbance(noise=0.03, stalls_s=60.0),
}


def intervals(disturbance: Disturbance, tests: int) -> list[tuple[float, float, int]]:
    """Of tests that stop at the first look whose interval is narrower than 5 % or excludes no difference.

    The rule makes the test stop early where chance made it look sure: a naive interval would hold the truth less often.
    """
    machine, found = replace(TRUTH, disturbance=disturbance), []
    for seed in range(tests):
        lab, pairs = SimulatedLab(machine, seed), list[tuple[float, float]]()
        while True:
            order = (FAST, SLOW) if len(pairs) % 2 == 0 else (SLOW, FAST)
            rates = {setting: lab.measure(setting, "run", 10.0, 600.0).rate for setting in order}
            pairs.append((rates[FAST], rates[SLOW]))
            now = compare(pairs)
            if now.low is None or now.high is None or len(pairs) not in LOOKS:
                continue
            if now.high - now.low < 0.05 or now.low > 0 or now.high < 0 or len(pairs) == max(LOOKS):
                found.append((now.low, now.high, now.pairs))
                break
    return found


@pytest.mark.parametrize("name", DISTURBANCES)
def test_95_percent_intervals_hold_the_truth_in_90_to_99_percent(name: str) -> None:
    """The lab draws its disturbance from the machine, of which no block tells."""
    truth = TRUTH.rate(FAST) / TRUTH.rate(SLOW) - 1
    found = intervals(DISTURBANCES[name], tests=400)
    covered = sum(low <= truth <= high for low, high, _ in found) / len(found)
    assert 0.90 <= covered <= 0.995
    assert len({pairs for _, _, pairs in found}) > 1, "the rule stops at more than one look"


def test_equal_settings_are_called_different_in_at_most_5_percent() -> None:
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(2000):
        logs = 0.05 * rng.standard_normal(max(LOOKS))
        pairs = [(math.exp(x), 1.0) for x in logs]
        wrong += any(compare(pairs[:n]).is_above(0.0) or compare(pairs[:n]).is_below(0.0) for n in LOOKS)
    assert 0.02 <= wrong / 2000 <= 0.055


def test_what_drifts_alike_for_both_cancels() -> None:
    speeds = [1.0, 0.7, 1.3, 0.9, 1.1]
    found = compare([(1.2 * speed, speed) for speed in speeds])
    assert found.gain == pytest.approx(0.2)
    assert found.low == pytest.approx(0.2)
    assert found.is_above(0.19)
    assert found.is_below(0.21)


@pytest.mark.parametrize(("pairs", "looked_at"), [(3, 3), (7, 6), (9, 8), (11, 10), (12, 12), (20, 12)])
def test_between_two_looks_the_earlier_one_counts(pairs: int, looked_at: int) -> None:
    assert compare([(1.0 + i % 2, 1.0) for i in range(pairs)]).pairs == looked_at


def test_two_pairs_have_no_interval() -> None:
    found = compare([(2.0, 1.0), (8.0, 1.0)])
    assert (found.gain, found.low, found.high, found.pairs) == (pytest.approx(3.0), None, None, 2)
    assert not found.is_above(0.0)
    assert not found.is_below(100.0)
