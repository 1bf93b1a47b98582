"""Evaluates a network on the tiles of a volume larger than memory: tasks, their files, and their order.

    state/00007/tiles/      results of the network in step 7, one file per tile, kept while a block needs it

Two jobs stand on this base (docs/design.md, "Tiles of a whole volume"): prediction (`predict/run.py`) and sampling
(`generate/volume/steps.py`).  Tasks give the same result in any process and order, and files are the only record of
progress.  Blocks are processed in groups, by index, and three groups roll at the same time: the input of the next one
is staged, the network sees the tiles over this one, and the blocks of the last one are written.
"""

import itertools
import mmap
import os
import shutil
import socket
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.errors import NonFiniteError
from vesuvius.predict.progress import kept_heap, one_thread
from vesuvius.predict.tiling import BlockGrid, Tiling, overlap_slices
from vesuvius.runlog.files import boot_id, flush_to_disk, write_atomically
from vesuvius.runlog.held import refuse_moved
from vesuvius.threads import Pool
from vesuvius.volumes.box import Box, shape_of

Blocks = Collection[int]
"""Indices of blocks, in order.  All blocks of a volume are a `range`, which takes no memory."""

_POLL_S = 0.2
_END_S = 3.0  # for the tasks that run when an error or Ctrl-C ends the others


@dataclass(frozen=True)
class Job:
    """The tiles of a computation, and their batches.  Picklable; methods are pure."""

    tiling: Tiling  # of the results
    batch_size: int  # tiles per network call; a resume does not change the batches
    channels: int = field(default=1, kw_only=True)  # of the results

    @property
    def tiles(self) -> Sequence[int]:
        """The tiles that may be needed, in order."""
        return range(self.tiling.tiles)

    def batches_over(self, blocks: Iterable[int], is_done: Callable[[int], bool] = lambda tile: False) -> set[int]:
        """Return the batches with unfinished tiles over some blocks."""
        tiles = {tile for block in blocks for tile in self.tiling.tiles_over(self.tiling.block_box(block))}
        return {bisect_left(self.tiles, tile) // self.batch_size for tile in tiles if not is_done(tile)}

    def tiles_of(self, batch: int) -> Sequence[int]:
        return self.tiles[batch * self.batch_size :][: self.batch_size]


@dataclass(frozen=True)
class Task:
    """The unit of work: a block of the input to stage, a batch of tiles, or a block of the result."""

    kind: Literal["stage", "tiles", "block"]
    step: int
    index: int  # of the staged block, of the batch, or of the block
    active: bool = True  # whether the block needs the network
    fetched_bytes: int = 0  # by the process of a finished task, since its last one


class BlockArray:
    """One value per voxel, in the folder `path`: a file of raw voxels per block of a grid.  Raises OSError."""

    def __init__(self, path: Path, grid: BlockGrid, dtype: np.dtype[Any] | str = "float32") -> None:
        self.path, self._grid = path, grid
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def has(self, block: int) -> bool:
        return self._file(block).exists()

    def write(self, block: int, voxels: NDArray[Any], flush: bool = True) -> None:
        """Write a block, in the shape of its box; once it is flushed, it survives a crash of the machine."""
        write_atomic(self._file(block), np.ascontiguousarray(voxels, self._dtype), flush)

    def delete(self, block: int) -> None:
        self._file(block).unlink(missing_ok=True)

    def read(self, box: Box, used: Container[int] | None = None) -> NDArray[Any]:
        """Return the voxels of a box.  Its blocks must exist; with `used`, blocks outside it read as 0."""
        out = np.zeros(shape_of(box), self._dtype)
        for block in self._grid.blocks_over(box):
            if used is None or block in used:
                _, there, here = overlap_slices(whole := self._grid.block_box(block), box)
                out[here] = map_file(self._file(block), self._dtype, shape_of(whole))[there]
        return out

    def _file(self, block: int) -> Path:
        z, y, x = self._grid.block_index(block)
        return self.path / f"{z}.{y}.{x}"


def write_atomic(file: Path, voxels: NDArray[Any], flush: bool = False) -> None:
    """Write under a temporary name and rename, so an existing file is complete and files alone record the progress."""
    refuse_moved(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{socket.gethostname()}.{os.getpid()}.{threading.get_native_id()}.tmp")
    voxels.tofile(temporary)
    if flush:
        flush_to_disk(temporary)
    temporary.replace(file)


def map_file(file: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Map a file as an array; only pages that are accessed are read.  (`np.memmap` is several times slower.)"""
    with file.open("rb", buffering=0) as opened:
        voxels: NDArray[Any] = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), dtype)
    return voxels.reshape(shape)


class Tiles:
    """Results of the network, float32 [channels, *patch], in the folder `path`: a file per tile.  Raises OSError."""

    def __init__(self, path: Path, tiling: Tiling, channels: int = 1) -> None:
        self.path, self._tiling, self._channels = path, tiling, channels

    def file(self, tile: int) -> Path:
        return self.path / str(tile)

    def has(self, tile: int) -> bool:
        return self.file(tile).exists()

    def write(self, tile: int, values: NDArray[Any]) -> None:
        """Write a tile; a crash of the machine may lose it (`delete_unflushed`)."""
        write_atomic(self.file(tile), np.ascontiguousarray(values, "<f4"))

    def blended(self, box: Box) -> Tensor:
        """Return the weighted mean of all tiles over a box, summed by index: float32 [channels, Z, Y, X]."""
        total = np.zeros((self._channels, *shape_of(box)), np.float32)
        weights = np.zeros(shape_of(box), np.float32) if self._tiling.window == "gaussian" else None
        for tile in self._tiling.tiles_over(box):
            values = map_file(self.file(tile), np.dtype("<f4"), (self._channels, *self._tiling.patch_zyx))
            self._tiling.add_tile(tile, values, box, total, weights)
        return torch.from_numpy(total if weights is None else np.divide(total, weights, out=total))


class TaskRunner(ABC):
    """Runs tasks on the files of a job, also in several processes and threads at the same time; raises OSError.

    The network sees at most `evaluations` batches at once; other threads read and write meanwhile.
    """

    def __init__(self, job: Job, evaluations: int = 1) -> None:
        self._job, self._evaluating, self._closed = job, threading.Semaphore(evaluations), False

    def run(self, task: Task) -> Task:
        torch.set_num_threads(1)  # the same order of summation on every machine; each thread has its own setting
        if task.kind == "stage":
            return replace(task, fetched_bytes=self.stage(task.index))
        if task.kind == "tiles":
            self.evaluate_tiles(task.step, task.index)
        else:
            self.write_block(task.step, task.index, task.active)
        return task

    def evaluate_tiles(self, step: int, batch: int) -> None:
        tiles = self._job.tiles_of(batch)
        # The last batch is padded, because results may depend on the batch size.
        inputs = self.read(step, [*tiles, *[tiles[-1]] * (self._job.batch_size - len(tiles))])
        with self._evaluating:
            results = None if self._closed else self.evaluate(step, tiles, inputs)
        if results is None or self._closed:
            return  # nobody waits for it, and the files may be those of another run
        for tile, values in zip(tiles, results.float().cpu().numpy(), strict=False):
            if not np.isfinite(values).all():
                raise NonFiniteError(self.non_finite(step, tile))
            self.tiles(step).write(tile, values)

    @abstractmethod
    def tiles(self, step: int) -> Tiles: ...

    @abstractmethod
    def read(self, step: int, tiles: Sequence[int]) -> Any:
        """Return what the network sees of these tiles."""

    @abstractmethod
    def evaluate(self, step: int, tiles: Sequence[int], inputs: Any) -> Tensor:
        """Return the network's results for what `read` returned: [B, channels, *patch]."""

    @abstractmethod
    def write_block(self, step: int, block: int, active: bool = True) -> None:
        """Write a block from the tiles over it; one that is not active needs none."""

    @abstractmethod
    def non_finite(self, step: int, tile: int) -> str:
        """Return the message for a tile with NaN or infinity."""

    def stage(self, index: int) -> int:
        """Copy a block of the input to the disk; returns the bytes fetched meanwhile."""
        return 0

    def close(self) -> None:
        """Drop the tasks that still run."""
        self._closed = True


OpenRunner = Callable[[], TaskRunner]
"""Creates the `TaskRunner` of a process; picklable."""
RunTasks = Callable[[Iterable[Task]], Iterator[Task]]
"""Runs tasks in any order and yields each when it is done: `run_locally`, `ray_workers`."""


@contextmanager
def run_locally(
    open_runner: OpenRunner, threads: int = 1, check: Callable[[], None] = lambda: None
) -> Iterator[RunTasks]:
    """Run tasks in this process, on this thread or on several others; `check` may raise to stop while they run.

    The threads have ended when the context ends, except that a slow network goes on, with a result that is dropped.
    """
    with one_thread(), kept_heap():
        runner, pool = open_runner(), Pool(threads, "tiles")

        def run(tasks: Iterable[Task]) -> Iterator[Task]:
            if threads == 1:
                yield from map(runner.run, tasks)
                return
            running = {pool.submit(runner.run, task) for task in tasks}
            while running:
                done, running = wait(running, _POLL_S, FIRST_COMPLETED)
                check()
                yield from (each.result() for each in done)

        try:
            yield run
        finally:
            pool.close()
            runner.close()
            deadline = time.monotonic() + _END_S
            for thread in pool.threads:
                thread.join(max(deadline - time.monotonic(), 0))


class RollingRun:
    """One step of a job on its blocks, in order, without those written; `active` are those that need the network."""

    def __init__(
        self, job: Job, tiles: Tiles, step: int, active: Container[int], written: Callable[[int], bool] | None = None
    ) -> None:
        self._job, self._tiles, self._step, self._active = job, tiles, step, active
        self._is_written = written or (lambda block: False)

    def run(self, blocks: Iterable[int], per_group: int, run_tasks: RunTasks) -> Iterator[Task]:
        """Run the missing tasks of these blocks, and yield each when it is done."""
        upcoming, here, ahead = iter(blocks), list[int](), list[int]()
        while True:
            before, here, ahead = here, ahead, list(itertools.islice(upcoming, per_group))
            if not (before or here or ahead):
                return
            batches = self._batches(here)
            staged = self.to_stage(self._batches(ahead) - batches)
            kinds = (
                [Task("tiles", self._step, batch) for batch in sorted(batches)],
                [Task("stage", self._step, index) for index in staged],
                [Task("block", self._step, n, n in self._active) for n in before if not self._is_written(n)],
            )
            yield from run_tasks(_interleaved(*kinds))
            if before:
                self._delete_tiles(before)
                self.finish(before)

    def to_stage(self, batches: set[int]) -> list[int]:
        """Return the blocks of the input that these batches need and that are not there."""
        return []

    def finish(self, blocks: list[int]) -> None:
        """Record that these blocks and all before them are written; delete what no later one needs."""

    def _batches(self, blocks: list[int]) -> set[int]:
        missing = (block for block in blocks if block in self._active and not self._is_written(block))
        return self._job.batches_over(missing, self._tiles.has)

    def _delete_tiles(self, blocks: list[int]) -> None:
        tiling, active = self._job.tiling, filter(self._active.__contains__, blocks)
        for tile in {tile for block in active for tile in tiling.tiles_over(tiling.block_box(block))}:
            if self.is_finished(tile, blocks[-1]):
                self._tiles.file(tile).unlink(missing_ok=True)

    def is_finished(self, tile: int, last: int) -> bool:
        """Whether no block after `last` needs a tile."""
        over = self._job.tiling.blocks_over(self._job.tiling.tile_box(tile))
        return all(block <= last or block not in self._active for block in over)


def _interleaved(*kinds: list[Task]) -> list[Task]:
    """Spread the tasks of each kind evenly, so that reading and writing overlap with the network."""
    placed = (((i + 0.5) / len(tasks), task) for tasks in kinds for i, task in enumerate(tasks))
    return [task for _, task in sorted(placed, key=lambda each: each[0])]


def delete_unflushed(folder: Path, unflushed: str) -> None:
    """After a crash of the machine, delete what was not flushed to the disk: folders that match a pattern."""
    now = f"{boot_id()}\n".encode()
    file = folder / "boot"
    if file.exists() and file.read_bytes() != now:
        for path in folder.glob(unflushed):
            shutil.rmtree(path)
    write_atomically(file, now)
