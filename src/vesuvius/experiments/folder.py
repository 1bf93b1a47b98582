"""The folder of a tune or a bench: its lock, and its figures as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vesuvius.errors import ConfigError, storage_errors
from vesuvius.runlog.files import take_lock, write_atomically
from vesuvius.runlog.held import LOCK, holding
from vesuvius.runlog.redact import redacted

_OF_OTHERS = (ConnectionError, TimeoutError, BlockingIOError)  # network errors, or a process that cannot start


@contextmanager
def locked(directory: Path, what: str) -> Iterator[int]:
    """Lock the directory against other sessions and the trainers of killed ones; yields the lock's file descriptor.

    Raises ConfigError if another one is active, and StorageError if a file cannot be written here or in the context.
    """
    remedy = "free some space and start again, or set VESUVIUS_RUNS"
    with storage_errors(f"the run directory {directory}", remedy, but=_OF_OTHERS):
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not take_lock(descriptor, directory / LOCK):
                raise ConfigError(
                    f"Another {what} (or the trainer of a killed one) is active in {directory}; wait for it or stop it"
                )
            with holding(directory, descriptor):
                yield descriptor
        finally:
            os.close(descriptor)


def write_figures(path: Path, figures: Mapping[str, Any]) -> None:
    """Write all figures of an experiment as JSON, atomically and without secrets.  Raises OSError."""
    write_atomically(path, (json.dumps(redacted(figures), indent=1, allow_nan=False) + "\n").encode())
