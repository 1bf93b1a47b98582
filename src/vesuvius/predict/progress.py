"""Progress of a long computation, its stop requests, and the threads and memory that torch computes with."""

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from vesuvius.training.stop import StoppedError, StopRequest, run_unless_stopped

OnProgress = Callable[[str, int, int], None]
"""Called with the unit ("sampling steps"), the number done, and the total."""
T = TypeVar("T")


@dataclass
class ProgressReporter:
    """Reports progress, and raises VesuviusError once a stop is requested."""

    stop: StopRequest | None = None
    on_progress: OnProgress = lambda what, done, total: None
    resumable: bool = False  # the same command resumes
    name: str = "sampling"
    _progress: str = "before the first step"

    def check(self) -> None:
        """Raise VesuviusError, with the exit code of the signal, if a stop is requested."""
        if self.stop is not None and self.stop.is_requested():
            remedy = "run the same command again to resume" if self.resumable else "no samples were kept"
            raise self.stop.as_error(f"{self.name} stopped {self._progress}; {remedy}")

    @contextmanager
    def unless_stopped(self, context: AbstractContextManager[T]) -> Iterator[T]:
        """Enter a context that may take long, on a thread if there may be a stop.  Raises as `check`; notes Ctrl-C."""
        with ExitStack() as held:
            try:
                value = (
                    held.enter_context(context)
                    if self.stop is None
                    else run_unless_stopped(lambda: held.enter_context(context), self.stop.is_requested)
                )
            except StoppedError:
                self.check()
                raise
            try:
                yield value
            except KeyboardInterrupt as error:
                error.add_note(f"{self.name} stopped {self._progress}; run the same command again to resume")
                raise

    def report(self, what: str, done: int, total: int) -> None:
        self._progress = f"after {done} of {total} {what}"
        self.on_progress(what, done, total)

    def track(self, what: str, items: Iterable[T], total: int) -> Iterator[T]:
        """Yield the items and report each when it is done; `total` is their number."""
        for done, item in enumerate(items, start=1):
            self.check()
            yield item
            self.report(what, done, total)


_counting, _threads = threading.Lock(), list[int]()  # of torch, before each `one_thread` that has not ended


@contextmanager
def one_thread() -> Iterator[None]:
    """Context in which torch computes on one thread, so in the same order of summation on every machine.

    New threads compute on as many as the last call of `set_num_threads` said: of several contexts at once, the last one
    to end restores what was before the first.
    """
    with _counting:
        threads = torch.get_num_threads()
        before = max([threads, *_threads])
        _threads.append(before)
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _counting:
            _threads.remove(before)
            torch.set_num_threads(before)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


@contextmanager
def kept_heap() -> Iterator[None]:
    """Context in which malloc keeps freed memory for later arrays: fresh pages for each took a fifth of the CPU time.

    Afterwards it has the thresholds that it reaches by itself once large arrays were freed.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, 2**30)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    except (OSError, AttributeError):  # another C library
        yield
        return
    try:
        yield
    finally:
        libc.mallopt(_MMAP_THRESHOLD, 2**25)
        libc.mallopt(_TRIM_THRESHOLD, 2**26)
        libc.malloc_trim(0)
