"""The note of each reader: the chunk that it decodes, in one small file that outlives the process.

The beginning of the file is a JSON object, mapped into memory: noting a chunk is no system call.  On a fatal signal
(SIGABRT, SIGSEGV, ...) Python's faulthandler appends to the file, so a crash can be told from a SIGKILL.  A chunk on
which two readers crashed is not decoded again.
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

_CRASHES_A_CHUNK = 2  # the reader may have crashed of something else once
_SIZE = 2**14  # of the object, padded with blanks
_FATAL = "Fatal Python error: "


@dataclass(frozen=True)
class ReadingLog:
    """A reader, and what it was last doing."""

    pid: int
    node: str  # host name
    actor: str  # the Ray actor whose process it is
    # volume, chunk: what it decodes; None between two regions
    volume: str | None = None
    chunk: Triple | None = None
    outage: Outage | None = None  # a store that it waits for
    crash: str | None = None  # the fatal signal that ended it, in faulthandler's words; None after a SIGKILL
    path: Path = Path()  # the file


class ReadingLogWriter:
    """Writes the note of this process, and takes over its faulthandler.

    Args:
        folder: on a disk of this machine, or in memory; made if missing.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, actor: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Never a name used before: the first process of every container has pid 1.
        self._file = (folder / f"{time.time_ns()}-{uuid.uuid4().hex}.note").open("w+b", buffering=0)
        self._file.write(b" " * _SIZE)  # takes the room on the disk, which mapped memory cannot ask for
        self._page = mmap.mmap(self._file.fileno(), _SIZE)
        self._fields = asdict(ReadingLog(os.getpid(), socket.gethostname(), actor))
        del self._fields["path"], self._fields["crash"]
        self._lock = threading.Lock()  # chunks and outages come on two threads
        self._write()
        faulthandler.enable(self._file, all_threads=False)

    def chunk(self, volume: str | None, chunk: Triple | None) -> None:
        """Note what is decoded next; None between two regions, so that a crash is blamed on no chunk."""
        self._write(volume=volume, chunk=chunk)

    def outage(self, outage: Outage | None) -> None:
        """Note that a store does not answer, or None that it does again.  On any thread."""
        self._write(outage=asdict(outage) if outage else None)

    def _write(self, **changes: Any) -> None:
        with self._lock:
            self._fields |= changes
            self._page[:] = json.dumps(self._fields).encode().ljust(_SIZE)[:_SIZE]


class TrainerReadingMarker:
    """Says in a file, while the context lasts, that the trainer of a run with readers reads itself.

    A chunk that crashes it would do so at each start, where one that crashes readers is replaced.

    Attributes:
        broke_off: whether an earlier trainer ended within the context, without a word.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / "trainer-reads"
        self.broke_off = self._file.exists()
        if self.broke_off:
            self.__exit__()
            log.warning(
                "the last session ended without a word while the trainer itself read the volumes; the readers read "
                "from the start this time, as a chunk may have crashed it"
            )

    def __enter__(self) -> None:
        with suppress(OSError):  # the readers say it
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch()

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._file.unlink(missing_ok=True)


def open_reading_log(folder: Path, actor: str) -> ReadingLogWriter | None:
    """The note of this process; None, with a warning, where the folder cannot be written."""
    try:
        return ReadingLogWriter(folder, actor)
    except OSError as error:
        log.warning("cannot note what this reader reads: %s; it continues without", one_line(error))
        return None


def read_logs(folder: Path) -> list[ReadingLog]:
    """The notes in a folder, the oldest first; none where there is no folder.  Those being written are left out."""
    notes = []
    for path in sorted(folder.glob("*.note")):
        try:
            content = path.read_bytes()
            note = from_dict(ReadingLog, json.loads(content[:_SIZE]))
        except (OSError, ValueError):
            continue
        _, crashed, reason = content[_SIZE:].decode(errors="replace").partition(_FATAL)
        notes.append(replace(note, crash=reason.splitlines()[0] if crashed else None, path=path))
    return notes


def crashed_chunks(folder: Path) -> dict[tuple[str | None, Triple | None], str]:
    """The volume and chunk on which so many readers crashed that it is not decoded again, with the last signal."""
    crashes = [((note.volume, note.chunk), note.crash) for note in read_logs(folder) if note.crash and note.chunk]
    counts = Counter(place for place, _ in crashes)
    return {place: signal for place, signal in crashes if counts[place] >= _CRASHES_A_CHUNK}


def remove_ended_logs(folder: Path) -> list[ReadingLog]:
    """Remove the notes of readers of this machine that have ended, but for crashes; returns those of the living.

    Raises OSError.
    """
    here = [note for note in read_logs(folder) if note.node == socket.gethostname()]
    ended = {note.path for note in here if not psutil.pid_exists(note.pid)}
    for note in read_logs(folder):  # as they were when the processes ended
        if note.path in ended and note.crash is None:
            note.path.unlink(missing_ok=True)
    return [note for note in here if note.path not in ended]


def remove_logs(folder: Path, *, crashes: bool) -> None:
    """Remove the notes of readers that are gone, or only those that say `crashes`: their chunks are read again.

    Raises OSError.
    """
    for note in read_logs(folder):
        if crashes == (note.crash is not None):
            note.path.unlink(missing_ok=True)
