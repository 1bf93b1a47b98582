"""How far something is that may take minutes: a line in the log every few seconds."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from vesuvius.runlog.units import format_duration, size_text

log = logging.getLogger(__name__)

T = TypeVar("T")

_EVERY_S = 5.0


class Progress:
    """Counts items, and says every few seconds how many; nothing of what is done sooner.  To be closed.

    Args:
        what: is done, e.g. "reading the shards of v.zarr".
        total: items in all, where it is known.
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what, self._total = what, total
        self._count = self._bytes = 0
        self._started = time.monotonic()
        self._has_said = False
        self._closed = threading.Event()
        threading.Thread(target=self._say_at_times, name="progress", daemon=True).start()

    def add(self, num_bytes: int = 0) -> None:
        """Count an item, with the bytes that it has brought."""
        self._count += 1
        self._bytes += num_bytes

    def end(self) -> None:
        """Close it, and say what it came to, if anything was said before."""
        self.close()
        if self._has_said:
            took = format_duration(time.monotonic() - self._started)
            log.info("%s: done, %d%s in %s", self._what, self._count, self._size, took)

    def close(self) -> None:
        """Say no more."""
        self._closed.set()

    def _say_at_times(self) -> None:
        while not self._closed.wait(_EVERY_S):
            self._has_said = True
            count, total, left = self._count, "", ""
            if self._total is not None:
                total = f" of {self._total}"
                if count:
                    seconds = (time.monotonic() - self._started) * (self._total - count) / count
                    left = f", about {format_duration(seconds)} left"
            log.info("%s: %d%s%s%s", self._what, count, total, self._size, left)

    @property
    def _size(self) -> str:
        return f", {size_text(self._bytes)}" if self._bytes else ""


def with_progress(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The items, counted by a `Progress`."""
    progress = Progress(what, total)
    try:
        for item in items:
            yield item
            progress.add()
        progress.end()
    finally:
        progress.close()
