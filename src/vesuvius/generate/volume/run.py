"""Distributes the parts of the work, pass by pass, until the last state is complete.

The files are the only record of progress: a restart continues from those that exist.  Parts are handed out in the order
of the blocks, and a block as soon as its tiles are done, so predictions of two or three rows of tiles exist at a time.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch

from vesuvius.errors import VesuviusError
from vesuvius.generate.volume.field import Field
from vesuvius.generate.volume.work import BlockSet, State, VolumeJob, Work, state_numbers, used_blocks
from vesuvius.generate.watch import Watch

log = logging.getLogger(__name__)

_POLL_S = 0.5
_DEATHS_WITHOUT_WORK = 3
_FLUSHED = 1000  # blocks whose flush is not waited for

Part = tuple[Literal["start", "tiles", "block"], int, int, bool]
"""What to do, in which pass, with which block or batch, and whether the block has gaps near."""
OpenWork = Callable[[int], Work]
"""Makes the `Work` of the process that it is called in, from the number of that process; picklable."""


class Sampling:
    """All passes over a volume.  `used` are the blocks that have a state (`used_blocks`).

    Args:
        folder: `state/`, which exists; `known` and `condition` have the used blocks.
        live: blocks with gaps near (`live_blocks`); None = all.
        open_work: called in each worker.
        workers: processes; 1 = this one.
        context: how worker processes are started.
    """

    def __init__(
        self,
        job: VolumeJob,
        folder: Path,
        open_work: OpenWork,
        workers: int = 1,
        watch: Watch | None = None,
        context: str = "spawn",
        live: BlockSet | None = None,
    ) -> None:
        self._job, self._folder, self._open_work = job, folder, open_work
        self._workers, self._watch, self._context = workers, watch or Watch(), context
        self._live = BlockSet(job.tiling.blocks) if live is None else live
        self.used = used_blocks(job, self._live)
        self._deaths = 0

    def run(self) -> Field:
        """Continue from what is there to the last state, and return it; only used blocks (`used_blocks`) have one.

        Raises:
            SamplingStoppedError: a stop was wanted.
            VesuviusError: workers die before they have done anything; and what a part of the work raises.
        """
        job = self._job
        number, last = self._resumed(), len(job.passes)
        while number < last:
            try:
                with self._executor() as executor, ThreadPoolExecutor(1, "flush") as flusher:
                    while number < last:
                        self._one_pass(executor, flusher, number)
                        State(self._folder, job, number).delete()
                        number += 1
            except BrokenProcessPool as error:
                self._deaths += 1
                if self._deaths > _DEATHS_WITHOUT_WORK:
                    raise VesuviusError(
                        f"workers must survive; got {self._deaths} deaths without any work done in between; "
                        "see the log above and, for a kill, the kernel log (dmesg); try fewer --workers"
                    ) from error
                log.warning("a worker has died; others are started and take over its part")
        return State(self._folder, job, last).x

    def _resumed(self) -> int:
        """The pass to continue with, -1 = the noise is to be drawn; older states are deleted."""
        states = [State(self._folder, self._job, number) for number in state_numbers(self._folder)]
        whole = [state for state in states if state.x.whole(self.used)]
        if not whole:
            return -1
        if states[0].number < whole[-1].number:
            for block in self.used:  # a process that was killed may not have flushed them
                whole[-1].flush(block)
            whole[-1].flush_folders()
        for state in states:
            if state.number < whole[-1].number:
                state.delete()
        return whole[-1].number

    def _one_pass(self, executor: Executor, flusher: Executor, number: int) -> None:
        """Write all blocks of the next state that are missing, and flush all of it."""
        job = self._job
        if number >= 0:
            State(self._folder, job, number).create()
        after = State(self._folder, job, number + 1)
        after.create()
        flushed: deque[Future[None]] = deque()

        def flush(block: int) -> None:
            flushed.append(flusher.submit(after.flush, block))
            if len(flushed) > _FLUSHED:
                flushed.popleft().result()

        # Those that are there were written by a process that was killed, or whose workers died.
        parts = _Parts(job, self._folder, number, self._live, self.used, flush)
        _, batches = job.tiles_and_batches(self._live)
        before, total = max(0, number) * batches, len(job.passes) * batches
        done = batches * after.x.count() // max(1, len(self.used)) if number >= 0 else 0  # after a restart, about
        flying: dict[Future[None], Part] = {}
        while True:
            while len(flying) < 2 * self._workers and (part := parts.next()):
                flying[executor.submit(_do, *part)] = part
                self._watch.check()
            if not flying:
                break
            finished, _ = wait(flying, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            for future in finished:
                part = flying.pop(future)
                future.result()
                self._deaths = 0
                parts.finished(part)
                if part[0] == "tiles":
                    done = min(done + 1, batches)
                    self._watch.tell("batches of tiles", before + done, total)
                else:
                    flush(part[2])
            self._watch.check()
        for flushing in flushed:
            flushing.result()
        after.flush_folders()

    @contextmanager
    def _executor(self) -> Iterator[Executor]:
        if self._workers == 1:
            threads = torch.get_num_threads()
            try:
                yield _Inline(self._open_work)
            finally:
                torch.set_num_threads(threads)
            return
        context = multiprocessing.get_context(self._context)
        executor = ProcessPoolExecutor(self._workers, context, _begin, (self._open_work, context.Value("i", 0)))
        try:
            yield executor
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


class _Parts:
    """The remaining parts of one pass, in the order in which they are handed out.

    It holds blocks and tiles between the first one that is not done and the last one that is handed out.

    Args:
        there: called with each block of the next state that is there already.
    """

    def __init__(
        self,
        job: VolumeJob,
        folder: Path,
        number: int,
        live: BlockSet,
        used: BlockSet,
        there: Callable[[int], None],
    ) -> None:
        self._job, self._number, self._live, self._used = job, number, live, used
        self._predictions = State(folder, job, number).predictions if number >= 0 else None
        self._there: set[int] = self._predictions.tiles() if self._predictions is not None else set()
        self._next_x, self._was_there = State(folder, job, number + 1).x, there
        self._blocks = iter(used)
        self._done: set[int] = set()  # blocks; all those before the first that is not done are done, too
        self._first_open = 0
        self._ready: deque[int] = deque()
        self._batches: deque[int] = deque()
        self._waiting: dict[int, set[int]] = {}  # block -> batches
        self._handed_out: set[int] = set()

    def next(self) -> Part | None:
        """A part that can be done now; None = none before one that is being done is finished."""
        while not self._ready and not self._batches:
            block = next(self._blocks, None)
            if block is None:
                return None
            if self._next_x.has(block):
                self._was_there(block)
                self._block_done(block)
            else:
                self._plan(block)
        if self._ready:
            block = self._ready.popleft()
            kind: Literal["start", "block"] = "start" if self._predictions is None else "block"
            return kind, self._number, block, block in self._live
        return "tiles", self._number, self._batches.popleft(), True

    def finished(self, part: Part) -> None:
        """Note a part that is done."""
        kind, _, index, _ = part
        if kind == "tiles":
            self._there.update(self._job.batch(index))
            self._handed_out.discard(index)
            for block in [block for block, batches in self._waiting.items() if index in batches]:
                self._waiting[block].discard(index)
                if not self._waiting[block]:
                    del self._waiting[block]
                    self._ready.append(block)
            return
        self._block_done(index)

    def _block_done(self, block: int) -> None:
        """Note a block of the next state, and delete tiles that no block needs any more."""
        self._done.add(block)
        while self._first_open in self._done or (
            self._first_open < self._live.blocks and self._first_open not in self._used
        ):
            self._done.discard(self._first_open)
            self._first_open += 1
        if self._predictions is None or block not in self._live:
            return
        tiling = self._job.tiling
        for tile in tiling.tiles_over(tiling.block_box(block)):
            over = tiling.blocks_over(tiling.tile_box(tile))
            if all(each < self._first_open or each in self._done or each not in self._live for each in over):
                self._predictions.delete(tile)
                self._there.discard(tile)

    def _plan(self, block: int) -> None:
        """Queue a block, or the batches it waits for."""
        missing: set[int] = set()
        if self._predictions is not None and block in self._live:
            missing = self._job.batches_over([block], self._there)
        if not missing:
            self._ready.append(block)
            return
        self._waiting[block] = missing
        self._batches.extend(sorted(missing - self._handed_out))
        self._handed_out |= missing


class _Inline(Executor):
    """Runs each part at once, in this process."""

    def __init__(self, open_work: OpenWork) -> None:
        global _work
        _work = open_work(0)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run it."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


_work: Work | None = None
"""What does the work in this process."""


def _begin(open_work: OpenWork, counter: Any) -> None:
    """Prepare a worker process."""
    global _work
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal's reach all processes; the one that hands out decides
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    with counter.get_lock():
        number = counter.value
        counter.value += 1
    _work = open_work(number)


def _end_with_parent() -> None:
    """End this worker when the process that hands out parts is killed."""
    process = multiprocessing.parent_process()
    if process is not None:
        process.join()
    os._exit(1)


def _do(kind: str, number: int, index: int, live: bool) -> None:
    assert _work is not None
    match kind:
        case "start":
            _work.start(index)
        case "tiles":
            _work.tiles(number, index)
        case "block":
            _work.block(number, index, live)
