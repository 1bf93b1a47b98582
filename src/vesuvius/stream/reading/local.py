"""Reads regions in this process: all with `workers: 0`, else the first ones while Ray starts."""

from __future__ import annotations

import logging
import os
import sys
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import chain, pairwise, takewhile
from typing import TypeGuard

import numpy as np

from vesuvius.errors import DataError
from vesuvius.plan.plan import Task, Visit
from vesuvius.stream.reading.reader import Reader, ReaderJob, Region, region_in
from vesuvius.stream.reading.reading_log import TrainerReadingMarker
from vesuvius.stream.reading.resident import Resident
from vesuvius.threads import on_thread
from vesuvius.volumes.box import intersection, shape_of
from vesuvius.volumes.errors import OutageError
from vesuvius.volumes.store.retry import Outage

log = logging.getLogger(__name__)

REGIONS_AHEAD = 2
"""Regions read ahead of those in flight."""
_DECODERS = 4
_CLOSE_TIMEOUT_S = 1.0
_RAY_START_TIMEOUT_S = 30.0


class Regions(Iterator[Region]):
    """Source of the regions of consecutive tasks.  One thread iterates; another calls the rest."""

    @property
    def tasks_left(self) -> int:
        """Number of tasks that reader processes have not finished."""
        return 0

    def report_replaced(self, actor: str, pid: int, node: str) -> None:
        """Report the death of a reader process: another one of the same actor delivers blocks."""

    @property
    @abstractmethod
    def outages(self) -> list[Outage]:
        """Current storage outages."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make a waiting `next` return soon, with any error."""

    @abstractmethod
    def close(self) -> None:
        """Stop reading, once iteration has ended."""


class LocalRegions(Regions):
    """Regions read in this process, one ahead of the cutter, within the context `marker`.

    Reading and decoding run on their own threads: codecs and copies release the GIL.  With a `resident` copy the
    missing part of a region is read into it, and the region is delivered as views of it.
    """

    def __init__(
        self,
        job: ReaderJob,
        tasks: Iterable[Task],
        resident: Resident | None = None,
        marker: AbstractContextManager[None] | None = None,
    ) -> None:
        self._job, self._resident = job, resident
        ring = 2 if resident else job.plan.regions_in_flight + REGIONS_AHEAD
        self._reader = Reader(job, ring, threads=min(os.cpu_count() or 1, _DECODERS))
        self._regions: Generator[Region] = self._read(tasks, marker or nullcontext())
        self._next: Future[Region | None] = on_thread(next, self._regions, None, name="reader")

    def _read(self, tasks: Iterable[Task], marker: AbstractContextManager[None]) -> Generator[Region]:
        with marker:
            for task, ahead in pairwise(chain(tasks, [()])):
                if self._resident is None:
                    yield from self._read_blocks(task, ahead)
                    continue
                for slot in task:
                    region = self._resident_region(self._job.plan.visit(slot), self._resident)
                    # One that touches damage is replaced; the cutter copies the replacement into the resident copy.
                    yield from [region] if region else self._read_blocks((slot,))

    def _read_blocks(self, task: Task, ahead: Task = ()) -> Iterator[Region]:
        return (region_in(block, self._job) for block in self._reader.blocks(task, ahead))

    def _resident_region(self, visit: Visit, resident: Resident) -> Region | None:
        """Return the region as views of the copy; None if it cannot be read (reading it as a block reports why)."""
        if self._reader.is_damaged(visit.volume, visit.region):
            return None
        copy = resident.volumes[visit.volume]
        if (missing := copy.missing(visit.region)) is None:
            return Region(visit, copy.views(visit.region))
        # Voxels outside the region are read for later ones; an error there must not affect this one.
        for box in dict.fromkeys((missing, intersection(missing, visit.region))):
            if self._reader.is_damaged(visit.volume, box):
                continue
            voxels = [np.empty(shape_of(box), dtype) for dtype in self._job.dtypes]
            try:
                self._reader.read(visit.volume, box, voxels)
            except OutageError:
                raise
            except DataError:
                continue
            copy.keep(box, voxels)
            return Region(visit, copy.views(visit.region), self._reader.report())
        return None

    def __next__(self) -> Region:
        region = self._next.result()
        if region is None:
            raise StopIteration
        self._next = on_thread(next, self._regions, None, name="reader")
        return region

    @property
    def outages(self) -> list[Outage]:
        return self._reader.outages

    def interrupt(self) -> None:
        self._reader.close()

    def close(self) -> None:
        """Release the regions, so that a resident copy can be freed at once."""
        if wait([self._next], _CLOSE_TIMEOUT_S).done:  # otherwise it still reads from a network that does not answer
            self._regions.close()


class LocalThenRay(Regions):
    """Reads the first regions in flight in this process while Ray starts; Ray readers deliver the rest.

    If an earlier trainer was interrupted (`marker`), readers read everything.  `start` starts Ray and the readers of
    the other tasks, if there are any, on its own thread; `next` raises its ConfigError.
    """

    def __init__(
        self,
        job: ReaderJob,
        tasks: Iterable[Task],
        resident: Resident | None,
        marker: TrainerReadingMarker | None,
        start: Callable[[Iterator[Task]], Regions],
    ) -> None:
        tasks = iter(tasks)
        local, later = _first_window(tasks, 0 if marker and marker.was_interrupted else job.plan.regions_in_flight)
        self._local: LocalRegions | None = LocalRegions(job, local, resident, marker) if local else None
        self._interrupted = False
        rest = takewhile(lambda _: not self._interrupted, chain([later or ()], tasks))
        self._ray = on_thread(start, rest, name="ray-start") if later else None

    def __next__(self) -> Region:
        if self._ray is not None and self._ray.done():
            self._ray.result()  # raises if it did not start
        if self._local is not None:
            with suppress(StopIteration):
                return next(self._local)
            self._local = None
        if self._ray is None:
            raise StopIteration
        ray = self._ray.result()
        if self._interrupted:  # while Ray started
            raise StopIteration
        return next(ray)

    @property
    def tasks_left(self) -> int:
        if self._ray is None:
            return 0
        return self._ray.result().tasks_left if _has_started(self._ray) else sys.maxsize

    def report_replaced(self, actor: str, pid: int, node: str) -> None:
        if _has_started(self._ray):
            self._ray.result().report_replaced(actor, pid, node)

    @property
    def outages(self) -> list[Outage]:
        local, ray = self._local, self._ray
        return (local.outages if local else []) + (ray.result().outages if _has_started(ray) else [])

    def interrupt(self) -> None:
        self._interrupted = True
        if (local := self._local) is not None:
            local.interrupt()
        if _has_started(self._ray):
            self._ray.result().interrupt()

    def close(self) -> None:
        if (local := self._local) is not None:
            local.close()
        if self._ray is None:
            return
        if wait([self._ray], _RAY_START_TIMEOUT_S).not_done:
            log.warning("Ray has not started within %g s; giving up on it", _RAY_START_TIMEOUT_S)
        elif _has_started(self._ray):
            self._ray.result().close()


def _first_window(tasks: Iterator[Task], slots: int) -> tuple[list[Task], Task | None]:
    """Take the tasks of the first `slots` slots.  Returns them and the task after them, if any."""
    first = list[Task]()
    for task in tasks:
        if task[0] >= (first or [task])[0][0] + slots:
            return first, task
        first.append(task)
    return first, None


def _has_started(ray: Future[Regions] | None) -> TypeGuard[Future[Regions]]:
    """Whether Ray has started successfully."""
    return ray is not None and ray.done() and ray.exception() is None
