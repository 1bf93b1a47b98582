"""How far something is that may take minutes: a line in the log every few seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from vesuvius.runlog.units import format_duration, size_text

log = logging.getLogger(__name__)

T = TypeVar("T")

_EVERY_S = 5.0


class Progress:
    """Counts items, and says nothing of what is done within a few seconds.

    Args:
        what: is done, e.g. "reading the shards of v.zarr".
        total: items in all, where it is known.
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what, self._total = what, total
        self._count = self._bytes = 0
        self._started = self._said = time.monotonic()

    def add(self, num_bytes: int = 0) -> None:
        """Count an item, with the bytes that it has brought."""
        self._count += 1
        self._bytes += num_bytes
        now = time.monotonic()
        if now - self._said >= _EVERY_S and self._count != self._total:
            self._said = now
            total, left = "", ""
            if self._total is not None:
                seconds = (now - self._started) * (self._total - self._count) / self._count
                total, left = f" of {self._total}", f", about {format_duration(seconds)} left"
            log.info("%s: %d%s%s%s", self._what, self._count, total, self._size, left)

    def end(self) -> None:
        """Say what it came to, if anything was said before."""
        if self._said != self._started:
            took = format_duration(time.monotonic() - self._started)
            log.info("%s: done, %d%s in %s", self._what, self._count, self._size, took)

    @property
    def _size(self) -> str:
        return f", {size_text(self._bytes)}" if self._bytes else ""


def with_progress(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """The items, counted by a `Progress`."""
    progress = Progress(what, total)
    for item in items:
        yield item
        progress.add()
    progress.end()
