"""Reading the small files of /proc and /sys, which may vanish at any moment.

/proc is where psutil reads it, `psutil.PROCFS_PATH`.
"""

from __future__ import annotations

from pathlib import Path

SYSFS_PATH = Path("/sys")


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
