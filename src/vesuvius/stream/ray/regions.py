"""Regions read by Ray actors: a chain of ordered Ray Data executions."""

from __future__ import annotations

import itertools
import logging
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from vesuvius.errors import DataError, VesuviusError
from vesuvius.plan.plan import Task
from vesuvius.stream.options import TASKS_PER_SEGMENT, StreamOptions
from vesuvius.stream.ray.segment import ReaderLostError, Segment
from vesuvius.stream.ray.watch import ReaderWatch
from vesuvius.stream.reading.local import Regions
from vesuvius.stream.reading.reader import Block, ReaderJob, Region, region_in
from vesuvius.stream.reading.reading_log import remove_logs
from vesuvius.threads import on_thread
from vesuvius.volumes.store.retry import Outage

log = logging.getLogger(__name__)

_END_S = 8.0  # ending two executions takes up to five seconds on a busy machine


class RayRegions(Regions):
    """The regions of tasks, in order, read by `options.workers` Ray actors: views into the object store, not to keep.

    `on_spill` is called on another thread, with a log line and its data, after Ray spilled objects to disk; `on_death`
    likewise for each reader that died: an error that it returns ends the stream.
    """

    def __init__(
        self,
        job: ReaderJob,
        tasks: Iterable[Task],
        options: StreamOptions,
        on_spill: Callable[[str, dict[str, Any]], None],
        on_death: Callable[[str, dict[str, Any]], DataError | None],
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="vesuvius-reading-", ignore_cleanup_errors=True)
        log_dir = Path(job.reading_log_dir or self._temporary.name)
        with suppress(OSError):  # the readers report it
            remove_logs(log_dir, crashes=False)
        self._job = job = replace(job, reading_log_dir=str(log_dir))
        self._job_ref = ray.put(job)  # once for all readers: the plan's maps can be large
        self._options = options
        self._tasks = iter(tasks)
        self._segments: list[Segment] = []  # the current one and, if it has started, the next one
        self._failure: DataError | None = None
        self._interrupted = False
        self._hangs = False
        self._on_death = on_death
        self._watch = ReaderWatch(log_dir, self._reader_died, on_spill)
        self._start_segment()

    @property
    def tasks_left(self) -> int:
        return sum(segment.tasks_left for segment in tuple(self._segments))

    @property
    def outages(self) -> list[Outage]:
        """Storage outages that readers on this machine are waiting for."""
        return self._watch.outages

    def report_replaced(self, actor: str, pid: int, node: str) -> None:
        self._watch.report_death(actor, pid, node)

    def __next__(self) -> Region:
        try:
            block = self._next()
        except (VesuviusError, StopIteration) as error:
            if isinstance(error, ReaderLostError):
                self._watch.report_crashes()  # its reading log has details
            if self._failure is not None:  # it ended the execution
                raise self._failure from None
            raise
        if self._failure is not None:  # another execution may continue, but blocks are lost
            raise self._failure
        return region_in(block, self._job)

    def _next(self) -> Block:
        while self._segments:
            segment = self._segments[0]
            block = segment.next_block()
            if block is not None:
                if len(self._segments) == 1 and segment.ends_soon():
                    self._start_segment()
                return block
            segment.close()
            self._segments = self._segments[1:]
        raise StopIteration

    def interrupt(self) -> None:
        """End the executions within seconds.  Call it on another thread than the one that waits for a block."""
        self._end(self._interrupt)

    def close(self) -> None:
        """End the executions and their actors within seconds."""
        self._end(self._close)
        self._segments = []
        self._temporary.cleanup()

    def _end(self, action: Callable[[], None]) -> None:
        """Run with a timeout: Ray waits forever for a cluster whose head does not answer."""
        if self._hangs:
            return
        ending = on_thread(action, name="ray-end")
        try:
            ending.result(_END_S)
        except TimeoutError:
            self._hangs = True
            log.warning("Ray did not end the readers within %g s, probably because its head hangs", _END_S)

    def _interrupt(self) -> None:
        self._interrupted = True
        self._tasks = iter(())
        for segment in tuple(self._segments):
            segment.interrupt()

    def _close(self) -> None:
        segments = tuple(self._segments)
        self._watch.close()
        for segment in segments:
            segment.close()

    def _reader_died(self, text: str, fields: dict[str, Any]) -> None:
        self._failure = self._failure or self._on_death(text, fields)
        if self._failure is not None:
            self._interrupt()

    def _start_segment(self) -> None:
        """Start the execution of the next tasks, if there are any."""
        if tasks := list(itertools.islice(self._tasks, TASKS_PER_SEGMENT)):
            segment = Segment(self._job, self._job_ref, tasks, self._options)
            self._segments.append(segment)
            if self._interrupted:  # while the segment was created
                segment.interrupt()
