"""Reads every stored chunk of a level once, in several processes, and lists the broken ones.

Intact chunks are recorded, so that an interrupted verification can continue:

    ~/.cache/vesuvius/verify/ID.txt     start time, then numbers of chunks (or shards), <12><13>...; a number torn by a
                                        kill has no end
"""

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
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, StoreConfig, Triple
from vesuvius.errors import DataError, storage_errors
from vesuvius.runlog.files import cache_folder
from vesuvius.volumes.box import Box, chunk_box, grid_shape, intersection, triple
from vesuvius.volumes.chunks import ChunkGrid
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.format.metadata import metadata_hash
from vesuvius.volumes.occupancy import Bools, check_shards, list_objects, read_sidecar
from vesuvius.volumes.volume import Volume, open_volume

log = logging.getLogger(__name__)

_CHUNKS_PER_TASK = 64
_TASKS_AHEAD = 8  # per process; they are read again after a process dies
_STAGED_AHEAD = 8

Task = tuple[list[int], list[Triple]]
"""Objects that a process reads together: their indices in the flattened grid of objects, and their chunks."""


@dataclass(frozen=True)
class BrokenChunk:
    chunk: Triple
    key: str  # of the object that holds it
    cause: str
    box: Box  # the damaged voxels, (start_zyx, stop_zyx)


@dataclass(frozen=True)
class Reading:
    """Opens the volume in a reading process.  Picklable."""

    spec: ArrayConfig
    store: StoreConfig
    listed: Bools | None  # chunks that must exist; None = unknown

    def open(self) -> Volume:
        volume = open_volume(self.spec, self.store, reopened=True)
        volume.missing.listed = self.listed
        return volume


@dataclass
class VerifyStats:
    """Progress and final report of a verification."""

    volume: str  # path and level
    objects: int  # chunks or shards to read
    since: str  # start time of the first process
    before: int = 0  # objects verified by earlier processes
    done: int = 0  # objects read so far, including `before`
    chunks: int = 0  # (inner) chunks read by this process
    broken: list[BrokenChunk] = field(default_factory=list)  # unreadable chunks, in order
    seconds: float = 0.0  # of this process


def verify_volume(
    spec: ArrayConfig,
    store: StoreConfig = StoreConfig(),
    processes: int = 1,
    on_progress: Callable[[VerifyStats], None] = lambda stats: None,
) -> VerifyStats:
    """Read every stored chunk once, in several processes, or resume an interrupted verification.

    Absent chunks are broken if the sidecar lists them.  Without a sidecar or a listing, as on a web server, every chunk
    is requested, and absent ones are air.  Calls `on_progress` after each task, from this thread.  Raises DataError:
    the volume cannot be opened or listed, or its store did not answer for `outage_minutes`; StorageError: the progress
    file cannot be written.
    """
    started = time.monotonic()
    with open_volume(spec, store) as volume:
        objects, listed = _objects(volume)
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
        reads = _read_tasks(Reading(spec, store, listed), volume.grid, _tasks(volume.grid, left), processes)
        with closing(reads):
            for (some, chunks), broken in reads:
                if not broken:  # broken chunks are read again by the next process, they may have been restored
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


# ---- processes


def _read_tasks(
    reading: Reading, grid: ChunkGrid, tasks: Iterator[Task], processes: int
) -> Generator[tuple[Task, list[BrokenChunk]], None, None]:
    """Read all tasks; yields each task with its broken chunks.  Closing the generator ends the processes.

    If a process dies while decoding, unfinished tasks are read again chunk by chunk.

    Raises DataError: the volume is no longer readable, or no process can be started.
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
    """Read in one process at a time, so that each death identifies the chunk that caused it."""
    broken, left = list[BrokenChunk](), list(chunks)
    while left:
        with _pool(reading, 1) as pool:
            try:
                while left:
                    broken += pool.submit(_read_chunks, left[:1]).result()
                    left.pop(0)
            except BrokenProcessPool:
                chunk, cause = left.pop(0), "decoding it killed the process (a crash in a codec, or SIGKILL)"
                broken.append(BrokenChunk(chunk, grid.key_of(chunk), cause, grid.box_of(chunk)))
    return broken


@contextmanager
def _pool(reading: Reading, processes: int) -> Iterator[ProcessPoolExecutor]:
    """A process pool that is terminated with the context.  Raises DataError if no process can be started."""
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin, (reading,))
    try:
        try:
            pool.submit(os.getpid).result()
        except BrokenProcessPool as error:
            raise DataError(
                "Cannot start a reading process; check the machine's memory and its limit on processes"
            ) from error
        yield pool
    finally:
        started = list((pool._processes or {}).values())  # Python 3.14 has terminate_workers
        pool.shutdown(wait=False, cancel_futures=True)
        for process in started:
            process.terminate()
        for process in started:
            process.join()


_volume: Callable[[], Volume]  # set in the processes of a pool


def _begin(reading: Reading) -> None:
    """Initialize a process of the pool."""
    global _volume
    _volume = cache(reading.open)
    for number in (signal.SIGINT, signal.SIGHUP):  # sent to all processes of a terminal
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # numcodecs creates a lock for blosc.  In a spawned process the lock has a name, and after a termination Python's
    # resource tracker reports a leak; with the fork method it has none.  No process is started from here.
    multiprocessing.set_start_method("fork", force=True)


def _end_with_parent() -> None:
    """Exit when the parent dies, which may be killed without ending its children."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _read_chunks(chunks: list[Triple]) -> list[BrokenChunk]:
    """Read chunks in this process; returns the broken ones."""
    volume, broken, lost = _volume(), list[BrokenChunk](), None
    boxes = [volume.grid.box_of(chunk) for chunk in chunks]
    for i, box in enumerate(boxes):
        if lost is not None and intersection(box, lost) == box:
            continue  # already reported with its shard's damaged index
        for ahead in boxes[i : i + _STAGED_AHEAD]:
            volume.stage(ahead)
        try:
            volume.read(box)
        except UnreadableChunkError as error:
            lost = error.box
            broken.append(BrokenChunk(error.chunk, volume.grid.key_of(error.chunk), error.cause, error.box))
    volume.unstage()
    return broken


# ---- tasks and progress


def _objects(volume: Volume) -> tuple[Bools, Bools | None]:
    """Which chunks (or shards) to read, and which chunks must exist (None = unknown)."""
    sidecar = read_sidecar(volume)
    grid = volume.grid
    counts = grid.object_counts_zyx
    objects = list_objects(volume) if volume.source.can_list else np.full(counts, sidecar is None)
    if grid.shard_zyx is not None and volume.source.can_list:
        check_shards(volume, objects)
    if sidecar is None:
        return objects, None
    per_object = [-(-n // c) for n, c in zip(sidecar.shape, counts, strict=True)]
    objects[tuple((np.argwhere(sidecar) // per_object).T)] = True
    return objects, sidecar if sidecar.shape == grid.counts_zyx else None


def _journal_of(volume: Volume) -> Path:
    """The progress file of a level, identified by its address and metadata."""
    address = volume.source.address if volume.source.remote else str(Path(volume.source.address).resolve())
    identity = f"{address}#{volume.array.path}#{volume.axes}#{metadata_hash(volume.array)}"
    return cache_folder() / "verify" / f"{hashlib.sha256(os.fsencode(identity)).hexdigest()[:24]}.txt"


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
