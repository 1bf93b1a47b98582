"""How many bytes a directory takes."""

from __future__ import annotations

from pathlib import Path


def directory_bytes(path: Path) -> int:
    """Bytes of all files in it and below; links are not followed, and what vanishes meanwhile is not counted."""
    total = 0
    try:
        entries = list(path.iterdir())
    except OSError:
        return 0
    for entry in entries:
        try:
            found = entry.lstat()
        except OSError:
            continue
        total += directory_bytes(entry) if entry.is_dir() and not entry.is_symlink() else found.st_size
    return total
