"""Reading the small files of /proc and /sys, which may vanish at any moment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

_psutil_lock = threading.RLock()


@dataclass(frozen=True)
class Roots:
    """Directories that stand for `/proc` and `/sys`."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")

    @contextmanager
    def for_psutil(self) -> Iterator[None]:
        """psutil reads `proc` while the context lasts.  Its path is global, so one thread at a time."""
        with _psutil_lock:
            before, psutil.PROCFS_PATH = psutil.PROCFS_PATH, str(self.proc)
            try:
                yield
            finally:
                psutil.PROCFS_PATH = before


def read_text(path: Path | str) -> str | None:
    """The whole of a file; None where it is not there, is forbidden, or its process has just ended."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return None


def read_counts(path: Path | str) -> dict[str, int]:
    """The figures of a file with a name and a whole number on each line, such as `memory.stat`; others are left out."""
    counts = {}
    for line in (read_text(path) or "").splitlines():
        name, _, figure = line.partition(" ")
        if figure.strip().isdigit():
            counts[name] = int(figure)
    return counts
