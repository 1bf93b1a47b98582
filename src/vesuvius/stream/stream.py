"""The data path as an endless, ordered iterator of batches, read by Ray workers or in this process.

The content of batch n depends on the plan alone: not on the number of workers, the prefetch or the cache.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np
from numpy.typing import NDArray

from vesuvius.errors import ConfigError, DataError, one_line
from vesuvius.runlog.units import format_count
from vesuvius.stream.cutter import Cutter, StreamOrderError
from vesuvius.stream.events import EventRecorder
from vesuvius.stream.feeder import Batch, Feeder, FeederClock, FeederStats, check_rings
from vesuvius.stream.options import (
    StreamChanges,
    StreamOptions,
    batches_ahead,
    check_store,
    is_ray_connected,
    store_prefetch_bytes,
)
from vesuvius.stream.reading.local import REGIONS_AHEAD, Regions
from vesuvius.stream.reading.reader import ReaderJob
from vesuvius.stream.reading.reader_stats import BlockReport, Readers, ReaderTotals
from vesuvius.stream.reading.reading_log import TrainerReadingMarker
from vesuvius.stream.reading.resident import Resident
from vesuvius.stream.sources import Sources

_ENDLESS = 2**62
_open = set["PatchStream"]()


class PatchStream(Iterator[Batch]):
    """Batches from sample `first` on.  A context manager; closing it ends the readers, and a Ray that it started.

    Args:
        job: plan, volumes and rank; `prepare_data(...).job`.
        options: batch size and readers.
        first: sample index to start at; a multiple of the number of ranks.
        stop: sample index to end before, or None for an endless stream.  The last batch may be short.
        buffers: a ring of at least 3 arrays (batch_size, Z, Y, X) of the job's dtype, e.g. in pinned memory; batches
            are delivered in them in turn, each valid until the second `next` after it.  By default new arrays.
        condition_buffers: the same for conditions.
        quarantined: `quarantined` of an earlier stream over the same volumes; these places are not tried again.
        interrupted: asked several times a second while a batch is waited for; where it says yes, `next` raises
            StreamInterrupted, and the stream stays where it was.
        resident: a copy of the volumes in memory to fill and to cut from, which the stream closes.  Once it holds them
            the readers end; where they are so small that it soon does, none are started.

    Attributes:
        options: the current ones; `reconfigure` and a resident copy change them.
        events: what happened so far, the last 10,000; the caller may take them out.
        quarantined: a record for each damaged place; regions that touch one are replaced.
        readers: figures of each living reader process by pid.

    Raises:
        DataError: on opening or iterating, where a volume cannot be read or too many regions cannot.
        ConfigError: on opening, where /dev/shm is too small; on iterating, where Ray does not start, or its cluster
            does not answer.
    """

    def __init__(
        self,
        job: ReaderJob,
        options: StreamOptions,
        *,
        first: int = 0,
        stop: int | None = None,
        buffers: Sequence[NDArray[Any]] = (),
        condition_buffers: Sequence[NDArray[Any]] = (),
        quarantined: Sequence[dict[str, Any]] = (),
        interrupted: Callable[[], bool] = lambda: False,
        resident: Resident | None = None,
    ) -> None:
        _check_place(first, stop, job.world)
        self._job = job
        self._resident = resident
        # A run without readers has nobody else to read.
        reads = TrainerReadingMarker(Path(job.reading_log_dir)) if job.reading_log_dir and options.workers else None
        if resident is not None and job.plan.is_small and not (reads and reads.broke_off):
            options = replace(options, workers=0)
        self.options = options
        self._next_sample = first
        self._ended_readers = 0  # as all that they would read is in memory
        self._stop = _ENDLESS if stop is None else stop
        self._interrupted = interrupted
        self._buffers = (buffers, condition_buffers)
        self._readers = Readers()
        self._events = EventRecorder(job, quarantined)
        self._sources = Sources(reads, partial(self._events.record, "spill"), self._reader_died)
        self.events, self.quarantined = self._events.events, self._events.quarantined
        self.readers = self._readers.living
        self._source: Regions | None = None
        self._feeder: Feeder | None = None
        self._clock = FeederClock()
        self._delivered = 0  # into the present ring
        self._held: list[Batch] = []
        self._failure: BaseException | None = None
        self._closed, self._pid = False, os.getpid()
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

    def __next__(self) -> Batch:
        if self._failure is not None:
            raise self._failure
        if self._resident is not None and self._resident.suffices and self.options.workers:
            self._end_readers()
        if self._feeder is None:
            raise StopIteration
        batch = self._feeder.next_batch()
        if batch is None:
            raise StopIteration
        count, world = len(batch.samples), self._job.world
        if not np.array_equal(batch.indices, self._next_sample + self._job.rank + world * np.arange(count)):
            got = batch.indices.tolist()
            raise StreamOrderError(f"samples {got} came at {self._next_sample}, out of order; report this as a bug")
        self._next_sample += world * count
        self._delivered += 1
        return batch

    def close(self) -> None:
        """End the readers for good.  Safe to call again.

        Takes at most half a minute: a private Ray whose head hangs is killed, a shared one is left behind, each with a
        warning.  In a forked child, such as a DataLoader's worker, it does nothing: all belongs to its parent.
        """
        if os.getpid() != self._pid:
            return
        self._closed = self._sources.closed = True
        try:
            self._close_readers()
        finally:
            self._held = []
            _open.discard(self)
            self._drop_resident()
            self._sources.end_ray()

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream, as plain data: enough to continue with any workers, prefetch or cache.

        Call it between two batches.
        """
        return {
            "seed": self._job.plan.seed,
            "sample_index": self._next_sample,
            "plan_hash": self._job.plan.hash,
            "quarantined": list(self.quarantined),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where another stream over the same plan was.

        Reads the regions in flight again, at most `plan.regions_in_flight`: the next samples are cut from them.

        Raises:
            ConfigError: it is not a state, or that of another plan, or the stream is closed; it stays as it was.
        """
        self._check_open()
        check_state(state, self._job)
        self._events.know(state["quarantined"])
        self._close_readers()
        self._next_sample = state["sample_index"]
        self._open_readers()

    def reconfigure(
        self,
        *,
        buffers: Sequence[NDArray[Any]] | None = None,
        condition_buffers: Sequence[NDArray[Any]] = (),
        **changes: Unpack[StreamChanges],
    ) -> None:
        """Change readers, their requests or prefetch: the stream is reopened at the next sample, so no batch changes.

        Takes the seconds in which new readers start and read the regions in flight again, at most
        `plan.regions_in_flight`.  A ring of buffers limits prefetch, so a larger prefetch needs larger rings.

        Args:
            changes: options that get other values.
            buffers, condition_buffers: rings that replace both old ones, filled from their first buffers on; None keeps
                the old ones.  Old buffers may be among them once nobody uses the batches delivered in them.

        Raises:
            TypeError: an option that a running stream cannot change.
            ConfigError: /dev/shm is too small, a ring has fewer than 3 buffers, or the stream is closed; it stays as it
                was.  Where new readers cannot start, `next` raises the error until another call succeeds.
        """
        self._check_open()
        if unknown := changes.keys() - StreamChanges.__annotations__.keys():
            can = ", ".join(StreamChanges.__annotations__)
            raise TypeError(f"a running stream cannot change {', '.join(unknown)}, only {can}; make another stream")
        check_rings((buffers or (), condition_buffers))
        options = replace(self.options, **changes)
        if not is_ray_connected() or not self._sources.fits(self._job, options):
            check_store(self._job, options)
        self.options = options
        self._close_readers()
        if not options.resident:
            self._drop_resident()
        if buffers is not None:
            self._buffers, self._delivered, self._held = (buffers, condition_buffers), 0, []
        self._open_readers()
        text = ", ".join(f"{key} {value}" for key, value in changes.items())
        self._events.record("reconfigured", f"readers changed at sample {self._next_sample}: {text}", changes)

    def waiting_for(self) -> str:
        """What delays the next batch, for people.  Any thread may ask."""
        if (feeder := self._feeder) is None:
            return "the readers to start or stop"
        workers, source = self.options.workers, self._source
        readers = format_count(workers, "reader") if workers else "no readers: the trainer reads"
        if workers and not self._sources.has_ray:
            readers = f"Ray, which has {format_count(workers, 'reader')}, is starting"
        return f"{feeder.waiting_for(source.outages if source else [])} ({readers})"

    def local_readers(self) -> frozenset[int]:
        """The reader processes on this machine, by pid; children of this process only where it started Ray itself."""
        host = socket.gethostname()
        return frozenset(pid for pid, figures in self.readers.copy().items() if figures.node == host)

    def reader_memory(self) -> dict[int, int]:
        """Bytes of private memory of each reader process, by pid, as last reported."""
        readers = self.readers.copy().items()
        return {pid: figures.rss_anon_bytes for pid, figures in readers if figures.rss_anon_bytes is not None}

    @property
    def has_resident(self) -> bool:
        """Whether volumes are kept in memory."""
        return self._resident is not None

    @property
    def resident_frees_memory(self) -> bool:
        """Whether `reconfigure(resident=False)` would: who reads again holds the regions in flight."""
        held = (self._job.plan.regions_in_flight + REGIONS_AHEAD) * self._job.block_bytes
        return self._resident is not None and Resident.size_bytes(self._job) > held

    @property
    def num_readers_without_resident(self) -> int:
        """Readers to go on with where the volumes are not kept: those that there are, or that were, and ended."""
        return self.options.workers or self._ended_readers

    @property
    def reader_deaths(self) -> int:
        """Readers that died and were replaced."""
        return self._events.reader_deaths

    @property
    def num_readers_with_work(self) -> int:
        """Readers for which there is a task: fewer than `options.workers` near the end, or where samples are few."""
        return min(self.options.workers, self._source.tasks_left) if self._source else self.options.workers

    @property
    def num_readers_alive(self) -> int | None:
        """Reader processes whose blocks come: they end once all that is left has been read.  None before the first."""
        return (len(self.readers) or None) if self.num_readers_with_work else 0

    @property
    def max_blocks_ahead(self) -> int:
        """Blocks that readers may have made and nobody has taken; 0 with `workers: 0`."""
        return store_prefetch_bytes(self._job, self.options) // self._job.block_bytes if self.options.workers else 0

    @property
    def reader_totals(self) -> ReaderTotals:
        """What all readers have done since the stream was opened, also those that have ended.  Never falls."""
        return self._readers.totals

    @property
    def feeder_stats(self) -> FeederStats:
        """What this process has done with it since the stream was opened.  Never falls."""
        return self._clock.figures

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("a closed stream cannot be changed; open another PatchStream")

    def _open_readers(self) -> None:
        job = replace(self._job, quarantined=frozenset(self._events.damaged))
        if (requests := self.options.requests) is not None:
            job = replace(job, data=job.data.with_store(requests=requests))
        self._readers.clear()
        try:
            place = self._next_sample, self._stop
            self._source = self._sources.open(job, self.options, job.tasks(*place), self._resident)
            cutter = Cutter(job, self._source, self._take_report, self._clock.starved, *place, self._resident)
            layout, ahead = job.batch_layout(self.options.batch_size), batches_ahead(self.options)
            ring = self._buffers, self._delivered, self._held
            self._feeder = Feeder(layout, cutter, self._clock, ahead, *ring, self._interrupted)
        except BaseException as error:
            self._failure = error  # or the next batch would look like the end of the stream
            raise
        self._failure = None

    def _close_readers(self) -> None:
        feeder, source = self._feeder, self._source
        if feeder is not None:
            feeder.stop()
        if source is not None:
            source.interrupt()
        if feeder is not None:
            feeder.join()
            self._held = list(feeder.held)
        if source is not None:
            source.close()
        self._feeder = self._source = None

    def _end_readers(self) -> None:
        """All that is needed is in memory: go on without readers and Ray."""
        began = time.monotonic()
        self._close_readers()
        self._sources.end_ray()
        self._ended_readers, self.options = self.options.workers, replace(self.options, workers=0)
        self._open_readers()
        where = f"from sample {self._next_sample} on patches are cut from the volumes in memory"
        text = f"{where}; the readers ended in {time.monotonic() - began:.1f} s"
        self._events.record("resident", text, {"sample": self._next_sample})

    def _drop_resident(self) -> None:
        if self._resident is not None:
            self._resident.close()
            self._resident = None

    def _take_report(self, report: BlockReport) -> None:
        """On the feeder's thread."""
        # Blocks come in order: once one of the next execution does, readers of the last one have no more to read.
        died = self._readers.take(report, self.options.workers)
        if died is not None:
            self._sources.replaced(report.actor, *died)
        for record in report.quarantined:
            self._events.quarantine(record)
        for found in report.nonfinite:
            found.warn()

    def _reader_died(self, text: str, fields: dict[str, Any]) -> DataError | None:
        """On any thread; returns what ends the stream."""
        self.readers.pop(fields["pid"], None)
        return self._events.reader_died(text, fields)


def check_state(state: Any, job: ReaderJob) -> None:
    """Raises ConfigError for anything but what `state_dict` of a stream over the same plan returns."""
    kinds = {"seed": int, "sample_index": int, "plan_hash": str, "quarantined": list}
    if not isinstance(state, dict) or any(type(state.get(key)) is not kind for key, kind in kinds.items()):
        raise ConfigError(
            f"{one_line(repr(state))} is no state that state_dict() of a stream returned; pass that on unchanged"
        )
    if state["plan_hash"] != job.plan.hash:
        raise ConfigError(
            f"The state is of plan {state['plan_hash']}, and the stream has {job.plan.hash}; use the same seed, data "
            "section and volumes"
        )
    _check_place(state["sample_index"], None, job.world)


def _check_place(first: int, stop: int | None, world: int) -> None:
    """Raises ConfigError where a stream cannot begin at sample `first`."""
    if first < 0 or first % world or (stop is not None and stop < first):
        raise ConfigError(
            f"a stream begins at a multiple of the number of ranks ({world}) and does not stop before it; got first "
            f"{first} and stop {stop}; change one of them"
        )


@cache
def _close_at_exit() -> None:
    """Close open streams when the interpreter exits, which would otherwise wait for their threads for ever.

    `atexit` runs too late: the interpreter waits for threads first, and Ray Data's wait for a block.
    """

    def close_all() -> None:
        with ExitStack() as closing:  # one that cannot be closed does not keep the others open
            for stream in _open:
                closing.callback(stream.close)

    with suppress(RuntimeError):  # the interpreter is already shutting down
        threading._register_atexit(close_all)  # type: ignore[attr-defined]
