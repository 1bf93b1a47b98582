"""One session at a time in a directory, and its `ledger.jsonl`: what was asked for, then a line for each result."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Self, TypeVar

from vesuvius import __version__
from vesuvius.config.describe import flatten
from vesuvius.errors import ConfigError, storage_errors
from vesuvius.runlog.files import take_lock, write_whole
from vesuvius.runlog.logfile import silence_lost_terminal
from vesuvius.runlog.records import JsonLines, from_plain, read_records
from vesuvius.runlog.redact import redacted
from vesuvius.training.stop import restore_handlers, stop_signals

log = logging.getLogger(__name__)

T = TypeVar("T")  # a dataclass
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


class Ledger(Generic[T]):
    """The results of a tune or a bench, on disk: a new ledger, or an earlier one with `read`.

    A new one is appended to what an earlier one has left in its file.

    Args:
        what: 'tune' or 'bench'.
        asked: what was asked for, as plain data.

    Attributes:
        results: all so far, in order.
        session: how many sessions have added results to it, with this one.
    """

    def __init__(self, path: Path, what: str, asked: Mapping[str, Any]) -> None:
        self.what, self.asked = what, asked
        self.results: list[T] = []
        self.session = 1
        self._path = path
        self._file: JsonLines | None = None

    @classmethod
    def read(cls, path: Path, what: str, kind: type[T]) -> Self:
        """Continue a ledger on disk, whose results are of one dataclass.

        Raises ConfigError: it is missing, or not of this version.
        """
        try:
            records = read_records(path)
            begins = max(place for place, record in enumerate(records) if record["kind"] == what)
            ledger = cls(path, what, records[begins]["asked"])
            found = [record for record in records[begins:] if record["kind"] == "result"]
            ledger.results = [from_plain(kind, record["result"]) for record in found]
            ledger.session = 1 + max((record["session"] for record in found), default=0)
        except OSError as error:
            raise ConfigError(f"there is no {what} to continue: {error}; drop --resume to start one") from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            why = f"{type(error).__name__} {error}"
            raise ConfigError(
                f"{path} is not a ledger of this version of vesuvius: {why}; drop --resume to start over"
            ) from error
        return ledger

    def check_same(self, asked: Mapping[str, Any]) -> None:
        """Raise ConfigError if any of `asked` differs from what this ledger was begun with."""
        was, now = flatten({key: self.asked.get(key) for key in asked}), flatten(asked)
        for key in sorted(was.keys() | now.keys()):
            if was.get(key) != now.get(key):
                raise ConfigError(
                    f"this {self.what} was begun with {key} {was.get(key)!r}, not {now.get(key)!r}; repeat what it was "
                    "begun with, or drop --resume to start over"
                )

    def begin(self) -> None:
        """Write what was asked for.  Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._write(self.what, version=__version__, asked=self.asked)

    def add(self, result: T) -> None:
        """Append a result.  Raises OSError."""
        self.results.append(result)
        self._write("result", session=self.session, result=asdict(result))  # type: ignore[call-overload]

    def _write(self, kind: str, **figures: Any) -> None:
        self._file = self._file or JsonLines(self._path)
        self._file.write(kind, **figures)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def write_figures(path: Path, figures: Mapping[str, Any]) -> None:
    """Write all figures of an experiment as JSON, whole or not at all, without secrets.  Raises OSError."""
    write_whole(path, (json.dumps(redacted(figures), indent=1, allow_nan=False) + "\n").encode())
