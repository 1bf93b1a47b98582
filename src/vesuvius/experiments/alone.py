"""One session at a time in a directory, which signals end."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from vesuvius.errors import ConfigError, storage_errors
from vesuvius.runlog.files import take_lock
from vesuvius.runlog.logfile import silence_lost_terminal
from vesuvius.training.stop import restore_handlers, stop_signals

log = logging.getLogger(__name__)

_OF_OTHERS = (ConnectionError, TimeoutError, BlockingIOError)  # of the network, or of a process that cannot start


@contextmanager
def locked(directory: Path, what: str) -> Iterator[int]:
    """Lock out another session (a tune, a bench) and the trainer of a killed one; yields the lock's file descriptor.

    Raises:
        ConfigError: another one is active.
        StorageError: a file cannot be written, here or within the context.
    """
    remedy = "free some space and continue with --resume, or set VESUVIUS_RUNS"
    with storage_errors("the run directory must be writable", remedy, f"in {directory}", but=_OF_OTHERS):
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not take_lock(descriptor, directory / ".lock"):
                raise ConfigError(
                    f"only one {what} per run may be active; got {directory}, where another {what}, or the trainer of "
                    "one that was killed, is active; wait for it or stop it"
                )
            yield descriptor
        finally:
            os.close(descriptor)


@contextmanager
def signals_to(stop: Callable[[], None]) -> Iterator[list[signal.Signals]]:
    """Let SIGINT, SIGTERM and SIGHUP call `stop`; yields the list of received signals."""
    came: list[signal.Signals] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        came.append(signal.Signals(number))
        silence_lost_terminal()
        stop()
        log.info("%s: ending the trainer", came[-1].name)

    before = {number: signal.signal(number, on_signal) for number in stop_signals()}
    try:
        yield came
    finally:
        restore_handlers(before, heard=signal.SIGHUP in came)
