"""Where run directories are, and which one a user means."""

from __future__ import annotations

import os
from pathlib import Path

from vesuvius.errors import NoRunError

_FILES = ("session.json", "metrics.jsonl", "config.resolved.yaml")


def runs_root() -> Path:
    """The folder of run directories: `VESUVIUS_RUNS` of the environment, or `runs` where the command runs."""
    return Path(os.path.expanduser(os.environ.get("VESUVIUS_RUNS") or "runs"))


def is_run(directory: Path) -> bool:
    """Whether a directory is that of a run; what may not be read, or has no possible name, is none."""
    try:
        return any((directory / name).is_file() for name in _FILES)
    except OSError:
        return False


def find_run(text: str) -> Path:
    """The run directory that a user means.  Raises NoRunError: there is none."""
    for directory in (Path(text), runs_root() / text):
        if is_run(directory):
            return directory.resolve()
    names = sorted(path.name for path in runs_root().glob("*") if is_run(path))
    there = f"there are {', '.join(names[:10])}" if names else f"there is none below {runs_root().resolve()}"
    raise NoRunError(f"RUN must be a run directory or a name below runs/; got {text!r}; {there}")
