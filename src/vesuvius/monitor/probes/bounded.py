"""A call that may never return, such as one to a driver that hangs, waited for only so long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class BoundedCall(Generic[_T]):
    """Calls a function on a thread of its own.  For one caller only.

    Args:
        function: takes no arguments.
        wait_s: how long a call is waited for.
    """

    def __init__(self, function: Callable[[], _T], wait_s: float) -> None:
        self._function = function
        self._wait_s = wait_s
        self._results: list[_T] = []
        self._errors: list[Exception] = []
        self._thread: threading.Thread | None = None
        self._began_s = 0.0
        self._late = False

    @property
    def is_running(self) -> bool:
        """Whether the function has been called and has not returned yet."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def silent_s(self) -> float:
        """For how many seconds the function has not returned; 0 where it has, or is not late yet."""
        return time.monotonic() - self._began_s if self._late else 0.0

    def __call__(self) -> _T | None:
        """Return what the function returns; None while it takes longer: it is not called again before it has ended.

        What comes late is returned by the next call.  None, too, where no thread can be started.  Raises what the
        function raises.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="bounded-call", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # too many, or no memory for one
                return None
            self._thread, self._began_s = thread, time.monotonic()
        self._thread.join(0.0 if self._late else self._wait_s)
        self._late = self._thread.is_alive()
        if self._late:
            return None
        self._thread = None
        if self._errors:
            raise self._errors.pop()
        return self._results.pop()

    def _run(self) -> None:
        try:
            self._results.append(self._function())
        except Exception as error:
            self._errors.append(error)
