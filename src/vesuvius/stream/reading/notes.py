"""Notes of what each reader is reading, for when it dies.

Each reader keeps one small file in a folder of its machine.  It begins with the chunk that is being decoded, mapped
into memory: noting it is no system call.  Who reads which region follows as JSON.  The page cache outlives the process,
so whoever comes next knows both.  On a fatal signal (SIGABRT, SIGSEGV, ...) Python's faulthandler writes to a file
beside it, so a crash can be told from a SIGKILL.  A chunk on which two readers crashed is not decoded again.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import mmap
import os
import socket
import struct
import threading
import uuid
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from vesuvius.config import Triple
from vesuvius.errors import one_line
from vesuvius.runlog.plain import from_plain
from vesuvius.volumes.box import Box, format_box
from vesuvius.volumes.store.retry import Outage

log = logging.getLogger(__name__)

CRASHES_A_CHUNK = 2  # the reader may have crashed of something else once
_CHUNK = struct.Struct("<?3q")  # whether one is being decoded, and which
_FATAL = "Fatal Python error: "
_SIGNALS = {
    "Aborted": "SIGABRT",
    "Segmentation fault": "SIGSEGV",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Floating-point exception": "SIGFPE",  # as of Python 3.13
    "Illegal instruction": "SIGILL",
}
_SAME_START_S = 5.0  # start times of processes move when the kernel's clock is set
_STDERR = 2


@dataclass(frozen=True)
class Note:
    """A reader, and what it was last doing."""

    pid: int
    node: str
    actor: str  # the Ray actor whose process it is; '' without Ray
    started: float  # when the process began, seconds since 1970; with `pid` it identifies the process
    # volume, box: the name of what it reads, and the voxels (z, y, x); None between two regions
    volume: str | None = None
    box: Box | None = None
    outage: Outage | None = None  # a store that it waits for
    chunk: Triple | None = None  # that it decodes
    crash: str | None = None  # the fatal signal that ended it; None while it lives, and after a SIGKILL
    path: Path = Path()  # the file

    @property
    def place(self) -> str:
        """What it reads, for people; '' between two regions."""
        if self.volume is None or self.box is None:
            return ""
        chunk = f", chunk {list(self.chunk)}" if self.chunk else ""
        return f"volume {self.volume}, region {format_box(self.box)}{chunk}"

    def is_alive(self) -> bool:
        """Whether the process still runs, on this machine."""
        try:
            here = self.node == socket.gethostname()
            return here and abs(psutil.Process(self.pid).create_time() - self.started) < _SAME_START_S
        except psutil.Error:
            return False

    def remove(self) -> None:
        """Remove the files of the process; they may be gone.  Raises OSError."""
        for path in (self.path, _dump_of(self.path)):
            path.unlink(missing_ok=True)


class NoteWriter:
    """Writes the note of this process.

    Takes over the process's faulthandler until it is closed.  Python does not say where stacks went before; if it was
    enabled, they go to standard error afterwards.

    Args:
        folder: on a disk of this machine, or in memory; made if missing.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, actor: str = "") -> None:
        pid = os.getpid()
        folder.mkdir(parents=True, exist_ok=True)
        # Never a name used before: the first process of every container has pid 1.
        path = folder / f"{pid}-{uuid.uuid4().hex}.note"
        self._note = Note(pid, socket.gethostname(), actor, psutil.Process().create_time(), path=path)
        self._lock = threading.Lock()  # regions and outages come on two threads
        self._file = path.open("w+b", buffering=0)
        self._file.write(bytes(_CHUNK.size))  # takes the room on the disk, which mapped memory cannot ask for
        self._write()
        self._chunk = mmap.mmap(self._file.fileno(), _CHUNK.size)
        self._dump = _dump_of(path).open("wb")
        self._was_enabled = faulthandler.is_enabled()
        faulthandler.enable(self._dump, all_threads=False)

    def region(self, volume: str | None = None, box: Box | None = None) -> None:
        """Note what is read from now on; between two regions nothing, so that a crash is blamed on no chunk."""
        _CHUNK.pack_into(self._chunk, 0, False, 0, 0, 0)
        self._write(volume=volume, box=box)

    def chunk(self, chunk: Triple) -> None:
        """Note which chunk of it is decoded next."""
        _CHUNK.pack_into(self._chunk, 0, True, *chunk)

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
            fields = {key: value for key, value in asdict(self._note).items() if key not in ("path", "chunk", "crash")}
            record = json.dumps(fields).encode()
            with suppress(OSError):  # a full disk: reading goes on
                os.pwrite(self._file.fileno(), record, _CHUNK.size)
                os.truncate(self._file.fileno(), _CHUNK.size + len(record))


def read_notes(folder: Path) -> list[Note]:
    """The notes in a folder, the oldest first; none where there is no folder."""
    notes = [note for path in folder.glob("*.note") if (note := read_note(path)) is not None]
    return sorted(notes, key=lambda note: note.started)


def read_note(path: Path) -> Note | None:
    """The note in a file; None where that is gone or is being written."""
    try:
        content = path.read_bytes()
        decoding, *chunk = _CHUNK.unpack_from(content)
        note = from_plain(Note, json.loads(content[_CHUNK.size :]))
        dump = _dump_of(path).read_text(errors="replace")
    except (OSError, ValueError, struct.error):
        return None
    crash = None
    if _FATAL in dump:
        reason = dump.split(_FATAL, 1)[1].splitlines()[0]
        crash = _SIGNALS.get(reason, reason)
    # Of a crash on another thread the chunk is innocent.  A thread that Python does not know has no frames.
    elsewhere = "  File " in dump and "/vesuvius/volumes/" not in dump
    decoded = tuple(chunk) if decoding and not elsewhere else None
    return replace(note, chunk=decoded, crash=crash, path=path)


def crashed_chunks(folder: Path) -> dict[tuple[str, Triple], str]:
    """The volume and chunk on which so many readers crashed that it is not decoded again, with the last signal."""
    crashes = [note for note in read_notes(folder) if note.crash and note.volume is not None and note.chunk is not None]
    last = {(note.volume, note.chunk): note.crash for note in crashes}
    counts = Counter((note.volume, note.chunk) for note in crashes)
    return {place: last[place] for place, count in counts.items() if count >= CRASHES_A_CHUNK}  # type: ignore[misc]


def forget_crashes(folder: Path) -> None:
    """Remove the notes of readers that crashed: what they were reading is read again.  Raises OSError."""
    for note in read_notes(folder):
        if note.crash is not None:
            note.remove()


def claim_folder(folder: Path) -> None:
    """Prepare a folder for new readers, while no others use it: crashes stay on record, and the last one is logged.

    Raises OSError.
    """
    notes = read_notes(folder)
    for note in notes:
        if note.crash is None:
            note.remove()
    if crashes := [note for note in notes if note.crash is not None]:
        last = crashes[-1]
        log.warning(
            "readers of earlier sessions crashed %d times, the last (process %d) by %s while it read %s; a chunk on "
            "which %d crashed is replaced",
            len(crashes),
            last.pid,
            last.crash,
            last.place or "nothing",
            CRASHES_A_CHUNK,
        )


def open_note(folder: Path | None, actor: str) -> NoteWriter | None:
    """The note of this process; None, with a warning, where the folder cannot be written, or without a folder."""
    if folder is None:
        return None
    try:
        return NoteWriter(folder, actor)
    except OSError as error:
        log.warning("a reader must be able to note what it reads; got %s; it continues without", one_line(error))
        return None


def _dump_of(path: Path) -> Path:
    """Where faulthandler writes."""
    return path.with_suffix(".crash")
