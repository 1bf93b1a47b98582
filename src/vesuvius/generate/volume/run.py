"""Hands out the parts of the work, pass by pass, until the last state is whole.

Everything that is done is a file, so there is no other record of progress: a new start looks which files are there.
Parts are handed out in the order of the blocks, and a block follows as soon as its tiles are there, so predictions of
two or three rows of tiles exist at a time.
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
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from vesuvius.errors import EXIT_INTERRUPTED, StorageError, VesuviusError
from vesuvius.generate.volume.field import Field
from vesuvius.generate.volume.work import Job, State, Work, live_blocks, state_numbers

log = logging.getLogger(__name__)

_POLL_S = 0.5
_DEATHS_WITHOUT_WORK = 3

Part = tuple[Literal["start", "tiles", "block"], int, int, bool]
"""What to do, in which pass, with which block or batch, and whether the block has gaps near."""
OpenWork = Callable[[int], Work]
"""Makes what does the work in the process it is called in, from the number of that process; picklable."""


class Stop(Protocol):
    """Says whether to end early."""

    exit_code: int | None

    def wanted(self) -> bool:
        """Whether to end now."""


class VolumeStoppedError(VesuviusError):
    """A signal came before the volume was whole."""

    def __init__(self, exit_code: int) -> None:
        name = signal.SIGINT.name if exit_code == EXIT_INTERRUPTED else signal.SIGTERM.name
        super().__init__(
            f"a volume is written when its last step is taken; got {name} before; what is done stays: give the same "
            "command again to go on"
        )
        self.exit_code = exit_code


class Sampling:
    """All passes over a volume.

    Args:
        folder: `state/`, which exists; `known` and `condition` are whole.
        open_work: called in each worker.
        workers: processes; 1 = this one.
        on_progress: called with batches done and batches in all.
        context: how worker processes are started.
    """

    def __init__(
        self,
        job: Job,
        folder: Path,
        open_work: OpenWork,
        workers: int = 1,
        stop: Stop | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        context: str = "spawn",
    ) -> None:
        self._job, self._folder, self._open_work = job, folder, open_work
        self._workers, self._stop, self._on_progress, self._context = workers, stop, on_progress, context
        self._live = np.ones(job.tiling.blocks, np.bool_)
        if job.inpaint:
            self._live = live_blocks(job, Field(folder / "known", job.tiling))
        self._batches = len(_batches_over(job, self._live))
        self._done = 0
        self._deaths = 0

    @property
    def total(self) -> int:
        """Batches of tiles of all passes."""
        return self._batches * len(self._job.passes)

    def run(self) -> Field:
        """Go on from what is there to the last state, and return it.

        Raises:
            VolumeStoppedError: `stop` was wanted.
            VesuviusError: workers die before they have done anything; and what a part of the work raises.
        """
        number = self._resumed()
        self._done = max(0, number) * self._batches
        last = len(self._job.passes)
        while number < last:
            try:
                with self._executor() as executor, ThreadPoolExecutor(1, "flush") as self._flusher:
                    while number < last:
                        self._one_pass(executor, number)
                        State(self._folder, self._job, number).delete()
                        number += 1
            except BrokenProcessPool as error:
                self._deaths += 1
                if self._deaths > _DEATHS_WITHOUT_WORK:
                    raise VesuviusError(
                        f"workers must live; got {self._deaths} deaths without work done between them; see the log "
                        "above, and for a kill the kernel's (dmesg); try fewer --workers"
                    ) from error
                log.warning("a worker has died; others are started and go on with its part")
        return State(self._folder, self._job, last).x

    def _resumed(self) -> int:
        """The pass to go on with, -1 = the noise is to be drawn; older states are deleted."""
        numbers = state_numbers(self._folder)
        whole = [n for n in numbers if State(self._folder, self._job, n).x.whole()]
        latest = whole[-1] if whole else -1
        for number in numbers:
            if number < latest:
                State(self._folder, self._job, number).delete()
        return latest

    def _one_pass(self, executor: Executor, number: int) -> None:
        """Write all blocks of the next state that are missing."""
        before = State(self._folder, self._job, number)
        if number >= 0:
            before.create()
        after = State(self._folder, self._job, number + 1)
        after.create()
        parts = _Parts(self._job, self._folder, number, self._live)
        done_before = self._done
        flying: dict[Future[None], Part] = {}
        flushed: list[Future[None]] = []
        while True:
            while len(flying) < 2 * self._workers and (part := parts.next()):
                flying[executor.submit(_do, *part)] = part
                self._check_stop()
            if not flying:
                break
            finished, _ = wait(flying, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            for future in finished:
                part = flying.pop(future)
                try:
                    future.result()
                except OSError as error:
                    raise _disk_error(self._folder, error) from error
                self._deaths = 0
                parts.finished(part)
                if part[0] == "tiles":
                    self._done += 1
                    self._on_progress(self._done, self.total)
                else:
                    flushed.append(self._flusher.submit(after.flush, part[2]))
            self._check_stop()
        for flush in flushed:
            flush.result()
        self._done = done_before + self._batches if number >= 0 else 0

    def _check_stop(self) -> None:
        if self._stop is not None and self._stop.wanted():
            assert self._stop.exit_code is not None
            raise VolumeStoppedError(self._stop.exit_code)

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
    """The parts of one pass that are still to be done, in the order in which they are handed out."""

    def __init__(self, job: Job, folder: Path, number: int, live: NDArray[np.bool_]) -> None:
        self._job, self._number, self._live = job, number, live
        self._predictions = State(folder, job, number).predictions if number >= 0 else None
        there = State(folder, job, number + 1).x
        self._finished = np.array([there.has(block) for block in range(job.tiling.blocks)])
        self._blocks = iter(np.flatnonzero(~self._finished).tolist())
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
            self._plan(block)
        if self._ready:
            block = self._ready.popleft()
            kind: Literal["start", "block"] = "start" if self._predictions is None else "block"
            return kind, self._number, block, bool(self._live[block])
        return "tiles", self._number, self._batches.popleft(), True

    def finished(self, part: Part) -> None:
        """Note a part that is done."""
        if part[0] == "tiles":
            self._handed_out.discard(part[2])
            for block in [block for block, batches in self._waiting.items() if part[2] in batches]:
                self._waiting[block].discard(part[2])
                if not self._waiting[block]:
                    del self._waiting[block]
                    self._ready.append(block)
            return
        self._finished[part[2]] = True
        if self._predictions is not None and part[3]:
            for tile in self._tiles_over(part[2]):
                if self._finished[self._needing(tile)].all():
                    self._predictions.delete(tile)

    def _plan(self, block: int) -> None:
        """Queue a block, or the batches it waits for."""
        missing: set[int] = set()
        if self._predictions is not None and self._live[block]:
            tiles = self._tiles_over(block)
            missing = {tile // self._job.batch_size for tile in tiles if not self._predictions.has(tile)}
        if not missing:
            self._ready.append(block)
            return
        self._waiting[block] = missing
        self._batches.extend(sorted(missing - self._handed_out))
        self._handed_out |= missing

    def _tiles_over(self, block: int) -> list[int]:
        return self._job.tiling.tiles_over(self._job.tiling.block_box(block))

    def _needing(self, tile: int) -> list[int]:
        blocks = self._job.tiling.blocks_over(self._job.tiling.tile_box(tile))
        return [block for block in blocks if self._live[block]]


class _Inline(Executor):
    """Does each part at once, in this process."""

    def __init__(self, open_work: OpenWork) -> None:
        global _work
        _work = open_work(0)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Do it."""
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the one that hands out decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    with counter.get_lock():
        number = counter.value
        counter.value += 1
    _work = open_work(number)


def _end_with_parent() -> None:
    """A killed process that hands out parts must not leave its workers behind."""
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


def _batches_over(job: Job, live: NDArray[np.bool_]) -> set[int]:
    """The batches that blocks with gaps near need."""
    if live.all():
        return set(range(-(-job.tiling.tiles // job.batch_size)))
    boxes = (job.tiling.block_box(int(block)) for block in np.flatnonzero(live))
    return {tile // job.batch_size for box in boxes for tile in job.tiling.tiles_over(box)}


def _disk_error(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"a volume that is being drawn needs a writable disk with enough room; got {error} in {folder}; free space: "
        "what is done stays, and the same command goes on"
    )
