"""Read every stored chunk of a level once, and list those that are broken.

What was read is written down task by task, so that an interrupted verification continues where it stopped:

    ~/.cache/vesuvius/verify/ID.jsonl   first line: which volume, a digest of the objects to read, and when it began
                                        then a line per task: its number, its chunks, and the broken ones

Tasks with broken chunks are read again: these may have been restored since.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, StoreConfig, Triple
from vesuvius.errors import ConfigError, storage_errors
from vesuvius.runlog.files.file_lock import take_lock
from vesuvius.runlog.records import parsed, records_in
from vesuvius.volume_tools.child_reads import BrokenChunk, FinishedTask, Reading, read_in_children
from vesuvius.volumes.box import chunk_box, grid_shape, triple
from vesuvius.volumes.chunks import ChunkGrid
from vesuvius.volumes.listing import Bools, kept_file, list_objects, read_sidecar
from vesuvius.volumes.missing import StoredChunks
from vesuvius.volumes.volume import Volume, metadata_hash, open_volume

log = logging.getLogger(__name__)

_CHUNKS_PER_TASK = 64


@dataclass
class VerifyFigures:
    """How far a verification is, and in the end the report of it."""

    volume: str  # path and level
    objects: int  # chunks to read, or shards
    before: int = 0  # of these, found whole by earlier processes
    before_since: float | None = None  # when the first of those began, seconds since 1970; None where `before` is 0
    done: int = 0  # read so far, those included
    chunks: int = 0  # chunks read so far; inner ones of shards
    broken: list[BrokenChunk] = field(default_factory=list)  # of these, those that cannot be read, in order
    seconds: float = 0.0  # of this process


def verify_volume(
    spec: ArrayConfig,
    store: StoreConfig = StoreConfig(),
    processes: int = 1,
    on_progress: Callable[[VerifyFigures], None] = lambda figures: None,
) -> VerifyFigures:
    """Read every stored chunk once, or continue where an earlier process ended.

    A chunk that the sidecar names and that is absent is broken.  Where there is neither a sidecar nor a listing, as on
    a web server, all places are asked for, and what is absent is air.

    Args:
        processes: that read and decode at once.
        on_progress: called after each task, from this thread.

    Raises:
        ConfigError: another process verifies the same level.
        DataError: the volume cannot be opened or listed, or its store is away for longer than `outage_minutes`.
        StorageError: the file that keeps what was done cannot be written.
    """
    started = time.monotonic()
    with closing(open_volume(spec, store)) as volume:
        objects, stored = _objects(volume)
        numbers = np.flatnonzero(objects)
        grid = volume.grid
        per_task = max(_CHUNKS_PER_TASK // math.prod(grid_shape(grid.object_zyx, grid.chunk_zyx)), 1)
        figures = VerifyFigures(volume.name, len(numbers))
        with _Journal.held(kept_file(volume, "verify", ".jsonl"), _identity(volume, objects, per_task)) as journal:
            for task in journal.finished.values():
                _count(figures, task, min(per_task, len(numbers) - task.number * per_task))
            figures.before = figures.done
            figures.before_since = journal.began if figures.before else None
            tasks = (
                (number, _chunks_of(grid, numbers[number * per_task : (number + 1) * per_task]))
                for number in range(-(-len(numbers) // per_task))
                if number not in journal.finished
            )
            reads = read_in_children(Reading(spec, store, stored), volume, tasks, processes)
            with closing(reads):  # type: ignore[type-var]
                for task in reads:
                    journal.add(task)
                    _count(figures, task, min(per_task, len(numbers) - task.number * per_task))
                    figures.seconds = time.monotonic() - started
                    on_progress(figures)
            journal.remove()
    figures.broken.sort(key=lambda broken: broken.chunk)
    return figures


def _count(figures: VerifyFigures, task: FinishedTask, objects: int) -> None:
    figures.done += objects
    figures.chunks += task.chunks
    figures.broken += task.broken


def _objects(volume: Volume) -> tuple[Bools, StoredChunks | None]:
    """Which chunks, or shards, are to be read; and which chunks must be there, where that is known."""
    sidecar = read_sidecar(volume)
    grid = volume.grid
    counts = grid.object_counts_zyx
    objects = list_objects(volume) if volume.source.can_list else np.full(counts, sidecar is None)
    if sidecar is None:
        return objects, None
    per_object = [-(-n // c) for n, c in zip(sidecar.shape, counts, strict=True)]
    objects[tuple((np.argwhere(sidecar) // per_object).T)] = True
    return objects, StoredChunks.of(sidecar) if sidecar.shape == grid.counts_zyx else None


def _chunks_of(grid: ChunkGrid, numbers: NDArray[np.int64]) -> list[Triple]:
    """The chunks in objects of these flat numbers."""
    places = np.stack(np.unravel_index(numbers, grid.object_counts_zyx), axis=1).tolist()
    boxes = (chunk_box(triple(place), grid.object_zyx, grid.shape_zyx) for place in places)
    return [chunk for box in boxes for chunk in grid.chunks_of(box)]


def _identity(volume: Volume, objects: Bools, per_task: int) -> dict[str, Any]:
    """What must be the same for a verification to continue: else the numbers of its tasks mean something else."""
    return {
        "volume": volume.name,
        "metadata": metadata_hash(volume.array),
        "objects": hashlib.sha256(np.packbits(objects).tobytes()).hexdigest()[:16],
        "per_task": per_task,
    }


class _Journal:
    """What was done, a line per task; one process at a time.

    Attributes:
        finished: tasks that earlier processes have finished, and of which all chunks were whole.
        began: when the first of those processes did, seconds since 1970.
    """

    def __init__(self, path: Path, identity: dict[str, Any], file: FileIO) -> None:
        self.finished: dict[int, FinishedTask] = {}
        self._path, self._file = path, file
        first, *lines = file.readall().splitlines() or [b""]
        head = parsed(first)
        if head and head == identity | {"began": head.get("began")}:
            self.began: float | None = head["began"]
            for record in records_in(lines):
                if not record["broken"]:  # the last line is torn where the process was killed
                    self.finished[record["number"]] = FinishedTask(record["number"], record["chunks"])
            file.write(b"\n")
            return
        if first:
            log.info("the chunks to read have changed since last time: all are read from the start")
        file.truncate(0)
        file.seek(0)
        self.began = time.time()
        self._write(identity | {"began": self.began})

    @classmethod
    @contextmanager
    def held(cls, path: Path, identity: dict[str, Any]) -> Iterator[_Journal]:
        """Open or begin a journal.  Raises ConfigError where another process has it, StorageError."""
        with _storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = FileIO(path, "a+")
        with file:
            with _storage_errors(path):
                file.seek(0)
                if not take_lock(file.fileno(), path):
                    raise ConfigError(
                        f"one process verifies a level at a time; got another one that holds {path}; wait for it or "
                        "stop it"
                    )
                journal = cls(path, identity, file)
            yield journal

    def add(self, task: FinishedTask) -> None:
        """Write down that a task is done.  Raises StorageError."""
        with _storage_errors(self._path):
            self._write(asdict(task))

    def remove(self) -> None:
        """All is done: the next time begins from the start."""
        with suppress(OSError):
            os.unlink(self._path)

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")


def _storage_errors(path: Path) -> AbstractContextManager[None]:
    rule = "the record of what was verified needs a writable place"
    remedy = "free some space, or set XDG_CACHE_HOME to a writable folder"
    return storage_errors(rule, remedy, f"for {path}")
