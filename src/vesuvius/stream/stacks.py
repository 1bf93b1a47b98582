"""Where the readers of this machine stand, for a run that hangs."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from vesuvius.stream.notes import STACKS_SIGNAL, Note, read_notes

_ANSWER_S = 2.0
_SETTLED_S = 0.1


def dump_stacks(folder: Path, path: Path) -> None:
    """Append the stacks of all threads of each reader that left its note in a folder to a file.

    A reader answers also from within a codec; one that is stopped, or waits in the kernel, is named as silent.  Takes
    at most two seconds.

    Raises:
        OSError: the file cannot be written.
    """
    readers = [note for note in read_notes(folder) if note.role == "reader" and note.is_alive()]
    before = {note.pid: _size(note) for note in readers}
    for note in readers:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(note.pid, STACKS_SIGNAL)
    _wait(readers, before)
    with path.open("a", encoding="utf-8") as out:
        for note in readers:
            since = "" if note.since is None else f" for {time.time() - note.since:.0f} s"
            out.write(f"---- reader {note.pid} on {note.node}, reading {note.place or 'nothing'}{since}\n")
            out.write(_written(note, before[note.pid]) or f"no answer in {_ANSWER_S:g} s\n")
        if not readers:
            out.write("---- no reader lives on this machine\n")


def _wait(readers: list[Note], before: dict[int, int]) -> None:
    """Until all have written something, and nobody has for a moment; not for ever."""
    deadline, sizes = time.monotonic() + _ANSWER_S, before
    while time.monotonic() < deadline:
        time.sleep(_SETTLED_S)
        now = {note.pid: _size(note) for note in readers}
        if now == sizes and all(now[pid] > before[pid] for pid in now):
            return
        sizes = now


def _size(note: Note) -> int:
    try:
        return note.stacks.stat().st_size
    except FileNotFoundError:
        return 0


def _written(note: Note, first: int) -> str:
    try:
        return note.stacks.read_bytes()[first:].decode(errors="replace")
    except FileNotFoundError:
        return ""
