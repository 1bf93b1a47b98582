"""Keeps the memory samples of the last two minutes in `recent.jsonl`, for memcheck and post-mortems.

There are two files: once the newer one is full, it replaces the older one.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from vesuvius.runlog.files import AppendFile
from vesuvius.runlog.held import where
from vesuvius.runlog.records import read_dataclasses

log = logging.getLogger(__name__)

KEPT = 120


@dataclass(frozen=True)
class MemorySample:
    """Memory of a run at one time."""

    time: float  # seconds since 1970
    step: int  # optimizer steps done
    # used_bytes, shared_bytes: of the run, as in `SystemSample`
    used_bytes: int
    shared_bytes: int
    trainer_bytes: int  # private memory of the trainer
    reader_bytes: Mapping[int, int] = field(default_factory=dict)  # private memory of each reader, by pid
    # the limit that is reached first: its name, its use, and the use at which it kills
    binding_limit: str = ""
    binding_used_bytes: int = 0
    limit_bytes: int = 0
    # level, reason: of the risk
    level: str = "LOW"
    reason: str = ""
    workers: int | None = None  # number of readers; None = unknown
    # vram_used_bytes, vram_limit_bytes: reserved by the trainer's allocator; None without a GPU
    vram_used_bytes: int | None = None
    vram_limit_bytes: int | None = None
    # cgroup_oom_kills, machine_oom_kills: the kernel's counters; None if it does not count
    cgroup_oom_kills: int | None = None
    machine_oom_kills: int | None = None
    # awaits, silent_s: what the loop waited for ("batch", "checkpoint"), and seconds since its last sign of life
    awaits: str = ""
    silent_s: float | None = None


class RecentFile:
    """Writes samples, after those of earlier sessions; survives a full disk, see `AppendFile`.  For one thread."""

    def __init__(self, path: Path, kept: int = KEPT) -> None:
        self._path, self._kept = path, kept
        self._file = AppendFile(path)
        self._lines = path.read_bytes().count(b"\n")

    def write(self, sample: MemorySample) -> None:
        """Append a sample."""
        if self._lines >= self._kept:
            self._rotate()
        self._file.write_line(json.dumps(asdict(sample), separators=(",", ":")))
        self._lines += 1

    def close(self) -> None:
        self._file.close()

    def _rotate(self) -> None:
        self._lines, full = 0, self._file
        try:
            path = where(self._path)
            os.replace(path, _before(path))  # also frees space on a full disk
            self._file = AppendFile(self._path)
            full.close()
        except OSError as error:
            log.warning("cannot rotate %s: %s; it grows until the folder is writable", self._path, error)


def read_recent(path: Path, kept: int = KEPT) -> list[MemorySample]:
    """Return the last samples, oldest first, without torn lines; empty without a file."""
    return [*read_dataclasses(MemorySample, _before(path)), *read_dataclasses(MemorySample, path)][-kept:]


def _before(path: Path) -> Path:
    return path.with_name(f"{path.stem}.before{path.suffix}")
