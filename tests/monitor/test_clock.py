"""The step clock: the parts add up, and waits hidden behind computing are not counted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.gpu import GPU, needs_gpu, sleep
from vesuvius.monitor.clock import Part, StepClock, StepTimes, make_clock


def all_parts(times: StepTimes) -> list[float]:
    return [times.data_s, times.h2d_s, times.forward_s, times.backward_s, times.optimizer_s, times.other_s]


def test_parts_of_a_host_step_are_timed_separately_and_add_up() -> None:
    clock = StepClock()
    forward, backward, optimizer = (partial(clock.computing, part) for part in ("forward", "backward", "optimizer"))
    around: list[tuple[Callable[[], AbstractContextManager[None]], float]] = []
    for _ in range(2):
        around += [(clock.pausing, 0.05), (clock.waiting, 0.02), (clock.copying, 0.01)]
        around += [(nullcontext, 0.01), (forward, 0.03), (backward, 0.04)]
    around.append((optimizer, 0.01))
    for part, seconds in around:
        with part():
            time.sleep(seconds)
    clock.step_done()
    (times,) = clock.finished()
    # Sleeps are never shorter than requested; how much longer depends on the machine.
    assert times.data_s >= 0.04
    assert times.h2d_s >= 0.02
    assert times.forward_s >= 0.06
    assert times.backward_s >= 0.08
    assert times.optimizer_s >= 0.01
    assert times.pause_s >= 0.10
    assert times.other_s >= times.pause_s + 0.01, "a pause is a part of the rest"
    assert times.gpu_s == times.forward_s + times.backward_s + times.optimizer_s
    assert sum(all_parts(times)) == pytest.approx(times.step_s, rel=1e-12)
    assert clock.finished() == []
    with clock.pausing():
        time.sleep(0.02)
    with clock.computing("forward"):
        pass
    clock.step_done()
    (later,) = clock.finished()
    assert later.other_s >= later.pause_s >= 0.02, "what lies between two steps belongs to the later one"


@dataclass
class FakeGpu:
    """A device with a queue of computing and a queue of copies, and the clock of the host that fills them.

    Attributes:
        host: what the host's clock says, seconds.
        computed_until, copied_until: when the device will be through with what is queued.
        busy, copied: begin and end of all that was computed and copied.
        copying: which queue is the current stream.
        events: all that were ever made.
        synchronized: how often the host has waited for an event.
    """

    host: float = 0.0
    computed_until: float = 0.0
    copied_until: float = 0.0
    busy: list[tuple[float, float]] = field(default_factory=list)
    copied: list[tuple[float, float]] = field(default_factory=list)
    copying: bool = False
    events: list[FakeEvent] = field(default_factory=list)
    synchronized: int = 0

    def event(self) -> FakeEvent:
        self.events.append(FakeEvent(self))
        return self.events[-1]

    def compute(self, seconds: float) -> None:
        begin = max(self.computed_until, self.host)
        self.computed_until = begin + seconds
        self.busy.append((begin, self.computed_until))

    def copy(self, seconds: float) -> None:
        """On its own stream, for which computing then waits."""
        begin = max(self.copied_until, self.host)
        self.copied_until = begin + seconds
        self.copied.append((begin, self.copied_until))

    def wait_for_copies(self) -> None:
        self.computed_until = max(self.computed_until, self.copied_until)


class FakeEvent:
    """Like a CUDA event: recording it again overwrites its time."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.at = math.nan

    def record(self) -> None:
        gpu = self._gpu
        self.at = max(gpu.host, gpu.copied_until if gpu.copying else gpu.computed_until)

    def query(self) -> bool:
        return self.at <= self._gpu.host

    def synchronize(self) -> None:
        self._gpu.synchronized += 1
        self._gpu.host = max(self._gpu.host, self.at)

    def elapsed_time(self, end: FakeEvent, /) -> float:
        assert max(self.at, end.at) <= self._gpu.host, "CUDA refuses to read events that are still ahead"
        assert self.at <= end.at, "CUDA does not say what it answers for events in the wrong order"
        return 1000 * (end.at - self.at)


@dataclass(frozen=True)
class Work:
    """Durations of a step, in seconds: the host's part, then the device's."""

    pause: float = 0.0
    wait: float = 0.0
    launch: float = 0.0
    copy: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    micro_batches: int = 1


def run_step(gpu: FakeGpu, clock: StepClock, *works: Work) -> None:
    """Like the training loop: the host queues everything and waits only for data.  Several works form one step."""
    for work in works:
        with clock.pausing():
            gpu.host += work.pause
        for _ in range(work.micro_batches):
            run_micro_batch(gpu, clock, work)
        computing(gpu, clock, "optimizer", work.optimizer)
    clock.step_done()


def run_micro_batch(gpu: FakeGpu, clock: StepClock, work: Work) -> None:
    with clock.waiting():
        gpu.host += work.wait
    copying(gpu, clock, work.copy)
    gpu.wait_for_copies()
    gpu.host += work.launch
    computing(gpu, clock, "forward", work.forward)
    computing(gpu, clock, "backward", work.backward)


def copying(gpu: FakeGpu, clock: StepClock, *copies: float) -> None:
    gpu.copying = True
    with clock.copying():
        for seconds in copies:
            gpu.copy(seconds)
    gpu.copying = False


def computing(gpu: FakeGpu, clock: StepClock, part: Part, seconds: float) -> None:
    with clock.computing(part):
        gpu.compute(seconds)


def test_a_gap_is_copy_then_wait_then_other_with_its_pause() -> None:
    work = Work(pause=5.0, wait=2.0, launch=0.5, copy=0.25, forward=1.0, backward=2.0, optimizer=0.5)
    gpu = FakeGpu()
    clock = StepClock(gpu.event, lambda: gpu.host)
    run_step(gpu, clock, work)
    (times,) = clock.finished(wait=True)
    assert times.step_s == 11.0, "the copy runs while the host launches"
    assert (times.forward_s, times.backward_s, times.optimizer_s) == (1.0, 2.0, 0.5)
    assert (times.h2d_s, times.data_s) == (0.25, 2.0)
    assert (times.other_s, times.pause_s) == (5.25, 5.0)


def test_waits_and_pauses_hidden_behind_computing_count_as_zero() -> None:
    gpu = FakeGpu()
    clock = StepClock(gpu.event, lambda: gpu.host)
    run_step(gpu, clock, Work(forward=10.0))
    run_step(gpu, clock, Work(pause=3.0, wait=4.0, copy=1.0, backward=2.0))
    _, times = clock.finished(wait=True)
    assert (times.step_s, times.backward_s) == (2.0, 2.0)
    assert (times.data_s, times.h2d_s, times.other_s, times.pause_s) == (0.0, 0.0, 0.0, 0.0)


def test_time_after_the_last_computing_belongs_to_the_next_step() -> None:
    gpu = FakeGpu()
    clock = StepClock(gpu.event, lambda: gpu.host)
    computing(gpu, clock, "forward", 1.0)
    with clock.waiting():
        gpu.host += 3.0
    copying(gpu, clock, 0.5)
    clock.step_done()
    gpu.wait_for_copies()
    computing(gpu, clock, "forward", 1.0)
    clock.step_done()
    first, second = clock.finished(wait=True)
    assert (first.step_s, first.data_s, first.h2d_s) == (1.0, 0.0, 0.0)
    assert (second.step_s, second.data_s, second.h2d_s) == (3.5, 2.0, 0.5)


seconds = st.floats(0, 5)
works = st.builds(Work, seconds, seconds, seconds, seconds, seconds, seconds, seconds, st.integers(1, 3))


def seconds_outside(busy: Sequence[tuple[float, float]], copied: Sequence[tuple[float, float]]) -> float:
    """Return the copying time that computing does not hide."""
    hidden = sum(max(0.0, min(end, e) - max(begin, b)) for begin, end in copied for b, e in busy)
    return sum(end - begin for begin, end in copied) - hidden


@given(st.lists(st.lists(works, min_size=1, max_size=4), min_size=1, max_size=5))
def test_parts_always_add_up_and_each_gap_is_split_by_its_own_activity(
    steps: list[list[Work]],
) -> None:
    gpu = FakeGpu()
    clock = StepClock(gpu.event, lambda: gpu.host)
    done = []
    for mixed in steps:
        run_step(gpu, clock, *mixed)
        done += clock.finished()
    assert gpu.synchronized == 0, "the host never waits for the device because of the clock"
    done += clock.finished(wait=True)
    # The fake uses float64 seconds, so only rounding of sums up to about 1000 s is left.
    near = 1e-9
    for mixed, times in zip(steps, done, strict=True):
        assert sum(all_parts(times)) == pytest.approx(times.step_s, rel=1e-12, abs=near)
        assert min(*all_parts(times), times.pause_s) >= -near
        assert times.forward_s == pytest.approx(sum(work.micro_batches * work.forward for work in mixed), abs=near)
        assert times.backward_s == pytest.approx(sum(work.micro_batches * work.backward for work in mixed), abs=near)
        assert times.optimizer_s == pytest.approx(sum(work.optimizer for work in mixed), abs=near)
        assert times.data_s <= sum(work.micro_batches * work.wait for work in mixed) + near
        assert times.pause_s <= min(times.other_s, sum(work.pause for work in mixed)) + near
        assert times.h2d_s <= sum(work.micro_batches * work.copy for work in mixed) + near
    assert sum(times.step_s for times in done) == pytest.approx(gpu.computed_until, abs=near), "no time is lost"
    unhidden_s = seconds_outside(gpu.busy, gpu.copied)
    assert sum(times.h2d_s for times in done) == pytest.approx(unhidden_s, abs=near), "exactly, not only at most"


def test_a_clock_is_read_without_waiting_for_a_step() -> None:
    gpu = FakeGpu()
    clock = StepClock(gpu.event, lambda: gpu.host)
    work = Work(launch=0.125, copy=0.25, forward=1.0, backward=2.0, optimizer=0.5, micro_batches=2)
    done: list[StepTimes] = []
    for number in range(300):
        run_step(gpu, clock, work)
        # Like a real host, it does not run ahead without bound, but by two steps.
        gpu.host = max(gpu.host, gpu.computed_until - 2 * 6.5)
        done += clock.finished()
        assert number - len(done) <= 3
    assert gpu.synchronized == 0


@pytest.mark.parametrize(
    ("work", "step_s"),
    [(Work(forward=2.0, backward=3.0, optimizer=1.0), 6.0), (Work(wait=2.0, forward=1.0, micro_batches=3), 7.0)],
)
def test_parts_longer_than_their_step_by_rounding_are_capped(work: Work, step_s: float) -> None:
    """CUDA rounds each span to half a microsecond."""

    class Rounded(FakeEvent):
        def elapsed_time(self, end: FakeEvent, /) -> float:
            return super().elapsed_time(end) + 0.0005 * (end.at - self.at < 5)

    gpu = FakeGpu()
    clock = StepClock(lambda: Rounded(gpu), lambda: gpu.host)
    run_step(gpu, clock, work)
    (times,) = clock.finished(wait=True)
    assert times.step_s == step_s
    assert times.gpu_s + times.data_s == pytest.approx(step_s, rel=1e-12)
    assert times.other_s >= -1e-12


@needs_gpu
def test_a_gpu_step_is_timed_by_the_device_clock() -> None:
    clock = make_clock(GPU)
    x = torch.randn(500, 500, device=GPU)
    for _ in range(3):
        for part in ("forward", "backward", "optimizer"):
            with clock.computing(part):  # type: ignore[arg-type]
                x = x @ x / 500
        clock.step_done()
    done = clock.finished(wait=True)
    assert len(done) == 3
    for times in done:
        assert min(times.forward_s, times.backward_s, times.optimizer_s) > 0
        assert times.gpu_s <= times.step_s


@needs_gpu
def test_a_gpu_step_is_split_into_what_the_device_did_and_waited_for() -> None:
    """It waits 0.2 s for data and 0.1 s for a copy; a second wait of the host is hidden behind its work.  All may take
    longer on a loaded machine.
    """
    clock, copies = make_clock(GPU), torch.Stream(GPU)
    with clock.computing("optimizer"):
        sleep(0.05)
    clock.step_done()
    torch.accelerator.synchronize()
    began = time.perf_counter()
    with clock.waiting():
        time.sleep(0.2)
    waited_s = time.perf_counter() - began
    with copies, clock.copying():
        sleep(0.1)
    torch.accelerator.current_stream(GPU).wait_stream(copies)
    with clock.computing("forward"):
        sleep(0.8)
    with clock.waiting():
        time.sleep(0.1)
    with clock.computing("backward"):
        sleep(0.1)
    clock.step_done()
    assert len(clock.finished()) == 1, "the second step is still running, and reading the clock does not wait for it"
    times = clock.finished(wait=True)[-1]
    least = {"data_s": 0.2, "h2d_s": 0.1, "forward_s": 0.8, "backward_s": 0.1, "optimizer_s": 0.0, "other_s": 0.0}
    for name, seconds in least.items():
        assert getattr(times, name) > seconds - 0.02, (name, times)
    assert times.data_s < waited_s + 0.01, "the hidden wait does not count"
    assert times.optimizer_s == 0
    assert times.step_s == pytest.approx(times.data_s + times.h2d_s + times.gpu_s + times.other_s)
