"""The reading log of each reader: the chunk that it decodes, in a small file that outlives the process.

The file begins with a memory-mapped JSON object, so that logging a chunk takes no system call.  On a fatal signal
(SIGABRT, SIGSEGV, ...) Python's faulthandler appends to the file, which distinguishes a crash from a SIGKILL.  A chunk
that crashed two readers is not decoded again.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import mmap
import os
import socket
import threading
import time
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from vesuvius.config import Triple
from vesuvius.errors import one_line
from vesuvius.runlog.records import from_dict
from vesuvius.volumes.store.retry import Outage

log = logging.getLogger(__name__)

_CRASHES_MAX = 2  # per chunk; a single crash may have another cause
_SIZE = 2**14  # of the object, padded with blanks
_FATAL = "Fatal Python error: "


_node = [socket.gethostname()]


def node_name(name: str = "") -> str:
    """Name of this machine, which tells local readers from others; sets it if given: host names may be equal."""
    _node[0] = name or _node[0]
    return _node[0]


@dataclass(frozen=True)
class ReadingLog:
    """State of a reader when it last wrote its log."""

    pid: int
    node: str  # `node_name` of its machine
    actor: str  # id of its Ray actor
    # volume and chunk being decoded; None between two regions
    volume: str | None = None
    chunk: Triple | None = None
    outage: Outage | None = None  # that it waits for
    crash: str | None = None  # fatal signal as faulthandler describes it; None after a SIGKILL
    path: Path = Path()  # the file


class ReadingLogWriter:
    """Writes the reading log of this process into a local folder, and redirects its faulthandler to it.

    Raises OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, actor: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # A pid would not be unique: the first process of every container has pid 1.
        self._file = (folder / f"{time.time_ns()}-{uuid.uuid4().hex}.note").open("w+b", buffering=0)
        self._file.write(b" " * _SIZE)  # allocates the space on disk; a full disk would kill a write to the mapping
        self._page = mmap.mmap(self._file.fileno(), _SIZE)
        self._fields = asdict(ReadingLog(os.getpid(), node_name(), actor))
        del self._fields["path"], self._fields["crash"]
        self._lock = threading.Lock()  # two threads log chunks and outages
        self._write()
        faulthandler.enable(self._file, all_threads=False)

    def chunk(self, volume: str | None, chunk: Triple | None) -> None:
        """Log the chunk that is decoded next; None between two regions, so that a crash is blamed on no chunk."""
        self._write(volume=volume, chunk=chunk)

    def outage(self, outage: Outage | None) -> None:
        """Log a storage outage, or None once it is over.  Any thread may call it."""
        self._write(outage=asdict(outage) if outage else None)

    def _write(self, **changes: Any) -> None:
        with self._lock:
            self._fields |= changes
            self._page[:] = json.dumps(self._fields).encode().ljust(_SIZE)[:_SIZE]


class TrainerReadingMarker:
    """A file that exists while the trainer of a run with readers reads volumes itself.

    A chunk that crashes the trainer would do so at every start, whereas one that crashes readers is replaced.

    Attributes:
        was_interrupted: whether an earlier trainer died in this context.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "trainer-reads"
        self.was_interrupted = self._file.exists()
        if self.was_interrupted:
            self.__exit__()
            log.warning(
                "The last session died while the trainer itself read the volumes, perhaps from a corrupt chunk; this "
                "time the readers read from the start"
            )

    def __enter__(self) -> None:
        with suppress(OSError):  # the readers report it
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch()

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._file.unlink(missing_ok=True)


def open_reading_log(folder: Path, actor: str) -> ReadingLogWriter | None:
    """Open the reading log of this process; None, with a warning, if the folder cannot be written."""
    try:
        return ReadingLogWriter(folder, actor)
    except OSError as error:
        log.warning("Cannot write the reading log in %s: %s; the reader continues without it", folder, one_line(error))
        return None


def read_logs(folder: Path) -> list[ReadingLog]:
    """Return the reading logs in a folder, oldest first, without those being written; none if there is no folder."""
    logs = []
    for path in sorted(folder.glob("*.note")):
        try:
            content = path.read_bytes()
            reading = from_dict(ReadingLog, json.loads(content[:_SIZE]))
        except (OSError, ValueError):
            continue
        _, crashed, reason = content[_SIZE:].decode(errors="replace").partition(_FATAL)
        logs.append(replace(reading, crash=reason.splitlines()[0] if crashed else None, path=path))
    return logs


def crashed_chunks(folder: Path) -> dict[tuple[str | None, Triple | None], str]:
    """Return volume and chunk of those that crashed two readers and are not decoded again, with the last signal."""
    crashes = [((each.volume, each.chunk), each.crash) for each in read_logs(folder) if each.crash and each.chunk]
    counts = Counter(chunk for chunk, _ in crashes)
    return {chunk: signal for chunk, signal in crashes if counts[chunk] >= _CRASHES_MAX}


def remove_ended_logs(folder: Path) -> list[ReadingLog]:
    """Remove the logs of readers of this machine that have ended, except crashes.  Returns those of living readers.

    Raises OSError.
    """
    local = [each for each in read_logs(folder) if each.node == node_name()]
    ended = {each.path for each in local if not psutil.pid_exists(each.pid)}
    for each in read_logs(folder):  # their final state
        if each.path in ended and each.crash is None:
            each.path.unlink(missing_ok=True)
    return [each for each in local if each.path not in ended]


def remove_logs(folder: Path, *, crashes: bool) -> None:
    """Remove the logs of crashes, so that their chunks are read again, or all other logs.  Raises OSError."""
    for each in read_logs(folder):
        if crashes == (each.crash is not None):
            each.path.unlink(missing_ok=True)
