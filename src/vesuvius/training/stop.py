"""Requests to end a run before its last step: signals, the time limit, the memory guard.

The current step is finished, or dropped if it takes long (`StopRequest.is_overdue`).
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from types import FrameType
from typing import Self, TypeVar

from vesuvius.errors import EXIT_INTERRUPTED, EXIT_STOPPED, STOP_SIGNALS, VesuviusError
from vesuvius.runlog.logfile import silence_lost_terminal
from vesuvius.threads import on_thread

log = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S = 0.1
_COUNTED = (signal.SIGTERM, signal.SIGINT)
_FINISH_S = 3.0  # for a step of many micro-batches after a stop


class StoppedError(Exception):
    """A stop was requested, and the work in progress is dropped."""


class StopRequest:
    """Turns signals and a time limit into a request that the loop checks after each step.

    A second SIGTERM or Ctrl-C ends the process at once.  The others (`STOP_SIGNALS`) are not counted: they are sent
    several times, and schedulers send SIGTERM after them.  A context manager, which restores the signal handlers.

    `ending` says in the log what a command does that ends at once; a second signal then does nothing.
    """

    def __init__(self, max_hours: float | None, ending: str = "") -> None:
        self._deadline = None if max_hours is None else time.monotonic() + 3600 * max_hours
        self._max_hours, self._ending = max_hours, ending
        self.exit_code: int | None = None
        self.reason: str | None = None
        self._received = set[int]()
        self._since_s: float | None = None
        # The others stay with a program that handles them, or ignored, as by `nohup`.
        handlers = {number: signal.getsignal(number) for number in (*_COUNTED, *STOP_SIGNALS)}
        self._before = {n: known for n, known in handlers.items() if n in _COUNTED or known is signal.SIG_DFL}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # not in a Ray Train worker
            for number in self._before:
                signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                repeats = number in self._received and number not in _COUNTED
                signal.signal(number, signal.SIG_IGN if repeats else handler)

    def time_left_s(self) -> float | None:
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def is_requested(self) -> bool:
        """Whether the run should save and end now, with `exit_code`."""
        if self.exit_code is None and self._deadline is not None and time.monotonic() >= self._deadline:
            self.request(EXIT_STOPPED, f"training.max_hours={self._max_hours:g} reached")
        return self.exit_code is not None

    def request(self, exit_code: int, reason: str, level: int = logging.INFO) -> None:
        """Request a stop, from any thread or on behalf of another rank.  The first request sets the exit code."""
        if self.exit_code is None:
            self.exit_code, self.reason = exit_code, reason
            log.log(level, "%s: stopping after the current step", reason)

    def requested_for_s(self) -> float:
        """Seconds since a stop was first noticed; 0 without one."""
        if not self.is_requested():
            return 0.0
        self._since_s = time.monotonic() if self._since_s is None else self._since_s
        return time.monotonic() - self._since_s

    def is_overdue(self) -> bool:
        """Whether to drop a step between two micro-batches: a stop was noticed 3 s ago."""
        return self.requested_for_s() >= _FINISH_S

    def raise_if_requested(self) -> None:
        if self.is_requested():
            raise StoppedError

    def pending(self) -> tuple[int, str] | None:
        """Exit code and reason of a requested stop, or None."""
        return (self.exit_code, self.reason or "") if self.is_requested() and self.exit_code is not None else None

    def as_error(self, text: str) -> VesuviusError:
        """Error with the same exit code, for a run that cannot stop as requested."""
        assert self.exit_code is not None
        error = VesuviusError(f"{self.reason}: {text}")
        error.exit_code = self.exit_code
        return error

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name, is_counted, is_first = signal.Signals(number).name, number in _COUNTED, self.exit_code is None
        if number == signal.SIGHUP:
            silence_lost_terminal()
        elif is_counted and not self._received.isdisjoint(_COUNTED) and not self._ending:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._received.add(number)
        if is_first:
            self.exit_code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_STOPPED
            self.reason = name
        if is_first or is_counted:
            hint = "; send the signal again to exit now" if is_counted else ""
            log.info("%s: %s", name, self._ending or f"stopping after the current step{hint}")
        self.requested_for_s()  # from now on


def run_unless_stopped(work: Callable[[], T], stopping: Callable[[], bool]) -> T:
    """Return or raise what `work` does on a thread.  Raises StoppedError: `stopping()` became true first.

    Python handles signals in the main thread, and not while it reads from an unresponsive store.  After a stop the
    thread is abandoned.
    """
    done = on_thread(work, name="before-the-run")
    while not stopping():
        if wait([done], timeout=_POLL_S).done:
            return done.result()
    raise StoppedError
