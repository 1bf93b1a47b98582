"""Daemon threads and their end: pools, calls with a timeout, forks; and the stacks of all threads."""

import itertools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Generic, TypeVar
from weakref import WeakSet

T = TypeVar("T")

_EXIT_S = 2.0


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


def started_ahead(items: Iterable[T], count: int) -> Iterator[T]:
    """Yield each item, such as a call that an iterable starts, once the next `count` have been taken too."""
    taken = deque[T]()
    for item in items:
        taken.append(item)
        if len(taken) > count:
            yield taken.popleft()
    yield from taken


def _run(future: Future[T], function: Callable[..., T], arguments: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(*arguments))
    except BaseException as error:
        future.set_exception(error)
        del future  # breaks the cycle future -> error -> traceback -> this frame


_renewed = WeakSet[Any]()
os.register_at_fork(after_in_child=lambda: [owner.renew() for owner in list(_renewed)])


def renew_after_fork(owner: Any) -> None:
    """Call `owner.renew`, which makes its locks and threads, now and in each forked child, where they are missing."""
    owner.renew()
    _renewed.add(owner)


class Pool:
    """Up to `threads` daemon threads that run calls; started as needed, also in a forked child.

    Takes no lock, as the garbage collector may close a pool on any thread, even on one inside its `submit`, where an
    executor would wait for itself.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._size, self._name = threads, name
        self._closed = False
        _end_pools_at_exit()
        renew_after_fork(self)

    def renew(self) -> None:
        self._calls: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._idle: SimpleQueue[None] = SimpleQueue()  # an entry for each thread that waits for a call
        self._unstarted: SimpleQueue[None] = SimpleQueue()  # an entry for each thread that may yet start
        for _ in range(self._size):
            self._unstarted.put(None)
        self.threads: list[threading.Thread] = []

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Return the call's future, cancelled if the pool is closed.  Raises RuntimeError: no thread can start."""
        future: Future[T] = Future()
        self._calls.put((future, function, arguments))
        try:
            self._idle.get_nowait()
        except Empty:
            with suppress(Empty):
                self._unstarted.get_nowait()
                thread = threading.Thread(target=_serve, args=(self._calls, self._idle), name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    self._unstarted.put(None)
                    future.cancel()
                    raise
                self.threads.append(thread)
        if self._closed:  # meanwhile
            self.close()
        return future

    def close(self) -> None:
        """Cancel the calls that have not begun, and let the threads end; waits for nothing."""
        self._closed = True
        with suppress(Empty):
            while True:
                if (call := self._calls.get_nowait()) is not None and call[0].cancel():
                    call[0].set_running_or_notify_cancel()  # or `wait` would not count it as done
        self.__del__()

    def __del__(self) -> None:
        for _ in self.threads:
            self._calls.put(None)


def _serve(calls: SimpleQueue[tuple[Any, ...] | None], idle: SimpleQueue[None]) -> None:
    while (call := calls.get()) is not None:
        _run(*call)
        del call  # while this thread waits for the next one
        idle.put(None)


def before_exit(end: Callable[[], object]) -> None:
    """Call `end` when the interpreter exits, before it waits for threads (`atexit` runs afterwards)."""
    with suppress(RuntimeError):  # it is already shutting down
        threading._register_atexit(end)  # type: ignore[attr-defined]


@cache
def _end_pools_at_exit() -> None:
    """End the threads of all pools at exit: one that returns from native code later could abort the process."""

    def end() -> None:
        pools, deadline = [pool for pool in list(_renewed) if isinstance(pool, Pool)], time.monotonic() + _EXIT_S
        for pool in pools:
            pool.close()
        for thread in itertools.chain.from_iterable(pool.threads for pool in pools):
            thread.join(max(deadline - time.monotonic(), 0))

    before_exit(end)


@cache
def _ender() -> Pool:
    return Pool(1, "end")


def end_later(end: Callable[[], object]) -> Future[object]:
    """Call `end` soon on a thread of its own, which the first call starts: for finalizers, which must take no lock."""
    return _ender().submit(end)


def thread_stacks() -> Iterator[str]:
    """The stacks of all threads as faulthandler writes them, with names and without its limit of 100 threads.

    Opens no source files: the disk may be what hangs.  Threads keep running, so a stack may be inconsistent.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for thread, top in sys._current_frames().items():
        yield f"Thread 0x{thread:x} {names.get(thread, 'without a name')} (most recent call first):\n"
        frame: FrameType | None = top
        while frame is not None:
            yield f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_qualname}\n'
            frame = frame.f_back
        yield "\n"


@dataclass(eq=False)
class BoundedCall(Generic[T]):
    """A call with a timeout, for functions that may hang, such as those of a driver.  For a single caller."""

    function: Callable[[], T]
    wait_s: float  # timeout of a call
    _call: Future[T] | None = field(default=None, init=False)
    _late: bool = field(default=False, init=False)

    @property
    def is_running(self) -> bool:
        return self._call is not None and not self._call.done()

    def __call__(self) -> T | None:
        """Return the function's result; None after the timeout, or if no thread can be started.  Raises its errors.

        A late result is returned by the next call; until then the function is not called again.
        """
        if self._call is None:
            try:
                self._call = on_thread(self.function, name="bounded-call")
            except RuntimeError:  # too many threads, or no memory for one
                return None
        self._late = bool(wait([self._call], 0.0 if self._late else self.wait_s).not_done)
        if self._late:
            return None
        call, self._call = self._call, None
        try:
            return call.result()
        finally:
            del call  # breaks the cycle call -> error -> this frame
