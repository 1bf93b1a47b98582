"""Reads small files of /proc (`psutil.PROCFS_PATH`) and /sys, which may vanish at any time."""

from __future__ import annotations

from pathlib import Path

SYSFS_PATH = Path("/sys")


def read_text(path: Path | str) -> str | None:
    """Read a file; None if it does not exist or is not readable."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return None


def read_counts(path: Path | str) -> dict[str, int]:
    """Read a file with a name and an integer per line, such as `memory.stat`; other lines are ignored."""
    counts = {}
    for line in (read_text(path) or "").splitlines():
        name, _, figure = line.partition(" ")
        if figure.strip().isdigit():
            counts[name] = int(figure)
    return counts
