"""Cuts patches from the regions in flight, in the order of the plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from numpy.typing import NDArray

from vesuvius.errors import VesuviusError
from vesuvius.plan.plan import Sample, Visit
from vesuvius.stream.reading.reader import ReaderJob, Region
from vesuvius.stream.reading.reader_stats import BlockReport
from vesuvius.stream.reading.resident import Resident
from vesuvius.volumes.box import slices


class StreamOrderError(VesuviusError):
    """Regions or samples arrived in another order than the plan's; training on them would not be reproducible."""


class WaitTime:
    """Sums the seconds spent in its `with` blocks.  One thread waits, any thread may read."""

    def __init__(self) -> None:
        self._state: tuple[float, float | None] = (0.0, None)  # one tuple, so that updates are atomic

    def __enter__(self) -> None:
        self._state = (self._state[0], time.perf_counter())

    def __exit__(self, *_: object) -> None:
        self._state = (self.seconds, None)

    @property
    def waiting(self) -> bool:
        """Whether a wait is under way."""
        return self._state[1] is not None

    @property
    def seconds(self) -> float:
        """Total so far, including a wait under way."""
        total, since = self._state
        return total if since is None else total + time.perf_counter() - since


Patch = tuple[Sample, list[NDArray[Any]]]
"""A sample and its voxels: views (Z, Y, X) into the regions of the volume and, if any, its condition."""


class Cutter:
    """Turns the regions of `job.tasks(first, stop)` into the patches of samples first <= i < stop.

    Holds at most the plan's M regions in flight.  `on_report` gets the reader's report of each region, `starved`
    measures the time spent waiting for them.  With a `resident` copy, regions are kept in it and patches are views of
    it.
    """

    def __init__(
        self,
        job: ReaderJob,
        regions: Iterator[Region],
        on_report: Callable[[BlockReport], None],
        starved: WaitTime,
        first: int,
        stop: int,
        resident: Resident | None = None,
    ) -> None:
        self._job = job
        self._regions = regions
        self._resident = resident
        self._on_report = on_report
        self._starved = starved
        self._indices = range(first + job.rank, stop, job.world)
        self._in_flight: dict[int, tuple[Visit, list[NDArray[Any]]]] = {}
        self._last_slot = -1
        self.index = first + job.rank  # of the next sample

    @property
    def is_resident(self) -> bool:
        """Whether patches are views of memory that is not reused."""
        return self._resident is not None

    def patches(self) -> Generator[Patch]:
        """Yield the patches in sample order.  A region is dropped in the round after its last patch.

        Raises StreamOrderError: a region is missing or out of order.
        """
        plan = self._job.plan
        try:
            for index in self._indices:
                self.index = index
                first = plan.mixing.first_slot(index // plan.mixing.regions)
                while self._in_flight and (oldest := next(iter(self._in_flight))) < first:
                    del self._in_flight[oldest]
                slot = plan.mixing.slot_of(index)
                while slot not in self._in_flight:
                    self._take_region(slot)
                visit, regions = self._in_flight[slot]
                sample = plan.sample_of(visit, index)
                crop = slices(sample.box, visit.region[0])
                yield sample, [region[crop] for region in regions]
        finally:
            self._in_flight.clear()  # views into the object store, which would otherwise stay full

    def _take_region(self, wanted: int) -> None:
        """Take the next region; they arrive in ascending order of their slots."""
        with self._starved:
            region = next(self._regions, None)
        if region is None:
            raise StreamOrderError(f"The readers ended before slot {wanted}; report this as a bug")
        visit = region.visit
        if not self._last_slot < visit.slot <= wanted:
            raise StreamOrderError(
                f"Slot {visit.slot} arrived after slot {self._last_slot}, not slot {wanted}; report this as a bug"
            )
        self._last_slot = visit.slot
        if region.report is not None:
            self._on_report(region.report)
        self._in_flight[visit.slot] = visit, region.voxels if self._resident is None else self._resident.take(region)
