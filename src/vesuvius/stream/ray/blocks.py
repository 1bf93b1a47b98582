"""Blocks read by Ray actors: a chain of ordered Ray Data executions."""

from __future__ import annotations

import itertools
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray

from vesuvius.errors import DataError, VesuviusError
from vesuvius.stream.closing import done_within
from vesuvius.stream.options import TASKS_PER_SEGMENT, StreamOptions, reads_here
from vesuvius.stream.ray.deaths import ReaderDeath
from vesuvius.stream.ray.segment import RayReader, ReaderLostError, Segment
from vesuvius.stream.ray.watch import ReaderWatch, StoreWatch
from vesuvius.stream.reading.reader import Block, ReaderJob
from vesuvius.volumes.store.retry import Outage

log = logging.getLogger(__name__)

# Ending two executions takes up to five seconds on a busy machine.
_END_S = 8.0
_COUNTED_S = 5.0


class RayBlocks(Iterator[Block]):
    """The blocks of all tasks from sample `first` on, in order, read by `options.workers` Ray actors.

    Blocks are read-only views into the object store: copy out of them and drop them.

    Args:
        on_spill: called from a thread of its own with a line and figures where Ray wrote objects to disk.
        on_death: called from a thread of its own for each reader that died; an error that it returns ends the stream.
    """

    def __init__(
        self,
        job: ReaderJob,
        first: int,
        stop: int,
        options: StreamOptions,
        on_spill: Callable[[str, dict[str, Any]], None],
        on_death: Callable[[ReaderDeath], DataError | None],
    ) -> None:
        assert job.notes_dir is not None, "a stream gives its readers a folder for their notes"
        self._job = job
        self._job_ref = ray.put(job)  # once for all readers: the plan's maps can be large
        self._options = options
        self._tasks = job.tasks(first, stop)
        self._segment: Segment | None = None
        self._upcoming: Segment | None = None
        self._failure: DataError | None = None
        self._failed = threading.Event()
        self._interrupted = False
        self._hangs = False
        self._on_death = on_death
        # A name of this stream's own: Ray's table of actors lists those of all streams of the process.
        self._reader_class = type(f"_RayReader_{uuid.uuid4().hex[:8]}", (RayReader,), {})
        self._store = StoreWatch(on_spill)
        say_nodes_of = 0 if reads_here(options.cluster, job.world) else options.workers
        self._readers = ReaderWatch(self._reader_class.__name__, Path(job.notes_dir), self._reader_died, say_nodes_of)
        self._segment = self._next_segment()
        self._heed_interrupt()

    @property
    def tasks_left(self) -> float:
        """Tasks that readers are given and have not finished."""
        return sum(segment.tasks_left for segment in (self._segment, self._upcoming) if segment is not None)

    @property
    def outages(self) -> list[Outage]:
        """Of the stores that readers on this machine wait for at the moment."""
        return self._readers.outages

    @property
    def readers_alive(self) -> int:
        """Reader processes, on any machine."""
        return self._readers.alive

    def __next__(self) -> Block:
        try:
            block = self._next()
        except (VesuviusError, StopIteration) as error:
            if isinstance(error, ReaderLostError):
                self._failed.wait(_COUNTED_S)  # the watch has yet to count this death, and knows more of it
            if self._failure is not None:  # which has ended the execution
                raise self._failure from None
            raise
        if self._failure is not None:  # and another execution may continue, after blocks that are lost
            raise self._failure
        return block

    def _next(self) -> Block:
        while self._segment is not None:
            block = self._segment.next_block()
            if block is not None:
                if self._upcoming is None and self._segment.ends_soon():
                    self._upcoming = self._next_segment()
                    self._heed_interrupt()
                return block
            self._segment.close()
            self._segment, self._upcoming = self._upcoming, None
            self._heed_interrupt()
        raise StopIteration

    def interrupt(self) -> None:
        """End the executions, within seconds.  Call it from another thread than the one that waits for a block."""
        self._end(self._interrupt)

    def close(self) -> None:
        """End the executions and their actors, within seconds."""
        self._end(self._close)
        self._segment = self._upcoming = None

    def _end(self, act: Callable[[], None]) -> None:
        """Bounded: Ray waits for ever for a cluster whose head does not answer."""
        if not self._hangs and not done_within(_END_S, act):
            self._hangs = True
            log.warning(
                "Ray did not end the readers within %g s, probably because its head hangs; a private Ray is killed",
                _END_S,
            )

    def _interrupt(self) -> None:
        self._interrupted = True
        self._tasks = iter(())
        for segment in (self._segment, self._upcoming):
            if segment is not None:
                segment.interrupt()

    def _heed_interrupt(self) -> None:
        """Interrupt again where it came while a segment was made or replaced: that one was missed."""
        if self._interrupted:
            self._interrupt()

    def _close(self) -> None:
        segments = [segment for segment in (self._segment, self._upcoming) if segment is not None]
        self._readers.close()
        self._store.close()
        for segment in segments:
            segment.close()

    def _reader_died(self, death: ReaderDeath) -> None:
        self._failure = self._failure or self._on_death(death)
        if self._failure is not None:
            self._failed.set()
            self._interrupt()

    def _next_segment(self) -> Segment | None:
        tasks = list(itertools.islice(self._tasks, TASKS_PER_SEGMENT))
        if not tasks:
            return None
        return Segment(self._job, self._job_ref, self._reader_class, tasks, self._options)
