"""Writes on a thread of their own, in order: a disk or server that hangs holds up nobody else."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

log = logging.getLogger(__name__)

_WAITING = 1000


class DelayedWrites:
    """Calls what it is given, later.

    Args:
        name: of the thread.
        on_error: called in place of an exception, which ends nothing.
    """

    def __init__(self, name: str, on_error: Callable[[], None]) -> None:
        self._name, self._on_error = name, on_error
        self._lost = 0  # a message about it may miss one of two threads' at once
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def later(self, call: Callable[[], object]) -> bool:
        """Any thread may call.  Returns whether it was taken: where 1000 calls wait the next are lost, and counted."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._lost += 1
            return False
        return True

    def close(self, timeout_s: float) -> bool:
        """Finish what waits; returns whether that was done in time."""
        deadline = time.monotonic() + timeout_s
        with suppress(queue.Full):
            self._calls.put(None, timeout=timeout_s)
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        self._say_lost()
        return not self._thread.is_alive()

    def _say_lost(self) -> None:
        lost, self._lost = self._lost, 0
        if lost:
            log.error(
                "%s: at most %d writes may wait for a disk or server that does not answer; %d more are "
                "lost: records, or lines of this log",
                *(self._name, _WAITING, lost),
            )

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._say_lost()
            try:
                call()
            except Exception:
                self._on_error()
