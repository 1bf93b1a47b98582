"""Fourth stop of a patch: out of the regions of a task into a batch, in the order of the plan."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from vesuvius.plan.plan import Task
from vesuvius.stream.reader import Block, BlockReport, ReaderJob, head_of, regions_in
from vesuvius.stream.wait_time import WaitTime
from vesuvius.volumes.box import Box, shape_of, slices


@dataclass(frozen=True)
class Patch:
    """One sample, not yet copied.

    Attributes:
        index: of the sample.
        voxels: views (Z, Y, X) into the region: the patch, and that of the condition where there is one.
    """

    index: int
    voxels: list[NDArray[Any]]


_Region = tuple[int, Box, list[NDArray[Any]]]


class Cutter:
    """Turns the blocks of tasks into the patches of their samples.

    Args:
        job: what was read.
        blocks: the blocks of consecutive tasks, in order.
        on_report: called with what the reader says of itself in each block.

    Attributes:
        starved: the time in which there was no block to cut from.
    """

    def __init__(self, job: ReaderJob, blocks: Iterator[Block], on_report: Callable[[BlockReport], None]) -> None:
        self._job = job
        self._blocks = blocks
        self._on_report = on_report
        self.starved = WaitTime()

    def patches(self) -> Generator[Patch]:
        """The patches in the order of the samples.  A region is let go once the last of its task is cut."""
        while (first_block := self._next_block()) is not None:
            task, regions = self._take_regions(first_block)
            del first_block
            for index in range(task.first, task.stop):
                if index % self._job.world == self._job.rank:
                    yield self._cut(index, regions)
            del regions  # views into the object store: held, they would keep it full

    def _take_regions(self, block: Block) -> tuple[Task, dict[int, _Region]]:
        """All regions of the task that a block begins: by slot, which attempt it is, its box and its voxels."""
        task = Task(*head_of(block).task)
        slots = self._job.slots(task)
        regions: dict[int, _Region] = {}
        while True:
            head = head_of(block)
            expected = (task.first, task.stop), slots[len(regions)]
            assert (head.task, head.slot) == expected, f"blocks out of order: expected {expected}, got {head}"
            regions[head.slot] = (head.attempt, head.box, regions_in(block, self._job, shape_of(head.box)))
            self._on_report(head.report)
            if len(regions) == len(slots):
                return task, regions
            following = self._next_block()
            assert following is not None, f"a task must come whole; got {len(regions)} of {len(slots)} blocks"
            block = following

    def _next_block(self) -> Block | None:
        with self.starved:
            return next(self._blocks, None)

    def _cut(self, index: int, regions: dict[int, _Region]) -> Patch:
        attempt, box, arrays = regions[self._job.plan.slot_of(index)]
        sample = self._job.plan.sample(index, attempt)
        assert sample.region == box, f"a block must hold the region of its slot: expected {sample.region}, got {box}"
        z, y, x = (start + size for start, size in zip(sample.start_zyx, self._job.plan.patch_zyx, strict=True))
        part = slices((sample.start_zyx, (z, y, x)), box[0])
        return Patch(index, [array[part] for array in arrays])
