"""Between reader and trainer when `workers` > 0: one ordered Ray Data execution.
Ray Data's defaults are made for large blocks in any order; each setting below says what goes wrong without it.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from vesuvius.stream.ray import session  # noqa: F401 - sets Ray's environment

# isort: split
import pyarrow as pa
import ray
import ray.data
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from ray.data import ActorPoolStrategy, DataContext
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.exceptions import RayError, RayTaskError
from ray.util.debug import log_once

from vesuvius.errors import VesuviusError, one_line
from vesuvius.plan.plan import Task
from vesuvius.stream.reader import Block, Reader, ReaderJob

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


class RayBlocks(Iterator[Block]):
    """The blocks of all tasks from sample `first` on, in order, read by `workers` Ray actors.

    Blocks are read-only views into the object store: copy out of them and drop them.

    Args:
        tasks_in_flight: tasks dispatched to each reader at once.
        store_bytes: limit for Ray Data's own accounting.
        on_spill: called from a thread of its own with a line and figures where Ray wrote objects to disk.
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
    ) -> None:
        self._job = job
        self._job_ref = ray.put(job)  # once for all readers: the plan's maps can be large
        self._workers = workers
        self._tasks_in_flight = tasks_in_flight
        self._store_bytes = store_bytes
        self._tasks = job.tasks(first, stop)
        self._upcoming: _Segment | None = None
        self._watch = _StoreWatch(on_spill)
        self._segment = self._next_segment()

    @property
    def store_peak_bytes(self) -> int | None:
        """Most bytes seen in use in the object store."""
        return self._watch.peak_bytes

    def __next__(self) -> Block:
        while self._segment is not None:
            block = self._segment.next_block()
            if block is not None:
                if self._upcoming is None and self._segment.ends_soon():
                    self._upcoming = self._next_segment()
                return block
            self._segment.close()
            self._segment, self._upcoming = self._upcoming, None
        raise StopIteration

    def interrupt(self) -> None:
        """End the executions; to be called from another thread than the one that waits for a block."""
        self._tasks = iter(())
        for segment in (self._segment, self._upcoming):
            if segment is not None:
                segment.interrupt()

    def close(self) -> None:
        """End the executions and their actors."""
        self._watch.close()
        for segment in (self._segment, self._upcoming):
            if segment is not None:
                segment.close()
        self._segment = self._upcoming = None

    def _next_segment(self) -> _Segment | None:
        tasks = list(itertools.islice(self._tasks, TASKS_PER_SEGMENT))
        if not tasks:
            return None
        return _Segment(self._job, self._job_ref, tasks, self._workers, self._tasks_in_flight, self._store_bytes)


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
            dataset: ray.data.Dataset = ray.data.from_blocks(_rows(tasks, workers))
            dataset = dataset.map_batches(
                _RayReader,
                fn_constructor_args=([job_ref],),
                batch_size=1,
                compute=ActorPoolStrategy(size=min(workers, len(tasks)), max_tasks_in_flight_per_actor=tasks_in_flight),
                num_cpus=1,
            )
        # The task after the one that is being cut is fetched to this machine.
        batches = dataset.iter_batches(batch_size=None, batch_format="numpy", prefetch_batches=job.blocks_per_task)
        self._iterator: Any = iter(batches)  # a generator: closing it ends the execution
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="ray-segment")
        self._first: Future[Block | None] | None = self._starter.submit(self._next)

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

    def _next(self) -> Block | None:
        return next((block["bytes"][0] for block in self._iterator if len(block.get("bytes", ()))), None)

    def interrupt(self) -> None:
        """End the execution; whoever waits for a block gets an error or the end."""
        self._execution.closed = True
        while self._execution.executor is None and self._first is not None and not self._first.done():
            wait([self._first], timeout=0.05)  # it is about to start
        if self._execution.executor is not None:
            self._execution.executor.shutdown(force=True)

    def close(self) -> None:
        """End the execution and wait for its threads: one that called Ray after its shutdown would start it anew, or
        end the process."""
        self.interrupt()
        self._starter.shutdown(wait=True)
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
        self._thread = threading.Thread(target=self._run, name="store-watch", daemon=True)
        if self._look():
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_WATCH_S) and self._look():
            pass

    def _look(self) -> bool:
        """Returns whether to look again."""
        try:
            self._state = self._state or get_state_from_address(  # type: ignore[no-untyped-call]
                ray.get_runtime_context().gcs_address
            )
            reply = get_memory_info_reply(self._state, timeout_seconds=5)  # type: ignore[no-untyped-call]
            self._take(reply.store_stats)
        except Exception as error:  # a watch must not end the run it watches; the log says that it is blind
            log.warning("Ray's object store cannot be watched for spills: %s", one_line(error))
            return False
        return True

    def _take(self, stats: Any) -> None:
        self.peak_bytes = max(self.peak_bytes, int(stats.object_store_bytes_used))
        spilled, before = int(stats.spilled_bytes_total), self._spilled_bytes
        self._spilled_bytes = spilled
        if before is not None and spilled > before:
            self._on_spill(
                f"Ray's object store was out of memory and spilled {(spilled - before) / 2**20:.0f} MiB to disk; lower "
                "data.reader_mib or training.workers, or raise cluster.object_store_gib",
                {"spilled_bytes": spilled - before, "capacity_bytes": int(stats.object_store_bytes_avail)},
            )


@dataclass
class _Execution:
    """What a segment knows of its execution, which starts on another thread."""

    executor: Any = None
    closed: bool = False


class _Pace(ExecutionCallback):
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
    log_once("ray_data_progress_manager_disabled")  # or Ray warns that progress bars are off, as asked
    context.execution_options.preserve_order = True
    context.execution_options.resource_limits = context.execution_options.resource_limits.copy(
        object_store_memory=store_bytes
    )
    # By default a task may run two blocks ahead of the trainer and then sleeps in steps of 200 ms.
    context._max_num_blocks_in_streaming_gen_buffer = job.blocks_per_task + 1
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
    if isinstance(error, RayError):
        return VesuviusError(
            f"a reader must not fail; got {type(error).__name__}: {one_line(error)}; run with training.workers=0 to "
            "see the error where it happens"
        )
    return VesuviusError(
        f"the stream must not fail; got {type(error).__name__}: {one_line(error)}; see the log for more"
    )
