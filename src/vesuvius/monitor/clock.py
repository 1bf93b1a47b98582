"""Where the time of a step goes: waiting for data, copying to the device, computing, and the rest.

On a CPU the host's clock is the truth.  On a GPU the device's clock is: events are recorded around the work and read a
step or more later, so that the host never waits for the device because of its clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import torch

Part = Literal["forward", "backward", "optimizer", "comm"]
"""What the device does.  Getting a batch ready on the device (cast, normalise, mirror) is part of "forward";
clipping and the averages of the weights are part of "optimizer"; "comm" is waiting for other ranks."""

_PARTS = ("data", "h2d", "forward", "backward", "optimizer", "comm", "pause")

Timed = Callable[[Part], AbstractContextManager[None]]
"""`StepClock.computing`, or `untimed` where nobody asks where the time goes."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one optimizer step; data, h2d, forward, backward, optimizer, comm and other add up to step_s."""

    step_s: float  # from the end of the step before to the end of this one
    data_s: float  # the device had nothing to do because the batch was not there
    h2d_s: float  # the device waited for the copy from host to device
    # forward_s, backward_s, optimizer_s: it computed (on a CPU: the same, by the host's clock)
    forward_s: float
    backward_s: float
    optimizer_s: float
    pause_s: float = 0.0  # of other_s, what went into work between the steps: validation, pictures, checkpoints
    comm_s: float = 0.0  # it waited for other ranks: the part of the gradients' all-reduce that no backward pass hid

    @property
    def gpu_s(self) -> float:
        """Forward, backward and optimizer."""
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def other_s(self) -> float:
        """The rest: pauses, logging, launching kernels."""
        return self.step_s - self.data_s - self.h2d_s - self.gpu_s - self.comm_s


def untimed(part: Part) -> AbstractContextManager[None]:
    """In place of a clock: takes no time."""
    return nullcontext()


class HostClock:
    """Parts and steps by the host's clock: right where the host itself computes.

    Enter the context managers around the parts of a step, any number of times each, none within another, then call
    `step_done`.  What is done between two steps (`pausing`) belongs to the later one.
    """

    def __init__(self) -> None:
        self._spent: dict[str, float] = dict.fromkeys(_PARTS, 0.0)
        self._last_end = time.perf_counter()
        self._done: list[StepTimes] = []

    def waiting(self) -> AbstractContextManager[None]:
        return _spending(self._spent, "data")

    def copying(self) -> AbstractContextManager[None]:
        return _spending(self._spent, "h2d")

    def computing(self, part: Part) -> AbstractContextManager[None]:
        return _spending(self._spent, part)

    def pausing(self) -> AbstractContextManager[None]:
        return _spending(self._spent, "pause")

    def step_done(self) -> None:
        now = time.perf_counter()
        self._done.append(StepTimes(now - self._last_end, **{f"{name}_s": s for name, s in self._spent.items()}))
        self._spent = dict.fromkeys(_PARTS, 0.0)
        self._last_end = now

    def finished(self, wait: bool = False) -> list[StepTimes]:
        """The steps finished since the last call, in order; with `wait`, all that were begun."""
        done, self._done = self._done, []
        return done


@contextmanager
def _spending(spent: dict[str, float], name: str, now: Callable[[], float] = time.perf_counter) -> Iterator[None]:
    """Adds the seconds that it is entered for."""
    started = now()
    try:
        yield
    finally:
        spent[name] += now() - started


_Stretch = tuple[torch.cuda.Event, torch.cuda.Event]
"""The events at the begin and the end of something that the device does."""


@dataclass
class _Meanwhile:
    """What the host asked for and did since it queued the stretch of computing before."""

    copied: list[_Stretch] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=lambda: {"data": 0.0, "pause": 0.0})


class _Computed(NamedTuple):
    """A stretch of computing, and what the gap in front of it may be due to."""

    part: Part
    begin: torch.cuda.Event
    end: torch.cuda.Event
    meanwhile: _Meanwhile


class CudaClock:
    """As `HostClock`, by the device's clock, without a synchronize per step.

    Time in which the device computes is forward, backward or optimizer, whatever the host does meanwhile.  Each gap
    between two stretches of computing is split by what the host did between queueing the two: the part of its copies
    that lies within the gap is h2d_s, at most its wait is data_s, the rest is other_s, of which at most its pause is
    pause_s.  What hides behind computing is 0, but for this: when the host waited is not known on the device's clock,
    so a hidden wait counts where its own gap is there for another reason, such as launching kernels.

    Events are used again once the step that they belong to has been read, so there are as many as the steps in flight
    need, however long the run.

    Args:
        new_event: makes an event that can time.
        now: the host's clock, seconds.
    """

    def __init__(
        self, new_event: Callable[[], torch.cuda.Event] | None = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._new_event = new_event or partial(torch.cuda.Event, enable_timing=True)
        self._now = now
        self._free: list[torch.cuda.Event] = []
        self._end_before = self._recorded()
        self._step: list[_Computed] = []  # the computing of the present step, in order
        self._meanwhile = _Meanwhile()
        self._pending: deque[list[_Computed]] = deque()

    def waiting(self) -> AbstractContextManager[None]:
        return _spending(self._meanwhile.spent, "data", self._now)

    def pausing(self) -> AbstractContextManager[None]:
        return _spending(self._meanwhile.spent, "pause", self._now)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Enter on the stream that copies.  The computing that is queued next must wait for what is copied."""
        begin = self._recorded()
        try:
            yield
        finally:
            self._meanwhile.copied.append((begin, self._recorded()))

    @contextmanager
    def computing(self, part: Part) -> Iterator[None]:
        """Enter on the stream that computes."""
        meanwhile, self._meanwhile = self._meanwhile, _Meanwhile()
        begin = self._recorded()
        try:
            yield
        finally:
            self._step.append(_Computed(part, begin, self._recorded(), meanwhile))

    def step_done(self) -> None:
        # On the device's clock the step ended with its last computing: what the host did since is the next step's.
        self._pending.append(self._step)
        self._step = []

    def finished(self, wait: bool = False) -> list[StepTimes]:
        done = []
        while self._pending:
            step = self._pending[0]
            end = step[-1].end
            if wait:
                end.synchronize()
            elif not end.query():  # type: ignore[no-untyped-call]
                break
            done.append(_split_step(step, self._end_before))
            events = [event for each in step for event in (each.begin, each.end)]
            events += [event for each in step for copy in each.meanwhile.copied for event in copy]
            self._free += [self._end_before, *(event for event in events if event is not end)]
            self._end_before = end  # from which the next step counts
            self._pending.popleft()
        return done

    def _recorded(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event


def _split_step(step: Sequence[_Computed], end_before: torch.cuda.Event) -> StepTimes:
    """Read the events of a step that the device has finished."""
    step_s = left_s = _seconds(end_before, step[-1].end)
    spent = dict.fromkeys(_PARTS, 0.0)
    for each in step:
        # Each is rounded for itself: together they may seem longer than the step.
        seconds = min(_seconds(each.begin, each.end), left_s)
        spent[each.part] += seconds
        left_s -= seconds
    gap_begin = end_before
    for each in step:
        # How long the device waited for copies, for data and for a pause: together no more than the gap.
        whole_s = _seconds(gap_begin, each.begin)
        gap_s = min(whole_s, left_s)
        copied_s = sum(_seconds_within(whole_s, each.begin, copy) for copy in each.meanwhile.copied)
        for name, most_s in (("h2d", copied_s), *each.meanwhile.spent.items()):
            seconds = min(most_s, gap_s)
            spent[name] += seconds
            gap_s -= seconds
            left_s -= seconds
        gap_begin = each.end
    return StepTimes(step_s, **{f"{name}_s": seconds for name, seconds in spent.items()})


def _seconds_within(gap_s: float, gap_end: torch.cuda.Event, copy: _Stretch) -> float:
    """How long of a copy lies within the gap that ends once it is over.

    Measured back from the gap's end, which comes last: a copy may begin before the gap or, where the host is far
    ahead, before the step, and CUDA does not say what it answers for two events in the wrong order.
    """
    since_begin_s, since_end_s = (_seconds(event, gap_end) for event in copy)
    return max(0.0, min(since_begin_s, gap_s) - min(since_end_s, gap_s))


def _seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(begin.elapsed_time(end)) / 1000


StepClock = HostClock | CudaClock


def make_clock(device: torch.device) -> StepClock:
    """The clock of the device that computes.  The first step is counted from here."""
    return CudaClock() if device.type == "cuda" else HostClock()
