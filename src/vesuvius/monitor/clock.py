"""Splits the time of a step into waiting for data, copying to the device, computing, and the rest.

On a CPU the host's clock counts.  On a GPU the device's clock does: events are recorded around the work and read a step
or more later, so that the host never waits for the device just to read its clock.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, Self

import torch

from vesuvius.accelerator import new_event

Part = Literal["forward", "backward", "optimizer", "comm"]
"""Parts of the device's work: preparing a batch is "forward", clipping and weight averages are "optimizer"."""

_PARTS = ("data", "h2d", "forward", "backward", "optimizer", "comm", "pause")

Timed = Callable[[Part], AbstractContextManager[None]]  # `StepClock.computing`, or `untimed`


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one optimizer step; data, h2d, forward, backward, optimizer, comm and other add up to step_s."""

    step_s: float  # from the end of the previous step to the end of this one
    data_s: float  # the device waited for a batch
    h2d_s: float  # the device waited for the copy from host to device
    # forward_s, backward_s, optimizer_s: the device computed (on a CPU, by the host's clock)
    forward_s: float
    backward_s: float
    optimizer_s: float
    pause_s: float = 0.0  # part of other_s: work between steps, such as validation, pictures and checkpoints
    comm_s: float = 0.0  # it waited for other ranks: the part of the all-reduce not hidden by the backward pass

    @property
    def gpu_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def other_s(self) -> float:
        return self.step_s - self.data_s - self.h2d_s - self.gpu_s - self.comm_s


def untimed(part: Part) -> AbstractContextManager[None]:
    return nullcontext()


class HostEvent:
    """An event of a device that is the host: over once it is recorded."""

    def record(self) -> None:
        self._recorded_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Self) -> float:
        return 1000 * (end._recorded_s - self._recorded_s)


_Event = Any  # HostEvent or torch.Event
_Span = tuple[_Event, _Event]  # begin and end of some work of the device


@dataclass
class _HostActivity:
    """Copies, waits and pauses of the host since it queued the previous span of computing."""

    copied: list[_Span] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=lambda: {"data": 0.0, "pause": 0.0})


class _Computed(NamedTuple):
    """A span of computing, and what may explain the gap before it."""

    part: Part
    begin: _Event
    end: _Event
    before: _HostActivity


class StepClock:
    """Times steps by the device's clock, without a synchronize per step.

    Enter the context managers around the parts of a step, not nested, then call `step_done`.  Work between two steps
    (`pausing`) belongs to the later one.

    Each gap between two spans of computing is split by what the host did between queueing them: copies within the gap
    are h2d_s, then the host's wait is data_s, and the rest is other_s, of which the host's pause is pause_s.  Waits
    hidden behind computing count as 0, unless their gap exists for another reason, such as launching kernels: the
    device's clock does not show when the host waited.  `now` is the host's clock, in seconds.
    """

    def __init__(
        self, new_event: Callable[[], _Event] = HostEvent, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._new_event = new_event
        self._now = now
        self._end_before = self._recorded()
        self._step: list[_Computed] = []  # of the current step, in order
        self._activity = _HostActivity()
        self._pending: deque[list[_Computed]] = deque()

    @contextmanager
    def waiting(self, name: Literal["data", "pause"] = "data") -> Iterator[None]:
        spent, started = self._activity.spent, self._now()
        try:
            yield
        finally:
            spent[name] += self._now() - started

    def pausing(self) -> AbstractContextManager[None]:
        return self.waiting("pause")

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Enter on the copying stream.  The computing queued next must wait for the copy."""
        begin = self._recorded()
        try:
            yield
        finally:
            self._activity.copied.append((begin, self._recorded()))

    @contextmanager
    def computing(self, part: Part) -> Iterator[None]:
        before, self._activity = self._activity, _HostActivity()
        begin = self._recorded()
        try:
            yield
        finally:
            self._step.append(_Computed(part, begin, self._recorded(), before))

    def step_done(self) -> None:
        # On the device's clock the step ended with its last computing; what the host does after it belongs to the next.
        self._pending.append(self._step)
        self._step = []

    def finished(self, wait: bool = False) -> list[StepTimes]:
        """Return the steps finished since the last call, in order; with `wait`, all steps begun."""
        done = []
        while self._pending:
            step = self._pending[0]
            end = step[-1].end
            if wait:
                end.synchronize()
            elif not end.query():
                break
            done.append(_split_step(step, self._end_before))
            self._end_before = end
            self._pending.popleft()
        return done

    def _recorded(self) -> _Event:
        event = self._new_event()
        event.record()
        return event


def _split_step(step: Sequence[_Computed], end_before: _Event) -> StepTimes:
    step_s = left_s = _seconds(end_before, step[-1].end)
    spent = dict.fromkeys(_PARTS, 0.0)
    for each in step:
        # Events are rounded: their sum may exceed the step.
        seconds = min(_seconds(each.begin, each.end), left_s)
        spent[each.part] += seconds
        left_s -= seconds
    gap_begin = end_before
    for each in step:
        # Waits for copies, data and a pause: together at most the gap.
        full_s = _seconds(gap_begin, each.begin)
        gap_s = min(full_s, left_s)
        copied_s = sum(_seconds_within(full_s, each.begin, copy) for copy in each.before.copied)
        for name, most_s in (("h2d", copied_s), *each.before.spent.items()):
            seconds = min(most_s, gap_s)
            spent[name] += seconds
            gap_s -= seconds
            left_s -= seconds
        gap_begin = each.end
    return StepTimes(step_s, **{f"{name}_s": seconds for name, seconds in spent.items()})


def _seconds_within(gap_s: float, gap_end: _Event, copy: _Span) -> float:
    """Return the part of a copy, in seconds, that lies within the gap that ends after it.

    Measured backwards from the gap's end, the latest event: a copy may begin before the gap or, if the host is far
    ahead, before the step, and CUDA does not define the elapsed time of two events in reverse order.
    """
    since_begin_s, since_end_s = (_seconds(event, gap_end) for event in copy)
    return max(0.0, min(since_begin_s, gap_s) - min(since_end_s, gap_s))


def _seconds(begin: _Event, end: _Event) -> float:
    return float(begin.elapsed_time(end)) / 1000


def make_clock(device: torch.device) -> StepClock:
    return StepClock(partial(new_event, device, timing=True)) if device.type != "cpu" else StepClock()
