"""Why a run ends before its last step: a signal, its time is up, or memory is short.

The step in hand is always finished.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from types import FrameType
from typing import TypeVar

from vesuvius.errors import EXIT_INTERRUPTED, EXIT_STOPPED

log = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S = 0.1


class StoppedError(Exception):
    """A stop was wanted before there was anything to save."""


class StopRequest:
    """Turns SIGTERM, Ctrl-C and a time limit into a wish that the loop looks at after each step.

    A second signal ends the process at once; the last checkpoint stays whole.  A context manager: puts the old signal
    handlers back.
    """

    def __init__(self, max_hours: float | None) -> None:
        self._deadline = None if max_hours is None else time.monotonic() + 3600 * max_hours
        self._max_hours = max_hours
        self.exit_code: int | None = None
        self._signalled = False
        self._before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def __enter__(self) -> StopRequest:
        for number in self._before:
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wanted(self) -> bool:
        """Whether the run should save and end now; `exit_code` then says how."""
        if self.exit_code is None and self._deadline is not None and time.monotonic() >= self._deadline:
            log.info("training.max_hours=%g are over", self._max_hours)
            self.exit_code = EXIT_STOPPED
        return self.exit_code is not None

    def ask(self, exit_code: int, reason: str) -> None:
        """Wish for the end from within; any thread may.  Whoever wished first says how."""
        if self.exit_code is None:
            self.exit_code = exit_code
            log.error("%s: stopping after the step in hand", reason)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signalled:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._signalled = True
        if self.exit_code is None:
            self.exit_code = EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_STOPPED
        log.info("%s: stopping after the step in hand; a second one ends at once", signal.Signals(number).name)


def unless_stopped(work: Callable[[], T], stopping: Callable[[], bool]) -> T:
    """What `work` returns or raises, for as long as nobody wants to stop.

    It runs on a thread of its own: Python handles signals in the main thread, and not while that reads from a store
    which does not answer.  After a stop the thread is left to its read; `door.end_soon` does not wait for it.

    Raises:
        StoppedError: `stopping()` came true first.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="before-the-run").start()
    while not stopping():
        if wait([done], timeout=_POLL_S).done:
            return done.result()
    raise StoppedError
