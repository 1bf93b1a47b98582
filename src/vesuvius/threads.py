"""Work on a thread of its own, and what all threads of this process do."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from types import FrameType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def on_thread(function: Callable[..., T], *arguments: Any, name: str) -> Future[T]:
    """Call a function on a daemon thread, for which the interpreter does not wait, as it would for an executor's.

    Returns:
        What it returns or raises, of whatever kind: an error of which nobody asks the future is lost.

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
        del future  # it holds the error, whose traceback holds this frame


def thread_stacks() -> Iterator[str]:
    """The stacks of all threads of this process, as faulthandler writes them, but with names, and of more than 100.

    Opens no file, as traceback does for the lines of source: the disk may be what hangs.  Threads that run Python code
    go on meanwhile, so their stacks may mix two moments.
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
    """A call that may never return, such as one to a driver that hangs, waited for only so long.  For one caller only.

    Args:
        function: takes no arguments.
        wait_s: how long a call is waited for.
    """

    def __init__(self, function: Callable[[], T], wait_s: float) -> None:
        self._function = function
        self._wait_s = wait_s
        self._call: Future[T] | None = None
        self._late = False

    @property
    def is_running(self) -> bool:
        """Whether the function has been called and has not returned yet."""
        return self._call is not None and not self._call.done()

    def __call__(self) -> T | None:
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
