"""The data path as an endless, ordered iterator of batches; batch n depends on the plan alone."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Self, Unpack
from weakref import WeakMethod, WeakSet

import numpy as np

from vesuvius.errors import ConfigError, DataError
from vesuvius.plan.plan import Task
from vesuvius.runlog.units import format_count
from vesuvius.stream.events import EventRecorder, check_process, check_state
from vesuvius.stream.feeder import Batch, Cutter, Feeder, FeederClock, FeederStats, StreamOrderError
from vesuvius.stream.options import (
    StreamChanges,
    StreamOptions,
    batches_ahead,
    check_store,
    is_ray_connected,
    store_prefetch_bytes,
)
from vesuvius.stream.reading.local import blocks_of_threads
from vesuvius.stream.reading.reader import ReaderJob
from vesuvius.stream.reading.reader_stats import BlockReport, Readers, ReaderTotals
from vesuvius.stream.reading.reading_log import TrainerReadingMarker, node_name
from vesuvius.stream.reading.resident import Resident
from vesuvius.stream.source import RayOfStream, RegionSource
from vesuvius.threads import before_exit, end_later
from vesuvius.volumes.errors import ClosedError

_ENDLESS = 2**62
_END_S = 60.0
_open = WeakSet["PatchStream"]()


class PatchStream(Iterator[Batch]):
    """Batches from sample `first` on.  A context manager: closing it ends the workers, and Ray if it started Ray.

    Dropped without `close`, it is closed soon after on another thread.  Refused in a forked child and in a DataLoader's
    worker.

    Args:
        job: plan, volumes and rank; `prepare_data(...).job`.
        first: index of the first sample; a multiple of the number of ranks.
        stop: index after the last sample, or None for an endless stream.  The last batch may be short.
        quarantined: `quarantined` of an earlier stream over the same volumes; these boxes are not read again.
        interrupted: polled several times a second while `next` waits for a batch; if it returns True, `next` raises
            StreamInterrupted and the stream keeps its position.
        resident: in-memory copy of the volumes to fill and to cut from, which the stream closes.  The workers end once
            it is full; none are started if the volumes are so small that it soon will be.

    Attributes:
        options: the current ones; `reconfigure` and a resident copy change them.
        events: the last 10,000 events; the caller may remove them.
        quarantined: a record for each damaged box; regions that touch one are replaced.
        readers: statistics of each living worker process by pid.

    Raises:
        DataError: a volume cannot be read or too many regions cannot.
        ConfigError: /dev/shm is too small; on iterating, Ray does not start or its cluster does not answer.
        ClosedError: on iterating, the stream is closed, or another thread closes it.
    """

    _closed = True  # until it has opened

    def __init__(
        self,
        job: ReaderJob,
        options: StreamOptions,
        *,
        first: int = 0,
        stop: int | None = None,
        quarantined: Sequence[dict[str, Any]] = (),
        interrupted: Callable[[], bool] = lambda: False,
        resident: Resident | None = None,
    ) -> None:
        self._job = job
        self._resident, self._pid = resident, os.getpid()
        try:
            check_process("PatchStream", self._pid)
            if first < 0 or first % job.world_size or (stop is not None and stop < first):
                raise ConfigError(
                    f"first={first}, stop={stop} is not a valid range of samples; set first to a multiple of the "
                    f"number of ranks ({job.world_size}), and stop to at least first"
                )
            self._events = EventRecorder(job, quarantined)
        except BaseException:
            self._drop_resident()
            raise
        # Without readers no other process could read instead.
        marker = TrainerReadingMarker(Path(job.reading_log_dir)) if job.reading_log_dir and options.processes else None
        interrupted_before = marker is not None and marker.was_interrupted
        if resident is not None and options.processes and job.plan.is_small and not interrupted_before:
            options = replace(options, num_workers=0, processes=False)
        self.options = options
        self._next_sample = first
        self._ended_readers = 0  # number that ended because the resident copy is full
        self._stop = _ENDLESS if stop is None else stop
        self._interrupted = interrupted
        self._readers = Readers()
        self._marker = marker
        self._ray = RayOfStream(partial(self._events.record, "spill"), _weak(self._worker_died))
        self.events, self.quarantined = self._events.events, self._events.quarantined
        self.readers = self._readers.living
        self._source: RegionSource | None = None
        self._feeder: Feeder | None = None
        self._clock = FeederClock()
        self._failure: BaseException | None = None
        self._closed = False
        self._changing = threading.RLock()
        end_later(lambda: None)  # starts its thread
        _close_at_exit()
        _open.add(self)
        try:
            self._open_readers()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed and os.getpid() == self._pid:
            end_later(self.close)  # which holds the stream until then

    def __next__(self) -> Batch:
        check_process("PatchStream", self._pid)
        if self._failure is not None:
            raise self._failure
        if self._resident is not None and self._resident.first_pass_done and self.options.processes:
            self._end_readers()
        if (feeder := self._feeder) is None:
            raise ClosedError("The stream is closed; open another PatchStream")
        batch = feeder.next_batch()
        if batch is None:
            raise StopIteration
        count, ranks = len(batch.samples), self._job.world_size
        if not np.array_equal(batch.indices, self._next_sample + self._job.rank + ranks * np.arange(count)):
            raise StreamOrderError(
                f"Samples {batch.indices.tolist()} arrived out of order at {self._next_sample}; report this as a bug"
            )
        self._next_sample += ranks * count
        return batch

    def close(self) -> None:
        """End the workers for good, within half a minute.  On any thread: a `next` that waits raises ClosedError.

        Does nothing in a forked child: all belongs to its parent.
        """
        if os.getpid() != self._pid:
            return
        self._closed = self._ray.closed = True
        with self._changing:
            try:
                self._close_readers()
            finally:
                _open.discard(self)
                self._drop_resident()
                self._ray.end()

    def state_dict(self) -> dict[str, Any]:
        """Return the position between two batches as plain data; continues with any workers, prefetch or cache."""
        return {
            "seed": self._job.plan.seed,
            "sample_index": self._next_sample,
            "plan_hash": self._job.plan.hash,
            "quarantined": list(self.quarantined),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of another stream over the same plan; reads the regions in flight again.

        Raises ConfigError: not a state, the state of another plan, or the stream is closed; the stream is unchanged.
        """
        self._check_open()
        check_state(state, self._job)
        with self._changing:
            self._events.set_quarantined(state["quarantined"])
            self._close_readers()
            self._next_sample = state["sample_index"]
            self._open_readers()

    def reconfigure(self, **changes: Unpack[StreamChanges]) -> None:
        """Change workers, their requests or prefetch.  The stream reopens at the next sample; batches do not change.

        Raises ConfigError: /dev/shm is too small or the stream is closed; the stream is unchanged.  If new workers
        cannot start, `next` raises the error until another call succeeds.
        """
        self._check_open()
        if unknown := changes.keys() - StreamChanges.__annotations__.keys():
            raise TypeError(f"Cannot change {', '.join(unknown)} of a running stream; open another PatchStream")
        options = replace(self.options, **changes)
        if not is_ray_connected() or not self._ray.fits(self._job, options):
            check_store(self._job, options)
        with self._changing:
            self.options = options
            self._close_readers()
            if not options.cache_in_memory:
                self._drop_resident()
            self._open_readers()
        text = ", ".join(f"{key} {value}" for key, value in changes.items())
        self._events.record("reconfigured", f"Workers changed at sample {self._next_sample}: {text}", changes)

    def waiting_for(self) -> str:
        """Describe what delays the next batch.  Any thread may call it."""
        if (feeder := self._feeder) is None:
            return "the workers to start or stop"
        workers, source = self.options.num_processes, self._source
        readers = format_count(workers or self.options.num_threads, "worker" if workers else "reader thread")
        if workers and not self._ray.has_started:
            readers = f"Ray is starting {format_count(workers, 'worker')}"
        return f"{feeder.waiting_for(source.outages if source else [])} ({readers})"

    def local_readers(self) -> frozenset[int]:
        """Pids of the reader processes on this machine; they are children of this process only if it started Ray."""
        here = node_name()
        return frozenset(pid for pid, figures in self.readers.copy().items() if figures.node == here)

    def reader_memory(self) -> dict[int, int]:
        """Bytes of private memory of each reader process by pid, as last reported."""
        return {pid: figures.rss_anon_bytes for pid, figures in self.readers.copy().items()}

    @property
    def has_resident(self) -> bool:
        return self._resident is not None

    @property
    def resident_frees_memory(self) -> bool:
        """Whether `reconfigure(cache_in_memory=False)` frees memory, as the regions in flight then take some."""
        if self._resident is None:
            return False
        regions = self._job.plan.regions_held(self._job.world_size)
        held = blocks_of_threads(regions, self.options.num_threads) * self._job.block_bytes
        return Resident.size_bytes(self._job) > held

    @property
    def num_readers_without_resident(self) -> int:
        """Number of processes to use without the resident copy: the current ones, or those it made unnecessary."""
        return self.options.num_processes or self._ended_readers

    @property
    def reader_deaths(self) -> int:
        return self._events.reader_deaths

    @property
    def num_readers_with_work(self) -> int:
        """Number of reader processes that still have tasks: fewer than there are near the end of the samples."""
        return min(self.options.num_processes, self._source.tasks_left) if self._source else self.options.num_processes

    @property
    def num_readers_alive(self) -> int | None:
        """Number of reader processes that have delivered blocks: 0 once everything is read, None before the first."""
        return (len(self.readers) or None) if self.num_readers_with_work else 0

    @property
    def max_blocks_ahead(self) -> int:
        """Maximum number of blocks that readers produce ahead of the trainer; 0 without processes."""
        return store_prefetch_bytes(self._job, self.options) // self._job.block_bytes if self.options.processes else 0

    @property
    def reader_totals(self) -> ReaderTotals:
        """Totals of all readers, including ended ones, since the stream was opened.  Never decrease."""
        return self._readers.totals

    @property
    def feeder_stats(self) -> FeederStats:
        """Totals of batch assembly in this process since the stream was opened.  Never decrease."""
        return self._clock.stats

    def _check_open(self) -> None:
        check_process("PatchStream", self._pid)
        if self._closed:
            raise ConfigError("The stream is closed and cannot be changed; open another PatchStream")

    def _open_readers(self) -> None:
        job = replace(self._job, quarantined=frozenset(self._events.damaged))
        if (requests := self.options.requests) is not None:
            job = replace(job, data=job.data.with_store(requests=requests))
        self._readers.clear()
        if self._closed:  # by another thread meanwhile
            return
        try:
            span = self._next_sample, self._stop
            self._source = self._open_source(job, job.tasks(*span))
            cutter = Cutter(job, self._source, _weak(self._take_report), self._clock.starved, *span)
            layout, ahead = job.batch_layout(self.options.batch_size), batches_ahead(self.options)
            views_stay = self._resident is not None
            self._feeder = Feeder(layout, cutter, self._clock, ahead, self._interrupted, views_stay)
        except BaseException as error:
            self._failure = error  # otherwise `next` would report the end of the stream
            raise
        self._failure = None

    def _open_source(self, job: ReaderJob, tasks: Iterator[Task]) -> RegionSource:
        local_slots = None
        if self.options.processes:
            if not self._ray.fits(job, self.options):
                self._ray.end()
            local_slots = 0
            if not (self._ray.has_started or is_ray_connected()):
                check_store(job, self.options)
                if not (self._marker and self._marker.was_interrupted):
                    local_slots = job.plan.regions_in_flight
        start = partial(self._ray.start, job, self.options)
        return RegionSource(job, tasks, self._resident, self._marker, start, local_slots, self.options.num_threads)

    def _close_readers(self) -> None:
        feeder, source = self._feeder, self._source
        if feeder is not None:
            feeder.stop()
        if source is not None:
            source.interrupt()
        if feeder is not None:
            feeder.join()
        if source is not None:
            source.close()
        self._feeder = self._source = None

    def _end_readers(self) -> None:
        """Continue without readers and Ray: the resident copy is full."""
        began = time.monotonic()
        with self._changing:
            self._close_readers()
            self._ray.end()
            self._ended_readers = self.options.num_processes
            self.options = replace(self.options, num_workers=0, processes=False)
            self._open_readers()
        text = (
            f"From sample {self._next_sample} on, patches are cut from the volumes in memory; the workers ended in "
            f"{time.monotonic() - began:.1f} s"
        )
        self._events.record("resident", text, {"sample": self._next_sample})

    def _drop_resident(self) -> None:
        if self._resident is not None:
            self._resident.close()
            self._resident = None

    def _take_report(self, report: BlockReport) -> None:
        """Process a reader's report, on the feeder's thread."""
        died = self._readers.add(report, self.options.num_processes)
        if died is not None and (source := self._source) is not None:
            source.report_replaced(report.actor, *died)
        for record in report.quarantined:
            self._events.quarantine(record)
        for nonfinite in report.nonfinite:
            nonfinite.warn()

    def _worker_died(self, text: str, fields: dict[str, Any]) -> DataError | None:
        """Record a death, on any thread.  Returns the error that ends the stream, if any."""
        self.readers.pop(fields["pid"], None)
        return self._events.worker_died(text, fields)


def _weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """Call a method as long as its object lives: the stream's threads must not keep it."""
    reference = WeakMethod(method)
    return lambda *arguments: None if (live := reference()) is None else live(*arguments)


@cache
def _close_at_exit() -> None:
    """Close open streams when the interpreter exits, where it would wait forever for threads of Ray Data."""

    def close_all() -> None:
        with ExitStack() as closing:  # a stream that fails to close does not keep the others open
            closing.callback(lambda: end_later(lambda: None).result(_END_S))  # those that were dropped
            for stream in list(_open):
                closing.callback(stream.close)

    before_exit(close_all)
