"""Notes of what each process is reading, for when a codec crashes it.

Each process keeps one small file in a folder of its machine: a record of fixed size, overwritten before each region,
followed by what Python's faulthandler writes on a fatal signal.  The page cache outlives the process, so the next one
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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from vesuvius.config import Triple
from vesuvius.errors import one_line
from vesuvius.runlog.plain import from_plain
from vesuvius.threads import stacks_of_threads
from vesuvius.volumes.box import Box, format_box, intersects
from vesuvius.volumes.store.retry import Outage

# One page, which is written and read whole.
_RECORD_BYTES = 4096
_SUFFIX = ".note"
_FATAL = "Fatal Python error: "
_SIGNALS = {
    "Aborted": "SIGABRT",
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Floating-point exception": "SIGFPE",  # as of Python 3.13
    "Illegal instruction": "SIGILL",
}
# Limits on texts in a record: together less than a page, whatever the characters are.
_VOLUME_BYTES = 1200
_ADDRESS_BYTES = 600
_CAUSE_BYTES = 1200
_CAUSE_CHARACTERS = 300
# The thread that crashed, and its frames.  Python does not list threads that a codec started itself.
_CRASHED_THREAD = re.compile(r"^Current thread 0x([0-9a-f]+).*\n((?:  .*\n?)*)", re.MULTILINE)
# zarr decodes on threads of its own.  Where such a thread calls zarrs, its innermost frame is the thread pool's.
_DECODES = re.compile(
    r"\A  <no Python frame>"
    r'|\A  File "[^"]*/concurrent/futures/thread\.py"'
    r"|-packages/(zarr|zarrs|numcodecs)/|/vesuvius/volumes/"
)
# Start times of processes move when the kernel's clock is set.
_SAME_START_S = 5.0
_STDERR = 2
# Makes a process write the stacks of all its threads; one whose threads run Python code meanwhile may crash.
STACKS_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True)
class Place:
    """What is being read."""

    volume: str  # its name
    box: Box  # the voxels (z, y, x) that were asked for
    chunk: Triple | None = None  # the chunk that is read alone, after a crash; `chunk_box` its voxels
    chunk_box: Box | None = None

    def __str__(self) -> str:
        chunk = f", chunk {list(self.chunk)}" if self.chunk else ""
        return f"volume {self.volume}, region {format_box(self.box)}{chunk}"


@dataclass(frozen=True)
class Note:
    """A process, and what it was last doing."""

    role: str  # 'reader', 'trainer' or 'start' (the process that reads for the start of a run)
    pid: int
    node: str
    actor: str  # the Ray actor whose process it is; '' without Ray
    started: float  # when the process began, seconds since 1970; with `pid` it identifies the process
    # what it is reading; None between two regions, and where it crashed on a thread that does not decode
    place: Place | None = None
    since: float | None = None  # when it began to read that, seconds since 1970
    thread: int = 0  # the thread that reads it, as `threading.get_ident`
    outage: Outage | None = None  # a store that it waits for
    # the fatal signal that ended it; None while it lives, and after a SIGKILL, which leaves no trace
    crash: str | None = None
    path: Path = Path()  # the file

    def is_alive(self) -> bool:
        """Whether the process still runs, on this machine."""
        try:
            return self.is_here and abs(psutil.Process(self.pid).create_time() - self.started) < _SAME_START_S
        except psutil.Error:
            return False

    @property
    def is_here(self) -> bool:
        """Whether the process ran, or runs, on this machine."""
        return self.node == socket.gethostname()

    def remove(self) -> None:
        """Remove the files of the process; they may be gone.  Raises OSError."""
        for path in (self.path, self.stacks):
            path.unlink(missing_ok=True)

    @property
    def stacks(self) -> Path:
        """Where the process writes its stacks when it is asked for them or receives `STACKS_SIGNAL`."""
        return self.path.with_suffix(".stacks")

    @property
    def address(self) -> str:
        """The socket on which a reader is asked for its stacks, in Linux's abstract namespace."""
        return f"\0vesuvius-{self.path.stem}"


def _write_stacks(asked: socket.socket, stacks: int) -> None:
    """Write the stacks of all threads whenever somebody asks."""
    while True:
        asked.recv(1)
        with suppress(OSError):  # a full disk: the next request may find room
            os.write(stacks, "".join(stacks_of_threads()).encode(errors="backslashreplace"))


class NoteWriter:
    """Writes the note of this process.

    Takes over the process's faulthandler until it is closed, so that the stacks of a fatal signal go into the note.
    Python does not say where they went before; if it was enabled, they go to standard error afterwards.

    Args:
        folder: on a disk of this machine, or in memory; made if missing.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, role: str = "reader", actor: str = "") -> None:
        pid = os.getpid()
        folder.mkdir(parents=True, exist_ok=True)
        # Never a name used before: the first process of every container has pid 1.
        path = folder / f"{role}-{pid}-{uuid.uuid4().hex}{_SUFFIX}"
        self._note = Note(role, pid, socket.gethostname(), actor, psutil.Process().create_time(), path=path)
        self._file = path.open("wb")
        self._dump = path.open("ab")  # after the record: a second file, as `pwrite` to this one would append too
        self._lock = threading.Lock()
        self._was_enabled = faulthandler.is_enabled()
        if role == "reader":  # the trainer dumps its own stacks
            # Stays registered, and open, until the process ends: somebody who has just read the note may still send
            # the signal, whose default action is to end the process.
            stacks = os.open(self._note.stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            faulthandler.register(STACKS_SIGNAL, stacks, all_threads=True)
            asked = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            asked.bind(self._note.address)
            threading.Thread(target=_write_stacks, args=(asked, stacks), name="stacks", daemon=True).start()
        self._write()
        faulthandler.enable(self._dump)

    @contextmanager
    def reading(self, place: Place) -> Iterator[None]:
        """Note what is read inside: a process that dies there leaves it behind."""
        self._write(place=place, since=time.time(), thread=threading.get_ident())
        try:
            yield
        finally:
            self._write(place=None, since=None)

    def outage(self, outage: Outage | None) -> None:
        """Note that a store does not answer, or None that it does again.  On any thread."""
        if outage != self._note.outage:
            self._write(outage=outage)

    def close(self) -> None:
        """Remove the note: the process reads no more.  Safe to call again."""
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


def read_notes(folder: Path) -> list[Note]:
    """The notes in a folder, the oldest first; none where there is no folder."""
    return _sorted(_read_note(path) for path, _, _ in _files(folder))


def read_crashes(folder: Path) -> list[Note]:
    """The notes of processes that crashed, the oldest first.  Others are not even opened, and none is parsed twice."""
    found = (_read_dump(*file) for file in _files(folder) if file[1] > _RECORD_BYTES)
    return _sorted(note for note in found if note is not None and note.crash)


def crashes_touching(folder: Path, volume: str, box: Box) -> list[Note]:
    """The crashes of processes that were reading this box of a volume, or chunks of it."""
    name = _fitting(volume, _VOLUME_BYTES)
    places = ((note, note.place) for note in read_crashes(folder))
    return [
        note
        for note, place in places
        if place is not None and place.volume == name and intersects(place.chunk_box or place.box, box)
    ]


def forget_crashes(folder: Path) -> None:
    """Remove the notes of processes that crashed: what they were reading is read normally again.  Raises OSError."""
    for note in read_crashes(folder):
        note.remove()


def claim_folder(folder: Path) -> list[Note]:
    """Prepare a folder for new processes; no other process may be using it.

    Crashes stay, for those that come; all other notes are removed.

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


def _sorted(notes: Iterable[Note | None]) -> list[Note]:
    return sorted((note for note in notes if note is not None), key=lambda note: note.started)


def _files(folder: Path) -> list[tuple[Path, int, int]]:
    """Each note with its size and the time of its last change, in ns."""
    found = []
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(_SUFFIX):
                with suppress(FileNotFoundError):  # just removed
                    stat = entry.stat()
                    found.append((Path(entry.path), stat.st_size, stat.st_mtime_ns))
    return found


def _encoded(value: Any) -> bytes:
    # Paths that the file system's encoding cannot decode hold lone surrogates.
    return json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")


def _fitting(text: str, limit: int) -> str:
    """A text of at most so many bytes as JSON: unchanged, or a hash and as much of its end as fits."""
    if len(_encoded(text)) <= limit:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
    end = text[-limit:]
    while len(_encoded(short := f"{digest}...{end}")) > limit:
        end = end[len(end) // 16 + 1 :]
    return short


@lru_cache(maxsize=1024)
def _read_dump(path: Path, size: int, changed_ns: int) -> Note | None:
    """The note of a process that crashed: where neither size nor time has changed, nor has its content."""
    return _read_note(path)


def _read_note(path: Path) -> Note | None:
    """None where the file is gone or incomplete."""
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
    note = replace(from_plain(Note, fields), crash=crash, path=path)
    return note if crash is None or _was_decoding(dump, note.thread) else replace(note, place=None)


def _was_decoding(dump: str, reading_thread: int) -> bool:
    """Whether a codec may have crashed, by faulthandler's account: on the thread that reads, or one that decodes for
    it, or one that Python does not know."""
    crashed = _CRASHED_THREAD.search(dump)
    if crashed is None:
        return True
    return int(crashed[1], 16) == reading_thread or _DECODES.search(crashed[2]) is not None
