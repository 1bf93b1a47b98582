"""Reads regions on threads of this process: all of them without worker processes, else the first while Ray starts."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain, islice

import numpy as np

from vesuvius.errors import DataError
from vesuvius.plan.plan import Task, Visit
from vesuvius.stream.reading.reader import Reader, ReaderJob, Region, region_in
from vesuvius.stream.reading.resident import Resident
from vesuvius.threads import Pool
from vesuvius.volumes.box import intersection, shape_of
from vesuvius.volumes.errors import Outage, OutageError

REGIONS_AHEAD = 2  # regions of each reader: with one, all would wait for a region that takes longer
_CLOSE_TIMEOUT_S = 1.0


def blocks_of_threads(in_use: int, threads: int) -> int:
    """Blocks of readers that take turns, the same number each: those in use, and two of each that are read ahead."""
    return threads * -(-(in_use + REGIONS_AHEAD * threads) // threads)


class LocalRegions(Iterator[Region]):
    """Regions in order, read by `threads` readers in turn within the context `marker`.

    Codecs and copies release the GIL.  Each reader has a thread and volumes of its own, and reads up to two regions
    ahead of the cutter.  With a `resident` copy the missing part of a region is read into it, and the region is
    delivered as views of it.
    """

    def __init__(
        self,
        job: ReaderJob,
        tasks: Iterable[Task],
        resident: Resident | None = None,
        marker: AbstractContextManager[None] | None = None,
        threads: int = 1,
    ) -> None:
        self._job, self._resident = job, resident
        # A region is in use until the cutter asks for the one that takes its place; with a copy, until it is copied.
        ring = blocks_of_threads(1 if resident else job.plan.regions_held(job.world_size), threads) // threads
        self._pools = [Pool(1, "reader") for _ in range(threads)]
        self._readers = [pool.submit(Reader, job, ring) for pool in self._pools]
        self._readers[0].result()  # raises if the volumes cannot be opened
        self._slots = chain.from_iterable(tasks)
        self._coming = deque[int]()  # the next slots, whose chunks are fetched from remote stores
        self._num_started = 0
        self._reading = deque[Future[Region]]()  # regions that were not delivered, in order
        self._context = ExitStack()
        self._context.enter_context(marker or nullcontext())
        for _ in range(REGIONS_AHEAD * threads):
            self._start()

    def _start(self) -> None:
        """Let the next reader read the next slot, if any is left."""
        count = len(self._readers)
        wanted = 1 + count * self._job.plan.regions_per_task
        self._coming.extend(islice(self._slots, wanted - len(self._coming)))
        if self._coming:
            slot, ahead = self._coming.popleft(), tuple(islice(self._coming, count - 1, None, count))
            turn = self._num_started % count
            self._reading.append(self._pools[turn].submit(self._read, self._readers[turn], slot, ahead))
            self._num_started += 1

    def _read(self, opened: Future[Reader], slot: int, ahead: Task) -> Region:
        reader, visit = opened.result(), self._job.plan.visit(slot)
        if self._resident is not None:
            if (region := self._missing_part(reader, visit, self._resident)) is not None:
                return region
            ahead = ()
        (block,) = reader.blocks((slot,), ahead)
        return region_in(block, self._job)

    def _missing_part(self, reader: Reader, visit: Visit, resident: Resident) -> Region | None:
        """Read what the copy lacks of a region; None if it cannot be read (reading it as a block reports why)."""
        if reader.is_damaged(visit.volume, visit.region):
            return None
        if (missing := resident.missing(visit)) is None:
            return Region(visit, [])
        # Voxels outside the region are read for later ones; an error there must not affect this one.
        for box in dict.fromkeys((missing, intersection(missing, visit.region))):
            if reader.is_damaged(visit.volume, box):
                continue
            boxes = self._job.boxes_of(visit.volume, box)
            voxels = [np.empty(shape_of(of), dtype) for of, dtype in zip(boxes, self._job.dtypes, strict=True)]
            try:
                reader.read(visit.volume, box, voxels)
            except OutageError:
                raise
            except DataError:
                continue
            return Region(visit, voxels, reader.report(), box)
        return None

    def __next__(self) -> Region:
        try:
            self._start()
            if not self._reading:
                raise StopIteration
            region = self._reading.popleft().result()
        except BaseException:
            self._context.close()
            raise
        return region if self._resident is None else self._resident.take(region)

    @property
    def outages(self) -> list[Outage]:
        return [outage for reader in self._opened() for outage in reader.outages]

    def interrupt(self) -> None:
        for pool in self._pools:
            pool.close()
        for reader in self._opened():
            reader.close()

    def close(self) -> None:
        """Release the regions, so that a resident copy can be freed at once."""
        self.interrupt()
        # Those that are not done read from a network that does not answer.
        wait(list(self._reading), _CLOSE_TIMEOUT_S)
        self._reading.clear()
        self._context.close()

    def _opened(self) -> list[Reader]:
        done = [each for each in self._readers if each.done() and not each.cancelled()]
        return [each.result() for each in done if each.exception() is None]
