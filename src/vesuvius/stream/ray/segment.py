"""One ordered Ray Data execution: readers as actors, and their blocks in the order of the tasks.

Ray Data's defaults are made for large blocks in any order; a comment on each setting says what goes wrong without it.
"""

import itertools
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, ClassVar

import pyarrow as pa
import ray
import ray.data
from numcodecs import blosc
from ray.data import ActorPoolStrategy, DataContext
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from vesuvius.errors import DataError, VesuviusError, one_line
from vesuvius.plan.plan import Task
from vesuvius.stream.events import DEATHS_MAX
from vesuvius.stream.options import READER_RING, TASKS_IN_FLIGHT, StreamOptions, readers_are_local, store_peak_bytes
from vesuvius.stream.ray import private
from vesuvius.stream.reading.reader import Block, Reader, ReaderJob
from vesuvius.stream.reading.reading_log import node_name
from vesuvius.threads import on_thread

# The next segment's readers start when the remaining tasks of this one last this long at the current pace, but not
# later than this many tasks before its end.
_OVERLAP_S = 15.0
_OVERLAP_TASKS = 4
_ROUND_S = 0.01
_ROW = ("slots", "slots_ahead")
# Ray Data's settings are global to the process: concurrent streams must not change each other's.
_settings = threading.Lock()


class ReaderLostError(DataError):
    """A reader died, and Ray no longer restarts it."""


class RayReader:
    """The actor: a `Reader` with the interface that Ray Data expects."""

    def __init__(self, job: list[Any]) -> None:
        blosc.set_nthreads(1)  # threads in several reader processes would only contend
        actor = ray.get_runtime_context().get_actor_id() or ""
        node_name(private.unique_node_name())
        self._reader = Reader(ray.get(job[0]), READER_RING, actor)

    def __call__(self, row: dict[str, Any]) -> Iterator[dict[str, Block]]:
        task, ahead = (tuple(row[name][0].tolist()) for name in _ROW)
        for block in self._reader.blocks(task, ahead):
            yield {"bytes": block[None]}  # one row: Ray takes seconds over a column of as many bytes


def _rows(tasks: list[Task], workers: int) -> list[pa.Table]:
    ahead = [*tasks[workers:], *[()] * workers]
    return [
        pa.table({name: pa.array([slots], pa.list_(pa.int64())) for name, slots in zip(_ROW, row, strict=True)})
        for row in zip(tasks, ahead, strict=False)
    ]


class Segment:
    """One Ray Data execution over a list of tasks.  Starts at once and fetches its first block on its own thread."""

    def __init__(
        self, job: ReaderJob, job_ref: Any, tasks: list[Task], options: StreamOptions, placement: dict[str, Any]
    ) -> None:
        workers, local = options.num_processes, readers_are_local(options.cluster, job.world_size)
        this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # Number of blocks up to the end of each task; the first and the last task may be short.
        self._ends = list(itertools.accumulate(len(task) for task in tasks))
        self._tasks = tasks
        self._blocks = 0
        self._began: float | None = None
        self._handle: type[_Pace] = type("_Pace", (_Pace,), {})  # Ray Data takes classes, not objects
        with _settings, DataContext.current(_context(job, store_peak_bytes(job, options), self._handle)):
            dataset = private.map_with_bounded_restarts(
                ray.data.from_blocks(_rows(tasks, workers)),
                RayReader,
                DEATHS_MAX,
                fn_constructor_args=([job_ref],),
                batch_size=1,
                compute=ActorPoolStrategy(size=min(workers, len(tasks)), max_tasks_in_flight_per_actor=TASKS_IN_FLIGHT),
                num_cpus=0 if local else 1,  # the rank has reserved the cores of its local readers
                # DEFAULT prefers nodes without GPUs that have a free core.
                scheduling_strategy=this_node if local else "DEFAULT",
                **placement,
            )
        # Prefetches one task to this machine.
        batches = dataset.iter_batches(
            batch_size=None, batch_format="numpy", prefetch_batches=job.plan.regions_per_task
        )
        self._iterator: Any = iter(batches)  # a generator: closing it ends the execution
        self._first: Future[Block | None] | None = on_thread(self._next, name="ray-segment")  # None once delivered

    @property
    def tasks_left(self) -> int:
        """Number of tasks whose blocks have not all been delivered."""
        return len(self._ends) - bisect_right(self._ends, self._blocks)

    def rest(self) -> list[Task]:
        """The tasks, or the part of one, whose blocks have not been delivered."""
        first = len(self._ends) - self.tasks_left
        delivered = self._blocks - (self._ends[first - 1] if first else 0)
        return [self._tasks[first][delivered:], *self._tasks[first + 1 :]] if self.tasks_left else []

    def ends_soon(self) -> bool:
        now = time.monotonic()
        self._began = self._began or now
        tasks_done = len(self._ends) - self.tasks_left
        tasks_in_overlap = _OVERLAP_S * tasks_done / max(now - self._began, 1.0)
        return self.tasks_left <= min(max(tasks_in_overlap, _OVERLAP_TASKS), len(self._ends) / 2)

    def next_block(self) -> Block | None:
        """Return the next block, or None at the end.  Raises the reader's error."""
        try:
            if self._first is not None:
                block = self._first.result()
                self._first = None
            else:
                block = self._next()
            self._blocks += block is not None
            return block
        except Exception as error:
            raise _reader_error(error) from None

    def _next(self) -> Block | None:
        return next((block["bytes"][0] for block in self._iterator if len(block.get("bytes", ()))), None)

    def interrupt(self) -> None:
        """End the execution; a waiting `next_block` raises an error or returns None."""
        self._handle.closed = True
        while self._handle.executor is None and (first := self._first) is not None and not first.done():
            wait([first], timeout=0.05)  # until the execution has started
        if self._handle.executor is not None:
            private.end_execution(self._handle.executor)

    def close(self) -> None:
        """End the execution and wait for its threads, which would restart Ray or crash after its shutdown."""
        self.interrupt()
        if (first := self._first) is not None:
            wait([first])
        with suppress(ValueError):  # another thread still waits in it, for a network that does not answer
            self._iterator.close()


class _Pace(private.ExecutionCallback):
    """A segment's handle on its execution: limits Ray Data's scheduling loop to one round per 10 ms.

    If the trainer is slower than the readers, the loop spins: it takes a full core and the GIL from the trainer (on two
    cores, steps took 1.4 s instead of 0.2 s).  A round delivers everything that the budget allows, so pacing costs no
    throughput; docs/performance.md has the figures.
    """

    executor: ClassVar[Any] = None
    closed: ClassVar[bool] = False

    def __init__(self) -> None:
        self._last = time.monotonic()

    def before_execution_starts(self, executor: object) -> None:
        type(self).executor = executor
        if self.closed:
            raise RuntimeError("The stream was closed before its execution started")

    def on_execution_step(self, executor: object) -> None:
        time.sleep(max(_ROUND_S - (time.monotonic() - self._last), 0))
        self._last = time.monotonic()


def _context(job: ReaderJob, store_bytes: int, handle: type[_Pace]) -> DataContext:
    """Return Ray Data's settings for an ordered stream of blocks.  `handle` receives the executor when it starts."""
    context = DataContext.get_current().copy()
    context.enable_progress_bars = False
    private.hide_progress_warning()
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = context.execution_options.resource_limits.copy(
        object_store_memory=store_bytes
    )
    private.set_blocks_ahead(context, job.plan.regions_per_task + 1)
    # Keeps the blocks that readers yield: the default merges or splits them, which copies.
    context.target_max_block_size = max(int(0.8 * job.block_bytes), 1)
    # A trainer that validates or waits in a debugger is not a stalled pipeline.
    context.execution_no_progress_timeout_s = -1
    context.max_errored_blocks = 0
    context.custom_execution_callback_classes = [*context.custom_execution_callback_classes, handle]
    return context


def _reader_error(error: BaseException) -> VesuviusError:
    """Turn Ray's nested error into one line; the reader's own message if there is one."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RayTaskError):  # also an instance of the reader's error, but its message is a traceback
            cause = cause.cause
            continue
        if isinstance(cause, VesuviusError):
            return type(cause)(str(cause).splitlines()[0])  # Ray appends its own advice in further lines
        cause = cause.__cause__
    if isinstance(error, RayActorError):
        if "creation task" in (text := str(error).strip()):
            return ReaderLostError(f"A worker could not start: {one_line(text.splitlines()[-1])}")
        return ReaderLostError(
            f"A worker died after {DEATHS_MAX} restarts and is not restarted again: {one_line(error)}; see the log for "
            "the chunk that it read"
        )
    return VesuviusError(
        f"{'A worker' if isinstance(error, RayError) else 'The stream'} failed: {type(error).__name__}: "
        f"{one_line(error)}; run with training.workers=0 for the full traceback"
    )
