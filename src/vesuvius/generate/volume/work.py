"""The parts of the work, each from files to files, with the same result in any process and any order.

    state/00007/x/          x_t before pass 7, a `Field`
    state/00007/x_0/        the estimate of the pass before, where the sampler needs it
    state/00007/tiles/      the estimates of x_0 in pass 7, a file per tile, as long as a block needs it
    state/known/            standardised values of known voxels, NaN in the gaps (inpainting)
    state/condition/        stored values of the condition

A part writes the block of the next state last: where that file exists, nothing of the part is missing.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.config import SamplerMethod
from vesuvius.diffusion.levels import NoiseLevel
from vesuvius.diffusion.sampler import Coefficients, Estimate, sample
from vesuvius.diffusion.schedule import x_0_and_eps
from vesuvius.errors import NonFiniteError
from vesuvius.generate.volume.field import Field, Predictions
from vesuvius.generate.volume.passes import START, STEP, Pass, advanced, block_noise, box_noise, corrected, passes_of
from vesuvius.generate.volume.tiling import Tiling
from vesuvius.generate.watch import Watch
from vesuvius.runlog.files.whole_file import write_whole
from vesuvius.runlog.proc import boot_id
from vesuvius.training.checkpoint.files import sync
from vesuvius.volumes.box import Box, format_box

_LISTED = 2**16  # blocks of a set that are listed at once

EstimateFor = Callable[[NDArray[Any] | None], Estimate]
"""From the stored condition of a batch of tiles, [B, 1, Z, Y, X] or None, to the estimate for tiles [B, 1, Z, Y, X]."""


@dataclass(frozen=True)
class VolumeJob:
    """What a volume depends on, beside the network and the given volumes; picklable."""

    tiling: Tiling
    seed: int
    levels: tuple[NoiseLevel, ...]  # noise levels, from most noise to none
    method: SamplerMethod
    eta: float = 0.0
    # each tile is drawn to its end and then blended, in one pass; else each step is blended
    whole_tiles: bool = False
    batch_size: int = 1  # tiles per call of the network; batches are the same whatever is still to be done
    rounds: int = 1  # passes per step, see `passes_of`
    inpaint: bool = False  # some voxels are known
    condition: str | None = None  # dtype of the condition

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """All passes, in order."""
        if self.whole_tiles:
            return (Pass(self.levels[0], Coefficients(x_0=1.0)),)
        return passes_of(self.levels, self.method, self.eta, self.rounds)

    def batch(self, number: int) -> range:
        """The tiles of a batch."""
        return range(number * self.batch_size, min((number + 1) * self.batch_size, self.tiling.tiles))

    def tiles_and_batches(self, live: BlockSet) -> tuple[int, int]:
        """How many tiles lie over some blocks, all in the batches of these, and how many batches there are."""
        if live.mask is None:
            return self.tiling.tiles, -(-self.tiling.tiles // self.batch_size)
        batches = self.batches_over(live)
        return sum(len(self.batch(batch)) for batch in batches), len(batches)

    def batches_over(self, blocks: Iterable[int], there: Container[int] = ()) -> set[int]:
        """The batches with the tiles over some blocks, but for the tiles that are `there`."""
        tiling = self.tiling
        tiles = (tile for block in blocks for tile in tiling.tiles_over(tiling.block_box(block)))
        return {tile // self.batch_size for tile in tiles if tile not in there}


@dataclass(frozen=True, eq=False)
class BlockSet:
    """Some blocks of a volume, in the order of their numbers.  All of them take no memory, whatever the shape."""

    blocks: int  # of the volume
    mask: NDArray[np.bool_] | None = None  # bool [blocks]; None = all

    def __contains__(self, block: object) -> bool:
        return self.mask is None or bool(self.mask[block])  # type: ignore[call-overload]

    def __iter__(self) -> Iterator[int]:
        if self.mask is None:
            yield from range(self.blocks)
            return
        for first in range(0, self.blocks, _LISTED):
            yield from (first + np.flatnonzero(self.mask[first : first + _LISTED])).tolist()

    def __len__(self) -> int:
        return self.blocks if self.mask is None else int(np.count_nonzero(self.mask))


class State:
    """The files of the state before one pass."""

    def __init__(self, folder: Path, job: VolumeJob, number: int) -> None:
        self.number, self.path = number, folder / f"{number:05d}"
        self.x = Field(self.path / "x", job.tiling)
        self.x_0 = Field(self.path / "x_0", job.tiling)
        self.predictions = Predictions(self.path / "tiles", job.tiling)

    def create(self) -> None:
        """Make the folders, where they are missing."""
        for part in (self.x, self.x_0, self.predictions):
            part.create()

    def flush(self, block: int) -> None:
        """Flush the voxels of a block to the disk."""
        for part in (self.x_0, self.x):
            if part.has(block):
                part.flush(block)

    def flush_folders(self) -> None:
        """Flush the names of all blocks to the disk."""
        for folder in (self.x_0.path, self.x.path, self.path, self.path.parent):
            if folder.exists():
                sync(folder)

    def delete(self) -> None:
        """Delete all of it."""
        shutil.rmtree(self.path, ignore_errors=True)


class Work:
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
        x_0 = self._drawn(estimate, x, boxes) if job.whole_tiles else estimate(x, job.passes[number].level)[0]
        for tile, box, values in zip(tiles, boxes, x_0[:, 0].float().cpu().numpy(), strict=False):
            if not np.isfinite(values).all():
                raise NonFiniteError(
                    f"samples must be finite; got NaN or infinity in the tile {format_box(box)} at sampling pass "
                    f"{number}; try --amp off, --clip 1 or an earlier checkpoint"
                )
            state.predictions.write(tile, values)

    def block(self, number: int, block: int, live: bool = True) -> None:
        """The next state of a block, from the predictions of the tiles over it.

        Args:
            live: gaps are near; else no tile is needed.
        """
        job, step = self._job, self._job.passes[number]
        here, there = State(self._folder, job, number), State(self._folder, job, number + 1)
        box = job.tiling.block_box(block)
        x = torch.from_numpy(here.x.read(box))
        x_0 = torch.from_numpy(here.predictions.blended(box)) if live else torch.zeros_like(x)
        if self.known is not None:
            known = torch.from_numpy(self.known.read(box))
            if live and not job.whole_tiles:
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

    def _drawn(self, estimate: Estimate, x: Tensor, boxes: Sequence[Box]) -> Tensor:
        """Tiles drawn to their end from the noise of the volume."""
        job = self._job

        def step_noise(k: int) -> Tensor:
            noise = [box_noise(job.seed, STEP, k, job.tiling, box) for box in boxes]
            return torch.stack(noise).unsqueeze(1).to(self._device)

        if self.known is not None:
            known = torch.from_numpy(np.stack([self.known.read(box)[None] for box in boxes])).to(self._device)
            estimate = _with_known(estimate, known)
        return sample(estimate, job.levels, x, job.method, eta=job.eta, step_noise=step_noise)


def live_blocks(tiling: Tiling, gaps: Callable[[Box], NDArray[np.bool_]], watch: Watch) -> NDArray[np.bool_]:
    """Whether there are gaps in a block, or less than half a patch from it: bool [blocks].

    Args:
        gaps: which voxels of a box are gaps; called once per block.
    """
    live = np.zeros(tiling.block_grid, np.bool_)
    for block in watch.over("blocks searched for gaps", range(tiling.blocks), tiling.blocks):
        gap, index = gaps(tiling.block_box(block)), tiling.block_index(block)
        if not gap.any():
            continue
        for offset in itertools.product((-1, 0, 1), repeat=3):
            near = tuple(i + o for i, o in zip(index, offset, strict=True))
            ends = zip(offset, tiling.patch_zyx, strict=True)
            part = tuple((slice(None), slice(p - p // 2, None), slice(p // 2))[o] for o, p in ends)
            if all(0 <= i < n for i, n in zip(near, tiling.block_grid, strict=True)) and gap[part].any():
                live[near] = True
    return live.ravel()


def used_blocks(job: VolumeJob, live: BlockSet) -> BlockSet:
    """The blocks with voxels that the network sees.  The others have no state, as nothing follows from it.

    Args:
        live: blocks with gaps near.  Where all voxels are gaps, all blocks are used.
    """
    if live.mask is None:
        return live
    used, tiling = live.mask.copy(), job.tiling
    for batch in job.batches_over(live):
        for tile in job.batch(batch):
            used[tiling.blocks_over(tiling.tile_box(tile))] = True
    return BlockSet(live.blocks, used)


def state_numbers(folder: Path) -> list[int]:
    """The passes before which there is a state, whole or not, in order."""
    return sorted(int(entry.name) for entry in os.scandir(folder) if entry.name.isdigit())


def forget_unflushed(job: VolumeJob, folder: Path, used: BlockSet) -> None:
    """After a crash of the machine, delete what may not have reached the disk as it was written.

    A state is flushed before its predecessor is deleted, so the oldest complete one is sound, except for the first,
    which has no predecessor.  Later ones, predictions and what was read of given volumes are made again.
    """
    now = f"{boot_id()}\n".encode()
    note = folder / "boot"
    if note.exists() and note.read_bytes() != now:
        states = [State(folder, job, number) for number in state_numbers(folder)]
        sound = [state.path for state in states if state.x.whole(used)][:1] if states and states[0].number else []
        for path in [entry for entry in folder.iterdir() if entry.is_dir()]:
            shutil.rmtree(path / "tiles" if path in sound else path, ignore_errors=True)
    write_whole(note, now)


def _with_known(estimate: Estimate, known: Tensor) -> Estimate:
    def estimated(x: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor]:
        x_0 = torch.where(known.isnan(), estimate(x, level)[0], known.to(x.dtype))
        return x_0, x_0_and_eps("x_0", x_0, x, level.alpha, level.sigma)[1]

    return estimated
