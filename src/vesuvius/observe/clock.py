"""Where the time of a step goes: waiting for data, copying to the device, computing, and the rest.

On a CPU the host's clock is the truth.  On a GPU the device's clock is: events are recorded around the work and read a
step or more later, so that the host never waits for the device because of its clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one optimizer step; the four parts add up to step_s.

    Attributes:
        step_s: from the end of the step before to the end of this one.
        data_s: the device had nothing to do because the batch was not there.
        h2d_s: the device waited for the copy from host to device.
        gpu_s: forward, backward and optimizer (on a CPU: the same, by the host's clock).
    """

    step_s: float
    data_s: float
    h2d_s: float
    gpu_s: float

    @property
    def other_s(self) -> float:
        """The rest: logging, checkpoints, pictures, launching kernels."""
        return self.step_s - self.data_s - self.h2d_s - self.gpu_s


class StepClock(Protocol):
    """Enter the context managers around the parts of a step, any number of times each, then call `step_done`."""

    def waiting(self) -> AbstractContextManager[None]: ...

    def copying(self) -> AbstractContextManager[None]: ...

    def computing(self) -> AbstractContextManager[None]: ...

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
        self._spent = {"data": 0.0, "h2d": 0.0, "gpu": 0.0}
        self._last_end = time.perf_counter()
        self._done: list[StepTimes] = []

    def waiting(self) -> AbstractContextManager[None]:
        return self._timed("data")

    def copying(self) -> AbstractContextManager[None]:
        return self._timed("h2d")

    def computing(self) -> AbstractContextManager[None]:
        return self._timed("gpu")

    def step_done(self) -> None:
        now = time.perf_counter()
        spent = self._spent
        self._done.append(StepTimes(now - self._last_end, spent["data"], spent["h2d"], spent["gpu"]))
        self._spent = dict.fromkeys(spent, 0.0)
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


@dataclass
class _CudaStep:
    """Events of one step: begin and end of each stretch of computing, of each copy, and what the host waited."""

    computed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    copied: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    waited_s: float = 0.0


class CudaClock:
    """Parts and steps by the device's clock, without a synchronize per step.

    Time in which the device computes is gpu_s, whatever the host does meanwhile.  The gaps between are split:
    at most the copies' own time is h2d_s, at most the host's wait is data_s, the rest is other_s.  What hides
    behind computing is 0.
    """

    def __init__(self) -> None:
        self._end_before = _recorded()
        self._step = _CudaStep()
        self._pending: deque[_CudaStep] = deque()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._step.waited_s += time.perf_counter() - started

    def copying(self) -> AbstractContextManager[None]:
        """Enter on the stream that copies."""
        return _between_events(self._step.copied)

    def computing(self) -> AbstractContextManager[None]:
        """Enter on the stream that computes."""
        return _between_events(self._step.computed)

    def step_done(self) -> None:
        self._pending.append(self._step)
        self._step = _CudaStep()

    def finished(self, wait: bool = False) -> list[StepTimes]:
        done = []
        while self._pending:
            end = self._pending[0].computed[-1][1]
            if wait:
                end.synchronize()
            elif not end.query():  # type: ignore[no-untyped-call]
                break
            done.append(_split_gaps(self._pending.popleft(), self._end_before))
            self._end_before = end
        return done


def _split_gaps(step: _CudaStep, end_before: torch.cuda.Event) -> StepTimes:
    step_s = _seconds(end_before, step.computed[-1][1])
    gpu_s = min(sum(_seconds(begin, end) for begin, end in step.computed), step_s)
    gap_s = step_s - gpu_s
    h2d_s = min(sum(_seconds(begin, end) for begin, end in step.copied), gap_s)
    data_s = min(step.waited_s, gap_s - h2d_s)
    return StepTimes(step_s, data_s, h2d_s, gpu_s)


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(begin.elapsed_time(end)) / 1000


@contextmanager
def _between_events(events: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> Iterator[None]:
    begin = _recorded()
    try:
        yield
    finally:
        events.append((begin, _recorded()))
