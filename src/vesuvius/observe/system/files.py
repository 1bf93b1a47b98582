"""Reading the small files of /proc and /sys, which may vanish at any moment."""

from __future__ import annotations

import os
from pathlib import Path


def read_text(path: Path | str) -> str | None:
    """The whole of a file; None where it is not there, is forbidden, or its process has just ended.

    Costs half of what `Path.read_text` does, which counts where dozens of files are read every second.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        # The kernel may hand out less than is asked for, a page of lines at a time: only an empty answer is the end.
        parts = [os.read(descriptor, 65536)]
        while parts[-1]:
            parts.append(os.read(descriptor, 65536))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return b"".join(parts).decode("utf-8", "replace")


def read_counts(path: Path | str) -> dict[str, int]:
    """The figures of a file with a name and a whole number on each line, such as `memory.stat`; others are left out."""
    counts = {}
    for line in (read_text(path) or "").splitlines():
        name, _, figure = line.partition(" ")
        if figure.strip().isdigit():
            counts[name] = int(figure)
    return counts
