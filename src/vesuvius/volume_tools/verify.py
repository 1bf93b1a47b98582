"""Reads every stored chunk of a level once, on several threads, and lists the broken ones.

Intact chunks are recorded, so that an interrupted verification can continue:

    ~/.cache/vesuvius/verify/ID.txt     start time, then numbers of chunks (or shards), <12><13>...; a number torn by a
                                        kill has no end
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, StoreConfig, Triple
from vesuvius.errors import storage_errors
from vesuvius.threads import Pool
from vesuvius.volumes.box import Box, chunk_box, grid_shape, intersection, triple
from vesuvius.volumes.chunks import ChunkGrid
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.format.metadata import metadata_hash
from vesuvius.volumes.occupancy import Bools, list_objects, read_sidecar
from vesuvius.volumes.volume import Volume, open_volume

log = logging.getLogger(__name__)

_CHUNKS_PER_TASK = 64
_TASKS_AHEAD = 2  # per thread
_STAGED_AHEAD = 8

Task = tuple[list[int], list[Triple]]
"""Objects that are read together: their indices in the flattened grid of objects, and their chunks."""


@dataclass(frozen=True)
class BrokenChunk:
    """An unreadable chunk."""

    chunk: Triple
    key: str  # of the object that holds it
    cause: str
    box: Box  # the damaged voxels, (start_zyx, stop_zyx)


@dataclass
class VerifyStats:
    """Progress and final report of a verification."""

    volume: str  # path and level
    objects: int  # chunks or shards to read
    since: str  # start time of the first session
    before: int = 0  # objects verified by earlier sessions
    done: int = 0  # objects read so far, including `before`
    chunks: int = 0  # (inner) chunks read in this session
    broken: list[BrokenChunk] = field(default_factory=list)  # unreadable chunks, in order
    seconds: float = 0.0  # of this session


def verify_volume(
    spec: ArrayConfig,
    store: StoreConfig = StoreConfig(),
    threads: int = 1,
    on_progress: Callable[[VerifyStats], None] = lambda stats: None,
) -> VerifyStats:
    """Read every stored chunk once, on several threads, or resume an interrupted verification.

    Absent chunks are broken if the sidecar lists them.  Without a sidecar or a listing, as on a web server, every chunk
    is requested, and absent ones are air.  Calls `on_progress` after each task, from this thread.  Raises DataError:
    the volume cannot be opened or listed, or its store did not answer for `outage_minutes`; StorageError: the progress
    file cannot be written.
    """
    started = time.monotonic()
    with open_volume(spec, store) as volume:
        objects, volume.missing.listed = _objects(volume)
        journal = _journal_of(volume)
        with _storage_errors(journal):
            journal.parent.mkdir(parents=True, exist_ok=True)
            if not journal.exists():
                journal.write_text(time.strftime("%Y-%m-%d %H:%M:%S\n"))
            since, _, text = journal.read_text().partition("\n")
        numbers = np.flatnonzero(objects)
        left = np.setdiff1d(numbers, [int(number) for number in re.findall(r"<(\d+)>", text)])
        before = len(numbers) - len(left)
        stats = VerifyStats(volume.name, len(numbers), since, before, before)
        if before:
            words = "resuming the verification started on %s: %d of %d chunks (or shards) are already verified"
            log.info(words, since, before, len(numbers))
        with closing(_read_tasks(volume, _tasks(volume.grid, left), threads)) as reads:
            for (some, chunks), broken in reads:
                if not broken:  # broken chunks are read again in the next session, they may have been restored
                    with _storage_errors(journal), journal.open("a") as file:
                        file.write("".join(f"<{number}>" for number in some) + "\n")
                stats.done += len(some)
                stats.chunks += len(chunks)
                stats.broken += broken
                stats.seconds = time.monotonic() - started
                on_progress(stats)
        journal.unlink(missing_ok=True)
    stats.broken.sort(key=lambda broken: broken.chunk)
    return stats


def _read_tasks(
    volume: Volume, tasks: Iterator[Task], threads: int
) -> Generator[tuple[Task, list[BrokenChunk]], None, None]:
    """Read tasks on several threads; yields them in order, each with its broken chunks."""
    pool, reading = Pool(threads, "verify"), deque[tuple[Task, Future[list[BrokenChunk]]]]()
    try:
        for task in tasks:
            reading.append((task, pool.submit(_read_chunks, volume, task[1])))
            if len(reading) > _TASKS_AHEAD * threads:
                first, broken = reading.popleft()
                yield first, broken.result()
        yield from ((first, broken.result()) for first, broken in reading)
    finally:
        pool.close()


def _read_chunks(volume: Volume, chunks: list[Triple]) -> list[BrokenChunk]:
    broken, lost = list[BrokenChunk](), None
    boxes = [volume.grid.box_of(chunk) for chunk in chunks]
    for i, box in enumerate(boxes):
        if lost is not None and intersection(box, lost) == box:
            volume.release(box)
            continue  # already reported with its shard's damaged index
        for ahead in boxes[i : i + _STAGED_AHEAD]:
            volume.stage(ahead)
        try:
            volume.read(box)
        except UnreadableChunkError as error:
            lost = error.box
            broken.append(BrokenChunk(error.chunk, volume.grid.key_of(error.chunk), error.cause, error.box))
    return broken


# ---- tasks and progress


def _objects(volume: Volume) -> tuple[Bools, Bools | None]:
    """Which chunks (or shards) to read, and which chunks must exist (None = unknown)."""
    sidecar = read_sidecar(volume)
    grid = volume.grid
    counts = grid.object_counts_zyx
    objects = list_objects(volume) if volume.source.can_list else np.full(counts, sidecar is None)
    if sidecar is None:
        return objects, None
    per_object = [-(-n // c) for n, c in zip(sidecar.shape, counts, strict=True)]
    objects[tuple((np.argwhere(sidecar) // per_object).T)] = True
    return objects, sidecar if sidecar.shape == grid.counts_zyx else None


def _journal_of(volume: Volume) -> Path:
    """The progress file of a level, identified by its address and metadata."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    address = volume.source.address if volume.source.remote else str(Path(volume.source.address).resolve())
    identity = f"{address}#{volume.array.path}#{volume.axes}#{metadata_hash(volume.array)}"
    return root / "vesuvius" / "verify" / f"{hashlib.sha256(identity.encode()).hexdigest()[:24]}.txt"


def _storage_errors(path: Path) -> AbstractContextManager[None]:
    return storage_errors(f"the progress file {path}", "free some space or set XDG_CACHE_HOME to a writable folder")


def _tasks(grid: ChunkGrid, numbers: NDArray[np.int64]) -> Iterator[Task]:
    """Split objects into tasks of about the same number of chunks."""
    per_task = max(_CHUNKS_PER_TASK // math.prod(grid_shape(grid.object_zyx, grid.chunk_zyx)), 1)
    for first in range(0, len(numbers), per_task):
        some = numbers[first : first + per_task]
        indices = np.stack(np.unravel_index(some, grid.object_counts_zyx), axis=1).tolist()
        boxes = (chunk_box(triple(index), grid.object_zyx, grid.shape_zyx) for index in indices)
        yield some.tolist(), [chunk for box in boxes for chunk in grid.chunks_of(box)]
