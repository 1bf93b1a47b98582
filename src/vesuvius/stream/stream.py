"""The whole data path as an endless, ordered iterator of batches, read by Ray workers or in this process.

The content of batch n depends on the plan alone: not on the number of workers, the prefetch or the cache.
"""

from __future__ import annotations

import logging
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from numpy.typing import NDArray

from vesuvius.errors import ConfigError, DataError
from vesuvius.stream.at_exit import close_at_exit, is_closed
from vesuvius.stream.cutter import Cutter
from vesuvius.stream.events import EventKind, StreamEvent
from vesuvius.stream.feeder import Batch, Feeder, FeederFigures, check_rings, rotated
from vesuvius.stream.guarded import say_crashes
from vesuvius.stream.local_blocks import BlockSource, LocalBlocks
from vesuvius.stream.notes import take_over
from vesuvius.stream.options import (
    TASKS_IN_FLIGHT,
    StreamOptions,
    batches_ahead,
    check_store,
    store_bytes,
    store_need_bytes,
)
from vesuvius.stream.quarantine import check_quarantine, check_records, damaged_box, damaged_boxes
from vesuvius.stream.reader import BlockReport, ReaderJob
from vesuvius.stream.reader_figures import ReaderBook, ReaderFigures, ReaderTotals
from vesuvius.stream.stacks import dump_stacks
from vesuvius.stream.state import StreamState, check_place, check_state

if TYPE_CHECKING:
    from vesuvius.stream.ray.watch import ReaderDeath  # Ray is not needed with workers: 0

log = logging.getLogger(__name__)

_ENDLESS = 2**62
_EVENTS_KEPT = 10_000


class PatchStream(Iterator[Batch]):
    """Batches from sample `first` on.  A context manager; closing it ends the readers, and Ray where it started it.

    Args:
        job: plan, volumes and rank; `prepare_data(...).job`.
        options: batch size and readers.
        first: sample index to start at; a multiple of the number of ranks.
        stop: sample index to end before, or None for an endless stream.  A last short batch is delivered.
        buffers: a ring of at least 3 arrays (batch_size, Z, Y, X) of the job's dtype, e.g. of pinned memory; batches
            are delivered in them in turn, each valid until the second `next` after it.  New arrays by default.
        condition_buffers: the same for conditions.
        quarantined: `quarantined` of an earlier stream over the same volumes; what they name is not tried again.
        interrupted: asked several times a second while a batch is waited for; `next` then raises StreamInterrupted, and
            the stream is where it was before.

    Attributes:
        readers: figures of each living reader process by pid.
        reader_deaths: readers that died and were replaced.
        events: what happened so far, the last 10,000; whoever takes them out may.
        quarantined: a record for each place that is damaged; regions that touch one are replaced.
        store_peak_bytes: most bytes seen in Ray's object store; None without Ray.

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
        check_place(first, stop, job.world)
        check_records(quarantined, len(job.volumes))
        self._job = replace(job, quarantined=damaged_boxes(quarantined))
        self._options = options
        self._next_sample = first
        self._stop = _ENDLESS if stop is None else stop
        self._interrupted = interrupted
        self._buffers = (buffers, condition_buffers)
        self._readers = ReaderBook()
        self.reader_deaths = 0
        self.events: deque[StreamEvent] = deque(maxlen=_EVENTS_KEPT)
        self.quarantined = list(quarantined)
        self._session: Any = None  # a ray.session.Session, whose module is not imported without workers
        self._source: BlockSource | None = None
        self._feeder: Feeder | None = None
        self._fed = FeederFigures()
        self._delivered = 0  # into the present ring
        self._held: list[Batch] = []
        self._failure: BaseException | None = None
        self._closed = False
        self._temporary_notes: tempfile.TemporaryDirectory[str] | None = None
        if job.notes_dir is not None:
            say_crashes(take_over(Path(job.notes_dir)))
        close_at_exit(self)
        try:
            self._open_readers()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __next__(self) -> Batch:
        if self._failure is not None:
            raise self._failure
        if self._feeder is None:
            raise StopIteration
        batch = self._feeder.next_batch()
        if batch is None:
            raise StopIteration
        self._next_sample += self._job.world * len(batch.indices)
        self._delivered += 1
        return batch

    def close(self) -> None:
        """End the readers for good.  Safe to call again.

        Takes half a minute at most: a private Ray that does not end in time, because its head hangs, is killed, and
        any other is left behind, with a warning.
        """
        self._closed = True
        try:
            self._close_readers()
        finally:
            is_closed(self)
            if self._session is not None:
                self._session.close()
                self._session = None
            if self._temporary_notes is not None:
                self._temporary_notes.cleanup()
                self._temporary_notes = None

    def state_dict(self) -> StreamState:
        """Where the stream is, as plain data.  Call it between two batches."""
        return {
            "seed": self._job.plan.seed,
            "sample_index": self._next_sample,
            "plan_hash": self._job.plan.hash,
            "quarantined": list(self.quarantined),
        }

    def load_state_dict(self, state: StreamState) -> None:
        """Go on where another stream over the same plan was.

        Reads the regions in flight again, at most `plan.regions_in_flight`: the next samples are cut from them.

        Raises:
            ConfigError: the state belongs to another plan, or is none, or the stream is closed; the stream stays as it
                was.
        """
        self._check_open()
        check_state(state)
        if state["plan_hash"] != self._job.plan.hash:
            raise ConfigError(
                f"a stream goes on with the plan it began with; got plan {state['plan_hash']} for "
                f"{self._job.plan.hash}; use the same seed, data section and volumes"
            )
        check_place(state["sample_index"], None, self._job.world)
        check_records(state["quarantined"], len(self._job.volumes))
        self._job = replace(self._job, quarantined=damaged_boxes(state["quarantined"]))
        self.quarantined = list(state["quarantined"])
        self._reopen(state["sample_index"])

    def reconfigure(
        self,
        *,
        workers: int | None = None,
        prefetch_factor: int | None = None,
        prefetch_bytes: int | None = None,
        buffers: Sequence[NDArray[Any]] | None = None,
        condition_buffers: Sequence[NDArray[Any]] = (),
    ) -> None:
        """Change readers or prefetch: closes and opens again at the next sample, so no batch changes.

        Costs the seconds in which new readers start and read the regions in flight again, at most
        `plan.regions_in_flight`.  No more batches are put together ahead than a ring of buffers has places for, so a
        larger prefetch wants larger rings.

        Args:
            buffers, condition_buffers: rings to take the place of both old ones, filled from their first buffers on;
                None = they stay.  Old buffers may be among them once nobody uses the batches delivered in them.

        Raises:
            ConfigError: /dev/shm is too small for that, a ring has fewer than 3 buffers, or the stream is closed; it
                stays as it was.  Where new readers cannot start, `next` raises the error again until another call
                succeeds.
        """
        self._check_open()
        check_rings((buffers or (), condition_buffers))
        changes = {"workers": workers, "prefetch_factor": prefetch_factor, "prefetch_bytes": prefetch_bytes}
        changes = {key: value for key, value in changes.items() if value is not None}
        options = replace(self._options, **changes)  # type: ignore[arg-type]
        need = (options.workers, self._job.world, store_bytes(self._job, options))
        if self._session is None or not self._session.fits(*need):
            check_store(self._job, options)
        self._options = options
        self._close_readers()
        if buffers is not None:
            self._buffers, self._delivered, self._held = (buffers, condition_buffers), 0, []
        self._open_readers()
        text = ", ".join(f"{key} {value}" for key, value in changes.items())
        self._event("reconfigured", f"readers changed at sample {self._next_sample}: {text}", changes)

    def waiting_for(self) -> str:
        """What a batch that does not come is waiting for, for people.  Any thread may ask."""
        if (feeder := self._feeder) is None:
            return "the readers to start or to end"
        workers, source = self._options.workers, self._source
        readers = f"{workers} readers" if workers else "no readers: the trainer reads"
        return f"{feeder.waiting_for(source.outages if source else [])} ({readers})"

    def dump_reader_stacks(self, path: Path) -> None:
        """Append the stacks of all threads of each reader process on this machine to a file, within two seconds.

        With `workers: 0` there are none: the threads that read are the trainer's.  Any thread may call.

        Raises:
            OSError: the file cannot be written.
        """
        if self._options.workers and self._job.notes_dir is not None:
            dump_stacks(Path(self._job.notes_dir), path)

    def reader_memory(self) -> dict[int, int]:
        """Bytes of private memory of each reader process, by pid, as it last said."""
        memory = {pid: figures.rss_anon_bytes for pid, figures in self.readers.copy().items()}
        return {pid: value for pid, value in memory.items() if value is not None}

    @property
    def options(self) -> StreamOptions:
        """As they are now; `reconfigure` changes them."""
        return self._options

    @property
    def readers(self) -> dict[int, ReaderFigures]:
        """Figures of each living reader process by pid."""
        return self._readers.living

    @property
    def reader_totals(self) -> ReaderTotals:
        """What all readers have done since the stream was opened, those that have ended included.  Never falls."""
        return replace(self._readers.totals)

    @property
    def feeder_figures(self) -> FeederFigures:
        """What has become of it in this process since the stream was opened.  Never falls."""
        feeder, fed = self._feeder, self._fed
        return fed if feeder is None else fed.plus(feeder.figures)

    @property
    def store_peak_bytes(self) -> int | None:
        """Most bytes seen in use in Ray's object store since the stream was opened; None without Ray."""
        return getattr(self._source, "store_peak_bytes", None)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("a stream must be open to be changed; got one that is closed; make another PatchStream")

    def _reopen(self, sample: int) -> None:
        self._close_readers()
        self._next_sample = sample
        self._open_readers()

    def _open_readers(self) -> None:
        try:
            self._start_readers()
        except BaseException as error:
            self._failure = error  # or the next batch would look like the end of the stream
            raise
        self._failure = None

    def _start_readers(self) -> None:
        self._readers.clear()
        self._job = replace(self._job, quarantined=damaged_boxes(self.quarantined))
        self._source = self._open_source()
        cutter = Cutter(self._job, self._source, self._take_report, self._next_sample, self._stop)
        first = self._next_sample + self._job.rank
        ahead = batches_ahead(self._job.patch_bytes, self._options)
        rings = [rotated(ring, self._delivered) for ring in self._buffers]
        self._feeder = Feeder(
            self._job, cutter, self._options.batch_size, ahead, first, rings, self._held, self._interrupted
        )

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
            feeder, self._feeder = self._feeder, None
            self._fed = self._fed.plus(feeder.figures)
        self._source = None

    def _open_source(self) -> BlockSource:
        options = self._options
        if options.workers and self._job.notes_dir is None:
            self._temporary_notes = tempfile.TemporaryDirectory(prefix="vesuvius-notes-", ignore_cleanup_errors=True)
            self._job = replace(self._job, notes_dir=self._temporary_notes.name)
        job = self._job
        if options.workers == 0:
            return LocalBlocks(job, self._next_sample, self._stop)
        # Ray takes a second to import and is not needed with workers: 0
        from vesuvius.stream.ray import blocks, session

        need = (options.workers, job.world, store_bytes(job, options))
        if self._session is not None and not self._session.fits(*need):
            self._session.close()
            self._session = None
        if self._session is None:
            check_store(job, options)
            self._session = session.Session(options.cluster, *need)
        return blocks.RayBlocks(
            job,
            self._next_sample,
            self._stop,
            options.workers,
            TASKS_IN_FLIGHT,
            store_need_bytes(job, options),
            lambda text, fields: self._event("spill", text, fields),
            self._reader_died,
        )

    def _take_report(self, report: BlockReport) -> None:
        """On the feeder's thread."""
        self._readers.take(report, self._options.workers)
        for record in report.quarantined:
            self._quarantine(record)

    def _reader_died(self, death: ReaderDeath) -> DataError | None:
        """On the thread of the watch; returns what ends the stream."""
        self.reader_deaths += 1
        self.readers.pop(death.pid, None)
        others = [pid for pid, reader in self.readers.copy().items() if reader.node == death.node]
        self._event(
            "reader_died", f"{death}; another reads its task again", death.fields(others[0] if others else None)
        )
        limit = self._job.max_reader_deaths
        if self.reader_deaths <= limit:
            return None
        return DataError(
            f"at most data.max_reader_deaths={limit} readers may die in one session; got {self.reader_deaths}, the "
            f"last: {death}; restore the volume if readers crash, lower training.workers or data.reader_mib if memory "
            "is short, or raise the limit"
        )

    def _quarantine(self, record: dict[str, Any]) -> None:
        if damaged_box(record) in damaged_boxes(self.quarantined):
            return
        self.quarantined.append(record)
        text = (
            f"voxels {record['box']} of {record['volume']} cannot be read; regions that touch them are replaced by "
            f"others: chunk {record['chunk']}: {record['cause']}"
        )
        self._event("quarantine", text, record)
        check_quarantine(len(self.quarantined), self._job.max_quarantined, record)

    def _event(self, kind: EventKind, text: str, fields: Any) -> None:
        self.events.append(StreamEvent(kind, text, dict(fields)))
        log.log(logging.INFO if kind == "reconfigured" else logging.ERROR, "%s", text)
