"""Reads regions in this process: all with `workers: 0`, else the first ones while Ray starts."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, pairwise

import numpy as np

from vesuvius.errors import DataError
from vesuvius.plan.plan import Task, Visit
from vesuvius.stream.reading.reader import Reader, ReaderJob, Region, region_in
from vesuvius.stream.reading.resident import Resident
from vesuvius.threads import on_thread
from vesuvius.volumes.box import intersection, shape_of
from vesuvius.volumes.errors import Outage, OutageError

REGIONS_AHEAD = 2
"""Regions read ahead of those in flight."""
_DECODERS = 4
_CLOSE_TIMEOUT_S = 1.0


class LocalRegions(Iterator[Region]):
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
                    region = self._missing_part(self._job.plan.visit(slot), self._resident)
                    # One that touches damage is replaced.
                    for found in [region] if region else self._read_blocks((slot,)):
                        yield self._resident.take(found)

    def _read_blocks(self, task: Task, ahead: Task = ()) -> Iterator[Region]:
        return (region_in(block, self._job) for block in self._reader.blocks(task, ahead))

    def _missing_part(self, visit: Visit, resident: Resident) -> Region | None:
        """Read what the copy lacks of a region; None if it cannot be read (reading it as a block reports why)."""
        if self._reader.is_damaged(visit.volume, visit.region):
            return None
        if (missing := resident.missing(visit)) is None:
            return Region(visit, [])
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
            return Region(visit, voxels, self._reader.report(), box)
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
