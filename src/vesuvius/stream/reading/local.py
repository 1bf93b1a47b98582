"""Regions that are read in this process: with `workers: 0`, and the first ones while Ray starts."""

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
from vesuvius.stream.reading.reader import Block, Reader, ReaderJob, Region, region_in
from vesuvius.stream.reading.reading_log import TrainerReadingMarker
from vesuvius.stream.reading.resident import Resident
from vesuvius.threads import on_thread
from vesuvius.volumes.box import intersection, shape_of
from vesuvius.volumes.errors import OutageError
from vesuvius.volumes.store.retry import Outage

log = logging.getLogger(__name__)

REGIONS_AHEAD = 2
"""Read while the cutter holds those in flight."""
_DECODERS = 4
_ENDS_S = 1.0
_RAY_STARTS_S = 30.0  # waited for where the stream ends before it has


class Regions(Iterator[Region]):
    """Where the regions of consecutive tasks come from.  Iterated on one thread; the rest is called from another."""

    @property
    @abstractmethod
    def tasks_left(self) -> int:
        """Tasks that reader processes are given and have not finished."""

    @property
    @abstractmethod
    def outages(self) -> list[Outage]:
        """Of the stores that do not answer at the moment."""

    @abstractmethod
    def interrupt(self) -> None:
        """Make a waiting `next` end soon, with any error."""

    @abstractmethod
    def close(self) -> None:
        """End what reads, once nobody iterates."""


class LocalRegions(Regions):
    """Read in this process, one ahead of the cutter.

    Reading and decoding have threads of their own: codecs and copies let go of the interpreter's lock.

    Args:
        resident: what is missing there of a region is read into it, and the region comes as views of it.
        noted: says that this process reads, as long as it does.
    """

    def __init__(
        self,
        job: ReaderJob,
        tasks: Iterable[Task],
        resident: Resident | None = None,
        noted: AbstractContextManager[None] | None = None,
    ) -> None:
        self._job, self._resident = job, resident
        ring = 2 if resident else job.plan.regions_in_flight + REGIONS_AHEAD
        self._reader = Reader(job, ring, threads=min(os.cpu_count() or 1, _DECODERS))
        self._regions: Generator[Region] = self._read(tasks, noted or nullcontext())
        self._next: Future[Region | None] = on_thread(next, self._regions, None, name="reader")

    def _read(self, tasks: Iterable[Task], noted: AbstractContextManager[None]) -> Generator[Region]:
        with noted:
            yield from self._read_all(tasks)

    def _read_all(self, tasks: Iterable[Task]) -> Generator[Region]:
        for task, ahead in pairwise(chain(tasks, [()])):
            if self._resident is None:
                yield from (region_in(block, self._job) for block in self._reader.blocks(task, ahead))
                continue
            for slot in task:
                visit = self._job.plan.visit(slot)
                # What touches damage is replaced, and copied into the resident copy by the cutter.
                yield self._resident_region(visit, self._resident) or region_in(self._read_block(slot), self._job)

    def _read_block(self, slot: int) -> Block:
        (block,) = self._reader.blocks((slot,))
        return block

    def _resident_region(self, visit: Visit, resident: Resident) -> Region | None:
        """The region as views of the copy; None where it cannot be read, which reading it as a block says."""
        if self._reader.is_damaged(visit.volume, visit.region):
            return None
        if (missing := resident.missing(visit)) is None:
            return Region(visit, resident.views(visit))
        # What lies beside the region is read for later ones, but nothing that is wrong there concerns this one.
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
            resident.keep(visit.volume, box, voxels)
            return Region(visit, resident.views(visit), self._reader.report())
        return None

    def __next__(self) -> Region:
        region = self._next.result()
        if region is None:
            raise StopIteration
        self._next = on_thread(next, self._regions, None, name="reader")
        return region

    @property
    def tasks_left(self) -> int:
        return 0

    @property
    def outages(self) -> list[Outage]:
        return self._reader.outages

    def interrupt(self) -> None:
        self._reader.close()

    def close(self) -> None:
        """Lets go of regions, so that a resident copy can be freed at once."""
        if wait([self._next], _ENDS_S).done:  # else it still reads, from a network that does not answer
            self._regions.close()


class LocalThenRay(Regions):
    """The regions in flight at first are read in this process while Ray starts; its readers bring those after them.

    Args:
        noted: as of `LocalRegions`; where an earlier trainer broke off, readers read all.
        start: starts Ray and the readers of these tasks; called on a thread of its own, if there are such tasks.

    Raises:
        ConfigError: from `next`, where Ray does not start.
    """

    def __init__(
        self,
        job: ReaderJob,
        tasks: Iterable[Task],
        resident: Resident | None,
        noted: TrainerReadingMarker | None,
        start: Callable[[Iterator[Task]], Regions],
    ) -> None:
        tasks = iter(tasks)
        own, later = _first_window(tasks, 0 if noted and noted.broke_off else job.plan.regions_in_flight)
        self._local: LocalRegions | None = LocalRegions(job, own, resident, noted) if own else None
        self._interrupted = False
        self._ray = (
            on_thread(start, self._unless_interrupted(chain([later], tasks)), name="ray-start") if later else None
        )

    def _unless_interrupted(self, tasks: Iterable[Task]) -> Iterator[Task]:
        """The tasks; none once it is clear that nobody takes what they bring."""
        return takewhile(lambda _: not self._interrupted, tasks)

    def __next__(self) -> Region:
        if self._ray is not None and self._ray.done():
            self._ray.result()  # raises why it has not started
        if self._local is not None:
            with suppress(StopIteration):
                return next(self._local)
            self._local = None
        if self._ray is None:
            raise StopIteration
        ray = self._ray.result()
        if self._interrupted:  # while Ray started: its readers are being ended
            raise StopIteration
        return next(ray)

    @property
    def tasks_left(self) -> int:
        if self._ray is None:
            return 0
        return self._ray.result().tasks_left if _is_there(self._ray) else sys.maxsize

    @property
    def outages(self) -> list[Outage]:
        local, ray = self._local, self._ray
        return (local.outages if local else []) + (ray.result().outages if _is_there(ray) else [])

    def interrupt(self) -> None:
        self._interrupted = True
        if (local := self._local) is not None:
            local.interrupt()
        if _is_there(self._ray):
            self._ray.result().interrupt()

    def close(self) -> None:
        if (local := self._local) is not None:
            local.close()
        if self._ray is None:
            return
        if wait([self._ray], _RAY_STARTS_S).not_done:
            log.warning("Ray has not started within %g s, and is left to the system", _RAY_STARTS_S)
        elif _is_there(self._ray):
            self._ray.result().close()


def _first_window(tasks: Iterator[Task], slots: int) -> tuple[list[Task], Task | None]:
    """The tasks of so many slots from the first one on, and the one after them if there is one."""
    first = list[Task]()
    for task in tasks:
        if task[0] >= (first or [task])[0][0] + slots:
            return first, task
        first.append(task)
    return first, None


def _is_there(ray: Future[Regions] | None) -> TypeGuard[Future[Regions]]:
    """Whether Ray has started, and not failed to."""
    return ray is not None and ray.done() and ray.exception() is None
