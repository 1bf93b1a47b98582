"""Tasks of a volume, which read and write files and give the same result in any process and order; and their order.

    state/00007/x/          x_t before pass 7, a `BlockArray`
    state/00007/x_0/        estimate of x_0 of the previous pass, if the sampler needs it
    state/00007/tiles/      estimates of x_0 in pass 7, one file per tile, kept while a block needs it
    state/known/            standardised values of known voxels, NaN in the gaps (inpainting)
    state/condition/        stored values of the condition

A task writes the block of the next state last, so files are the only record of progress.  Blocks are processed in
groups, by index: first the tiles over a group, then its blocks.  Tiles that no later block needs are deleted, so two or
three rows of tiles exist at a time.
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
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vesuvius.config import SamplerMethod, Triple
from vesuvius.diffusion.sampler import Estimate, NoiseLevel
from vesuvius.errors import NonFiniteError
from vesuvius.generate.common import ProgressReporter, one_thread
from vesuvius.generate.volume.tiling import (
    START,
    STEP,
    Pass,
    Tiling,
    advance,
    block_noise,
    correct_known,
    make_passes,
    overlap_slices,
)
from vesuvius.runlog.files import boot_id, flush_to_disk, write_atomically
from vesuvius.volumes.box import Box, format_box, shape_of

EstimateFor = Callable[[NDArray[Any] | None], Estimate]
"""Maps the stored condition of a batch of tiles, [B, 1, Z, Y, X] or None, to the estimate for the tiles."""
Blocks = Collection[int]
"""Indices of blocks, in order.  All blocks of a volume are a `range`, which takes no memory."""


@dataclass(frozen=True)
class Task:
    """The unit of work: the first state of a block, a batch of tiles, or the next state of a block."""

    kind: Literal["start", "tiles", "block"]
    pass_index: int
    index: int  # of the block, or of the batch of tiles
    active: bool = True  # the block is near a gap


@dataclass(frozen=True)
class VolumeJob:
    """All settings of a volume except the network and the input volumes; picklable."""

    tiling: Tiling
    seed: int
    levels: tuple[NoiseLevel, ...]  # decreasing noise
    method: SamplerMethod
    batch_size: int = 1  # tiles per network call; a resume does not change the batches
    rounds: int = 1  # passes per step, see `make_passes`
    inpaint: bool = False  # some voxels are known
    condition: str | None = None  # dtype

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        return make_passes(self.levels, self.method, self.rounds)

    def batch(self, index: int) -> range:
        return range(self.tiling.tiles)[index * self.batch_size :][: self.batch_size]

    def num_batches(self, active: Blocks) -> int:
        return -(-self.tiling.tiles // self.batch_size) if isinstance(active, range) else len(self.batches_over(active))

    def batches_over(self, blocks: Iterable[int], is_done: Callable[[int], bool] = lambda tile: False) -> set[int]:
        """Return the batches with unfinished tiles over some blocks."""
        tiling = self.tiling
        tiles = {tile for block in blocks for tile in tiling.tiles_over(tiling.block_box(block))}
        return {tile // self.batch_size for tile in tiles if not is_done(tile)}


class BlockArray:
    """One value per voxel, in the folder `path`: a file of raw voxels per block of a tiling.  Raises OSError."""

    def __init__(self, path: Path, tiling: Tiling, dtype: np.dtype[Any] | str = "float32") -> None:
        self.path, self._tiling = path, tiling
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def create(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def has(self, block: int) -> bool:
        return self._file(block).exists()

    def write(self, block: int, voxels: NDArray[Any]) -> None:
        """Write a block, in the shape of its box, and flush it: it survives a crash of the machine."""
        if voxels.shape != self._tiling.patch_zyx:
            padded = np.zeros(self._tiling.patch_zyx, self._dtype)
            padded[tuple(map(slice, voxels.shape))] = voxels
            voxels = padded
        write_atomic(self._file(block), np.ascontiguousarray(voxels, self._dtype), flush=True)

    def read(self, box: Box, used: Container[int] | None = None) -> NDArray[Any]:
        """Return the voxels of a box.  Its blocks must exist; with `used`, blocks outside it read as 0."""
        out = np.zeros(shape_of(box), self._dtype)
        for block in self._tiling.blocks_over(box):
            if used is None or block in used:
                _, there, here = overlap_slices(self._tiling.block_box(block), box)
                out[here] = map_file(self._file(block), self._dtype, self._tiling.patch_zyx)[there]
        return out

    def _file(self, block: int) -> Path:
        z, y, x = self._tiling.block_index(block)
        return self.path / f"{z}.{y}.{x}"


def write_atomic(file: Path, voxels: NDArray[Any], flush: bool = False) -> None:
    """Write under a temporary name and rename, so an existing file is complete and files alone record the progress."""
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
    def __init__(self, folder: Path, job: VolumeJob, pass_index: int) -> None:
        self.pass_index, self.path, self._tiling = pass_index, folder / f"{pass_index:05d}", job.tiling
        self.x = BlockArray(self.path / "x", job.tiling)
        self.x_0 = BlockArray(self.path / "x_0", job.tiling)

    def create(self) -> None:
        self.x.create()
        self.x_0.create()
        (self.path / "tiles").mkdir(exist_ok=True)

    def tile(self, tile: int) -> Path:
        """Return the file with a tile's estimate of x_0, float32; a crash may lose it (`delete_unflushed_tiles`)."""
        return self.path / "tiles" / str(tile)

    def blended(self, box: Box) -> NDArray[np.float32]:
        """Return the weighted mean of all tiles over a box, summed by index: float32 [Z, Y, X]."""
        out = np.zeros(shape_of(box), np.float32)
        for tile in self._tiling.tiles_over(box):
            shared, there, here = overlap_slices(self._tiling.tile_box(tile), box)
            x_0 = map_file(self.tile(tile), np.dtype("<f4"), self._tiling.patch_zyx)
            out[here] += self._tiling.weight(tile, shared) * x_0[there]
        return out

    def flush_names(self) -> None:
        """Flush the directories to the disk; voxels were flushed when they were written."""
        for folder in (self.x_0.path, self.x.path, self.path, self.path.parent):
            flush_to_disk(folder)

    def delete(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class TaskRunner:
    """Runs tasks on the files in `folder` (state/), also in several processes at the same time; raises OSError."""

    def __init__(self, job: VolumeJob, folder: Path, estimate_for: EstimateFor, device: torch.device) -> None:
        self._job, self._folder, self._device = job, folder, device
        self._estimate_for = estimate_for
        self.known = BlockArray(folder / "known", job.tiling) if job.inpaint else None
        self.condition = None if job.condition is None else BlockArray(folder / "condition", job.tiling, job.condition)

    def run(self, task: Task) -> Task:
        match task.kind:
            case "start":
                self.start_block(task.index)
            case "tiles":
                self.evaluate_tiles(task.pass_index, task.index)
            case "block":
                self.step_block(task.pass_index, task.index, task.active)
        return task

    def start_block(self, block: int) -> None:
        """Write the first state of a block: noise, or known voxels with the same level of noise."""
        job = self._job
        x = block_noise(job.seed, START, 0, job.tiling, block)
        if self.known is not None:
            known, level = torch.from_numpy(self.known.read(job.tiling.block_box(block))), job.levels[0]
            x = torch.where(known.isnan(), x, level.alpha * known + level.sigma * x)
        State(self._folder, job, 0).x.write(block, x.numpy())

    def evaluate_tiles(self, pass_index: int, batch: int) -> None:
        job, state = self._job, State(self._folder, self._job, pass_index)
        tiles = job.batch(batch)
        # The last batch is padded, because results may depend on the batch size.
        boxes = [job.tiling.tile_box(min(tiles.start + i, tiles.stop - 1)) for i in range(job.batch_size)]
        condition = None
        if self.condition is not None:
            condition = np.stack([self.condition.read(box)[None] for box in boxes])
        estimate = self._estimate_for(condition)
        x = torch.from_numpy(np.stack([state.x.read(box)[None] for box in boxes])).to(self._device)
        x_0 = estimate(x, job.passes[pass_index].level)[0]
        for tile, box, values in zip(tiles, boxes, x_0[:, 0].float().cpu().numpy(), strict=False):
            if not np.isfinite(values).all():
                raise NonFiniteError(
                    f"The network returned NaN or infinity for tile {format_box(box)} in sampling pass {pass_index}; "
                    "try --amp off, --clip 1 or an earlier checkpoint"
                )
            write_atomic(state.tile(tile), values.astype("<f4", copy=False))

    def step_block(self, pass_index: int, block: int, active: bool = True) -> None:
        """Write the next state of a block from the tiles over it; a block that is not active needs no tiles."""
        job, step = self._job, self._job.passes[pass_index]
        here, there = State(self._folder, job, pass_index), State(self._folder, job, pass_index + 1)
        box = job.tiling.block_box(block)
        x = torch.from_numpy(here.x.read(box))
        x_0 = torch.from_numpy(here.blended(box)) if active else torch.zeros_like(x)
        if self.known is not None:
            known = torch.from_numpy(self.known.read(box))
            if active:
                x = correct_known(step, x, x_0, known)
            x_0 = torch.where(known.isnan(), x_0, known)
        if (row := step.row) is not None:
            before = torch.from_numpy(here.x_0.read(box)) if row.x_0_before != 0 else None
            noise = block_noise(job.seed, STEP, pass_index, job.tiling, block) if row.noise != 0 else None
            x = advance(step, x, x_0, before, noise)
        elif step.keeps_x_0:
            x_0 = torch.from_numpy(here.x_0.read(box))
        if step.keeps_x_0:
            there.x_0.write(block, x_0.numpy())
        there.x.write(block, x.numpy())


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
            task = tuple((slice(None), slice(p - p // 2, None), slice(p // 2))[o] for o, p in ends)
            if all(0 <= i < n for i, n in zip(near, tiling.block_grid, strict=True)) and gap[task].any():
                active.add((near[0] * ny + near[1]) * nx + near[2])
    return dict.fromkeys(sorted(active))


def used_blocks(job: VolumeJob, active: Blocks) -> Blocks:
    """Return the blocks with voxels that the network sees; the others need no state."""
    if isinstance(active, range):
        return active
    tiles = (tile for batch in job.batches_over(active) for tile in job.batch(batch))
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


BLOCKS_PER_GROUP = 16
"""Blocks per worker in a group: enough that their tiles keep all workers busy."""

OpenRunner = Callable[[], TaskRunner]
"""Creates the `TaskRunner` of a process; picklable."""
RunTasks = Callable[[Iterable[Task]], Iterator[Task]]
"""Runs tasks in any order and yields each when it is done: `run_locally`, `ray_workers`."""


@contextmanager
def run_locally(open_runner: OpenRunner) -> Iterator[RunTasks]:
    with one_thread():
        runner = open_runner()
        yield lambda tasks: map(runner.run, tasks)


class VolumeSampler:
    """Runs all passes over a volume.  `used` are the blocks with a state (`used_blocks`).

    Args:
        folder: existing `state/`, in which `known` and `condition` have the used blocks.
        active: blocks near gaps (`active_blocks`), or a range of all blocks.
    """

    def __init__(self, job: VolumeJob, folder: Path, progress: ProgressReporter, active: Blocks) -> None:
        self._job, self._folder, self._progress, self._active = job, folder, progress, active
        self.used = used_blocks(job, active)

    def run(self, run_tasks: RunTasks, workers: int = 1) -> BlockArray:
        """Resume from the existing files, run to the last state and return it; only used blocks have one.

        `workers` tasks run at the same time.  Raises VesuviusError if a stop was requested, and the errors of tasks.
        """
        last = len(self._job.passes)
        for pass_index in range(self._resume(), last):
            self._run_pass(run_tasks, pass_index, BLOCKS_PER_GROUP * workers)
            State(self._folder, self._job, pass_index).delete()
        return State(self._folder, self._job, last).x

    def _resume(self) -> int:
        """Delete old states and return the pass to resume from; -1 = the initial noise is missing."""
        passes = sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdigit())
        states = [State(self._folder, self._job, pass_index) for pass_index in passes]
        newest = max((state.pass_index for state in states if all(map(state.x.has, self.used))), default=-1)
        for state in states:
            if state.pass_index == newest:
                state.flush_names()  # a killed process may not have flushed them
            elif state.pass_index < newest:
                state.delete()
        return newest

    def _run_pass(self, run_tasks: RunTasks, pass_index: int, group_size: int) -> None:
        """Write all missing blocks of the next state and flush them."""
        for each in range(max(0, pass_index), pass_index + 2):
            State(self._folder, self._job, each).create()
        batches = self._job.num_batches(self._active)
        before, total, done = max(0, pass_index) * batches, len(self._job.passes) * batches, 0
        blocks = iter(self.used)
        while group := list(itertools.islice(blocks, group_size)):
            for task in self.run_group(pass_index, group, run_tasks):
                if task.kind == "tiles":
                    done += 1
                    self._progress.report("batches of tiles", before + done, total)
                self._progress.check()
        State(self._folder, self._job, pass_index + 1).flush_names()

    def run_group(self, pass_index: int, blocks: list[int], run_tasks: RunTasks) -> Iterator[Task]:
        """Run and yield the missing tasks of these blocks in a pass; delete tiles that no later block needs."""
        job, tiling = self._job, self._job.tiling
        here, after = (State(self._folder, job, each) for each in (pass_index, pass_index + 1))
        missing = [block for block in blocks if not after.x.has(block)]
        if pass_index < 0:
            yield from run_tasks(Task("start", pass_index, block) for block in missing)
            return
        batches = job.batches_over(filter(self._active.__contains__, missing), lambda tile: here.tile(tile).exists())
        yield from run_tasks(Task("tiles", pass_index, batch) for batch in sorted(batches))
        yield from run_tasks(Task("block", pass_index, block, block in self._active) for block in missing)
        active = filter(self._active.__contains__, blocks)
        for tile in {tile for block in active for tile in tiling.tiles_over(tiling.block_box(block))}:
            over = tiling.blocks_over(tiling.tile_box(tile))
            if all(block <= blocks[-1] or block not in self._active for block in over):
                here.tile(tile).unlink(missing_ok=True)
