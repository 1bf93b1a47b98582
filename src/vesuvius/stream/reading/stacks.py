"""Stacks of the readers on this machine, for a run that hangs."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from vesuvius.stream.reading.notes import STACKS_SIGNAL, Note, read_notes

_ANSWER_S = 2.0
_SETTLED_S = 0.1


def dump_stacks(folder: Path, path: Path) -> None:
    """Append the stacks of all threads of each reader with a note in a folder to a file; at most two seconds.

    A reader answers even from within a codec; one that is stopped, or waits in the kernel, is listed as silent.

    Raises:
        OSError: the file cannot be written.
    """
    readers = [note for note in read_notes(folder) if note.role == "reader" and note.is_alive()]
    before = {note.pid: len(_stacks(note)) for note in readers}
    for note in readers:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(note.pid, STACKS_SIGNAL)
    deadline, sizes = time.monotonic() + _ANSWER_S, before
    while time.monotonic() < deadline:  # until all have written something, and none has since the last look
        time.sleep(_SETTLED_S)
        now = {note.pid: len(_stacks(note)) for note in readers}
        if now == sizes and all(now[pid] > before[pid] for pid in now):
            break
        sizes = now
    with path.open("a", encoding="utf-8") as out:
        for note in readers:
            since = "" if note.since is None else f" for {time.time() - note.since:.0f} s"
            out.write(f"---- reader {note.pid} on {note.node}, reading {note.place or 'nothing'}{since}\n")
            written = _stacks(note)[before[note.pid] :].decode(errors="replace")
            out.write(written or f"no answer within {_ANSWER_S:g} s\n")
        if not readers:
            out.write("---- no live reader on this machine\n")


def _stacks(note: Note) -> bytes:
    try:
        return note.stacks.read_bytes()
    except FileNotFoundError:
        return b""
