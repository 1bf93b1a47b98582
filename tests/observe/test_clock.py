"""The step clock: the parts add up, and waits hidden behind computing are not counted."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vesuvius.observe import clock as clock_module
from vesuvius.observe.clock import HostClock, StepTimes, _CudaStep, _split_gaps, make_clock


def test_parts_of_a_host_step_are_timed_apart_and_add_up() -> None:
    clock = HostClock()
    for _ in range(2):
        with clock.waiting():
            time.sleep(0.02)
        with clock.copying():
            time.sleep(0.01)
        with clock.computing():
            time.sleep(0.03)
        time.sleep(0.01)
    clock.step_done()
    (times,) = clock.finished()
    # Sleeps are never shorter than asked for; how much longer depends on the machine.
    assert times.data_s >= 0.04
    assert times.h2d_s >= 0.02
    assert times.gpu_s >= 0.06
    assert times.other_s >= 0.02
    assert times.data_s + times.h2d_s + times.gpu_s + times.other_s == pytest.approx(times.step_s, rel=1e-9)
    assert clock.finished() == []


def test_what_lies_between_two_steps_belongs_to_the_later_one() -> None:
    clock = HostClock()
    clock.step_done()
    time.sleep(0.02)
    clock.step_done()
    _, second = clock.finished()
    assert second.other_s >= 0.02


def test_a_part_that_raises_is_still_counted() -> None:
    clock = HostClock()

    def fail_while_waiting() -> None:
        with clock.waiting():
            time.sleep(0.01)
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        fail_while_waiting()
    clock.step_done()
    assert clock.finished()[0].data_s >= 0.01


class FakeEvent:
    """A device event at a given second of the device's clock."""

    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1000 * (other.at - self.at)


def split(
    end_before: float, computed: list[tuple[float, float]], copied: list[tuple[float, float]], waited: float
) -> StepTimes:
    def events(pairs: list[tuple[float, float]]) -> list[tuple[FakeEvent, FakeEvent]]:
        return [(FakeEvent(a), FakeEvent(b)) for a, b in pairs]

    step = _CudaStep(events(computed), events(copied), waited)  # type: ignore[arg-type]
    return _split_gaps(step, FakeEvent(end_before))  # type: ignore[arg-type]


def test_a_wait_hidden_behind_computing_is_no_waiting() -> None:
    times = split(10.0, computed=[(10.0, 12.0)], copied=[(10.1, 10.2)], waited=1.5)
    assert (times.step_s, times.gpu_s, times.data_s, times.h2d_s) == (2.0, 2.0, 0.0, 0.0)


def test_a_gap_is_copy_then_wait_then_other() -> None:
    times = split(10.0, computed=[(13.0, 14.0)], copied=[(12.4, 12.5)], waited=2.0)
    assert times.step_s == 4.0
    assert times.gpu_s == 1.0
    assert times.h2d_s == pytest.approx(0.1)
    assert times.data_s == 2.0
    assert times.other_s == pytest.approx(0.9)


def test_waits_between_micro_batches_count() -> None:
    times = split(0.0, computed=[(0.0, 1.0), (3.0, 4.0)], copied=[], waited=2.0)
    assert (times.gpu_s, times.data_s) == (2.0, 2.0)


@given(
    lengths=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5)), min_size=1, max_size=4),
    copies=st.floats(0, 10),
    waited=st.floats(0, 30),
)
def test_device_parts_are_never_negative_and_add_up(
    lengths: list[tuple[float, float]], copies: float, waited: float
) -> None:
    now, computed = 0.0, []
    for gap, length in lengths:
        computed.append((now + gap, now + gap + length))
        now += gap + length
    times = split(0.0, computed, [(0.0, copies)], waited)
    # events count in milliseconds of float32 on a GPU; here float64, so only rounding is left
    for part in (times.data_s, times.h2d_s, times.gpu_s, times.other_s):
        assert part >= -1e-9
    assert times.data_s + times.h2d_s + times.gpu_s + times.other_s == pytest.approx(times.step_s)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_step_is_timed_by_the_gpu() -> None:
    clock = make_clock(torch.device("cuda"))
    x = torch.randn(2000, 2000, device="cuda")
    for _ in range(3):
        with clock.computing():
            x = x @ x / 2000
        clock.step_done()
    done = clock.finished(wait=True)
    assert len(done) == 3
    assert all(0 < times.gpu_s <= times.step_s for times in done)


def test_a_cpu_gets_the_host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Callable[[torch.device], object] = clock_module.make_clock
    assert isinstance(made(torch.device("cpu")), HostClock)
