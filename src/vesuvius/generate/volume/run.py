"""Hands out the parts of the work, pass by pass, until the last state is complete.

The files are the only record of progress: a restart continues from those that exist.  Blocks are taken in groups, in
the order of their numbers: first the tiles over a group, then its blocks.  Tiles that no later block needs are deleted,
so predictions of two or three rows of tiles exist at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from vesuvius.generate.drawing import Watch
from vesuvius.generate.volume.field import Field
from vesuvius.generate.volume.work import BlockSet, Part, State, VolumeJob, Work, used_blocks

GROUP = 16
"""Blocks per worker that are done together: enough that their tiles keep all workers busy."""

OpenWork = Callable[[], Work]
"""Makes the `Work` of the process that it is called in; picklable."""
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
        live: blocks with gaps near (`live_blocks`); None = all.
    """

    def __init__(self, job: VolumeJob, folder: Path, watch: Watch | None = None, live: BlockSet | None = None) -> None:
        self._job, self._folder, self._watch = job, folder, watch or Watch()
        self._live = BlockSet(job.tiling.blocks) if live is None else live
        self.used = used_blocks(job, self._live)

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
        """Do what is missing of these blocks in a pass, and delete the tiles that no later block needs.

        Yields:
            Each part when it is done.
        """
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
