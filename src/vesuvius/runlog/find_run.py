"""Finds run directories."""

import os
from pathlib import Path

from vesuvius.errors import NoRunError, disk_path

_FILES = ("session.json", "metrics.jsonl", "config.resolved.yaml")


def runs_root() -> Path:
    """Return the folder of run directories, absolute: `VESUVIUS_RUNS`, or `runs` in the working directory."""
    return disk_path(os.environ.get("VESUVIUS_RUNS") or "runs", "VESUVIUS_RUNS=")


def is_run(directory: Path) -> bool:
    try:
        return any((directory / name).is_file() for name in _FILES)
    except OSError:
        return False


def find_run(text: str) -> Path:
    """Return the run directory given by path or name.  Raises NoRunError: there is none."""
    places = Path(text), runs_root() / text
    for directory in filter(is_run, places):
        return directory.resolve()
    for directory in filter(os.path.isdir, places):
        if not os.access(directory, os.R_OK | os.X_OK):
            raise NoRunError(f"cannot read {directory}: permission denied; correct the permissions or run as its owner")
    names = sorted(path.name for path in runs_root().glob("*") if is_run(path))
    known = f"; runs are {', '.join(names[:10])}" if names else ""
    raise NoRunError(f"no run {text!r} in {runs_root()}; name a run directory, or one in runs/{known}")
