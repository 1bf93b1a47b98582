"""`recent.jsonl`: a ring of the last two minutes' looks, one a second, that outlives the run's own death.

A fixed number of slots of fixed size, each a line of JSON padded with spaces, written in place: no growth, no rename,
and what was handed to the system is there though the process is killed in the next instant.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vesuvius.monitor.plain import from_plain

log = logging.getLogger(__name__)

# Divides a page of memory: the kernel copies a page at a time, and a signal that kills comes between pages, so no slot
# is torn by it.  Holds some 70 readers.
SLOT_BYTES = 2048
_LONGEST_KILLER = 200


@dataclass(frozen=True)
class MemorySample:
    """What is kept of a look."""

    time: float  # seconds since 1970
    step: int  # optimizer steps done
    # used_bytes, shared_bytes: of the run, as in `SystemSample`
    used_bytes: int
    shared_bytes: int
    trainer_bytes: int  # private memory of the trainer
    # private memory of each reader, by pid; the largest ones only where the slot is too small
    reader_bytes: Mapping[int, int] = field(default_factory=dict)
    # killer, killer_used_bytes, kills_at_bytes: the first killer
    killer: str = ""
    killer_used_bytes: int = 0
    kills_at_bytes: int = 0
    level: str = "LOW"  # name of the risk's level
    workers: int | None = None  # readers that there are now; None = not known
    # vram_used_bytes, vram_limit_bytes: reserved by the trainer's allocator; None without a GPU
    vram_used_bytes: int | None = None
    vram_limit_bytes: int | None = None
    # cgroup_oom_kills, machine_oom_kills: the kernel's counters; None where it does not count
    cgroup_oom_kills: int | None = None
    machine_oom_kills: int | None = None
    # awaits, silent_s: what the loop waited for ("batch", "checkpoint"), and seconds since its last sign of life; None
    # = not known
    awaits: str = ""
    silent_s: float | None = None


class RecentFile:
    """Writes moments into the ring.  A full or failing disk is no error: a warning, once.

    A file that is there already is gone on with: what an earlier session left is overwritten last.  One thread writes.

    Raises:
        OSError: on opening, also where the disk has no space for the ring.
    """

    def __init__(self, path: Path, slots: int = 120) -> None:
        self._path = path
        self._slots = slots
        self._warned = False
        self._next = max((number for number, _ in _read_slots(path)), default=-1) + 1
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._make_slots()
        except OSError:
            self.close()
            raise

    def write(self, moment: MemorySample) -> None:
        """Put a moment in the place of the oldest."""
        slot = _slot(self._next, moment)
        try:
            os.pwrite(self._descriptor, slot, (self._next % self._slots) * SLOT_BYTES)
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning(
                    "%s must be writable; got %s; free some space: until then memcheck does not see the last minutes",
                    self._path,
                    error,
                )
        self._next += 1

    def close(self) -> None:
        """Safe to call again."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)

    def _make_slots(self) -> None:
        """Take the space for all slots now: a disk that is full later then still takes moments."""
        whole, size = self._slots * SLOT_BYTES, os.fstat(self._descriptor).st_size
        if size % SLOT_BYTES or size > whole:  # of another making
            os.ftruncate(self._descriptor, 0)
            size = 0
        blank = b" " * (SLOT_BYTES - 1) + b"\n"
        while size < whole:
            size += os.pwrite(self._descriptor, blank[size % SLOT_BYTES :], size)


def read_recent(path: Path) -> list[MemorySample]:
    """The moments in the ring, oldest first; slots that are torn are passed over.  Empty without a file."""
    return [moment for _, moment in sorted(_read_slots(path), key=lambda slot: slot[0])]


def _slot(number: int, moment: MemorySample) -> bytes:
    """A line of `SLOT_BYTES` bytes; the smallest readers are left out where it would be longer.  Pure."""
    data: dict[str, Any] = {"n": number} | asdict(moment)
    data["killer"] = moment.killer[:_LONGEST_KILLER]
    readers = sorted(moment.reader_bytes.items(), key=lambda item: -item[1])
    while True:
        data["reader_bytes"] = dict(readers)
        text = json.dumps(data, separators=(",", ":")).encode("ascii")
        if len(text) < SLOT_BYTES:
            return text.ljust(SLOT_BYTES - 1) + b"\n"
        assert readers, "a slot holds a moment without readers"
        del readers[-1 - len(readers) // 8 :]


def _read_slots(path: Path) -> list[tuple[int, MemorySample]]:
    """Each whole slot with its running number, in no order."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    slots = []
    for line in lines:
        if line.isspace():
            continue
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            data = json.loads(line)
            slots.append((int(data["n"]), from_plain(MemorySample, data)))
    return slots
