"""How many bytes a directory takes, and how many are free."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path


def directory_bytes(path: Path) -> int:
    """Bytes of all files in it and below; links are not followed, and what vanishes meanwhile is not counted."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest one above it, where something is."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def free_disk_bytes(path: Path) -> int:
    """Free bytes of the disk that a path lies on, or will.  Raises OSError."""
    return shutil.disk_usage(nearest_existing(path)).free
