"""Fifth stop of a patch: batches are put together on a thread of their own, a few ahead of the trainer."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.errors import ConfigError
from vesuvius.stream.cutter import Cutter, StreamOrderError
from vesuvius.stream.reader import ReaderJob
from vesuvius.stream.wait_time import WaitTime
from vesuvius.volumes.retry import Outage

# A batch stays untouched until the second `next` after it: the copy to a GPU may still be reading it.
HELD = 2
_POLL_S = 0.2
_JOIN_S = 1.0


class StreamInterrupted(Exception):  # noqa: N818 - no error: the way out of a wait
    """A batch was asked for, none was ready, and whoever asked wants to stop."""


@dataclass(frozen=True)
class Batch:
    """Consecutive samples of one rank.

    Attributes:
        patches: (B, Z, Y, X) in the stored dtype.  Where the stream was given buffers, one of them: valid until the
            second `next` after it.
        indices: (B,) int64, the sample index of each patch.
        condition: like `patches`, cut from the condition volumes at the same place; None without them.
    """

    patches: NDArray[Any]
    indices: NDArray[np.int64]
    condition: NDArray[Any] | None = None


@dataclass(frozen=True)
class FeederFigures:
    """What feeders have done so far.

    Attributes:
        cut_s: copying patches out of regions into batches.
        starved_s: waiting for blocks of the readers; with `workers: 0`, in which nobody else reads, reading them.
        full_s: waiting for a free place, because enough batches were ready.
        batches: handed over.
        ran_empty: times that a batch was asked for and none was ready.
        delivered_bytes: of the patches and conditions handed over.
    """

    cut_s: float = 0.0
    starved_s: float = 0.0
    full_s: float = 0.0
    batches: int = 0
    ran_empty: int = 0
    delivered_bytes: int = 0

    def plus(self, other: FeederFigures) -> FeederFigures:
        """Of both together."""
        both = zip(vars(self).values(), vars(other).values(), strict=True)
        return FeederFigures(*(mine + theirs for mine, theirs in both))


def check_rings(rings: Sequence[Sequence[NDArray[Any]]]) -> None:
    """Raises ConfigError where a ring has fewer than three buffers; none at all is fine."""
    if any(0 < len(ring) <= HELD for ring in rings):
        raise ConfigError(
            f"a ring of buffers must have at least {HELD + 1}, of which {HELD} stay untouched; got "
            f"{[len(ring) for ring in rings]}; give more, or none"
        )


def rotated(ring: Sequence[NDArray[Any]], count: int) -> list[NDArray[Any]]:
    """The ring from where it is after so many batches."""
    first = count % len(ring) if ring else 0
    return [*ring[first:], *ring[:first]]


class Feeder:
    """Copies patches into batches, ahead of whoever takes them.

    Args:
        job: what is read.
        cutter: where the patches come from; iterated on the feeder's thread.
        batch_size: samples of a batch; the last one may be shorter.
        ahead: batches that are put together ahead; fewer where the rings are shorter.
        first: index of the first sample.
        rings: buffers to deliver patches in, and those for conditions; either may be empty, for new arrays.
        held: the last batches of a feeder before this one, which are in the buffers at the end of the rings.
        interrupted: asked several times a second while a batch is waited for: whether to give that up.

    Raises:
        ConfigError: a ring has fewer than three buffers.
    """

    def __init__(
        self,
        job: ReaderJob,
        cutter: Cutter,
        batch_size: int,
        ahead: int,
        first: int,
        rings: Sequence[Sequence[NDArray[Any]]],
        held: Sequence[Batch] = (),
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        check_rings(rings)
        self._interrupted = interrupted
        self._job = job
        self._patches = cutter.patches()
        self._starved = cutter.starved
        self._full = WaitTime()
        self._cut_s = 0.0
        self._delivered = FeederFigures()
        self._batch_size = batch_size
        self._expected = first
        self._rings = [itertools.cycle(ring) for ring in rings]
        size = min([HELD + ahead, *(len(ring) for ring in rings if ring)])
        # Both are queues in C.  A lock of Python, which a semaphore has too, would stay held if Ctrl-C came in it.
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(size - len(held)):
            self._free.put(None)
        self._ready: SimpleQueue[Batch | BaseException | None] = SimpleQueue()
        self.held = deque(held)
        self._ended = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def next_batch(self) -> Batch | None:
        """The next batch, or None at the end.

        Raises what reading and cutting raise.  Raises StreamInterrupted where none is ready and `interrupted` says so;
        nothing is lost by that.
        """
        if self._ended:
            return None
        if len(self.held) == HELD:
            self.held.popleft()
            self._free.put(None)
        empty = self._ready.empty()
        ready = self._wait_for_batch()
        if not isinstance(ready, Batch):
            self._ended = True
            if ready is not None:
                raise ready
            return None
        self.held.append(ready)
        size = ready.patches.nbytes + (0 if ready.condition is None else ready.condition.nbytes)
        self._delivered = self._delivered.plus(FeederFigures(batches=1, ran_empty=empty, delivered_bytes=size))
        return ready

    def waiting_for(self, outages: Sequence[Outage] = ()) -> str:
        """What a batch that does not come is waiting for, for people.  Any thread may ask.

        Args:
            outages: of the stores that do not answer at the moment.
        """
        if not self._ready.empty():
            return "the device: a batch is ready"
        if self._starved.waiting:
            oldest = min(outages, key=lambda outage: outage.since, default=None)
            why = f" ({oldest})" if oldest else ""
            return f"regions to be read, for sample {self._expected} on{why}"
        return f"patches to be cut, for sample {self._expected} on"

    @property
    def figures(self) -> FeederFigures:
        """What it has done so far.  Any thread may ask."""
        spent = FeederFigures(cut_s=self._cut_s, starved_s=self._starved.seconds, full_s=self._full.seconds)
        return self._delivered.plus(spent)

    def stop(self) -> None:
        """Have the thread end after the patch in hand.  Does not wait."""
        self._stopped.set()
        self._free.put(None)

    def join(self) -> None:
        """Wait for the thread, but not for ever: a read from a dead network may take its time."""
        self._thread.join(_JOIN_S)

    def _wait_for_batch(self) -> Batch | BaseException | None:
        while True:
            stopping = self._interrupted()
            try:
                return self._ready.get(timeout=0.0 if stopping else _POLL_S)
            except Empty:
                if stopping:
                    raise StreamInterrupted from None

    def _run(self) -> None:
        try:
            while not self._wait_for_place():
                started, starved_s = time.perf_counter(), self._starved.seconds
                batch = self._next()
                self._cut_s += time.perf_counter() - started - (self._starved.seconds - starved_s)
                self._ready.put(batch)
                if batch is None:
                    return
        except BaseException as error:
            self._ready.put(error)
        finally:
            self._patches.close()  # lets go of the regions

    def _wait_for_place(self) -> bool:
        """Until there is a free buffer; returns whether the feeder was stopped."""
        with self._full:
            self._free.get()
        return self._stopped.is_set()

    def _next(self) -> Batch | None:
        shape = (self._batch_size, *self._job.plan.patch_zyx)
        arrays = [
            array if (array := next(ring, None)) is not None else np.empty(shape, dtype)
            for ring, dtype in zip(self._rings, self._job.dtypes, strict=False)
        ]
        indices: list[int] = []
        for patch in itertools.islice(self._patches, self._batch_size):
            if self._stopped.is_set():
                return None
            for array, voxels in zip(arrays, patch.voxels, strict=True):
                array[len(indices)] = voxels
            indices.append(patch.index)
        if not indices:
            return None
        # A lost, repeated or reordered sample must never train silently.
        expected = self._expected + self._job.world * np.arange(len(indices))
        if not np.array_equal(indices, expected):
            raise StreamOrderError(
                f"samples must come in the order of the plan; got {indices} for {expected}; report this as a defect"
            )
        self._expected += self._job.world * len(indices)
        return Batch(arrays[0][: len(indices)], expected, arrays[1][: len(indices)] if len(arrays) > 1 else None)
