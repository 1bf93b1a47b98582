"""A call that may never return, such as one to a driver that hangs, waited for only so long."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from vesuvius.threads import on_thread

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
        self._call: Future[_T] | None = None
        self._late = False

    @property
    def is_running(self) -> bool:
        """Whether the function has been called and has not returned yet."""
        return self._call is not None and not self._call.done()

    def __call__(self) -> _T | None:
        """Return what the function returns; None while it takes longer: it is not called again before it has ended.

        What comes late is returned by the next call.  None, too, where no thread can be started.  Raises what the
        function raises.
        """
        if self._call is None:
            try:
                self._call = on_thread(self._function, name="bounded-call")
            except RuntimeError:  # too many threads, or no memory for one
                return None
        self._late = bool(wait([self._call], 0.0 if self._late else self._wait_s).not_done)
        if self._late:
            return None
        call, self._call = self._call, None
        try:
            return call.result()
        finally:
            del call  # an error that it holds refers to this frame
