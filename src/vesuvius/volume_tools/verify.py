"""Read every stored chunk of a level once, in several processes, and list those that are broken.

What was read and found whole is kept, so that an interrupted verification continues where it stopped:

    ~/.cache/vesuvius/verify/ID.txt     when it began, then numbers of chunks (or shards), <12><13>...; one that a kill
                                        has torn has no end
"""

from __future__ import annotations

import hashlib
import logging
import math
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, StoreConfig, Triple
from vesuvius.errors import DataError, storage_errors
from vesuvius.volumes.box import Box, chunk_box, grid_shape, intersection, triple
from vesuvius.volumes.chunks import ChunkGrid
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.format.metadata import metadata_hash
from vesuvius.volumes.missing import StoredChunks
from vesuvius.volumes.occupancy import Bools, list_objects, read_sidecar
from vesuvius.volumes.volume import Volume, open_volume

log = logging.getLogger(__name__)

_CHUNKS_PER_TASK = 64
_TASKS_AHEAD = 8  # per process: after the death of one of them, that many are read again
_STAGED_AHEAD = 8

Task = tuple[list[int], list[Triple]]
"""Objects that one process reads together: their numbers in the flat grid of objects, and their chunks."""


@dataclass(frozen=True)
class BrokenChunk:
    """A chunk that cannot be read."""

    chunk: Triple
    key: str  # of the object that holds it
    cause: str
    box: Box  # the voxels that are lost with it, (start_zyx, stop_zyx)


@dataclass
class VerifyFigures:
    """How far a verification is, and in the end the report of it."""

    volume: str  # path and level
    objects: int  # chunks to read, or shards
    since: str  # when it began, of a continued one the first time
    before: int = 0  # of the objects, found whole by earlier processes
    done: int = 0  # read so far, those included
    chunks: int = 0  # chunks that this process has read; of shards the inner ones
    broken: list[BrokenChunk] = field(default_factory=list)  # of these, those that cannot be read, in order
    seconds: float = 0.0  # of this process


@dataclass(frozen=True)
class Reading:
    """What every process reads.  Picklable."""

    spec: ArrayConfig
    store: StoreConfig
    stored: StoredChunks | None


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
        DataError: the volume cannot be opened or listed, or its store is away for longer than `outage_minutes`.
        StorageError: the file that keeps what was done cannot be written.
    """
    started = time.monotonic()
    with closing(open_volume(spec, store)) as volume:
        objects, stored = _objects(volume)
        journal = _journal_of(volume)
        with _storage_errors(journal):
            journal.parent.mkdir(parents=True, exist_ok=True)
            if not journal.exists():
                journal.write_text(time.strftime("%Y-%m-%d %H:%M:%S\n"))
            since, _, text = journal.read_text().partition("\n")
        numbers = np.flatnonzero(objects)
        left = np.setdiff1d(numbers, [int(number) for number in re.findall(r"<(\d+)>", text)])
        before = len(numbers) - len(left)
        figures = VerifyFigures(volume.name, len(numbers), since, before, before)
        if before:
            words = "continuing a verification that began on %s: %d of %d chunks (or shards) have been found whole"
            log.info(words, since, before, len(numbers))
        reads = _read_tasks(Reading(spec, store, stored), volume.grid, _tasks(volume.grid, left), processes)
        with closing(reads):
            for (some, chunks), broken in reads:
                if not broken:  # what is broken may have been restored next time
                    with _storage_errors(journal), journal.open("a") as file:
                        file.write("".join(f"<{number}>" for number in some) + "\n")
                figures.done += len(some)
                figures.chunks += len(chunks)
                figures.broken += broken
                figures.seconds = time.monotonic() - started
                on_progress(figures)
        journal.unlink(missing_ok=True)  # all is done: the next time begins from the start
    figures.broken.sort(key=lambda broken: broken.chunk)
    return figures


# ---- processes


def _read_tasks(
    reading: Reading, grid: ChunkGrid, tasks: Iterator[Task], processes: int
) -> Generator[tuple[Task, list[BrokenChunk]], None, None]:
    """Read all chunks of all tasks; yields each task with those that are broken.  Closing it ends the processes.

    Where a process dies of what it decodes, the tasks in hand are read again, chunk by chunk.

    Raises:
        DataError: the volume as a whole cannot be read any more, or no process can be started.
    """
    rounds = iter(lambda: list(islice(tasks, _TASKS_AHEAD * processes)), [])
    is_over = False
    while not is_over:
        left = list[Task]()
        with _pool(reading, processes) as pool, suppress(BrokenProcessPool):
            for left in rounds:
                for broken in pool.map(_read_chunks, [chunks for _, chunks in left]):
                    yield left.pop(0), broken
        for task in left:
            yield task, _read_one_by_one(reading, grid, task[1])
        is_over = not left


def _read_one_by_one(reading: Reading, grid: ChunkGrid, chunks: list[Triple]) -> list[BrokenChunk]:
    """In one process at a time; each that dies names the chunk that it died of."""
    broken, left = list[BrokenChunk](), list(chunks)
    while left:
        with _pool(reading, 1) as pool:
            try:
                while left:
                    broken += pool.submit(_read_chunks, left[:1]).result()
                    left.pop(0)
            except BrokenProcessPool:
                chunk, cause = left.pop(0), "decoding it ended the process (a codec that crashes, or a kill)"
                broken.append(BrokenChunk(chunk, grid.key_of(chunk), cause, grid.box_of(chunk)))
    return broken


@contextmanager
def _pool(reading: Reading, processes: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that are ended with the context, whatever they do.  Raises DataError where none can be started."""
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin, (reading,))
    try:
        try:
            pool.submit(os.getpid).result()
        except BrokenProcessPool as error:
            raise DataError(
                "No process that reads can be started; check the machine's memory and its limit of processes"
            ) from error
        yield pool
    finally:
        started = list((pool._processes or {}).values())  # Python 3.14 has terminate_workers
        pool.shutdown(wait=False, cancel_futures=True)
        for process in started:
            process.terminate()
        for process in started:
            process.join()


_reading: Reading | None = None  # of this process of a pool
_opened: Volume | None = None


def _begin(reading: Reading) -> None:
    """Prepare a process of the pool."""
    global _reading
    _reading = reading
    for number in (signal.SIGINT, signal.SIGHUP):  # they go to all of a terminal's processes; the parent ends us
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # numcodecs makes a lock for blosc.  A spawned process gives it a name, and where it is terminated Python's resource
    # tracker complains of a leak; of the fork kind it has none.  No process is started from here.
    multiprocessing.set_start_method("fork", force=True)


def _end_with_parent() -> None:
    """A parent that was killed cannot end its children."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _read_chunks(chunks: list[Triple]) -> list[BrokenChunk]:
    """Read chunks in this process; those that are broken."""
    global _opened
    assert _reading is not None
    if _opened is None:
        _opened = open_volume(_reading.spec, _reading.store, reopened=True, stored=_reading.stored)
    volume, broken, lost = _opened, list[BrokenChunk](), None
    boxes = [volume.grid.box_of(chunk) for chunk in chunks]
    for place, box in enumerate(boxes):
        if lost is not None and intersection(box, lost) == box:
            continue  # its shard's index is damaged, which was told
        for ahead in boxes[place : place + _STAGED_AHEAD]:
            volume.stage(ahead)
        try:
            volume.read(box)
        except UnreadableChunkError as error:
            lost = error.box
            broken.append(BrokenChunk(error.chunk, volume.grid.key_of(error.chunk), error.cause, error.box))
    volume.unstage()
    return broken


# ---- what is to be read, and what was


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


def _journal_of(volume: Volume) -> Path:
    """The file of what was found whole: one for each level and its metadata, wherever the command is run."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    address = volume.source.address if volume.source.remote else str(Path(volume.source.address).resolve())
    identity = f"{address}#{volume.array.path}#{volume.axes}#{metadata_hash(volume.array)}"
    return root / "vesuvius" / "verify" / f"{hashlib.sha256(identity.encode()).hexdigest()[:24]}.txt"


def _storage_errors(path: Path) -> AbstractContextManager[None]:
    return storage_errors(f"the progress file {path}", "free some space or set XDG_CACHE_HOME to a writable folder")


def _tasks(grid: ChunkGrid, numbers: NDArray[np.int64]) -> Iterator[Task]:
    """Some objects each, of about as many chunks."""
    per_task = max(_CHUNKS_PER_TASK // math.prod(grid_shape(grid.object_zyx, grid.chunk_zyx)), 1)
    for first in range(0, len(numbers), per_task):
        some = numbers[first : first + per_task]
        places = np.stack(np.unravel_index(some, grid.object_counts_zyx), axis=1).tolist()
        boxes = (chunk_box(triple(place), grid.object_zyx, grid.shape_zyx) for place in places)
        yield some.tolist(), [chunk for box in boxes for chunk in grid.chunks_of(box)]
