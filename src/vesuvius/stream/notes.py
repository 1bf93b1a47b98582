"""What a process is reading, left where it can be found when a codec has ended that process.

Each process keeps one small file in a folder of its machine: a record of fixed size, overwritten before each region,
and behind it what Python's faulthandler writes on a fatal signal.  The page cache outlives the process, so the next one
knows the region, and a crash (SIGABRT, SIGSEGV, ...) can be told from a SIGKILL, which leaves no trace.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from vesuvius.config import Triple
from vesuvius.errors import one_line
from vesuvius.volumes.box import Box, format_box, intersects
from vesuvius.volumes.source import Outage

# One page: a reader of the file never sees half of a record.
_RECORD_BYTES = 4096
_SUFFIX = ".note"
_FATAL = "Fatal Python error: "
_SIGNALS = {
    "Aborted": "SIGABRT",
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_CAUSE_CHARACTERS = 400
# Asks a process for the stacks of all its threads.
STACKS_SIGNAL = signal.SIGUSR2
_number = count()


@dataclass(frozen=True)
class Place:
    """What is being read.

    Attributes:
        volume: its name.
        box: the voxels (z, y, x) that were asked for.
        chunk: the chunk that is read by itself, in careful mode; `chunk_box` its voxels.
    """

    volume: str
    box: Box
    chunk: Triple | None = None
    chunk_box: Box | None = None

    def __str__(self) -> str:
        chunk = f", chunk {list(self.chunk)}" if self.chunk else ""
        return f"volume {self.volume}, region {format_box(self.box)}{chunk}"


@dataclass(frozen=True)
class Note:
    """One process and what it was doing last.

    Attributes:
        role: 'reader', 'trainer' or 'start' (the process that reads for the start of a run).
        actor: the Ray actor that it is an incarnation of; '' without Ray.
        started: when the process began, seconds since 1970; with `pid` it names the process.
        place: what it reads; None between two regions.
        since: when it began to read that, seconds since 1970.
        outage: a store that it waits for.
        crash: the fatal signal that ended it; None while it lives, and where nothing was left behind (SIGKILL).
        path: its file.
    """

    role: str
    pid: int
    node: str
    actor: str
    started: float
    place: Place | None = None
    since: float | None = None
    outage: Outage | None = None
    crash: str | None = None
    path: Path = Path()

    def is_alive(self) -> bool:
        """Whether the process runs on this machine, under the same number."""
        try:
            return self.node == socket.gethostname() and psutil.Process(self.pid).create_time() == self.started
        except psutil.Error:
            return False

    @property
    def stacks(self) -> Path:
        """The file that the process writes its stacks to when it is sent `STACKS_SIGNAL`."""
        return self.path.with_suffix(".stacks")


class Notebook:
    """Writes the note of this process.

    Takes the process's faulthandler over: where it dies by a fatal signal the stacks go into the note.

    Args:
        folder: on a disk of this machine, or in memory; made if it is not there.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, role: str = "reader", actor: str = "") -> None:
        pid = os.getpid()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{role}-{pid}-{next(_number)}{_SUFFIX}"
        self._note = Note(role, pid, socket.gethostname(), actor, psutil.Process().create_time(), path=path)
        self._file = path.open("wb")
        self._dump = path.open("ab")  # behind the record: a second file, as `pwrite` to this one would append too
        self._lock = threading.Lock()
        self._was_enabled = faulthandler.is_enabled()
        self._stacks = None
        if role == "reader":  # the trainer's stacks are its own affair
            self._stacks = self._note.stacks.open("ab")
            faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True)
        self._write()
        faulthandler.enable(self._dump)

    @property
    def folder(self) -> Path:
        return self._note.path.parent

    @contextmanager
    def reading(self, place: Place) -> Iterator[None]:
        """Around the reading of a place: a process that dies inside leaves it behind."""
        self._write(place=place, since=time.time())
        try:
            yield
        finally:
            self._write(place=None, since=None)

    def outage(self, outage: Outage | None) -> None:
        """Say that a store does not answer, or that it does again.  On any thread."""
        if outage != self._note.outage:
            self._write(outage=outage)

    def close(self) -> None:
        """The process reads no more; its note is removed.  Safe to call again."""
        with self._lock:
            if self._file.closed:
                return
            self._file.close()
        if self._was_enabled and sys.stderr is not None:
            with suppress(OSError, ValueError):  # stderr may have no file behind it
                faulthandler.enable()
        else:
            faulthandler.disable()
        if self._stacks is not None:
            faulthandler.unregister(STACKS_SIGNAL)
            self._stacks.close()
        self._dump.close()
        for path in (self._note.path, self._note.stacks):
            path.unlink(missing_ok=True)

    def _write(self, **changes: Any) -> None:
        with self._lock:
            if self._file.closed:
                return
            self._note = replace(self._note, **changes)
            fields = asdict(self._note)
            del fields["path"], fields["crash"]
            if self._note.outage is not None:
                fields["outage"]["cause"] = one_line(self._note.outage.cause, _CAUSE_CHARACTERS)
            record = json.dumps(fields).encode()
            assert len(record) <= _RECORD_BYTES, f"a note must fit into {_RECORD_BYTES} bytes; got {len(record)}"
            os.pwrite(self._file.fileno(), record.ljust(_RECORD_BYTES), 0)


def read_notes(folder: Path) -> list[Note]:
    """The notes in a folder, the oldest first; none where there is no folder."""
    try:
        with os.scandir(folder) as entries:
            paths = [Path(entry.path) for entry in entries if entry.name.endswith(_SUFFIX)]
    except FileNotFoundError:
        return []
    notes = [note for path in paths if (note := _read_note(path)) is not None]
    return sorted(notes, key=lambda note: note.started)


def take_over(folder: Path) -> list[Note]:
    """Make a folder ready for new processes; nobody else may be at work in it.

    What crashed stays, as a warning to those that come; all other notes are removed.

    Returns:
        The crashes in which a trainer itself ended, each returned once only.
    """
    crashed = []
    for note in read_notes(folder):
        if note.crash is None:
            note.path.unlink(missing_ok=True)
        elif note.path.name.startswith("trainer-"):
            note.path.rename(note.path.with_name(f"said-{note.path.name}"))
            crashed.append(note)
    for path in folder.glob("*.stacks"):
        path.unlink(missing_ok=True)
    return crashed


class Strikes:
    """The places that crashed a process which left its note in a folder, looked up anew where notes have changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[str, int] = {}
        self._strikes: list[Note] = []

    def on(self, volume: str, box: Box) -> list[Note]:
        """The crashes in this box of a volume, or in chunks of it."""
        self._look()
        return [note for note in self._strikes if note.place is not None and _is_on(note.place, volume, box)]

    def _look(self) -> None:
        try:
            with os.scandir(self._folder) as entries:
                sizes = {entry.name: entry.stat().st_size for entry in entries if entry.name.endswith(_SUFFIX)}
        except FileNotFoundError:  # a file or the folder has just gone
            return
        if sizes != self._sizes:  # a crash makes a note longer; a new place does not
            self._sizes = sizes
            self._strikes = [note for note in read_notes(self._folder) if note.crash is not None]


def forget_crashes(folder: Path) -> None:
    """Remove the notes of processes that crashed: what they read is read again as any other place.  Raises OSError."""
    for path in folder.glob(f"*{_SUFFIX}"):
        note = _read_note(path)
        if note is not None and note.crash is not None:
            path.unlink(missing_ok=True)


def _is_on(place: Place, volume: str, box: Box) -> bool:
    return place.volume == volume and intersects(place.chunk_box or place.box, box)


def _read_note(path: Path) -> Note | None:
    """None where it is gone, or was not written to the end before its process died."""
    try:
        content = path.read_bytes()
        fields = json.loads(content[:_RECORD_BYTES])
    except (OSError, ValueError):
        return None
    dump = content[_RECORD_BYTES:].decode(errors="replace")
    crash = None
    if _FATAL in dump:
        reason = dump.split(_FATAL, 1)[1].splitlines()[0]
        crash = _SIGNALS.get(reason, reason)
    place, outage = fields.pop("place"), fields.pop("outage")
    return Note(
        **fields,
        place=_place(place) if place else None,
        outage=Outage(**outage) if outage else None,
        crash=crash,
        path=path,
    )


def _place(fields: dict[str, Any]) -> Place:
    chunk, chunk_box = fields["chunk"], fields["chunk_box"]
    return Place(
        fields["volume"], _box(fields["box"]), tuple(chunk) if chunk else None, _box(chunk_box) if chunk_box else None
    )


def _box(corners: list[list[int]]) -> Box:
    (z0, y0, x0), (z1, y1, x1) = corners
    return (z0, y0, x0), (z1, y1, x1)
