"""The data path as an endless, ordered iterator of batches, read by Ray workers or in this process.

The content of batch n depends on the plan alone: not on the number of workers, the prefetch or the cache.
"""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from vesuvius.errors import ConfigError, DataError, one_line
from vesuvius.stream.cutter import Cutter, StreamOrderError
from vesuvius.stream.events import EventRecorder
from vesuvius.stream.feeder import Batch, Feeder, FeederClock, FeederFigures, check_rings
from vesuvius.stream.local_blocks import LocalBlocks
from vesuvius.stream.options import (
    StreamChanges,
    StreamOptions,
    batches_ahead,
    check_store,
    store_ahead_bytes,
    store_bytes,
    store_is_there,
)
from vesuvius.stream.reading.notes import claim_folder
from vesuvius.stream.reading.reader import ReaderJob
from vesuvius.stream.reading.reader_figures import BlockReport, Readers, ReaderTotals

if TYPE_CHECKING:
    from vesuvius.stream.ray.blocks import RayBlocks  # Ray is not needed with workers: 0
    from vesuvius.stream.ray.session import Session
    from vesuvius.stream.ray.watch import ReaderDeath

_ENDLESS = 2**62
_open = set["PatchStream"]()


class StreamState(TypedDict):
    """The state of a stream, as plain data: enough to continue with any workers, prefetch or cache."""

    seed: int
    sample_index: int
    plan_hash: str
    quarantined: list[dict[str, Any]]


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

    Attributes:
        options: the current ones; `reconfigure` changes them.
        events: what happened so far, the last 10,000; the caller may take them out.
        quarantined: a record for each damaged place; regions that touch one are replaced.
        readers: figures of each living reader process by pid.

    Raises:
        DataError: on opening or iterating, where a volume cannot be read or too many regions cannot.
        ConfigError: on opening, where /dev/shm is too small or the Ray cluster does not answer.
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
    ) -> None:
        _check_place(first, stop, job.world)
        self._job = job
        self.options = options
        self._next_sample = first
        self._stop = _ENDLESS if stop is None else stop
        self._interrupted = interrupted
        self._buffers = (buffers, condition_buffers)
        self._readers = Readers()
        self._events = EventRecorder(job, quarantined)
        self.events, self.quarantined = self._events.events, self._events.quarantined
        self.readers = self._readers.living
        self._session: Session | None = None
        self._source: LocalBlocks | RayBlocks | None = None
        self._feeder: Feeder | None = None
        self._clock = FeederClock()
        self._delivered = 0  # into the present ring
        self._held: list[Batch] = []
        self._failure: BaseException | None = None
        self._closed = False
        self._temporary_notes: tempfile.TemporaryDirectory[str] | None = None
        if job.notes_dir is not None:
            claim_folder(Path(job.notes_dir))
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
        if self._feeder is None:
            raise StopIteration
        batch = self._feeder.next_batch()
        if batch is None:
            raise StopIteration
        count, world = len(batch.samples), self._job.world
        if not np.array_equal(batch.indices, self._next_sample + self._job.rank + world * np.arange(count)):
            raise StreamOrderError(
                f"samples must come in the order of the plan; got {batch.indices.tolist()} at {self._next_sample}; "
                "report this as a bug"
            )
        self._next_sample += world * count
        self._delivered += 1
        return batch

    def close(self) -> None:
        """End the readers for good.  Safe to call again.

        Takes at most half a minute: a private Ray whose head hangs is killed, a shared one is left behind, each with a
        warning.
        """
        self._closed = True
        try:
            self._close_readers()
        finally:
            _open.discard(self)
            if self._session is not None:
                self._session.close()
                self._session = None
            if self._temporary_notes is not None:
                self._temporary_notes.cleanup()
                self._temporary_notes = None

    def state_dict(self) -> StreamState:
        """The position of the stream, as plain data.  Call it between two batches."""
        return {
            "seed": self._job.plan.seed,
            "sample_index": self._next_sample,
            "plan_hash": self._job.plan.hash,
            "quarantined": list(self.quarantined),
        }

    def load_state_dict(self, state: StreamState) -> None:
        """Continue where another stream over the same plan was.

        Reads the regions in flight again, at most `plan.regions_in_flight`: the next samples are cut from them.

        Raises:
            ConfigError: it is not a state, or that of another plan, or the stream is closed; it stays as it was.
        """
        self._check_open()
        _check_state(state)
        if state["plan_hash"] != self._job.plan.hash:
            raise ConfigError(
                f"a stream continues with the plan it began with; got plan {state['plan_hash']} for "
                f"{self._job.plan.hash}; use the same seed, data section and volumes"
            )
        _check_place(state["sample_index"], None, self._job.world)
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
            raise TypeError(
                f"a running stream can change {', '.join(StreamChanges.__annotations__)}; got {', '.join(unknown)}; "
                "make another stream"
            )
        check_rings((buffers or (), condition_buffers))
        options = replace(self.options, **changes)
        need = (options.workers, self._job.world, store_bytes(self._job, options))
        if not store_is_there() or (self._session is not None and not self._session.fits(*need)):
            check_store(self._job, options)
        self.options = options
        self._close_readers()
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
        readers = f"{workers} readers" if workers else "no readers: the trainer reads"
        return f"{feeder.waiting_for(source.outages if source else [])} ({readers})"

    def readers_here(self) -> frozenset[int]:
        """The reader processes on this machine, by pid; children of this process only where it started Ray itself."""
        host = socket.gethostname()
        return frozenset(pid for pid, figures in self.readers.copy().items() if figures.node == host)

    def reader_memory(self) -> dict[int, int]:
        """Bytes of private memory of each reader process, by pid, as last reported."""
        memory = {pid: figures.rss_anon_bytes for pid, figures in self.readers.copy().items()}
        return {pid: value for pid, value in memory.items() if value is not None}

    @property
    def reader_deaths(self) -> int:
        """Readers that died and were replaced."""
        return self._events.reader_deaths

    @property
    def readers_with_work(self) -> int:
        """Readers for which there is a task: fewer than `options.workers` near the end, or where samples are few."""
        return min(self.options.workers, self._source.tasks_left) if self._source else self.options.workers

    @property
    def readers_alive(self) -> int:
        """Reader processes at the moment: they end once all that is left has been read."""
        return self._source.readers_alive if self._source else 0

    @property
    def blocks_ahead(self) -> int:
        """Blocks that readers may have made and nobody has taken; 0 with `workers: 0`."""
        ahead_bytes = store_ahead_bytes(self._job, self.options) if self.options.workers else 0
        return ahead_bytes // self._job.block_bytes

    @property
    def reader_totals(self) -> ReaderTotals:
        """What all readers have done since the stream was opened, also those that have ended.  Never falls."""
        return self._readers.totals

    @property
    def feeder_figures(self) -> FeederFigures:
        """What this process has done with it since the stream was opened.  Never falls."""
        return self._clock.figures

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("a stream must be open to be changed; got a closed one; open another PatchStream")

    def _open_readers(self) -> None:
        job = replace(self._job, quarantined=frozenset(self._events.damaged))
        if (requests := self.options.requests) is not None:
            job = replace(job, data=job.data.with_store(requests=requests))
        self._readers.clear()
        try:
            self._source = self._open_source(job)
            report, starved = self._take_report, self._clock.starved
            cutter = Cutter(job, self._source, report, starved, self._next_sample, self._stop)
            self._feeder = Feeder(
                job.batch_layout(self.options.batch_size),
                cutter,
                self._clock,
                batches_ahead(job.patch_bytes, self.options),
                self._buffers,
                self._delivered,
                self._held,
                self._interrupted,
            )
        except BaseException as error:
            self._failure = error  # or the next batch would look like the end of the stream
            raise
        self._failure = None

    def _close_readers(self) -> None:
        if self._feeder is not None:
            self._feeder.stop()
        if self._source is not None:
            self._source.interrupt()
        if self._feeder is not None:
            self._feeder.join()
        if self._source is not None:
            self._source.close()
        if self._feeder is not None:
            self._held = list(self._feeder.held)
        self._feeder = self._source = None

    def _open_source(self, job: ReaderJob) -> LocalBlocks | RayBlocks:
        options = self.options
        if options.workers == 0:
            return LocalBlocks(job, self._next_sample, self._stop)
        if job.notes_dir is None:
            self._temporary_notes = self._temporary_notes or tempfile.TemporaryDirectory(
                prefix="vesuvius-notes-", ignore_cleanup_errors=True
            )
            job = replace(job, notes_dir=self._temporary_notes.name)
        # Ray takes a second to import and is not needed with workers: 0
        from vesuvius.stream.ray.blocks import RayBlocks
        from vesuvius.stream.ray.session import Session

        need = (options.workers, job.world, store_bytes(job, options))
        if self._session is not None and not self._session.fits(*need):
            self._session.close()
            self._session = None
        if self._session is None:
            if not store_is_there():
                check_store(job, options)
            self._session = Session(options.cluster, *need)
        return RayBlocks(
            job,
            self._next_sample,
            self._stop,
            options,
            lambda text, fields: self._events.record("spill", text, fields),
            self._reader_died,
        )

    def _take_report(self, report: BlockReport) -> None:
        """On the feeder's thread."""
        self._readers.take(report, 2 * max(self.options.workers, 1))  # while one execution hands over to the next
        for record in report.quarantined:
            self._events.quarantine(record)
        for found in report.nonfinite:
            found.say()

    def _reader_died(self, death: ReaderDeath) -> DataError | None:
        """On the thread of the watch; returns what ends the stream."""
        self.readers.pop(death.pid, None)
        others = [pid for pid, reader in self.readers.copy().items() if reader.node == death.node]
        return self._events.reader_died(death, others[0] if others else None)


def _check_state(state: Any) -> None:
    """Raises ConfigError for anything but what `state_dict` returns."""
    wanted = {"seed": int, "sample_index": int, "plan_hash": str, "quarantined": list}
    for key, kind in wanted.items():
        got = state.get(key) if isinstance(state, dict) else None
        if not isinstance(got, kind) or isinstance(got, bool) or (isinstance(got, int) and got < 0):
            raise ConfigError(
                f"a stream's state must be what state_dict() returned; got {one_line(repr(state))}, where {key} is no "
                f"{kind.__name__}; pass it on unchanged"
            )


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
