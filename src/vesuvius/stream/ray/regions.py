"""Regions read by Ray actors: a chain of ordered executions, which starts again when nodes are lost or join."""

import itertools
import logging
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from vesuvius.errors import DataError, VesuviusError
from vesuvius.plan.plan import Task
from vesuvius.stream.options import TASKS_PER_SEGMENT, StreamOptions, readers_are_local
from vesuvius.stream.ray import private
from vesuvius.stream.ray.nodes import HeadCheck, Nodes, local_paths, nodes_alive
from vesuvius.stream.ray.segment import ReaderLostError, Segment
from vesuvius.stream.reading.reader import Block, ReaderJob, Region, region_in
from vesuvius.stream.reading.reading_log import ReaderWatch, remove_logs
from vesuvius.threads import on_thread
from vesuvius.volumes.errors import Outage

log = logging.getLogger(__name__)

_POLL_S = 0.2
_STALL_S = 15.0  # without a block, after a node was lost
_NOTICE_S = 30.0  # Ray takes up to ten seconds to notice that a node is gone
_END_S = 8.0  # ending two executions takes up to five seconds on a busy machine


class RayRegions(Iterator[Region]):
    """The regions of tasks, in order, read by `options.num_processes` Ray actors: views of the object store.

    `on_spill` and `on_death` as in `ReaderWatch`; an error that the latter returns ends the stream.
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
        self._options, self._interrupted = options, False
        elsewhere = options.cluster.address is not None and not readers_are_local(options.cluster, job.world_size)
        self._nodes = Nodes(local_paths(job.data), poll=self._check_interrupted) if elsewhere else None
        self._tasks = iter(tasks)
        self._segments: list[Segment] = []  # the current one and, if it has started, the next one
        self._failure: VesuviusError | None = None
        self._hangs = False
        self._nodes_changed, self._closed = threading.Event(), threading.Event()
        self._waits_since = math.inf  # for the next block
        self._running_on: set[str] = set()  # ids of the nodes when the segments started
        self._num_readers = options.num_processes  # that fit on them
        self._on_death = on_death
        self._watch = ReaderWatch(
            log_dir,
            self._worker_died,
            on_spill,
            private.worker_exits,
            private.object_stores,
            self._check_nodes,
            on_cluster=options.cluster.address is not None,
        )
        # A thread of its own: calls about the cluster wait for a head that is gone until Ray ends this process.
        on_thread(self._watch_head, HeadCheck(), name="ray-head")
        try:
            self._start_segment()
        except BaseException:
            self.close()
            raise

    @property
    def tasks_left(self) -> int:
        return sum(segment.tasks_left for segment in tuple(self._segments))

    @property
    def outages(self) -> list[Outage]:
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
            self._waits_since = time.monotonic()
            try:
                block = self._next_block(segment)
            except VesuviusError as error:
                if not self._is_of_nodes(error):
                    raise
                block = None
            if block is not None:
                if len(self._segments) == 1 and segment.ends_soon():
                    self._start_segment()
                self._waits_since = math.inf
                return block
            if self._nodes_changed.is_set():
                self._start_again()
                continue
            segment.close()
            self._segments = self._segments[1:]
        raise StopIteration

    def _next_block(self, segment: Segment) -> Block | None:
        """Wait for a block; of a cluster on another thread, because Ray waits forever for a head that is gone."""
        if self._options.cluster.address is None:
            return segment.next_block()
        coming = on_thread(segment.next_block, name="ray-block")
        while wait([coming], _POLL_S).not_done:
            if self._failure is not None:
                raise self._failure
        return coming.result()

    def _is_of_nodes(self, error: VesuviusError) -> bool:
        """Whether Ray, not a reader, failed, and nodes were lost or joined, which its table says seconds later."""
        is_of_ray = isinstance(error, ReaderLostError) or type(error) is VesuviusError
        if self._nodes is None or self._interrupted or not is_of_ray:
            return False
        deadline, self._waits_since = time.monotonic() + _NOTICE_S, 0.0
        while not self._nodes_changed.wait(_POLL_S):
            if self._interrupted or self._failure is not None or time.monotonic() > deadline:
                return False
        return True

    def _check_nodes(self) -> None:
        """Interrupt the executions if they wait since nodes were lost or joined, or if readers need one that joined:
        Ray would restart the readers of a lost node on any node with room, or wait for room.
        """
        if self._nodes is None or self._nodes_changed.is_set() or not self._running_on:
            return
        alive = nodes_alive().keys()
        lost, joined = self._running_on - alive, alive - self._running_on
        stalled = time.monotonic() - self._waits_since > _STALL_S
        if ((lost or joined) and stalled) or (joined and self._num_readers < self._options.num_processes):
            text = f"{len(lost)} lost, {len(joined)} new; the workers start again on {len(alive)} nodes"
            log.warning("Nodes of the Ray cluster: %s, from the next region on", text)
            self._nodes_changed.set()
            for segment in tuple(self._segments):
                segment.interrupt()

    def _start_again(self) -> None:
        """Read the rest with readers on the nodes that there are now."""
        self._check_interrupted()
        segments, self._segments = self._segments, []
        self._tasks = itertools.chain(*[segment.rest() for segment in segments], self._tasks)
        for segment in segments:
            segment.close()
        self._running_on = set()
        self._nodes_changed.clear()
        self._start_segment()

    def _check_interrupted(self) -> None:
        if self._interrupted:
            raise StopIteration

    def interrupt(self) -> None:
        """End the executions within seconds.  Call it on another thread than the one that waits for a block."""
        self._end(self._interrupt)

    def close(self) -> None:
        """End the executions and their actors within seconds."""
        self._closed.set()
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
            log.warning("Ray did not end the workers within %g s, probably because its head hangs", _END_S)

    def _interrupt(self) -> None:
        self._interrupted = True
        self._tasks = iter(())
        for segment in tuple(self._segments):
            segment.interrupt()

    def _close(self) -> None:
        self._watch.close()
        for segment in tuple(self._segments):
            segment.close()

    def _worker_died(self, text: str, fields: dict[str, Any]) -> None:
        self._failure = self._failure or self._on_death(text, fields)
        if self._failure is not None:
            self._interrupt()

    def _watch_head(self, check: HeadCheck) -> None:
        while not self._closed.wait(1.0):
            try:
                check()
            except VesuviusError as error:
                log.error("%s", error)  # now: Ray may end this process before the executions have ended
                self._failure = self._failure or error
                self._interrupt()
                return

    def _start_segment(self) -> None:
        if tasks := list(itertools.islice(self._tasks, TASKS_PER_SEGMENT)):
            placement, wanted = dict[str, Any](), self._options.num_processes
            if self._nodes is not None:
                minutes = self._options.cluster.rank_timeout_minutes
                self._num_readers = self._nodes.room(wanted, self._job.world_size, minutes)
                placement = self._nodes.placement(unchecked=False)  # Ray restarts readers, too
                self._running_on |= self._nodes.alive.keys()
            options = replace(self._options, num_workers=self._num_readers)
            segment = Segment(self._job, self._job_ref, tasks, options, placement)
            self._segments.append(segment)
            if self._interrupted or self._nodes_changed.is_set():  # while the segment was created
                segment.interrupt()
