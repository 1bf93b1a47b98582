"""Requests to end a run before its last step: signals, the time limit, the memory guard.

The current step is always finished.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from types import FrameType
from typing import TypeVar

from vesuvius.errors import EXIT_INTERRUPTED, EXIT_STOPPED, VesuviusError
from vesuvius.runlog.logfile import silence_lost_terminal
from vesuvius.threads import on_thread

log = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S = 0.1


class StoppedError(Exception):
    """A stop was requested, and the work in progress is dropped."""


class StopRequest:
    """Turns SIGTERM, SIGHUP, Ctrl-C and a time limit into a request that the loop checks after each step.

    A second signal ends the process at once; the last checkpoint stays intact.  SIGHUP is not counted: when a terminal
    closes, the kernel, the shell and systemd send it several times, along with SIGTERM.  A context manager, which
    restores the signal handlers.

    `ending` says in the log what a command does that ends at once; a second signal then does nothing.
    """

    def __init__(self, max_hours: float | None, ending: str = "") -> None:
        self._deadline = None if max_hours is None else time.monotonic() + 3600 * max_hours
        self._max_hours, self._ending = max_hours, ending
        self.exit_code: int | None = None
        self.reason: str | None = None
        self._signalled = self._hung_up = False
        self._since_s: float | None = None
        self._before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        if self._before[signal.SIGHUP] is signal.SIG_IGN:  # `nohup`
            del self._before[signal.SIGHUP]

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # not in a Ray Train worker
            for number in self._before:
                signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                ignored = self._hung_up and number == signal.SIGHUP  # it is sent several times
                signal.signal(number, signal.SIG_IGN if ignored else handler)

    def time_left_s(self) -> float | None:
        """Seconds until the time limit; None without one."""
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
        self._since_s = self._since_s or time.monotonic()
        return time.monotonic() - self._since_s

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
        name, hangup = signal.Signals(number).name, number == signal.SIGHUP
        if hangup:
            self._hung_up = True
            silence_lost_terminal()
        elif self._signalled and not self._ending:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._signalled = self._signalled or not hangup
        if self.exit_code is None:
            self.exit_code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_STOPPED
            self.reason = name
        elif hangup:
            return
        hint = "" if hangup else "; send the signal again to exit now"
        log.info("%s: %s", name, self._ending or f"stopping after the current step{hint}")


def run_unless_stopped(work: Callable[[], T], stopping: Callable[[], bool]) -> T:
    """Return or raise what `work` does, unless a stop is requested first.

    Runs on its own thread, because Python handles signals only in the main thread, and not while it reads from an
    unresponsive store.  After a stop the thread is abandoned; `commands/cli.py: end_soon` does not wait for it.

    Raises StoppedError: `stopping()` became true first.
    """
    done = on_thread(work, name="before-the-run")
    while not stopping():
        if wait([done], timeout=_POLL_S).done:
            return done.result()
    raise StoppedError
