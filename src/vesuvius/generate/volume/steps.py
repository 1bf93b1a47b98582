"""The steps of sampling a volume: states on disk, and the tasks that map each to the next.

    state/00007/x/          the state before step 7, a `BlockArray`; some jobs keep more than `x`
    state/00007/tiles/      results of the network in step 7 (`predict/tasks.py`)
    state/known/, ...       what the job is given

A task writes the `x` of the next state last, so files are the only record of progress.
"""

import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.config import Triple
from vesuvius.generate.volume.passes import Fields, SamplingJob
from vesuvius.predict.progress import ProgressReporter
from vesuvius.predict.tasks import BlockArray, Blocks, RollingRun, RunTasks, TaskRunner, Tiles
from vesuvius.predict.tiling import Tiling
from vesuvius.runlog.files import flush_to_disk
from vesuvius.runlog.held import refuse_moved
from vesuvius.training.step.feed import StoredCondition, Windows
from vesuvius.volumes.box import Box, format_box, relative
from vesuvius.volumes.context import ContextAlignment

Evaluate = Callable[[int, Tensor, StoredCondition | None], Tensor]
"""Maps a step, its `x` over a batch of tiles [B, 1, Z, Y, X], and the given `condition` there, to results like `x`."""

BLOCKS_PER_GROUP = 16
"""Blocks per worker in a group: enough that their tiles keep all workers busy."""


class State:
    def __init__(self, folder: Path, tiling: Tiling, step: int) -> None:
        self.step, self.path, self._tiling = step, folder / f"{step:05d}", tiling
        self.x = self.field("x")
        self.tiles = Tiles(self.path / "tiles", tiling)

    def field(self, name: str) -> BlockArray:
        return BlockArray(self.path / name, self._tiling)

    def write(self, block: int, fields: Fields) -> None:
        """Write the fields of a block, `x` last."""
        for name in sorted(fields, key=lambda name: name == "x"):
            self.field(name).write(block, fields[name].numpy())

    def flush_names(self) -> None:
        """Flush the directories to the disk; voxels were flushed when they were written."""
        fields = (path for path in self.path.iterdir() if path.name != "tiles")
        for folder in (*fields, self.path, self.path.parent):
            flush_to_disk(folder)

    def delete(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def context_fields(job: SamplingJob, folder: Path) -> tuple[BlockArray, BlockArray]:
    """Return the staged voxels of a condition with context, and their noise, on `job.context_grid`."""
    assert job.condition is not None
    grid = job.context_grid
    return BlockArray(folder / "context", grid, job.condition), BlockArray(folder / "noise", grid)


class SamplingRunner(TaskRunner):
    def __init__(self, job: SamplingJob, folder: Path, evaluate: Evaluate) -> None:
        super().__init__(job)
        self._sampling, self._folder, self._evaluate = job, folder, evaluate
        self._given = {name: BlockArray(folder / name, job.tiling, dtype) for name, dtype in job.given.items()}

    def tiles(self, step: int) -> Tiles:
        return State(self._folder, self._job.tiling, step).tiles

    def read(self, step: int, tiles: Sequence[int]) -> tuple[Tensor, StoredCondition | None]:
        boxes = [self._job.tiling.tile_box(tile) for tile in tiles]

        def read(field: BlockArray) -> NDArray[Any]:
            return np.stack([field.read(box)[None] for box in boxes])

        condition = StoredCondition(read(self._given["condition"])) if "condition" in self._given else None
        if self._sampling.context is not None:
            condition = self._windows(self._sampling.context, [box[0] for box in boxes])
        return torch.from_numpy(read(State(self._folder, self._job.tiling, step).x)), condition

    def _windows(self, context: ContextAlignment, starts_zyx: Sequence[Triple]) -> StoredCondition:
        job, boxes = self._sampling, [context.window(start) for start in starts_zyx]
        voxels, noise = (
            np.stack([field.read(relative(box, job.context_box[0]))[None] for box in boxes])
            for field in context_fields(job, self._folder)
        )
        windows = Windows([*map(context.rows, starts_zyx)], torch.from_numpy(noise), [job.condition_noise] * len(boxes))
        return StoredCondition(voxels, windows)

    def evaluate(self, step: int, tiles: Sequence[int], inputs: tuple[Tensor, StoredCondition | None]) -> Tensor:
        return self._evaluate(step, *inputs)

    def non_finite(self, step: int, tile: int) -> str:
        return (
            f"The network returned NaN or infinity for tile {format_box(self._job.tiling.tile_box(tile))} in sampling "
            f"pass {step}; "
            "try --amp off, --clip 1 or an earlier checkpoint"
        )

    def write_block(self, step: int, block: int, active: bool = True) -> None:
        job, box = self._sampling, self._job.tiling.block_box(block)
        here, there = (State(self._folder, job.tiling, each) for each in (step, step + 1))

        def read(name: str) -> Tensor:
            return torch.from_numpy((self._given.get(name) or here.field(name)).read(box))

        if step < 0:
            there.write(block, job.first(block, read))
        else:
            there.write(block, job.next(step, block, read, here.tiles.blended(box)[0] if active else None))


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


def used_blocks(job: SamplingJob, active: Blocks) -> Blocks:
    """Return the blocks with voxels that the network sees; the others need no state."""
    if isinstance(active, range):
        return active
    tiles = (tile for batch in job.batches_over(active) for tile in job.tiles_of(batch))
    seen = {block for tile in tiles for block in job.tiling.blocks_over(job.tiling.tile_box(tile))}
    return dict.fromkeys(sorted(seen | set(active)))


def count_batches(job: SamplingJob, active: Blocks) -> int:
    return -(-job.tiling.tiles // job.batch_size) if isinstance(active, range) else len(job.batches_over(active))


class TiledRun:
    """All steps of a job in `folder`, in which all given arrays have the used blocks.

    `active` are the blocks that need the network (`active_blocks`), or a range of all blocks; `used` those with a
    state.
    """

    def __init__(self, job: SamplingJob, folder: Path, progress: ProgressReporter, active: Blocks) -> None:
        self._job, self._folder, self._progress, self._active = job, folder, progress, active
        self.used = used_blocks(job, active)

    def run(self, run_tasks: RunTasks, workers: int = 1) -> BlockArray:
        """Resume from the existing files, run to the last state and return its `x`; only used blocks have one.

        `workers` tasks run at the same time.  Raises VesuviusError if a stop was requested, and the errors of tasks.
        """
        batches, blocks_per_group = count_batches(self._job, self._active), BLOCKS_PER_GROUP * workers
        for step in range(self._resume(), self._job.steps):
            done, here, after = max(0, step) * batches, self._state(step), self._state(step + 1)
            refuse_moved(after.x.path)
            after.x.path.mkdir(parents=True, exist_ok=True)  # there may be no blocks
            active = self._active if step >= 0 else ()
            rolling = RollingRun(self._job, here.tiles, step, active, after.x.has)
            for task in rolling.run(self.used, blocks_per_group, run_tasks):
                if task.kind == "tiles":
                    done += 1
                    self._progress.report("batches of tiles", done, self._job.steps * batches)
                refuse_moved(after.x.path)  # workers know no lock
                self._progress.check()
            after.flush_names()
            here.delete()
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
