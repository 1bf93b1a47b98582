"""Assembles batches on a thread of its own, a few ahead of the trainer."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.errors import ConfigError
from vesuvius.plan.plan import Sample
from vesuvius.stream.cutter import Cutter, WaitTime
from vesuvius.volumes.store.retry import Outage

# A batch stays untouched until the second `next` after it: the copy to a GPU may still be reading it.
BUFFERS_IN_USE = 2
_POLL_S = 0.2
_JOIN_S = 1.0
_COPIERS = 2


class StreamInterrupted(Exception):  # noqa: N818 - no error: the way out of a wait
    """No batch was ready, and the caller wants to stop."""


@dataclass(frozen=True)
class Batch:
    """Consecutive samples of one rank."""

    # (B, Z, Y, X) in the stored dtype.  Where the stream was given buffers, one of them: valid until the second
    # `next` after it.
    patches: NDArray[Any]
    samples: tuple[Sample, ...]  # what each patch is
    # like `patches`, cut from the condition volumes at the same place; None without them
    condition: NDArray[Any] | None = None

    @cached_property
    def indices(self) -> NDArray[np.int64]:
        """The sample index of each patch, (B,)."""
        return np.array([sample.index for sample in self.samples], np.int64)

    def rows(self, of: slice) -> Batch:
        """Some of it, in the same memory."""
        return Batch(self.patches[of], self.samples[of], None if self.condition is None else self.condition[of])

    def copy(self) -> Batch:
        """The same in memory of its own."""
        return Batch(self.patches.copy(), self.samples, None if self.condition is None else self.condition.copy())

    @property
    def nbytes(self) -> int:
        """Bytes of patches and condition."""
        return self.patches.nbytes + (0 if self.condition is None else self.condition.nbytes)


@dataclass(frozen=True)
class FeederStats:
    """What feeders have done so far."""

    cut_s: float = 0.0  # copying patches out of regions into batches
    starved_s: float = 0.0  # waiting for blocks from the readers; with `workers: 0`, reading them
    full_s: float = 0.0  # waiting for a free buffer, because enough batches were ready
    batches: int = 0  # handed over
    ran_empty: int = 0  # times that a batch was asked for and none was ready
    delivered_bytes: int = 0  # of the patches and conditions handed over


class FeederClock:
    """Counts what the feeders of a stream do, one after the other.  Any thread may ask."""

    def __init__(self) -> None:
        self.starved, self.full = WaitTime(), WaitTime()
        self.cut_s = 0.0
        self.batches = self.ran_empty = self.delivered_bytes = 0

    @property
    def figures(self) -> FeederStats:
        """So far, including waits that are under way."""
        return FeederStats(
            self.cut_s, self.starved.seconds, self.full.seconds, self.batches, self.ran_empty, self.delivered_bytes
        )


def check_rings(rings: Sequence[Sequence[NDArray[Any]]]) -> None:
    """Raises ConfigError where a ring has fewer than three buffers; none at all is fine."""
    if any(0 < len(ring) <= BUFFERS_IN_USE for ring in rings):
        raise ConfigError(
            f"rings of {[len(ring) for ring in rings]} buffers are too small, as {BUFFERS_IN_USE} are in use; give at "
            f"least {BUFFERS_IN_USE + 1}, or none"
        )


def reusable_arrays(shape: tuple[int, ...], dtype: np.dtype[Any], kept: int) -> Iterator[NDArray[Any]]:
    """Arrays of before once they and all views of them are gone, as fresh memory costs as much as the copy into it.

    Up to `kept` are used again; where more are held, new ones come.
    """
    made: list[NDArray[Any]] = []
    while True:
        array = _unheld(made)
        if array is None:
            array = np.empty(shape, dtype)
            if len(made) < kept:
                made.append(array)
        yield array
        del array


def _unheld(made: list[NDArray[Any]]) -> NDArray[Any] | None:
    """The first that is in this list alone."""
    return next((array for array in made if sys.getrefcount(array) <= _UNHELD), None)


def _references_within() -> int:
    """What `_unheld` counts of an array that only a list holds; differs by version of Python."""
    return next(sys.getrefcount(array) for array in [np.empty(0)])


_UNHELD = _references_within()


class Feeder:
    """Copies patches into batches, ahead of whoever takes them.

    Args:
        layout: shape and dtype of a batch's arrays; the last batch may be shorter.
        cutter: iterated on the feeder's thread.
        ahead: batches assembled ahead; fewer where the rings are shorter.
        rings: buffers to deliver patches in, and those for conditions; either may be empty, for arrays that nobody else
            holds.
        delivered: batches delivered in these rings so far: the next one goes into the buffer after theirs.
        held: the last batches of the feeder before this one, still in their buffers.
        interrupted: asked several times a second while a batch is waited for: whether to stop waiting.
    """

    def __init__(
        self,
        layout: Sequence[tuple[tuple[int, int, int, int], np.dtype[Any]]],
        cutter: Cutter,
        clock: FeederClock,
        ahead: int,
        rings: Sequence[Sequence[NDArray[Any]]],
        delivered: int,
        held: Sequence[Batch],
        interrupted: Callable[[], bool],
    ) -> None:
        check_rings(rings)
        self._interrupted = interrupted
        self._batch_size = layout[0][0][0]
        self._cutter = cutter
        self._patches = cutter.patches()
        # Of regions that stay where they are two threads copy patches, as memory answers them sooner; others are copied
        # before the next patch is cut.
        self._copiers = ThreadPoolExecutor(_COPIERS, "cut") if cutter.is_resident else None
        self._clock = clock
        size = min([BUFFERS_IN_USE + ahead, *(len(ring) for ring in rings if ring)])
        self._rings = [
            itertools.islice(itertools.cycle(ring), delivered % len(ring), None) if ring else reusable_arrays(*of, size)
            for ring, of in zip(rings, layout, strict=False)
        ]
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

        Raises what reading and cutting raise, and StreamInterrupted where none is ready and `interrupted` says so.
        """
        if self._ended:
            return None
        if len(self.held) == BUFFERS_IN_USE:
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
        self._clock.batches += 1
        self._clock.ran_empty += empty
        self._clock.delivered_bytes += ready.nbytes
        return ready

    def waiting_for(self, outages: Sequence[Outage]) -> str:
        """What delays the next batch, for people, given the stores that do not answer.  Any thread may ask."""
        if not self._ready.empty():
            return "the device: a batch is ready"
        if self._clock.starved.waiting:
            oldest = min(outages, key=lambda outage: outage.since, default=None)
            why = f" ({oldest})" if oldest else ""
            return f"regions to be read, for sample {self._cutter.index} on{why}"
        return f"patches to be cut, for sample {self._cutter.index} on"

    def stop(self) -> None:
        """End the thread after the current patch.  Does not wait."""
        self._stopped.set()
        self._free.put(None)

    def join(self) -> None:
        """Wait for the thread, but at most a second: a read from a dead network may take long."""
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
        starved = self._clock.starved
        try:
            while True:
                with self._clock.full:
                    self._free.get()
                if self._stopped.is_set():
                    return
                started, starved_s = time.perf_counter(), starved.seconds
                batch = self._next()
                self._clock.cut_s += time.perf_counter() - started - (starved.seconds - starved_s)
                self._ready.put(batch)
                if batch is None:
                    return
        except BaseException as error:
            self._ready.put(error)
        finally:
            self._patches.close()  # lets go of the regions
            if self._copiers is not None:
                self._copiers.shutdown()

    def _next(self) -> Batch | None:
        arrays = [next(ring) for ring in self._rings]
        samples: list[Sample] = []
        copies: list[Future[None]] = []
        for sample, views in itertools.islice(self._patches, self._batch_size):
            if self._stopped.is_set():
                return None
            for array, voxels in zip(arrays, views, strict=True):
                if self._copiers is None:
                    array[len(samples)] = voxels
                else:
                    copies.append(self._copiers.submit(np.copyto, array[len(samples)], voxels))
            samples.append(sample)
        for copy in copies:
            copy.result()
        if not samples:
            return None
        patches, *conditions = (array[: len(samples)] for array in arrays)
        return Batch(patches, tuple(samples), *conditions)
