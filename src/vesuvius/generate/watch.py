"""Progress of a long command, and its early end on a signal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from vesuvius.errors import GpuMemoryError, VesuviusError
from vesuvius.training.stop import StopRequest

OnProgress = Callable[[str, int, int], None]
"""Called with what is counted ("sampling steps"), how many are done, and how many there are in all."""
T = TypeVar("T")


class SamplingStoppedError(VesuviusError):
    """A signal came before all was drawn and written."""

    def __init__(self, exit_code: int, name: str, progress: str, resumable: bool) -> None:
        left = "what is done is kept" if resumable else "nothing of them is kept"
        super().__init__(
            f"{name} stopped sampling {progress}; {left}: run the same command again"
            + (" to continue" if resumable else "")
        )
        self.exit_code = exit_code


@dataclass
class Watch:
    """Reports progress, and raises SamplingStoppedError once a stop is wanted."""

    stop: StopRequest | None = None
    on_progress: OnProgress = lambda what, done, total: None
    resumable: bool = False  # the same command continues from what is done
    _progress: str = "before the first step"

    def check(self) -> None:
        """Raises SamplingStoppedError."""
        if self.stop is not None and (asked := self.stop.asked()):
            raise SamplingStoppedError(*asked, self._progress, self.resumable)

    def tell(self, what: str, done: int, total: int) -> None:
        """Report progress."""
        self._progress = f"after {done} of {total} {what}"
        self.on_progress(what, done, total)

    def over(self, what: str, items: Iterable[T], total: int) -> Iterator[T]:
        """Yield so many items, and report each one when it is done."""
        for number, item in enumerate(items):
            self.check()
            yield item
            self.tell(what, number + 1, total)


@contextmanager
def gpu_memory(batch_size: int) -> Iterator[None]:
    """Turns torch's out-of-memory error into one with a remedy."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise GpuMemoryError(
            f"The GPU ran out of memory with --batch-size {batch_size} ({error}); lower --batch-size"
        ) from error
