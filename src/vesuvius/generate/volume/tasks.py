"""The parts of the work, each from files to files, the same in any process and any order; and who hands them out.

    state/00007/x/          x_t before pass 7, a `Field`
    state/00007/x_0/        the estimate of the pass before, where the sampler needs it
    state/00007/tiles/      the estimates of x_0 in pass 7, a file per tile, as long as a block needs it
    state/known/            standardised values of known voxels, NaN in the gaps (inpainting)
    state/condition/        stored values of the condition

A part writes the block of the next state last: if that file exists, nothing of the part is missing, and files are the
only record of progress.  Blocks are taken in groups, in the order of their numbers: first the tiles over a group, then
its blocks.  Tiles that no later block needs are deleted, so two or three rows of tiles exist at a time.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from vesuvius.config import SamplerMethod
from vesuvius.diffusion.sampler import Estimate, NoiseLevel
from vesuvius.errors import NonFiniteError
from vesuvius.generate.common import Watch
from vesuvius.generate.volume.block_array import Field, mapped, write_renamed
from vesuvius.generate.volume.tiling import (
    START,
    STEP,
    Pass,
    Tiling,
    advanced,
    block_noise,
    corrected,
    passes_of,
    shared_part,
)
from vesuvius.runlog.files import boot_id, flush_to_disk, write_atomically
from vesuvius.volumes.box import Box, format_box, shape_of

EstimateFor = Callable[[NDArray[Any] | None], Estimate]
"""From the stored condition of a batch of tiles, [B, 1, Z, Y, X] or None, to the estimate for tiles [B, 1, Z, Y, X]."""
Blocks = Collection[int]
"""Numbers of blocks, in order.  All of a volume are a `range`, which takes no memory, whatever the shape."""


@dataclass(frozen=True)
class Part:
    """A piece of work."""

    kind: Literal["start", "tiles", "block"]
    number: int  # of the pass
    index: int  # of the block, or of the batch of tiles
    live: bool = True  # gaps are near the block


@dataclass(frozen=True)
class VolumeJob:
    """What a volume depends on, in addition to the network and the given volumes; picklable."""

    tiling: Tiling
    seed: int
    levels: tuple[NoiseLevel, ...]  # noise levels, from most noise to none
    method: SamplerMethod
    batch_size: int = 1  # tiles per call of the network; batches are the same whatever is still to be done
    rounds: int = 1  # passes per step, see `passes_of`
    inpaint: bool = False  # some voxels are known
    condition: str | None = None  # dtype of the condition

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """All passes, in order."""
        return passes_of(self.levels, self.method, self.rounds)

    def batch(self, number: int) -> range:
        """The tiles of a batch."""
        return range(self.tiling.tiles)[number * self.batch_size :][: self.batch_size]

    def batches(self, live: Blocks) -> int:
        """How many batches of tiles lie over some blocks."""
        return -(-self.tiling.tiles // self.batch_size) if isinstance(live, range) else len(self.batches_over(live))

    def batches_over(self, blocks: Iterable[int], is_done: Callable[[int], bool] = lambda tile: False) -> set[int]:
        """The batches with the tiles over some blocks, except for tiles that are done."""
        tiling = self.tiling
        tiles = {tile for block in blocks for tile in tiling.tiles_over(tiling.block_box(block))}
        return {tile // self.batch_size for tile in tiles if not is_done(tile)}


class State:
    """The files of the state before one pass."""

    def __init__(self, folder: Path, job: VolumeJob, number: int) -> None:
        self.number, self.path, self._tiling = number, folder / f"{number:05d}", job.tiling
        self.x = Field(self.path / "x", job.tiling)
        self.x_0 = Field(self.path / "x_0", job.tiling)

    def create(self) -> None:
        """Make the folders, where they are missing."""
        self.x.create()
        self.x_0.create()
        (self.path / "tiles").mkdir(exist_ok=True)

    def tile(self, tile: int) -> Path:
        """The file with the estimate of x_0 of a tile, float32; it may be lost in a crash (`forget_unflushed`)."""
        return self.path / "tiles" / str(tile)

    def blended(self, box: Box) -> NDArray[np.float32]:
        """The weighted mean of all tiles over a box, summed in the order of their numbers: float32 [Z, Y, X]."""
        out = np.zeros(shape_of(box), np.float32)
        for tile in self._tiling.tiles_over(box):
            shared, there, here = shared_part(self._tiling.tile_box(tile), box)
            x_0 = mapped(self.tile(tile), np.dtype("<f4"), self._tiling.patch_zyx)
            out[here] += self._tiling.weight(tile, shared) * x_0[there]
        return out

    def flush_names(self) -> None:
        """Flush the names of all blocks to the disk; their voxels were flushed when they were written."""
        for folder in (self.x_0.path, self.x.path, self.path, self.path.parent):
            flush_to_disk(folder)

    def delete(self) -> None:
        """Delete all of it."""
        shutil.rmtree(self.path, ignore_errors=True)


class TaskRunner:
    """Does the parts.  Several processes may do different ones at the same time; raises OSError.

    Args:
        folder: `state/`.
        device: where estimates are made.
    """

    def __init__(self, job: VolumeJob, folder: Path, estimate_for: EstimateFor, device: torch.device) -> None:
        self._job, self._folder, self._device = job, folder, device
        self._estimate_for = estimate_for
        self.known = Field(folder / "known", job.tiling) if job.inpaint else None
        self.condition = None if job.condition is None else Field(folder / "condition", job.tiling, job.condition)

    def do(self, part: Part) -> None:
        """Do a part."""
        match part.kind:
            case "start":
                self.start(part.index)
            case "tiles":
                self.tiles(part.number, part.index)
            case "block":
                self.block(part.number, part.index, part.live)

    def start(self, block: int) -> None:
        """The first state of a block: noise, or known voxels with as much noise."""
        job = self._job
        x = block_noise(job.seed, START, 0, job.tiling, block)
        if self.known is not None:
            known, level = torch.from_numpy(self.known.read(job.tiling.block_box(block))), job.levels[0]
            x = torch.where(known.isnan(), x, level.alpha * known + level.sigma * x)
        State(self._folder, job, 0).x.write(block, x.numpy())

    def tiles(self, number: int, batch: int) -> None:
        """Evaluate the network on a batch of tiles in a pass."""
        job, state = self._job, State(self._folder, self._job, number)
        tiles = job.batch(batch)
        # The last batch is filled up, as results may depend on the size of a batch.
        boxes = [job.tiling.tile_box(min(tiles.start + i, tiles.stop - 1)) for i in range(job.batch_size)]
        condition = None
        if self.condition is not None:
            condition = np.stack([self.condition.read(box)[None] for box in boxes])
        estimate = self._estimate_for(condition)
        x = torch.from_numpy(np.stack([state.x.read(box)[None] for box in boxes])).to(self._device)
        x_0 = estimate(x, job.passes[number].level)[0]
        for tile, box, values in zip(tiles, boxes, x_0[:, 0].float().cpu().numpy(), strict=False):
            if not np.isfinite(values).all():
                raise NonFiniteError(
                    f"The network returned NaN or infinity for the tile {format_box(box)} at sampling pass {number}; "
                    "try --amp off, --clip 1 or an earlier checkpoint"
                )
            write_renamed(state.tile(tile), values.astype("<f4", copy=False))

    def block(self, number: int, block: int, live: bool = True) -> None:
        """The next state of a block, from the predictions of the tiles over it; it needs none if no gaps are near."""
        job, step = self._job, self._job.passes[number]
        here, there = State(self._folder, job, number), State(self._folder, job, number + 1)
        box = job.tiling.block_box(block)
        x = torch.from_numpy(here.x.read(box))
        x_0 = torch.from_numpy(here.blended(box)) if live else torch.zeros_like(x)
        if self.known is not None:
            known = torch.from_numpy(self.known.read(box))
            if live:
                x = corrected(step, x, x_0, known)
            x_0 = torch.where(known.isnan(), x_0, known)
        if step.row is None:
            if step.keeps_x_0:
                there.x_0.write(block, here.x_0.read(box))
            there.x.write(block, x.numpy())
            return
        before = torch.from_numpy(here.x_0.read(box)) if step.row.x_0_before != 0 else None
        noise = block_noise(job.seed, STEP, number, job.tiling, block) if step.row.noise != 0 else None
        if step.keeps_x_0:
            there.x_0.write(block, x_0.numpy())
        there.x.write(block, advanced(step, x, x_0, before, noise).numpy())


def live_blocks(tiling: Tiling, gaps: Callable[[Box], NDArray[np.bool_]], watch: Watch) -> Blocks:
    """The blocks with gaps in them, or less than half a patch from them.

    Args:
        gaps: which voxels of a box are gaps; called once per block.
    """
    _, ny, nx = tiling.block_grid
    live = set[int]()
    for block in watch.over("blocks searched for gaps", range(tiling.blocks), tiling.blocks):
        gap, index = gaps(tiling.block_box(block)), tiling.block_index(block)
        if not gap.any():
            continue
        for offset in itertools.product((-1, 0, 1), repeat=3):
            near = tuple(i + o for i, o in zip(index, offset, strict=True))
            ends = zip(offset, tiling.patch_zyx, strict=True)
            part = tuple((slice(None), slice(p - p // 2, None), slice(p // 2))[o] for o, p in ends)
            if all(0 <= i < n for i, n in zip(near, tiling.block_grid, strict=True)) and gap[part].any():
                live.add((near[0] * ny + near[1]) * nx + near[2])
    return dict.fromkeys(sorted(live))


def used_blocks(job: VolumeJob, live: Blocks) -> Blocks:
    """The blocks with voxels that the network sees.  The others have no state, as nothing follows from it.

    Args:
        live: blocks with gaps near; a range = all.
    """
    if isinstance(live, range):
        return live
    tiles = (tile for batch in job.batches_over(live) for tile in job.batch(batch))
    seen = {block for tile in tiles for block in job.tiling.blocks_over(job.tiling.tile_box(tile))}
    return dict.fromkeys(sorted(seen | set(live)))


def forget_unflushed(folder: Path) -> None:
    """After a crash of the machine, delete all predictions: only blocks are flushed to the disk when written."""
    now = f"{boot_id()}\n".encode()
    note = folder / "boot"
    if note.exists() and note.read_bytes() != now:
        for path in folder.glob("*/tiles"):
            shutil.rmtree(path)
    write_atomically(note, now)


GROUP = 16
"""Blocks per worker that are done together: enough that their tiles keep all workers busy."""

OpenWork = Callable[[], TaskRunner]
"""Makes the `TaskRunner` of the process that it is called in; picklable."""
RunParts = Callable[[Iterable[Part]], Iterator[Part]]
"""Does the parts in any order and yields each when it is done; returns when all are."""


@contextmanager
def this_process(open_work: OpenWork) -> Iterator[RunParts]:
    """Each part at once, in this process."""
    threads = torch.get_num_threads()
    try:
        work = open_work()

        def run(parts: Iterable[Part]) -> Iterator[Part]:
            for part in parts:
                work.do(part)
                yield part

        yield run
    finally:
        torch.set_num_threads(threads)


class Sampling:
    """All passes over a volume.  `used` are the blocks that have a state (`used_blocks`).

    Args:
        folder: `state/`, which exists; `known` and `condition` have the used blocks.
        live: blocks with gaps near (`live_blocks`), or a range of all.
    """

    def __init__(self, job: VolumeJob, folder: Path, watch: Watch, live: Blocks) -> None:
        self._job, self._folder, self._watch, self._live = job, folder, watch, live
        self.used = used_blocks(job, live)

    def run(self, run_parts: RunParts, workers: int = 1) -> Field:
        """Continue from what is there to the last state, and return it; only used blocks (`used_blocks`) have one.

        Args:
            run_parts: does parts, in any order (`this_process`, `ray_workers`).
            workers: how many parts it does at a time.

        Raises:
            SamplingStoppedError: a stop was wanted.
            VesuviusError: workers die again and again; and what a part of the work raises.
        """
        last = len(self._job.passes)
        for number in range(self._resumed(), last):
            self._one_pass(run_parts, number, GROUP * workers)
            State(self._folder, self._job, number).delete()
        return State(self._folder, self._job, last).x

    def _resumed(self) -> int:
        """The pass to continue with, -1 = the noise is to be drawn; older states are deleted."""
        numbers = sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdigit())
        states = [State(self._folder, self._job, number) for number in numbers]
        newest = max((state.number for state in states if all(map(state.x.has, self.used))), default=-1)
        for state in states:
            if state.number == newest:
                state.flush_names()  # a process that was killed may not have done it
            elif state.number < newest:
                state.delete()
        return newest

    def _one_pass(self, run_parts: RunParts, number: int, group: int) -> None:
        """Write all blocks of the next state that are missing, and flush all of it."""
        for each in range(max(0, number), number + 2):
            State(self._folder, self._job, each).create()
        batches = self._job.batches(self._live)
        before, total, done = max(0, number) * batches, len(self._job.passes) * batches, 0
        blocks = iter(self.used)
        while found := list(itertools.islice(blocks, group)):
            for part in self.parts_of(number, found, run_parts):
                if part.kind == "tiles":
                    done += 1
                    self._watch.tell("batches of tiles", before + done, total)
                self._watch.check()
        State(self._folder, self._job, number + 1).flush_names()

    def parts_of(self, number: int, blocks: list[int], run_parts: RunParts) -> Iterator[Part]:
        """Do what is missing of these blocks in a pass, yield each part when it is done, and delete the tiles that no
        later block needs."""
        job, tiling = self._job, self._job.tiling
        here, after = (State(self._folder, job, each) for each in (number, number + 1))
        missing = [block for block in blocks if not after.x.has(block)]
        if number < 0:
            yield from run_parts(Part("start", number, block) for block in missing)
            return
        lacking = (block for block in missing if block in self._live)
        batches = job.batches_over(lacking, lambda tile: here.tile(tile).exists())
        yield from run_parts(Part("tiles", number, batch) for batch in sorted(batches))
        yield from run_parts(Part("block", number, block, block in self._live) for block in missing)
        live = (block for block in blocks if block in self._live)
        for tile in {tile for block in live for tile in tiling.tiles_over(tiling.block_box(block))}:
            over = tiling.blocks_over(tiling.tile_box(tile))
            if all(block <= blocks[-1] or block not in self._live for block in over):
                here.tile(tile).unlink(missing_ok=True)
