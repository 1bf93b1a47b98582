"""Stacks of the readers on this machine, for a run that hangs."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from vesuvius.runlog.proc import STOPPED
from vesuvius.stream.reading.notes import STACKS_SIGNAL, Note, read_notes

_ANSWER_S = 2.0
_SETTLED_S = 0.1


def dump_stacks(folder: Path, path: Path) -> None:
    """Append the stacks of all threads of each reader with a note in a folder to a file; at most two seconds.

    A thread of the reader answers.  Where a codec keeps it from running, a signal makes the reader write its stacks,
    whose threads run no Python code then.  One that is stopped, or waits in the kernel, is listed as silent.

    Raises:
        OSError: the file cannot be written.
    """
    readers = [note for note in read_notes(folder) if note.role == "reader" and note.is_alive()]
    before = {note.pid: len(_stacks(note)) for note in readers}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
        for note in readers:
            with suppress(OSError):  # it has just ended
                asking.sendto(b"?", socket.MSG_DONTWAIT, note.address)
    if silent := _wait_for_stacks(readers, before):
        for note in silent:
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if psutil.Process(note.pid).status() not in STOPPED:  # else it would come when threads run again
                    os.kill(note.pid, STACKS_SIGNAL)
        _wait_for_stacks(readers, before)
    with path.open("a", encoding="utf-8") as out:
        for note in readers:
            since = "" if note.since is None else f" for {time.time() - note.since:.0f} s"
            out.write(f"---- reader {note.pid} on {note.node}, reading {note.place or 'nothing'}{since}\n")
            written = _stacks(note)[before[note.pid] :].decode(errors="replace")
            out.write(written or f"no answer within {_ANSWER_S:g} s\n")
        if not readers:
            out.write("---- no live reader on this machine\n")


def _wait_for_stacks(readers: Sequence[Note], before: Mapping[int, int]) -> list[Note]:
    """Wait until all have written something, and none has since the last look; returns those that have not in time."""
    deadline, sizes = time.monotonic() + _ANSWER_S / 2, before
    while True:
        time.sleep(_SETTLED_S)
        now = {note.pid: len(_stacks(note)) for note in readers}
        silent = [note for note in readers if now[note.pid] == before[note.pid]]
        if time.monotonic() > deadline or (now == sizes and not silent):
            return silent
        sizes = now


def _stacks(note: Note) -> bytes:
    try:
        return note.stacks.read_bytes()
    except FileNotFoundError:
        return b""
