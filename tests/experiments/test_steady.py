"""The steady state: what does not count, how long is enough, and what was read ahead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vesuvius.experiments import steady
from vesuvius.experiments.steady import SteadyState, TrialLength, Warmup, reader_limited_s


@pytest.mark.parametrize(
    ("samples", "elapsed_s", "enough"),
    [
        (0, 100.0, False),  # nothing has come
        (90, 9.0, False),  # 10 s would be one cycle
        (100, 10.0, True),
        (100, 7.0, True),  # nearer to 10 s than two cycles
        (100, 6.0, False),  # two cycles take 12 s
        (199, 11.9, False),
        (200, 12.0, True),
        (108, 12.0, False),  # slower than it seemed at first: to the end of the cycle
        (108, 20.0, True),  # within bounds
        (40, 9.9, False),  # no cycle fits
        (40, 10.0, True),
    ],
)
def test_a_measurement_has_full_cycles_and_about_the_requested_time(
    samples: int, elapsed_s: float, enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steady, "_LONGEST", 1.0)  # it may not be longer, although so few cycles say little
    assert TrialLength(4, 100, 10.0).is_over(samples, elapsed_s) is enough


def test_samples_read_ahead_count_with_the_time_of_their_readers() -> None:
    """Two readers of 0.1 s a sample deliver 20 a second."""
    assert reader_limited_s(100, 5.0, 0.1, 2) == 5.0
    assert reader_limited_s(100, 4.8, 0.1, 2) == 4.8, "within what is tolerated"
    assert reader_limited_s(100, 1.0, 0.1, 2) == pytest.approx(5.0)
    assert reader_limited_s(100, 1.0, 0.1, 0) == 1.0, "the trainer reads"
    assert reader_limited_s(100, 1.0, None, 2) == 1.0


def length_of(cycles_s: list[float]) -> int:
    """Cycles of a trial of 10 s, of 100 samples each."""
    length, elapsed_s = TrialLength(100, 100, 10.0), 0.0
    for number, seconds in enumerate(cycles_s, 1):
        elapsed_s += seconds
        if length.is_over(100 * number, elapsed_s):
            return number
    raise AssertionError("it never ends")


def test_a_trial_is_longer_the_more_its_cycles_vary_and_four_times_as_long_at_most() -> None:
    assert length_of([1.0] * 100) == 10
    assert 10 < length_of([0.7, 1.3] * 50) <= 40
    assert length_of([0.1, 1.9] * 50) == 40
    assert length_of([9.0] * 50) == 4, "fewer cycles do not show how they vary"
    assert length_of([9.0, 30.0] * 50) == 3, "more would take too long"


PLAN: Any = SimpleNamespace(samples_per_task=8, regions_in_flight=4, patches_per_region=4)


def step(number: int, **changed: Any) -> dict[str, Any]:
    usual = {"kind": "step", "time": 100.0 + number, "step_s": 0.5, "pause_s": 0.0, "gpu_s": 0.4, "backward_s": 0.2}
    usual |= {"comm_s": 0.05, "data_s": 0.1, "ram_used_bytes": 10, "vram_used_bytes": None}
    return usual | {"readers": {"blocks": 0, "decode_s": 0.0, "read_s": None}} | changed


def steady_state(workers: int = 0) -> SteadyState:
    return SteadyState(Warmup(3, 4), PLAN, workers, batch=4, seconds=2.0)


def test_warm_up_steps_and_pauses_are_not_counted() -> None:
    state = steady_state()
    slow = [step(n, step_s=9.0 if n == 0 else 0.5) for n in range(4)]
    assert not any(state.add(each) for each in slow)
    taken = 0
    while not state.add(step(4 + taken, step_s=5.5, pause_s=5.0)):
        taken += 1
        assert taken < 20
    assert state.samples_s == pytest.approx(4 / 0.5)
    assert state.figures()["data_share"] == pytest.approx(0.1 / 0.5)
    assert state.figures()["comm_share"] == pytest.approx(0.05 / 0.5)
    assert "vram_bytes" not in state.figures()
    assert state.start_s(launched_s=90.0) == pytest.approx(13.0 - 4 * 0.5)  # the last warm step came at 103


def test_the_warm_up_of_a_slow_trainer_is_bounded() -> None:
    assert not Warmup(3, 40).is_over(3, elapsed_s=1.0, most_s=2.0)
    assert Warmup(3, 40).is_over(3, elapsed_s=2.0, most_s=2.0)
    assert not Warmup(3, 40).is_over(2, elapsed_s=9.0, most_s=2.0)


def test_samples_read_ahead_are_not_the_steady_state() -> None:
    """Two readers of 1 s a sample cannot keep up with 8 samples/s, however many lie ready."""
    state, number = steady_state(workers=2), 0
    while not state.add(step(number, readers={"blocks": number, "decode_s": 4.0 * number, "read_s": None})):
        number += 1
    assert state.samples_s == pytest.approx(2.0)
