"""Daemon threads, calls with a timeout, and the stacks of all threads."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from types import FrameType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def on_thread(function: Callable[..., T], *arguments: Any, name: str) -> Future[T]:
    """Call a function on a daemon thread, which the interpreter does not wait for at exit, unlike an executor's.

    Returns:
        A future for its result or any error it raises; an error is lost if nobody reads the future.

    Raises:
        RuntimeError: no thread can be started.
    """
    future: Future[T] = Future()
    threading.Thread(target=_run, args=(future, function, arguments), name=name, daemon=True).start()
    return future


def _run(future: Future[T], function: Callable[..., T], arguments: tuple[Any, ...]) -> None:
    try:
        future.set_result(function(*arguments))
    except BaseException as error:
        future.set_exception(error)
        del future  # breaks the cycle future -> error -> traceback -> this frame


def thread_stacks() -> Iterator[str]:
    """The stacks of all threads, in the format of faulthandler, but with names and without its limit of 100 threads.

    Opens no source files, because the disk may be what hangs.  Python threads keep running, so a stack may be
    inconsistent.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for thread, top in sys._current_frames().items():
        yield f"Thread 0x{thread:x} {names.get(thread, 'without a name')} (most recent call first):\n"
        frame: FrameType | None = top
        while frame is not None:
            yield f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_qualname}\n'
            frame = frame.f_back
        yield "\n"


class BoundedCall(Generic[T]):
    """A call with a timeout, for functions that may hang, such as those of a driver.  For a single caller.

    Args:
        function: takes no arguments.
        wait_s: timeout of a call.
    """

    def __init__(self, function: Callable[[], T], wait_s: float) -> None:
        self._function = function
        self._wait_s = wait_s
        self._call: Future[T] | None = None
        self._late = False

    @property
    def is_running(self) -> bool:
        """Whether a call has started and not yet returned."""
        return self._call is not None and not self._call.done()

    def __call__(self) -> T | None:
        """Return the function's result; None after the timeout, or if no thread can be started.  Raises its errors.

        A late result is returned by the next call; until then the function is not called again.
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
            del call  # breaks the cycle call -> error -> this frame
