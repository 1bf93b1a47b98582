"""Writes on a thread of their own, in order: a disk that hangs holds up nobody else."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

_WAITING = 1000


class DelayedWrites:
    """Calls what it is given, later.

    Args:
        name: of the thread.
        on_error: called in place of an exception, which ends nothing.
    """

    def __init__(self, name: str, on_error: Callable[[], None]) -> None:
        self._on_error = on_error
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def later(self, call: Callable[[], None]) -> bool:
        """Any thread may call.  Returns whether it was taken: where 1000 calls wait, the next are lost."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            return False
        return True

    def close(self, timeout_s: float) -> bool:
        """Finish what waits; returns whether that was done in time."""
        with suppress(queue.Full):
            self._calls.put_nowait(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:
                self._on_error()
