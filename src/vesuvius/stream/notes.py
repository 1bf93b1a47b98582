"""What a process is reading, left where it can be found when a codec has ended that process.

Each process keeps one small file in a folder of its machine: a record of fixed size, overwritten before each region,
and behind it what Python's faulthandler writes on a fatal signal.  The page cache outlives the process, so the next one
knows the region, and a crash (SIGABRT, SIGSEGV, ...) can be told from a SIGKILL, which leaves no trace.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from vesuvius.config import Triple
from vesuvius.errors import one_line
from vesuvius.volumes.box import Box, format_box, intersects
from vesuvius.volumes.retry import Outage

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
# How much of each text of any length goes into a record: together less than a page, whatever the characters are.
_VOLUME_BYTES = 1200
_ADDRESS_BYTES = 600
_CAUSE_BYTES = 1200
_CAUSE_CHARACTERS = 300
# The thread that crashed, and its frames.  Threads that a codec has started itself are in no list of Python's.
_CRASHED_THREAD = re.compile(r"^Current thread 0x([0-9a-f]+).*\n((?:  .*\n?)*)", re.MULTILINE)
# zarr decodes on threads of its own.  Where such a thread calls zarrs, the innermost frame is that of its pool.
_DECODES = re.compile(
    r"\A  <no Python frame>"
    r'|\A  File "[^"]*/concurrent/futures/thread\.py"'
    r"|-packages/(zarr|zarrs|numcodecs)/|/vesuvius/volumes/"
)
# A file that was written less than this long ago may change again without another time of change.
_SETTLED_S = 1.0
# The kernel's clock is set from time to time, and the start of a process with it.
_SAME_START_S = 5.0
_STDERR = 2
# Asks a process for the stacks of all its threads.
STACKS_SIGNAL = signal.SIGUSR2


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
        place: what it reads; None between two regions, and where it crashed on a thread that does not decode.
        since: when it began to read that, seconds since 1970.
        thread: which reads that, as `threading.get_ident`.
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
    thread: int = 0
    outage: Outage | None = None
    crash: str | None = None
    path: Path = Path()

    def is_alive(self) -> bool:
        """Whether the process runs on this machine, under the same number."""
        try:
            return self.is_here and abs(psutil.Process(self.pid).create_time() - self.started) < _SAME_START_S
        except psutil.Error:
            return False

    @property
    def is_here(self) -> bool:
        """Whether the process ran, or runs, on this machine."""
        return self.node == socket.gethostname()

    def remove(self) -> None:
        """Remove the files of the process.  Raises OSError; not where they are gone."""
        for path in (self.path, self.stacks):
            path.unlink(missing_ok=True)

    @property
    def stacks(self) -> Path:
        """The file that the process writes its stacks to when it is sent `STACKS_SIGNAL`."""
        return self.path.with_suffix(".stacks")


class Notebook:
    """Writes the note of this process.

    Takes the process's faulthandler over until it is closed: where it dies by a fatal signal the stacks go into the
    note.  Python does not tell where they went before; one that was enabled writes to the standard error afterwards.

    Args:
        folder: on a disk of this machine, or in memory; made if it is not there.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, role: str = "reader", actor: str = "") -> None:
        pid = os.getpid()
        folder.mkdir(parents=True, exist_ok=True)
        # Never a name that was there before: each process of a container may be number 1.
        path = folder / f"{role}-{pid}-{uuid.uuid4().hex}{_SUFFIX}"
        self._note = Note(role, pid, socket.gethostname(), actor, psutil.Process().create_time(), path=path)
        self._file = path.open("wb")
        self._dump = path.open("ab")  # behind the record: a second file, as `pwrite` to this one would append too
        self._lock = threading.Lock()
        self._was_enabled = faulthandler.is_enabled()
        if role == "reader":  # the trainer's stacks are its own affair
            # Stays registered, and open, until the process ends: whoever has just read the note may still send the
            # signal, which ends a process that does not expect it.
            stacks = os.open(self._note.stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True)
        self._write()
        faulthandler.enable(self._dump)

    @property
    def folder(self) -> Path:
        return self._note.path.parent

    @contextmanager
    def reading(self, place: Place) -> Iterator[None]:
        """Around the reading of a place: a process that dies inside leaves it behind."""
        self._write(place=place, since=time.time(), thread=threading.get_ident())
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
        self._note.remove()
        if self._was_enabled:
            faulthandler.enable(_STDERR)
        else:
            faulthandler.disable()
        self._dump.close()

    def _write(self, **changes: Any) -> None:
        with self._lock:
            if self._file.closed:
                return
            self._note = replace(self._note, **changes)
            fields = asdict(self._note)
            del fields["path"], fields["crash"]
            if self._note.place is not None:
                fields["place"]["volume"] = _fitting(self._note.place.volume, _VOLUME_BYTES)
            if self._note.outage is not None:
                fields["outage"]["cause"] = _fitting(one_line(self._note.outage.cause, _CAUSE_CHARACTERS), _CAUSE_BYTES)
                fields["outage"]["address"] = _fitting(self._note.outage.address, _ADDRESS_BYTES)
            record = _encoded(fields)
            assert len(record) <= _RECORD_BYTES, f"a note must fit into {_RECORD_BYTES} bytes; got {len(record)}"
            os.pwrite(self._file.fileno(), record.ljust(_RECORD_BYTES), 0)


class NoteFolder:
    """The notes in a folder, for those who look often: a file is parsed again only where it has changed.

    Args:
        crashes: only the notes of processes that crashed; the others are not even opened.
    """

    def __init__(self, folder: Path, crashes: bool = False) -> None:
        self._folder = folder
        self._crashes = crashes
        self._known: dict[Path, tuple[tuple[int, int] | None, Note | None]] = {}

    def read(self) -> list[Note]:
        """The oldest first; none where there is no folder."""
        settled_ns = time.time_ns() - int(_SETTLED_S * 1e9)
        before, self._known = self._known, {}
        for path, size, changed_ns in _files(self._folder):
            if self._crashes and size <= _RECORD_BYTES:
                continue
            stamp = (size, changed_ns) if changed_ns < settled_ns else None
            known = before.get(path)
            is_same = known is not None and known[0] is not None and known[0] == stamp
            self._known[path] = known if known is not None and is_same else (stamp, _read_note(path))
        notes = [note for _, note in self._known.values() if note is not None]
        return sorted((note for note in notes if note.crash or not self._crashes), key=lambda note: note.started)


def read_notes(folder: Path) -> list[Note]:
    """The notes in a folder, the oldest first; none where there is no folder."""
    return NoteFolder(folder).read()


def take_over(folder: Path) -> list[Note]:
    """Make a folder ready for new processes; nobody else may be at work in it.

    What crashed stays, as a warning to those that come; all other notes are removed.

    Returns:
        The crashes in which a trainer itself ended, each returned once only.
    """
    crashed = []
    for note in read_notes(folder):
        if note.crash is None:
            note.remove()
        elif note.path.name.startswith("trainer-"):
            note.path.rename(note.path.with_name(f"said-{note.path.name}"))
            crashed.append(note)
    for path in folder.glob("*.stacks"):
        path.unlink(missing_ok=True)
    return crashed


class Strikes:
    """The places that crashed a process which left its note in a folder, looked up anew where notes have changed."""

    def __init__(self, folder: Path) -> None:
        self._crashes = NoteFolder(folder, crashes=True)

    def on(self, volume: str, box: Box) -> list[Note]:
        """The crashes in this box of a volume, or in chunks of it."""
        name = _fitting(volume, _VOLUME_BYTES)
        return [note for note in self._crashes.read() if note.place is not None and _is_on(note.place, name, box)]


def forget_crashes(folder: Path) -> None:
    """Remove the notes of processes that crashed: what they read is read again as any other place.  Raises OSError."""
    for note in NoteFolder(folder, crashes=True).read():
        note.remove()


def _is_on(place: Place, volume: str, box: Box) -> bool:
    return place.volume == volume and intersects(place.chunk_box or place.box, box)


def _files(folder: Path) -> list[tuple[Path, int, int]]:
    """Each note with its size and the time of its last change, in ns."""
    found = []
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(_SUFFIX):
                with suppress(FileNotFoundError):  # it has just been removed
                    stat = entry.stat()
                    found.append((Path(entry.path), stat.st_size, stat.st_mtime_ns))
    return found


def _encoded(value: Any) -> bytes:
    # Paths that are no text in the file system's encoding hold lone surrogates.
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")


def _fitting(text: str, limit: int) -> str:
    """A text whose JSON has no more than so many bytes: as it is, or a hash and as much of its end as fits."""
    if len(_encoded(text)) <= limit:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
    end = text[-limit:]
    while len(_encoded(short := f"{digest}...{end}")) > limit:
        end = end[len(end) // 16 + 1 :]
    return short


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
    if crash is not None and not _was_decoding(dump, fields.get("thread", 0)):
        place = None
    return Note(
        **fields,
        place=_place(place) if place else None,
        outage=Outage(**outage) if outage else None,
        crash=crash,
        path=path,
    )


def _was_decoding(dump: str, reading_thread: int) -> bool:
    """Whether faulthandler's account leaves it possible that a codec has crashed.

    Not where it was a thread of Python other than the one that reads, and not one of those that decode for it.
    """
    crashed = _CRASHED_THREAD.search(dump)
    if crashed is None:
        return True
    return int(crashed[1], 16) == reading_thread or _DECODES.search(crashed[2]) is not None


def _place(fields: dict[str, Any]) -> Place:
    chunk, chunk_box = fields["chunk"], fields["chunk_box"]
    return Place(
        fields["volume"], _box(fields["box"]), tuple(chunk) if chunk else None, _box(chunk_box) if chunk_box else None
    )


def _box(corners: list[list[int]]) -> Box:
    (z0, y0, x0), (z1, y1, x1) = corners
    return (z0, y0, x0), (z1, y1, x1)
