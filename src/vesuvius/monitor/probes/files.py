"""Reading the small files of /proc and /sys, which may vanish at any moment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

_turn = threading.Condition()
_turns: list[str] = []  # in use now: where psutil looks, once for each user, behind where it looked before


@dataclass(frozen=True)
class Roots:
    """Directories that stand for `/proc` and `/sys`."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")

    @contextmanager
    def for_psutil(self) -> Iterator[None]:
        """psutil reads `proc` while the context lasts.

        Its path is global, so who needs another one waits.  Who needs the same does not: to read of another process may
        hang, and the guard must go on.
        """
        path = str(self.proc)
        with _turn:
            _turn.wait_for(lambda: not _turns or path == psutil.PROCFS_PATH)
            if not _turns:
                _turns.append(psutil.PROCFS_PATH)
            _turns.append(path)
            psutil.PROCFS_PATH = path
        try:
            yield
        finally:
            with _turn:
                _turns.pop()
                if len(_turns) == 1:
                    psutil.PROCFS_PATH = _turns.pop()
                    _turn.notify_all()


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
