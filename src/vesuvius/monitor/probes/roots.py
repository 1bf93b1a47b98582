"""Where the system is read from: the real `/proc` and `/sys`, or a recorded tree in a test."""

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
            psutil.PROCFS_PATH = str(self.proc)
            yield
