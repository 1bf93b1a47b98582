"""Read every stored chunk of a level once, in several processes, and list those that are broken.

What was read is written down task by task, so that an interrupted verification continues where it stopped:

    ~/.cache/vesuvius/verify/ID.jsonl   first line: which volume, a digest of the objects to read, and when it began
                                        then a line per task of whole chunks: its number and its chunks
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, StoreConfig, Triple
from vesuvius.errors import ConfigError, DataError, storage_errors
from vesuvius.runlog.files import take_lock
from vesuvius.runlog.records import parsed, records_in
from vesuvius.volumes.box import Box, chunk_box, grid_shape, intersection, triple
from vesuvius.volumes.chunks import ChunkGrid
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.listing import Bools, list_objects, read_sidecar
from vesuvius.volumes.missing import StoredChunks
from vesuvius.volumes.volume import Nan, Volume, metadata_hash, open_volume

log = logging.getLogger(__name__)

_CHUNKS_PER_TASK = 64
_STAGED_AHEAD = 8


@dataclass(frozen=True)
class BrokenChunk:
    """A chunk that cannot be read."""

    chunk: Triple
    key: str  # of the object that holds it
    cause: str
    box: Box  # the voxels that are lost with it, (start_zyx, stop_zyx)


@dataclass(frozen=True)
class Reading:
    """What is read, by every process.  Picklable."""

    spec: ArrayConfig
    store: StoreConfig
    stored: StoredChunks | None = None
    nan: Nan = "air"


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

        def count(number: int, chunks: int) -> None:
            figures.done += min(per_task, len(numbers) - number * per_task)
            figures.chunks += chunks

        path = _journal_path(volume)
        with _journal(path, _identity(volume, objects, per_task)) as (journal, began, finished):
            for number, chunks in finished.items():
                count(number, chunks)
            figures.before, figures.before_since = figures.done, began if finished else None
            tasks = (
                (number, _chunks_of(grid, numbers[number * per_task : (number + 1) * per_task]))
                for number in range(-(-len(numbers) // per_task))
                if number not in finished
            )
            reads = read_in_processes(Reading(spec, store, stored), volume, tasks, processes)
            with closing(reads):  # type: ignore[type-var]
                for number, read, broken in reads:
                    if not broken:  # what is broken may have been restored next time
                        with _storage_errors(path):
                            journal.write(json.dumps({"number": number, "chunks": len(read)}).encode() + b"\n")
                    count(number, len(read))
                    figures.broken += broken
                    figures.seconds = time.monotonic() - started
                    on_progress(figures)
            with suppress(OSError):  # all is done: the next time begins from the start
                path.unlink()
    figures.broken.sort(key=lambda broken: broken.chunk)
    return figures


# ---- processes


def read_in_processes(
    reading: Reading, volume: Volume, tasks: Iterable[tuple[int, list[Triple]]], processes: int
) -> Iterator[tuple[int, list[Triple], list[BrokenChunk]]]:
    """Read all chunks of all tasks.  Closing the iterator ends the processes.

    A chunk that ends the process that decodes it is broken: the tasks in hand are then read again, chunk by chunk.

    Args:
        volume: the same one, opened here, to name keys and boxes; no chunk is read with it.
        tasks: a number and the chunks, of each.
        processes: at work at once.

    Yields:
        Number and chunks of a task, and those of them that are broken.

    Raises:
        DataError: the volume as a whole cannot be read any more.
    """
    waiting, running = iter(tasks), dict[Future[list[BrokenChunk]], tuple[int, list[Triple]]]()
    died: list[tuple[int, list[Triple]]] = []
    with _pool(reading, processes) as pool:
        while True:
            while not died and len(running) < processes and (task := next(waiting, None)) is not None:
                try:
                    running[pool.submit(_read_chunks, task[1])] = task
                except BrokenProcessPool:  # while the caller had the last result
                    died.append(task)
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number, chunks = running.pop(future)
                try:
                    yield number, chunks, future.result()
                except BrokenProcessPool:
                    died.append((number, chunks))
    for number, chunks in died:
        yield number, chunks, _read_one_by_one(reading, volume, chunks)
    if died:
        yield from read_in_processes(reading, volume, waiting, processes)


def _read_one_by_one(reading: Reading, volume: Volume, chunks: list[Triple]) -> list[BrokenChunk]:
    """In one process at a time; each that dies names the chunk that it died of."""
    broken, left = list[BrokenChunk](), list(chunks)
    while left:
        with _pool(reading, 1) as pool, suppress(BrokenProcessPool):
            try:
                pool.submit(_begun).result()
            except BrokenProcessPool as error:
                raise DataError(
                    f"No process for the reading of {volume.name} can be started; check the machine's memory and its "
                    "limit of processes"
                ) from error
            while left:
                broken += pool.submit(_read_chunks, left[:1]).result()
                left.pop(0)
        if left:
            chunk = left.pop(0)
            box, key = volume.grid.box_of(chunk), volume.grid.key_of(chunk)
            broken.append(
                BrokenChunk(chunk, key, "decoding it ended the process (a codec that crashes, or a kill)", box)
            )
    return broken


@contextmanager
def _pool(reading: Reading, processes: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that are ended with the context, whatever they do."""
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin, (reading,))
    try:
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
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # backtraces of what ends the process


def _begun() -> None:
    """Say that this process of the pool has begun."""


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
        _opened = open_volume(_reading.spec, _reading.store, nan=_reading.nan, known=True, stored=_reading.stored)
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


def _journal_path(volume: Volume) -> Path:
    """The same for the same level, wherever the command is run."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    address = volume.source.address if volume.source.remote else str(Path(volume.source.address).resolve())
    name = hashlib.sha256(f"{address}#{volume.array.path}#{volume.axes}".encode()).hexdigest()[:24]
    return root / "vesuvius" / "verify" / f"{name}.jsonl"


@contextmanager
def _journal(path: Path, identity: dict[str, Any]) -> Iterator[tuple[IO[bytes], float, dict[int, int]]]:
    """The file of what was done, for one process at a time; when it was begun; and the chunks of each finished task.

    Raises ConfigError where another process has it, StorageError.
    """
    with _storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", buffering=0)
    with file:
        with _storage_errors(path):
            file.seek(0)
            if not take_lock(file.fileno(), path):
                raise ConfigError(
                    f"one process verifies a level at a time; got another one that holds {path}; wait for it or stop it"
                )
            first, *lines = file.read().splitlines() or [b""]
            head = parsed(first) or {}
            if head == identity | {"began": head.get("began")}:
                finished = {record["number"]: record["chunks"] for record in records_in(lines)}
                file.write(b"\n")  # the last line is torn where the process was killed
            else:
                if first:
                    log.info("the chunks to read have changed since last time: all are read from the start")
                head, finished = identity | {"began": time.time()}, {}
                file.truncate(0)
                file.write(json.dumps(head).encode() + b"\n")
        yield file, head["began"], finished


def _storage_errors(path: Path) -> Any:
    rule = "the record of what was verified needs a writable place"
    return storage_errors(rule, "free some space, or set XDG_CACHE_HOME to a writable folder", f"for {path}")
