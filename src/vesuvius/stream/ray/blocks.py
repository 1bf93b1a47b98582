"""Between reader and trainer when `workers` > 0: one ordered Ray Data execution.
Ray Data's defaults are made for large blocks in any order; each setting below says what goes wrong without it.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import ray
import ray.data
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayActorError, RayError, RayTaskError

from vesuvius.errors import DataError, VesuviusError, one_line
from vesuvius.plan.plan import Task
from vesuvius.stream.at_exit import done_within
from vesuvius.stream.ray import private
from vesuvius.stream.ray.watch import ReaderDeath, ReaderWatch
from vesuvius.stream.reader import Block, Reader, ReaderJob
from vesuvius.volumes.retry import Outage

log = logging.getLogger(__name__)

# Each row of the input costs Ray's driver time (0.5 ms) and memory for as long as an execution lasts, so the run is a
# chain of executions of this many tasks.
TASKS_PER_SEGMENT = 500
# The next execution's readers start when the tasks of the present one that are still to be handed over last this long
# at the present pace, but not later than this many tasks before its end.
_OVERLAP_S = 15.0
_OVERLAP_TASKS = 4
_ROUND_S = 0.01
_WATCH_S = 1.0
_JOIN_S = 3.0
# Ending two executions takes up to five seconds on a busy machine.
_END_S = 8.0
_COUNTED_S = 5.0


class ReaderLostError(DataError):
    """A reader died, and Ray replaces it no more."""


class RayBlocks(Iterator[Block]):
    """The blocks of all tasks from sample `first` on, in order, read by `workers` Ray actors.

    Blocks are read-only views into the object store: copy out of them and drop them.

    Args:
        tasks_in_flight: tasks dispatched to each reader at once.
        store_bytes: limit for Ray Data's own accounting.
        on_spill: called from a thread of its own with a line and figures where Ray wrote objects to disk.
        on_death: called from a thread of its own for each reader that died; an error that it returns ends the stream.
    """

    def __init__(
        self,
        job: ReaderJob,
        first: int,
        stop: int,
        workers: int,
        tasks_in_flight: int,
        store_bytes: int,
        on_spill: Callable[[str, dict[str, Any]], None],
        on_death: Callable[[ReaderDeath], DataError | None],
    ) -> None:
        assert job.notes_dir is not None, "a stream gives its readers a folder for their notes"
        self._job = job
        self._job_ref = ray.put(job)  # once for all readers: the plan's maps can be large
        self._workers = workers
        self._tasks_in_flight = tasks_in_flight
        self._store_bytes = store_bytes
        self._tasks = job.tasks(first, stop)
        self._segment: _Segment | None = None
        self._upcoming: _Segment | None = None
        self._failure: DataError | None = None
        self._failed = threading.Event()
        self._interrupted = False
        self._hangs = False
        self._on_death = on_death
        # A name of this stream's own: Ray's table of actors lists those of all streams of the process.
        self._reader_class = type(f"_RayReader_{uuid.uuid4().hex[:8]}", (_RayReader,), {})
        self._watch = _StoreWatch(on_spill)
        self._readers = ReaderWatch(self._reader_class.__name__, Path(job.notes_dir), self._reader_died)
        self._segment = self._next_segment()
        self._heed_interrupt()

    @property
    def store_peak_bytes(self) -> int | None:
        """Most bytes seen in use in the object store."""
        return self._watch.peak_bytes

    @property
    def outages(self) -> list[Outage]:
        """Of the stores that readers on this machine wait for at the moment."""
        return self._readers.outages

    def __next__(self) -> Block:
        try:
            block = self._next()
        except (VesuviusError, StopIteration) as error:
            if isinstance(error, ReaderLostError):
                self._failed.wait(_COUNTED_S)  # the watch has yet to count this death, and knows more of it
            if self._failure is not None:  # which has ended the execution
                raise self._failure from None
            raise
        if self._failure is not None:  # and another execution may go on, behind blocks that are lost
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
        """End the executions, within seconds; to be called from another thread than the one that waits for a block."""
        self._end(self._interrupt)

    def close(self) -> None:
        """End the executions and their actors, within seconds."""
        self._end(self._close)
        self._segment = self._upcoming = None

    def _end(self, act: Callable[[], None]) -> None:
        """A cluster whose head does not answer would be waited for without end."""
        if not self._hangs and not done_within(_END_S, act):
            self._hangs = True
            log.warning(
                "Ray did not end the readers within %g s, as where its head hangs; they end with a private Ray",
                _END_S,
            )

    def _interrupt(self) -> None:
        self._interrupted = True
        self._tasks = iter(())
        for segment in (self._segment, self._upcoming):
            if segment is not None:
                segment.interrupt()

    def _heed_interrupt(self) -> None:
        """Interrupt again where it came while a segment was made or took another's place: that one was missed."""
        if self._interrupted:
            self._interrupt()

    def _close(self) -> None:
        segments = [segment for segment in (self._segment, self._upcoming) if segment is not None]
        self._readers.close()
        self._watch.close()
        for segment in segments:
            segment.close()

    def _reader_died(self, death: ReaderDeath) -> None:
        self._failure = self._failure or self._on_death(death)
        if self._failure is not None:
            self._failed.set()
            self._interrupt()

    def _next_segment(self) -> _Segment | None:
        tasks = list(itertools.islice(self._tasks, TASKS_PER_SEGMENT))
        if not tasks:
            return None
        return _Segment(
            self._job,
            self._job_ref,
            self._reader_class,
            tasks,
            self._workers,
            self._tasks_in_flight,
            self._store_bytes,
        )


class _RayReader:
    """The actor: a `Reader` behind Ray Data's calling convention."""

    def __init__(self, job: list[Any]) -> None:
        actor = ray.get_runtime_context().get_actor_id() or ""
        self._reader = Reader(ray.get(job[0]), _RING, node=socket.gethostname(), actor=actor)

    def __call__(self, row: dict[str, Any]) -> Iterator[dict[str, Block]]:
        task, ahead = (Task(tuple(row[name][0].tolist())) for name in _ROW)
        for block in self._reader.blocks(task, ahead):
            yield {"bytes": block[None]}  # one row: Ray takes seconds over a column of as many bytes


# Ray has copied a block into the object store before it asks for the next one; one more to be safe.
_RING = 2
_ROW = ("slots", "slots_ahead")


def _rows(tasks: list[Task], workers: int) -> list[pa.Table]:
    """One row per task; with it the task that the same reader will probably get next, readers taking turns."""
    ahead = [*tasks[workers:], *[Task(())] * workers]
    return [
        pa.table({name: pa.array([one.slots], pa.list_(pa.int64())) for name, one in zip(_ROW, both, strict=True)})
        for both in zip(tasks, ahead, strict=False)
    ]


class _Segment:
    """One Ray Data execution over a list of tasks.  Starts at once, its first block fetched on a thread of its own."""

    def __init__(
        self,
        job: ReaderJob,
        job_ref: Any,
        reader_class: type[_RayReader],
        tasks: list[Task],
        workers: int,
        tasks_in_flight: int,
        store_bytes: int,
    ) -> None:
        self.tasks = tasks
        self._blocks_per_task = len(tasks[len(tasks) // 2].slots)
        self._blocks = 0
        self._began: float | None = None
        self._execution = _Execution()
        with DataContext.current(_context(job, store_bytes, self._execution)):
            dataset = private.map_with_bounded_restarts(
                ray.data.from_blocks(_rows(tasks, workers)),
                reader_class,
                job.max_reader_deaths,
                fn_constructor_args=([job_ref],),
                batch_size=1,
                compute=ActorPoolStrategy(size=min(workers, len(tasks)), max_tasks_in_flight_per_actor=tasks_in_flight),
                num_cpus=1,
            )
        # The task after the one that is being cut is fetched to this machine.
        batches = dataset.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=job.blocks_per_task)
        self._iterator: Any = iter(batches)  # a generator: closing it ends the execution
        self._first: Future[Block | None] | None = Future()
        # Daemon, unlike an executor's: one that waits for a dead cluster must not keep the interpreter.
        self._starter = threading.Thread(target=self._fetch, args=(self._first,), name="ray-segment", daemon=True)
        self._starter.start()

    def ends_soon(self) -> bool:
        """Whether the next segment should start, given the blocks handed over so far."""
        now = time.monotonic()
        self._began = self._began or now
        tasks_done = self._blocks / self._blocks_per_task
        tasks_in_overlap = _OVERLAP_S * tasks_done / max(now - self._began, 1.0)
        tasks_left = len(self.tasks) - tasks_done
        return tasks_left <= min(max(tasks_in_overlap, _OVERLAP_TASKS), len(self.tasks) / 2)

    def next_block(self) -> Block | None:
        """The next block, or None at the end.

        Raises the reader's own error.
        """
        try:
            if self._first is not None:
                block = self._first.result()
                self._first = None
            else:
                block = self._next()
            self._blocks += 1
            return block
        except Exception as error:
            raise _reader_error(error) from None

    def _fetch(self, first: Future[Block | None]) -> None:
        try:
            first.set_result(self._next())
        except BaseException as error:
            first.set_exception(error)

    def _next(self) -> Block | None:
        return next((block["bytes"][0] for block in self._iterator if len(block.get("bytes", ()))), None)

    def interrupt(self) -> None:
        """End the execution; whoever waits for a block gets an error or the end."""
        self._execution.closed = True
        while self._execution.executor is None and (first := self._first) is not None and not first.done():
            wait([first], timeout=0.05)  # it is about to start
        if self._execution.executor is not None:
            private.end_execution(self._execution.executor)

    def close(self) -> None:
        """End the execution and wait for its threads: one that called Ray after its shutdown would start it anew, or
        end the process."""
        self.interrupt()
        self._starter.join()
        with suppress(ValueError):  # somebody still waits in it, for a network that does not answer
            self._iterator.close()


class _StoreWatch:
    """Looks at the object stores of the cluster every second: how much is in use, and whether Ray wrote to disk.

    What Ray has written before this was made does not count.
    """

    def __init__(self, on_spill: Callable[[str, dict[str, Any]], None]) -> None:
        self._on_spill = on_spill
        self.peak_bytes = 0
        self._spilled_bytes: int | None = None
        self._state: Any = None
        self._stop = threading.Event()
        self._blind = False
        self._thread = threading.Thread(target=self._run, name="store-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        self._look()  # on this thread: Ray waits for ever for a cluster whose head is gone
        while not self._stop.wait(_WATCH_S):
            self._look()

    def _look(self) -> None:
        try:
            self._state = self._state or private.cluster_state()
            self._take(private.store_stats(self._state, timeout_s=5))
        except Exception as error:  # a watch must not end the run it watches; the log says that it is blind
            if not self._blind:
                log.warning(
                    "Ray's object store cannot be watched for spills, and is asked again every second: %s",
                    one_line(error),
                )
            self._blind, self._state = True, None
            return
        if self._blind:
            log.info("Ray's object store is watched for spills again")
        self._blind = False

    def _take(self, stats: private.StoreStats) -> None:
        self.peak_bytes = max(self.peak_bytes, stats.used_bytes)
        spilled, before = stats.spilled_bytes, self._spilled_bytes
        self._spilled_bytes = spilled
        if before is not None and spilled > before:
            self._on_spill(
                f"Ray's object store was out of memory and spilled {(spilled - before) / 2**20:.0f} MiB to disk; lower "
                "data.regions_in_flight, data.reader_mib or training.workers, or raise cluster.object_store_gib",
                {"spilled_bytes": spilled - before, "capacity_bytes": stats.capacity_bytes},
            )


@dataclass
class _Execution:
    """What a segment knows of its execution, which starts on another thread."""

    executor: Any = None
    closed: bool = False


class _Pace(private.ExecutionCallback):
    """Holds Ray Data's scheduling loop to one round in 10 ms.

    The loop waits until all tasks in flight have something to offer.  When the trainer is slower than the readers they
    always have, and the loop spins: it takes a whole core and the interpreter lock from the trainer (on two cores,
    steps took 1.4 s instead of 0.2 s).  A round hands over all that the budget allows, so pacing costs no throughput;
    docs/performance.md has the figures.
    """

    execution: ClassVar[_Execution]

    def __init__(self) -> None:
        self._last = time.monotonic()

    def before_execution_starts(self, executor: object) -> None:
        self.execution.executor = executor
        if self.execution.closed:
            raise RuntimeError("the stream was closed before it began")

    def on_execution_step(self, executor: object) -> None:
        time.sleep(max(_ROUND_S - (time.monotonic() - self._last), 0))
        self._last = time.monotonic()


def _context(job: ReaderJob, store_bytes: int, execution: _Execution) -> DataContext:
    """Ray Data's settings for one ordered stream of blocks.  Its executor is put into `execution` when it starts."""
    context = DataContext.get_current().copy()
    context.enable_progress_bars = False
    private.hide_progress_warning()
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = context.execution_options.resource_limits.copy(
        object_store_memory=store_bytes
    )
    private.set_blocks_ahead(context, job.blocks_per_task + 1)
    # One block yielded by a reader stays one block: the default merges or splits them, which copies.
    context.target_max_block_size = max(int(0.8 * job.block_bytes), 1)
    # A trainer that validates or sits in a debugger is not a stalled pipeline.
    context.execution_no_progress_timeout_s = -1
    context.max_errored_blocks = 0
    callback = type("_Pace", (_Pace,), {"execution": execution})  # Ray Data takes classes, not objects
    context.custom_execution_callback_classes = [*context.custom_execution_callback_classes, callback]
    return context


def _reader_error(error: BaseException) -> VesuviusError:
    """Ray's nested error as one line; the reader's own message where there is one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RayTaskError):  # also an instance of the reader's error, with a traceback for a message
            cause = cause.cause
            continue
        if isinstance(cause, VesuviusError):
            return type(cause)(str(cause).splitlines()[0])  # Ray appends advice of its own in further lines
        cause = cause.__cause__
    if isinstance(error, RayActorError):
        return ReaderLostError(
            "a reader may be replaced data.max_reader_deaths times; got one that Ray does not replace again: "
            f"{one_line(error)}; see the log for what it read, or raise the limit"
        )
    if isinstance(error, RayError):
        return VesuviusError(
            f"a reader must not fail; got {type(error).__name__}: {one_line(error)}; run with training.workers=0 to "
            "see the error where it happens"
        )
    return VesuviusError(
        f"the stream must not fail; got {type(error).__name__}: {one_line(error)}; see the log for more"
    )
