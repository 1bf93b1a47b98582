"""Out of the regions in flight into patches, in the order of the plan."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from vesuvius.errors import VesuviusError
from vesuvius.plan.plan import Visit
from vesuvius.stream.reader import Block, BlockReport, ReaderJob, head_of, regions_in
from vesuvius.stream.wait_time import WaitTime
from vesuvius.volumes.box import shape_of, slices


class StreamOrderError(VesuviusError):
    """Blocks or samples came in another order than the plan's: nothing may be trained on them."""


@dataclass(frozen=True)
class Patch:
    """One sample, not yet copied.

    Attributes:
        index: of the sample.
        voxels: views (Z, Y, X) into the region: the patch, and that of the condition where there is one.
    """

    index: int
    voxels: list[NDArray[Any]]


@dataclass(frozen=True)
class _Region:
    """A region in flight: what is visited, and which attempt of its slot that is."""

    visit: Visit
    attempt: int
    voxels: list[NDArray[Any]]


class Cutter:
    """Turns blocks into the patches of samples first <= i < stop.

    Holds the regions in flight, at most M of the plan.

    Args:
        job: what is read.
        blocks: the blocks of `job.tasks(first, stop)`, in order.
        on_report: called with what the reader says of itself in each block.

    Attributes:
        starved: the time in which there was no block to cut from.
    """

    def __init__(
        self, job: ReaderJob, blocks: Iterator[Block], on_report: Callable[[BlockReport], None], first: int, stop: int
    ) -> None:
        self._job = job
        self._blocks = blocks
        self._on_report = on_report
        self._indices = range(first + job.rank, stop, job.world)
        self._expected = (slot for task in job.tasks(first, stop) for slot in task.slots)
        self._in_flight: dict[int, _Region] = {}
        self.starved = WaitTime()

    def patches(self) -> Generator[Patch]:
        """The patches in the order of the samples.  A region is let go in the round after its last patch.

        Raises:
            StreamOrderError: a block is missing or out of order.
        """
        mixing = self._job.plan.mixing
        try:
            for index in self._indices:
                self._let_go(before=mixing.first_slot(index // mixing.regions))
                slot = mixing.slot_of(index)
                while slot not in self._in_flight:
                    self._take_block(slot)
                yield self._cut(index, self._in_flight[slot])
        finally:
            self._in_flight.clear()  # views into the object store: held, they would keep it full

    def _let_go(self, before: int) -> None:
        """Drop the regions that are no longer in flight: those of the first slots."""
        while self._in_flight and (first := next(iter(self._in_flight))) < before:
            del self._in_flight[first]

    def _take_block(self, wanted: int) -> None:
        """Take the next block in."""
        with self.starved:
            block = next(self._blocks, None)
        expected = next(self._expected, None)
        if block is None:
            raise StreamOrderError(
                f"readers must deliver every region; got the end where slot {expected} was next and {wanted} is "
                "needed; report this as a defect"
            )
        head = head_of(block)
        if head.slot != expected or head.slot > wanted:
            raise StreamOrderError(
                f"regions must come in the order of the plan; got slot {head.slot} for {expected}, where {wanted} is "
                "needed; report this as a defect"
            )
        visit = self._job.plan.visit(head.slot, head.attempt)
        if visit.region != head.region:
            raise StreamOrderError(
                f"a block must hold the region of its slot; got {head.region} for {visit.region}; report this as a "
                "defect"
            )
        self._on_report(head.report)
        self._in_flight[head.slot] = _Region(visit, head.attempt, regions_in(block, self._job, shape_of(head.region)))

    def _cut(self, index: int, region: _Region) -> Patch:
        plan = self._job.plan
        start = plan.start(index, region.visit, region.attempt)
        z, y, x = (lo + size for lo, size in zip(start, plan.patch_zyx, strict=True))
        part = slices((start, (z, y, x)), region.visit.region[0])
        return Patch(index, [voxels[part] for voxels in region.voxels])
