"""Logs the progress of long operations, a line every few seconds."""

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Self, TypeVar

from vesuvius.runlog.units import format_duration, format_size

log = logging.getLogger(__name__)

T = TypeVar("T")

_EVERY_S = 5.0
_LAST_LINE_S = 1.0  # longest wait for a line that is being written


class Progress:
    """Logs the progress of `what` ("reading the shards of v.zarr") every few seconds; short operations log nothing."""

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what, self._total = what, total
        self._unit = self._more = ""
        self._count = self._first = self._bytes = 0
        self._started = self._counted_from = time.monotonic()
        self._has_logged = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._log_regularly, name="progress", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, num_bytes: int = 0) -> None:
        self._count += 1
        self._bytes += num_bytes

    def update(self, unit: str, done: int, total: int, more: str = "") -> None:
        """Set unit ("chunks"), numbers and further text; another unit restarts the estimate of the time left."""
        if unit != self._unit:
            self._counted_from, self._first = time.monotonic(), done
        self._unit, self._count, self._total, self._more = unit, done, total, more

    def end(self) -> None:
        """Close it, and log the total if progress was logged."""
        self.close()
        self._thread.join(_LAST_LINE_S)  # its last line comes before this one
        if self._has_logged:
            took = format_duration(time.monotonic() - self._started)
            log.info("%s: done, %d%s in %s", self._what, self._count, self._size, took)

    def close(self) -> None:
        self._closed.set()

    def _log_regularly(self) -> None:
        logged = None
        while not self._closed.wait(_EVERY_S):
            logged, before = (self._unit, self._count), logged
            if logged == before and self._count == self._total:
                continue  # this phase has ended, and the next one has not counted anything yet
            self._has_logged = True
            text, done = f"{self._what}: {self._count}", self._count - self._first
            if self._total is None and not self._count:
                text = f"{self._what} for {format_duration(time.monotonic() - self._started)}"
            text += f" of {self._total}" if self._total is not None else ""
            text += (self._unit and f" {self._unit}") + (self._more and f", {self._more}") + self._size
            if self._total is not None and done > 0 and self._count < self._total:
                seconds = (time.monotonic() - self._counted_from) * (self._total - self._count) / done
                text += f", about {format_duration(round(seconds))} left"
            log.info("%s", text)

    @property
    def _size(self) -> str:
        return f", {format_size(self._bytes)}" if self._bytes else ""


def with_progress(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    with Progress(what, total) as progress:
        for item in items:
            yield item
            progress.add()
        progress.end()
