"""The interval of a comparison holds what it says, however the machine was disturbed and whenever the test stopped."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import stdtrit

from tests.experiments.tune.simulated import SOURCE, BiasedPlanner, Disturbance, Machine, SimulatedRunner, run_to_end
from vesuvius.experiments.paired import _POCOCK, ALPHA, LOOKS, Comparison, compare, compare_one_of
from vesuvius.experiments.tune.search import Asks, Search

BASE, OTHER = SOURCE, replace(SOURCE, channels_last=True)

DRIFTS = Disturbance(drift=0.10, drift_s=200.0, noise=0.05)


def compared(disturbance: Disturbance, gain: float, seed: int) -> Comparison:
    """A comparison of full runs as in a tune: it stops early if one looks faster by chance."""
    machine = Machine("two", sample_s=0.2, faster={"channels_last": 1 + gain}, disturbance=disturbance)
    results: list[Comparison | None] = []

    def policy(search: Search) -> Asks[None]:
        results.append((yield from search.in_turn((OTHER, "run"), (BASE, "run"), "confirm")))

    run_to_end(Search(machine.space(), BiasedPlanner(machine), policy), SimulatedRunner(machine, seed))
    (found,) = results
    assert found is not None
    truth = machine.rate(OTHER) / machine.rate(BASE) - 1
    assert truth == pytest.approx(gain, abs=0.01)
    return found


def test_intervals_cover_the_truth_on_a_machine_that_drifts() -> None:
    """Of 60 tests, so few that a naive interval (0.26 to 0.5) is distinguished and chance is not."""
    hits = 0
    for seed in range(60):
        gain = (0.0, 0.04, 0.12)[seed % 3]
        found = compared(DRIFTS, gain, seed)
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= gain <= found.high
    assert hits / 60 >= 0.85


def test_equal_settings_are_called_different_in_5_percent() -> None:
    """Of 400,000 tests, for a standard error of 0.03 %; `compare` itself is tried on a hundred of them."""
    logs = np.random.default_rng(0).standard_normal((400_000, max(LOOKS)))
    wrong = np.zeros(len(logs), dtype=bool)
    for n in LOOKS:
        half = stdtrit(n - 1, 1 - _POCOCK / 2) * logs[:, :n].std(axis=1, ddof=1) / math.sqrt(n)
        now = abs(logs[:, :n].mean(axis=1)) > half
        for row, expected in zip(logs[:100].tolist(), now[:100], strict=True):
            found = compare([(math.exp(x), 1.0) for x in row[:n]])
            assert (found.is_above(0.0) or found.is_below(0.0)) == expected
        wrong |= now
    assert wrong.mean() == pytest.approx(ALPHA, abs=0.001)


def test_common_drift_cancels() -> None:
    speeds = [1.0, 0.7, 1.3, 0.9, 1.1]
    found = compare([(1.2 * speed, speed) for speed in speeds])
    assert found.gain == pytest.approx(0.2)
    assert found.low == pytest.approx(0.2)
    assert found.is_above(0.19)
    assert found.is_below(0.21)


def test_between_two_looks_the_earlier_one_counts_and_two_pairs_have_no_interval() -> None:
    for pairs, looked_at in ((3, 3), (7, 6), (9, 8), (11, 10), (12, 12), (20, 12)):
        assert compare([(1.0 + i % 2, 1.0) for i in range(pairs)]).pairs == looked_at
    found = compare([(2.0, 1.0), (8.0, 1.0)])
    assert found == compare_one_of([(2.0, 1.0), (8.0, 1.0)], 1)
    assert (found.gain, found.low, found.high, found.pairs) == (pytest.approx(3.0), None, None, 2)
    assert not found.is_above(0.0)
    assert not found.is_below(100.0)


@pytest.mark.parametrize("trials", [1, 9])
def test_all_trials_of_a_bench_together_are_wrong_in_at_most_5_percent(trials: int) -> None:
    """Nine trials that are as fast as the baseline, each compared in the same six rounds."""
    rng, wrong = np.random.default_rng(1), 0
    for _ in range(1000):
        rates = np.exp(0.05 * rng.standard_normal((trials + 1, 6)))
        found = [compare_one_of(list(zip(a, rates[0], strict=True)), trials) for a in rates[1:]]
        wrong += any(each.is_above(0.0) or each.is_below(0.0) for each in found)
    assert 0.02 * (trials == 1) <= wrong / 1000 <= ALPHA + 0.02
