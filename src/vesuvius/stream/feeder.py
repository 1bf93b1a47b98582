"""Cuts patches from the regions in flight and assembles batches, on a thread, a few ahead of the trainer."""

import itertools
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from vesuvius.errors import VesuviusError
from vesuvius.plan.plan import Sample, Visit
from vesuvius.stream.reading.reader import ReaderJob, Region
from vesuvius.stream.reading.reader_stats import BlockReport
from vesuvius.threads import Pool
from vesuvius.volumes.errors import ClosedError, Outage

BATCHES_IN_USE = 2  # by the trainer: the current batch, and the previous one until it is released
_POLL_S = 0.2
_JOIN_S = 1.0
_COPIERS = 2


class StreamInterrupted(Exception):  # noqa: N818 - not an error: it ends a wait
    """No batch was ready, and the caller wants to stop."""


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
        return self._state[1] is not None

    @property
    def seconds(self) -> float:
        """Total so far, including a wait under way."""
        total, since = self._state
        return total if since is None else total + time.perf_counter() - since


Patch = tuple[Sample, list[NDArray[Any]]]
"""A sample and its voxels: views (Z, Y, X) into the region of each array."""


@dataclass(eq=False)
class Cutter:
    """Turns the regions of `job.tasks(first, stop)` into the patches of samples first <= i < stop.

    Holds at most the plan's M regions in flight.
    """

    job: ReaderJob
    regions: Iterator[Region]
    on_report: Callable[[BlockReport], None]  # gets the reader's report of each region
    starved: WaitTime  # measures the time spent waiting for regions
    first: int
    stop: int

    def __post_init__(self) -> None:
        self._in_flight: dict[int, tuple[Visit, list[NDArray[Any]]]] = {}
        self._last_slot = -1
        self.index = self.first + self.job.rank  # of the next sample

    def patches(self) -> Generator[Patch]:
        """Yield the patches in sample order.  A region is dropped in the round after its last patch.

        Raises StreamOrderError: a region is missing or out of order.
        """
        plan = self.job.plan
        try:
            for index in range(self.index, self.stop, self.job.world_size):
                self.index = index
                first = plan.mixing.first_slot(index // plan.mixing.regions)
                while self._in_flight and (oldest := next(iter(self._in_flight))) < first:
                    del self._in_flight[oldest]
                slot = plan.mixing.slot_of(index)
                while slot not in self._in_flight:
                    self._take_region(slot)
                visit, regions = self._in_flight[slot]
                sample = plan.sample_of(visit, index)
                yield sample, self.job.cut(visit.volume, regions, visit.region, sample.box)
        finally:
            self._in_flight.clear()  # views into the object store, which would otherwise stay full

    def _take_region(self, wanted: int) -> None:
        """Take the next region; they arrive in ascending order of their slots."""
        with self.starved:
            region = next(self.regions, None)
        if region is None:
            raise StreamOrderError(f"The workers ended before slot {wanted}; report this as a bug")
        visit = region.visit
        if not self._last_slot < visit.slot <= wanted:
            raise StreamOrderError(
                f"Slot {visit.slot} arrived after slot {self._last_slot}, not slot {wanted}; report this as a bug"
            )
        self._last_slot = visit.slot
        if region.report is not None:
            self.on_report(region.report)
        self._in_flight[visit.slot] = visit, region.voxels


@dataclass(frozen=True)
class Batch:
    """Consecutive samples of one rank."""

    arrays: tuple[NDArray[Any], ...]  # (B, Z, Y, X) in the stored dtype: channels of the image, then conditions
    samples: tuple[Sample, ...]  # of each patch
    channels: int = 1

    @property
    def patches(self) -> NDArray[Any]:
        """The first channel of the image, (B, Z, Y, X)."""
        return self.arrays[0]

    @property
    def condition(self) -> NDArray[Any] | None:
        """The first condition, cut like `patches`; None without one."""
        return self.arrays[self.channels] if len(self.arrays) > self.channels else None

    @cached_property
    def indices(self) -> NDArray[np.int64]:
        """The sample index of each patch, (B,)."""
        return np.array([sample.index for sample in self.samples], np.int64)

    def rows(self, of: slice) -> Self:
        return type(self)(tuple(array[of] for array in self.arrays), self.samples[of], self.channels)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


@dataclass
class FeederStats:
    """Totals of a stream's feeders."""

    cut_s: float = 0.0  # copying patches from regions into batches
    wait_for_readers_s: float = 0.0  # waiting for blocks from the readers; without processes, reading them
    idle_s: float = 0.0  # waiting because enough batches were ready
    batches: int = 0  # delivered
    empty_queue_hits: int = 0  # requests for a batch when none was ready
    delivered_bytes: int = 0  # of patches and conditions


class FeederClock:
    """Measures the feeders of a stream, one after the other.  Any thread may read it."""

    def __init__(self) -> None:
        self.starved, self.full, self.counted = WaitTime(), WaitTime(), FeederStats()

    @property
    def stats(self) -> FeederStats:
        return replace(self.counted, wait_for_readers_s=self.starved.seconds, idle_s=self.full.seconds)


def reusable_arrays(shape: tuple[int, ...], dtype: np.dtype[Any], kept: int) -> Iterator[NDArray[Any]]:
    """Yield arrays, reusing up to `kept` that are no longer referenced: allocating costs as much as copying."""
    pool: list[NDArray[Any]] = []
    while True:
        array = _unreferenced(pool)
        if array is None:
            array = np.empty(shape, dtype)
            if len(pool) < kept:
                pool.append(array)
        yield array
        del array


def _unreferenced(pool: list[NDArray[Any]]) -> NDArray[Any] | None:
    return next((array for array in pool if sys.getrefcount(array) <= _REFERENCES), None)


_REFERENCES = next(sys.getrefcount(array) for array in [np.empty(0)])
"""References that `_unreferenced` counts for an array held only by a list; differs between versions of Python."""


class Feeder:
    """Copies the patches of a cutter, which is iterated on its own thread, into batches ahead of the consumer.

    `layout` has shape and dtype of a batch's arrays.  At most `ahead` batches are assembled ahead.  During a wait
    `interrupted` is polled several times a second.  `views_stay`: patches stay valid after the next one is cut.
    """

    def __init__(
        self,
        layout: Sequence[tuple[tuple[int, int, int, int], np.dtype[Any]]],
        cutter: Cutter,
        clock: FeederClock,
        ahead: int,
        interrupted: Callable[[], bool],
        views_stay: bool,
    ) -> None:
        self._interrupted = interrupted
        self._batch_size = layout[0][0][0]
        self._cutter = cutter
        self._patches = cutter.patches()
        # Two threads copy faster than one.
        self._copiers = Pool(_COPIERS, "cut") if views_stay else None
        self._clock = clock
        self._arrays = [reusable_arrays(*of, BATCHES_IN_USE + ahead) for of in layout]
        # Both are C queues: the Python lock of a semaphore would stay locked if Ctrl-C interrupted it.
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(ahead):
            self._free.put(None)
        self._ready: SimpleQueue[Batch | BaseException | None] = SimpleQueue()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def next_batch(self) -> Batch | None:
        """Return the next batch, or None at the end.

        Raises the errors of reading and cutting, again at each further call; StreamInterrupted if none is ready and
        `interrupted` returns True; ClosedError if another thread stops the feeder.
        """
        empty = self._ready.empty()
        ready = self._wait_for_batch()
        if not isinstance(ready, Batch):
            self._ready.put(ready)  # the end stays the end, and an error an error
            if ready is not None:
                raise ready
            return None
        self._free.put(None)
        self._clock.counted.batches += 1
        self._clock.counted.empty_queue_hits += empty
        self._clock.counted.delivered_bytes += ready.nbytes
        return ready

    def waiting_for(self, outages: Sequence[Outage]) -> str:
        """Describe what delays the next batch, given the storage outages.  Any thread may call it."""
        if not self._ready.empty():
            return "the device: a batch is ready"
        if self._clock.starved.waiting:
            oldest = min(outages, key=lambda outage: outage.since, default=None)
            why = f" ({oldest})" if oldest else ""
            return f"regions to be read, for sample {self._cutter.index} on{why}"
        return f"patches to be cut, for sample {self._cutter.index} on"

    def stop(self) -> None:
        """Stop the thread after the current patch, without waiting for it; ends a `next_batch` on another thread."""
        self._stopped.set()
        self._free.put(None)
        self._ready.put(ClosedError("The stream was closed or reopened by another thread while it was read"))

    def join(self) -> None:
        """Wait for the thread for at most a second: a read from an unreachable network may take long."""
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _wait_for_batch(self) -> Batch | BaseException | None:
        while True:
            stopping = self._interrupted()
            try:
                return self._ready.get(timeout=0.0 if stopping else _POLL_S)
            except Empty:
                if stopping:
                    raise StreamInterrupted from None

    def _run(self) -> None:
        starved = self._clock.starved
        try:
            while True:
                with self._clock.full:
                    self._free.get()
                if self._stopped.is_set():
                    return
                started, wait_for_readers_s = time.perf_counter(), starved.seconds
                batch = self._next()
                self._clock.counted.cut_s += time.perf_counter() - started - (starved.seconds - wait_for_readers_s)
                self._ready.put(batch)
                if batch is None:
                    return
        except BaseException as error:
            self._ready.put(error)
        finally:
            self._patches.close()  # releases the regions
            if self._copiers is not None:
                self._copiers.close()

    def _next(self) -> Batch | None:
        arrays = [next(each) for each in self._arrays]
        samples: list[Sample] = []
        copies: list[Future[None]] = []
        for sample, views in itertools.islice(self._patches, self._batch_size):
            if self._stopped.is_set():
                return None
            for array, voxels in zip(arrays, views, strict=True):
                if self._copiers is None:
                    array[len(samples)] = voxels
                else:
                    copies.append(self._copiers.submit(np.copyto, array[len(samples)], voxels))
            samples.append(sample)
        for copy in copies:
            copy.result()
        if not samples:
            return None
        return Batch(tuple(array[: len(samples)] for array in arrays), tuple(samples), self._cutter.job.channels)
