"""Where the time of a step goes: waiting for data, copying to the device, computing, and the rest.

On a CPU the host's clock is the truth.  On a GPU the device's clock is: events are recorded around the work and read a
step or more later, so that the host never waits for the device because of its clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

Part = Literal["forward", "backward", "optimizer"]
"""What the device computes.  Getting a batch ready on the device (cast, normalise, mirror, noise) is part of "forward";
clipping and the averages of the weights are part of "optimizer"."""

Timed = Callable[[Part], AbstractContextManager[None]]
"""`StepClock.computing`, or `untimed` where nobody asks where the time goes."""


def untimed(part: Part) -> AbstractContextManager[None]:
    """In place of a clock: takes no time."""
    return nullcontext()


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one optimizer step; data, h2d, forward, backward, optimizer and other add up to step_s.

    Attributes:
        step_s: from the end of the step before to the end of this one.
        data_s: the device had nothing to do because the batch was not there.
        h2d_s: the device waited for the copy from host to device.
        forward_s, backward_s, optimizer_s: it computed (on a CPU: the same, by the host's clock).
        pause_s: of other_s, what went into work between the steps: validation, pictures, checkpoints.
    """

    step_s: float
    data_s: float
    h2d_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    pause_s: float = 0.0

    @property
    def gpu_s(self) -> float:
        """Forward, backward and optimizer."""
        return self.forward_s + self.backward_s + self.optimizer_s

    @property
    def other_s(self) -> float:
        """The rest: pauses, logging, launching kernels."""
        return self.step_s - self.data_s - self.h2d_s - self.gpu_s


class StepClock(Protocol):
    """Enter the context managers around the parts of a step, any number of times each, then call `step_done`.

    None lies within another.
    """

    def waiting(self) -> AbstractContextManager[None]: ...

    def copying(self) -> AbstractContextManager[None]: ...

    def computing(self, part: Part) -> AbstractContextManager[None]: ...

    def pausing(self) -> AbstractContextManager[None]:
        """Around what is done between two steps, which belongs to the later one."""
        ...

    def step_done(self) -> None: ...

    def finished(self, wait: bool = False) -> list[StepTimes]:
        """The steps finished since the last call, in order; with `wait`, all that were begun."""
        ...


def make_clock(device: torch.device) -> StepClock:
    """The clock of the device that computes.  The first step is counted from here."""
    return CudaClock() if device.type == "cuda" else HostClock()


class HostClock:
    """Parts and steps by the host's clock: right where the host itself computes."""

    def __init__(self) -> None:
        self._spent = dict.fromkeys(("data", "h2d", "forward", "backward", "optimizer", "pause"), 0.0)
        self._last_end = time.perf_counter()
        self._done: list[StepTimes] = []

    def waiting(self) -> AbstractContextManager[None]:
        return self._timed("data")

    def copying(self) -> AbstractContextManager[None]:
        return self._timed("h2d")

    def computing(self, part: Part) -> AbstractContextManager[None]:
        return self._timed(part)

    def pausing(self) -> AbstractContextManager[None]:
        return self._timed("pause")

    def step_done(self) -> None:
        now = time.perf_counter()
        parts = {f"{name}_s": seconds for name, seconds in self._spent.items()}
        self._done.append(StepTimes(now - self._last_end, **parts))
        self._spent = dict.fromkeys(self._spent, 0.0)
        self._last_end = now

    def finished(self, wait: bool = False) -> list[StepTimes]:
        done, self._done = self._done, []
        return done

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._spent[part] += time.perf_counter() - started


class DeviceEvent(Protocol):
    """What the clock uses of `torch.cuda.Event`."""

    def record(self) -> None:
        """On the current stream; again means anew."""
        ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds."""
        ...


@dataclass
class _Stretch:
    """Events at the begin and the end of something that the device does."""

    begin: DeviceEvent
    end: DeviceEvent

    @property
    def seconds(self) -> float:
        return _seconds(self.begin, self.end)


@dataclass
class _DeviceStep:
    """What is known of a step: stretches of computing, of copying, and what the host waited and paused."""

    computed: list[tuple[Part, _Stretch]] = field(default_factory=list)
    copied: list[_Stretch] = field(default_factory=list)
    waited_s: float = 0.0
    paused_s: float = 0.0

    @property
    def end(self) -> DeviceEvent:
        return self.computed[-1][1].end

    def events(self) -> list[DeviceEvent]:
        """All but the end, from which the next step counts."""
        stretches = [stretch for _, stretch in self.computed] + self.copied
        return [event for each in stretches for event in (each.begin, each.end) if event is not self.end]


class CudaClock:
    """Parts and steps by the device's clock, without a synchronize per step.

    Time in which the device computes is forward, backward or optimizer, whatever the host does meanwhile.  The gaps
    between are split: at most the copies' own time is h2d_s, at most the host's wait is data_s, the rest is other_s,
    of which at most what the host paused is pause_s.  What hides behind computing is 0.

    Events are used again once the step that they belong to has been read, so there are as many as the steps in flight
    need, however long the run.

    Args:
        new_event: makes an event that can time.
        now: the host's clock, seconds.
    """

    def __init__(
        self, new_event: Callable[[], DeviceEvent] | None = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._new_event = new_event or _new_cuda_event
        self._now = now
        self._free: list[DeviceEvent] = []
        self._end_before = self._recorded()
        self._step = _DeviceStep()
        self._pending: deque[_DeviceStep] = deque()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        started = self._now()
        try:
            yield
        finally:
            self._step.waited_s += self._now() - started

    @contextmanager
    def pausing(self) -> Iterator[None]:
        started = self._now()
        try:
            yield
        finally:
            self._step.paused_s += self._now() - started

    def copying(self) -> AbstractContextManager[None]:
        """Enter on the stream that copies, for what the step's computing waits for."""
        return self._between_events(self._step.copied.append)

    def computing(self, part: Part) -> AbstractContextManager[None]:
        """Enter on the stream that computes."""
        computed = self._step.computed
        return self._between_events(lambda stretch: computed.append((part, stretch)))

    def step_done(self) -> None:
        self._pending.append(self._step)
        self._step = _DeviceStep()

    def finished(self, wait: bool = False) -> list[StepTimes]:
        done = []
        while self._pending:
            step = self._pending[0]
            if wait:
                step.end.synchronize()
            elif not step.end.query():
                break
            done.append(_split_gaps(step, self._end_before))
            self._free += [self._end_before, *step.events()]
            self._end_before = step.end
            self._pending.popleft()
        return done

    def _recorded(self) -> DeviceEvent:
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event

    @contextmanager
    def _between_events(self, keep: Callable[[_Stretch], None]) -> Iterator[None]:
        begin = self._recorded()
        try:
            yield
        finally:
            keep(_Stretch(begin, self._recorded()))


def _split_gaps(step: _DeviceStep, end_before: DeviceEvent) -> StepTimes:
    """Read the events of a step that the device has finished."""
    step_s = _seconds(end_before, step.end)
    spent: dict[Part, float] = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    left_s = step_s
    for part, stretch in step.computed:
        seconds = min(
            stretch.seconds, left_s
        )  # each is rounded for itself: together they may seem longer than the step
        spent[part] += seconds
        left_s -= seconds
    h2d_s = min(sum(copy.seconds for copy in step.copied), left_s)
    data_s = min(step.waited_s, left_s - h2d_s)
    pause_s = min(step.paused_s, left_s - h2d_s - data_s)
    return StepTimes(step_s, data_s, h2d_s, spent["forward"], spent["backward"], spent["optimizer"], pause_s)


def _new_cuda_event() -> DeviceEvent:
    event: DeviceEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


def _seconds(begin: DeviceEvent, end: DeviceEvent) -> float:
    return float(begin.elapsed_time(end)) / 1000
