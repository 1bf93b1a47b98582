"""A network evaluated on the tiles of a volume larger than memory, in one or more steps; all state is in files.

    state/00007/x/          the state before step 7, a `BlockArray`; some jobs keep more than `x`
    state/00007/tiles/      results of the network in step 7, one file per tile, kept while a block needs it
    state/known/, ...       what the job is given

Tasks give the same result in any process and order.  A task writes the `x` of the next state last, so files are the
only record of progress.  Blocks are processed in groups, by index: first the tiles over a group, then its blocks.
Tiles that no later block needs are deleted, so two or three rows of tiles exist at a time.
"""

from __future__ import annotations

import itertools
import mmap
import os
import shutil
import socket
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.config import Triple
from vesuvius.errors import NonFiniteError
from vesuvius.predict.progress import ProgressReporter, one_thread
from vesuvius.predict.tiling import Tiling, overlap_slices
from vesuvius.runlog.files import boot_id, flush_to_disk, write_atomically
from vesuvius.volumes.box import Box, format_box, shape_of

Blocks = Collection[int]
"""Indices of blocks, in order.  All blocks of a volume are a `range`, which takes no memory."""
Fields = dict[str, Tensor]
"""Voxels of a block by name, each in the shape of its box."""
Read = Callable[[str], Tensor]
"""Reads a field of the block's state, or of what the job is given."""
Evaluate = Callable[[int, Tensor, NDArray[Any] | None], Tensor]
"""Maps a step, its `x` over a batch of tiles [B, 1, Z, Y, X], and the given `condition` there, to results like `x`."""

BLOCKS_PER_GROUP = 16
"""Blocks per worker in a group: enough that their tiles keep all workers busy."""


@dataclass(frozen=True)
class Job:
    """The computation of each block: here one step, the network on the given `input`.  Picklable; methods are pure."""

    tiling: Tiling
    batch_size: int  # tiles per network call; a resume does not change the batches

    @property
    def steps(self) -> int:
        return 1

    @property
    def given(self) -> dict[str, str]:
        """Names and dtypes of the arrays that exist in the folder from the start."""
        return {"input": "float32"}

    def first(self, block: int, read: Read) -> Fields:
        """Return the first state of a block."""
        return {"x": read("input")}

    def next(self, step: int, block: int, read: Read, blended: Tensor | None) -> Fields:
        """Return the next state of a block from the blended results of the tiles over it; None = it is not active."""
        return {"x": read("x") if blended is None else blended}

    def batches_over(self, blocks: Iterable[int], is_done: Callable[[int], bool] = lambda tile: False) -> set[int]:
        """Return the batches with unfinished tiles over some blocks."""
        tiles = {tile for block in blocks for tile in self.tiling.tiles_over(self.tiling.block_box(block))}
        return {tile // self.batch_size for tile in tiles if not is_done(tile)}

    def count_batches(self, active: Blocks) -> int:
        return -(-self.tiling.tiles // self.batch_size) if isinstance(active, range) else len(self.batches_over(active))

    def tiles_of(self, batch: int) -> range:
        return range(self.tiling.tiles)[batch * self.batch_size :][: self.batch_size]


@dataclass(frozen=True)
class Task:
    """The unit of work: a batch of tiles, or the next state of a block."""

    step: int  # -1: write the first state
    index: int  # of the block, or of the batch of tiles
    is_batch: bool = False
    active: bool = True  # the block needs the network


class BlockArray:
    """One value per voxel, in the folder `path`: a file of raw voxels per block of a tiling.  Raises OSError."""

    def __init__(self, path: Path, tiling: Tiling, dtype: np.dtype[Any] | str = "float32") -> None:
        self.path, self._tiling = path, tiling
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def has(self, block: int) -> bool:
        return self._file(block).exists()

    def write(self, block: int, voxels: NDArray[Any]) -> None:
        """Write a block, in the shape of its box, and flush it: it survives a crash of the machine."""
        write_atomic(self._file(block), np.ascontiguousarray(voxels, self._dtype), flush=True)

    def read(self, box: Box, used: Container[int] | None = None) -> NDArray[Any]:
        """Return the voxels of a box.  Its blocks must exist; with `used`, blocks outside it read as 0."""
        out = np.zeros(shape_of(box), self._dtype)
        for block in self._tiling.blocks_over(box):
            if used is None or block in used:
                _, there, here = overlap_slices(whole := self._tiling.block_box(block), box)
                out[here] = map_file(self._file(block), self._dtype, shape_of(whole))[there]
        return out

    def _file(self, block: int) -> Path:
        z, y, x = self._tiling.block_index(block)
        return self.path / f"{z}.{y}.{x}"


def write_atomic(file: Path, voxels: NDArray[Any], flush: bool = False) -> None:
    """Write under a temporary name and rename, so an existing file is complete and files alone record the progress."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    voxels.tofile(temporary)
    if flush:
        flush_to_disk(temporary)
    temporary.replace(file)


def map_file(file: Path, dtype: np.dtype[Any], shape: Triple) -> NDArray[Any]:
    """Map a file as an array; only pages that are accessed are read.  (`np.memmap` is several times slower.)"""
    with file.open("rb", buffering=0) as opened:
        voxels: NDArray[Any] = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), dtype)
    return voxels.reshape(shape)


class State:
    def __init__(self, folder: Path, tiling: Tiling, step: int) -> None:
        self.step, self.path, self._tiling = step, folder / f"{step:05d}", tiling
        self.x = self.field("x")

    def field(self, name: str) -> BlockArray:
        return BlockArray(self.path / name, self._tiling)

    def write(self, block: int, fields: Fields) -> None:
        """Write the fields of a block, `x` last."""
        for name in sorted(fields, key=lambda name: name == "x"):
            self.field(name).write(block, fields[name].numpy())

    def tile(self, tile: int) -> Path:
        """Return the file with a tile's result, float32; a crash may lose it (`delete_unflushed_tiles`)."""
        return self.path / "tiles" / str(tile)

    def blended(self, box: Box) -> Tensor:
        """Return the weighted mean of all tiles over a box, summed by index: float32 [Z, Y, X]."""
        out = np.zeros(shape_of(box), np.float32)
        for tile in self._tiling.tiles_over(box):
            shared, there, here = overlap_slices(self._tiling.tile_box(tile), box)
            values = map_file(self.tile(tile), np.dtype("<f4"), self._tiling.patch_zyx)
            out[here] += self._tiling.weight(tile, shared) * values[there]
        return torch.from_numpy(out)

    def flush_names(self) -> None:
        """Flush the directories to the disk; voxels were flushed when they were written."""
        fields = (path for path in self.path.iterdir() if path.name != "tiles")
        for folder in (*fields, self.path, self.path.parent):
            flush_to_disk(folder)

    def delete(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class TaskRunner:
    """Runs tasks on the files in `folder` (state/), also in several processes at the same time; raises OSError."""

    def __init__(self, job: Job, folder: Path, evaluate: Evaluate) -> None:
        self._job, self._folder, self._evaluate = job, folder, evaluate
        self._given = {name: BlockArray(folder / name, job.tiling, dtype) for name, dtype in job.given.items()}

    def run(self, task: Task) -> Task:
        if task.is_batch:
            self.evaluate_tiles(task.step, task.index)
        else:
            self.step_block(task.step, task.index, task.active)
        return task

    def evaluate_tiles(self, step: int, batch: int) -> None:
        tiling, tiles = self._job.tiling, self._job.tiles_of(batch)
        state = State(self._folder, tiling, step)
        # The last batch is padded, because results may depend on the batch size.
        boxes = [tiling.tile_box(min(tiles.start + i, tiles.stop - 1)) for i in range(self._job.batch_size)]

        def read(field: BlockArray) -> NDArray[Any]:
            return np.stack([field.read(box)[None] for box in boxes])

        condition = read(self._given["condition"]) if "condition" in self._given else None
        results = self._evaluate(step, torch.from_numpy(read(state.x)), condition)
        for tile, box, values in zip(tiles, boxes, results[:, 0].float().cpu().numpy(), strict=False):
            if not np.isfinite(values).all():
                raise NonFiniteError(
                    f"The network returned NaN or infinity for tile {format_box(box)} in sampling pass {step}; "
                    "try --amp off, --clip 1 or an earlier checkpoint"
                )
            write_atomic(state.tile(tile), values.astype("<f4", copy=False))

    def step_block(self, step: int, block: int, active: bool = True) -> None:
        """Write the next state of a block from the tiles over it; a block that is not active needs no tiles."""
        job, box = self._job, self._job.tiling.block_box(block)
        here, there = (State(self._folder, job.tiling, each) for each in (step, step + 1))

        def read(name: str) -> Tensor:
            return torch.from_numpy((self._given.get(name) or here.field(name)).read(box))

        if step < 0:
            there.write(block, job.first(block, read))
        else:
            there.write(block, job.next(step, block, read, here.blended(box) if active else None))


def active_blocks(tiling: Tiling, gaps: Callable[[Box], NDArray[np.bool_]], progress: ProgressReporter) -> Blocks:
    """Return the blocks with gaps in them or less than half a patch away; calls `gaps` once per block."""
    _, ny, nx = tiling.block_grid
    active = set[int]()
    for block in progress.track("blocks searched for gaps", range(tiling.blocks), tiling.blocks):
        gap, index = gaps(tiling.block_box(block)), tiling.block_index(block)
        if not gap.any():
            continue
        for offset in itertools.product((-1, 0, 1), repeat=3):
            near = tuple(i + o for i, o in zip(index, offset, strict=True))
            ends = zip(offset, tiling.patch_zyx, strict=True)
            side = tuple((slice(None), slice(p - p // 2, None), slice(p // 2))[o] for o, p in ends)
            if all(0 <= i < n for i, n in zip(near, tiling.block_grid, strict=True)) and gap[side].any():
                active.add((near[0] * ny + near[1]) * nx + near[2])
    return dict.fromkeys(sorted(active))


def used_blocks(job: Job, active: Blocks) -> Blocks:
    """Return the blocks with voxels that the network sees; the others need no state."""
    if isinstance(active, range):
        return active
    tiles = (tile for batch in job.batches_over(active) for tile in job.tiles_of(batch))
    seen = {block for tile in tiles for block in job.tiling.blocks_over(job.tiling.tile_box(tile))}
    return dict.fromkeys(sorted(seen | set(active)))


def delete_unflushed_tiles(folder: Path) -> None:
    """After a crash of the machine, delete all tiles: only blocks are flushed to the disk when written."""
    now = f"{boot_id()}\n".encode()
    file = folder / "boot"
    if file.exists() and file.read_bytes() != now:
        for path in folder.glob("*/tiles"):
            shutil.rmtree(path)
    write_atomically(file, now)


OpenRunner = Callable[[], TaskRunner]
"""Creates the `TaskRunner` of a process; picklable."""
RunTasks = Callable[[Iterable[Task]], Iterator[Task]]
"""Runs tasks in any order and yields each when it is done: `run_locally`, `ray_workers`."""


@contextmanager
def run_locally(open_runner: OpenRunner) -> Iterator[RunTasks]:
    with one_thread():
        runner = open_runner()
        yield lambda tasks: map(runner.run, tasks)


class TiledRun:
    """All steps of a job in `folder`, in which all given arrays have the used blocks.

    `active` are the blocks that need the network (`active_blocks`), or a range of all blocks; `used` those with a
    state.
    """

    def __init__(self, job: Job, folder: Path, progress: ProgressReporter, active: Blocks) -> None:
        self._job, self._folder, self._progress, self._active = job, folder, progress, active
        self.used = used_blocks(job, active)

    def run(self, run_tasks: RunTasks, workers: int = 1) -> BlockArray:
        """Resume from the existing files, run to the last state and return its `x`; only used blocks have one.

        `workers` tasks run at the same time.  Raises VesuviusError if a stop was requested, and the errors of tasks.
        """
        batches, blocks_per_group = self._job.count_batches(self._active), BLOCKS_PER_GROUP * workers
        for step in range(self._resume(), self._job.steps):
            done, blocks = max(0, step) * batches, iter(self.used)
            self._state(step + 1).x.path.mkdir(parents=True, exist_ok=True)  # there may be no blocks
            while group := list(itertools.islice(blocks, blocks_per_group)):
                for task in self.run_group(step, group, run_tasks):
                    if task.is_batch:
                        done += 1
                        self._progress.report("batches of tiles", done, self._job.steps * batches)
                    self._progress.check()
            self._state(step + 1).flush_names()
            self._state(step).delete()
        return self._state(self._job.steps).x

    def _state(self, step: int) -> State:
        return State(self._folder, self._job.tiling, step)

    def _resume(self) -> int:
        """Delete old states and return the step to resume from; -1 = the first state is missing."""
        steps = sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdigit())
        newest = max((step for step in steps if all(map(self._state(step).x.has, self.used))), default=-1)
        for step in steps:
            if step == newest:
                self._state(step).flush_names()  # a killed process may not have flushed them
            elif step < newest:
                self._state(step).delete()
        return newest

    def run_group(self, step: int, blocks: list[int], run_tasks: RunTasks) -> Iterator[Task]:
        """Run and yield the missing tasks of these blocks in a step; delete tiles that no later block needs."""
        tiling, here, after = self._job.tiling, self._state(step), self._state(step + 1)
        missing = [block for block in blocks if not after.x.has(block)]
        if step >= 0:
            active = filter(self._active.__contains__, missing)
            batches = self._job.batches_over(active, lambda tile: here.tile(tile).exists())
            yield from run_tasks(Task(step, batch, is_batch=True) for batch in sorted(batches))
        yield from run_tasks(Task(step, block, active=block in self._active) for block in missing)
        if step < 0:
            return
        active = filter(self._active.__contains__, blocks)
        for tile in {tile for block in active for tile in tiling.tiles_over(tiling.block_box(block))}:
            over = tiling.blocks_over(tiling.tile_box(tile))
            if all(block <= blocks[-1] or block not in self._active for block in over):
                here.tile(tile).unlink(missing_ok=True)
