"""Simulates the data path of the ranks of one node, event by event: requests, decoding, batches, steps.  Pure.

It follows `stream/`: each reader stages regions ahead (`reader.py`), fetches them with a limited number of requests in
flight, decodes their chunks in order, and runs a limited number of regions ahead of the cutter (`local.py`); the cutter
needs each region at a known sample, and assembles a limited number of batches ahead (`feeder.py`).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass

_NO_WAIT = 1e-3  # of the time

Process = Generator["float | _Signal", None, None]
"""Yields the seconds to sleep, or a signal to wait for."""


@dataclass(frozen=True)
class ArrayLoad:
    """Bytes and requests of one array that a reader fetches and decodes for a region."""

    chunks: int
    requests: float  # for chunks and whole shards; rounded, at least 1
    indices: float  # of shards, fetched before them; rounded
    decoded_bytes: int  # of all chunks
    fetched_bytes: float  # by all requests


@dataclass(frozen=True)
class RegionLoad:
    first_sample: int  # position, among the rank's samples, of the first that needs this or a later region
    task: int  # read by reader `task` modulo the number of readers
    arrays: tuple[ArrayLoad, ...]


@dataclass(frozen=True)
class NodeSetup:
    """Settings of the readers, and rates of the node; infinite = no limit."""

    readers: int  # per rank
    regions_ahead: int  # per reader, between it and the cutter
    staged: int  # regions that a reader fetches at a time
    requests: int  # in flight, per reader and array
    cores: int  # of the node, for decoding
    batch: int  # samples of a micro-batch
    batches_ahead: int
    batch_s: float = 0.0  # the trainer's time per micro-batch
    decode_bytes_s: float = math.inf  # decoded bytes per CPU second
    latency_s: float = 0.0  # of a request, without its bytes
    request_bytes_s: float = math.inf  # rate of one request
    node_bytes_s: float = math.inf  # of all requests of the node
    requests_s: float = math.inf  # begun by the node


def simulate(ranks: Sequence[Sequence[RegionLoad]], samples: int, setup: NodeSetup) -> tuple[float, float]:
    """Simulate `samples` samples of each rank, given the regions that it reads, in order; all ranks wait for the last.

    Returns patches/s of the node, and the share of the time that the trainers wait for data.  The first quarter is left
    out, as the readers begin with nothing read ahead.
    """
    node, batches = _Node(setup), samples // setup.batch
    started = [_Rank(node, regions, batches) for regions in ranks]
    done, taken = _Signal(node), list[tuple[float, float]]()

    def train() -> Process:
        for number in range(batches):
            for rank in started:
                yield rank.ready[number]
            taken.append((node.now_s, node.regions_read))
            for rank in started:
                rank.free.release()
            yield setup.batch_s
        done.set()

    node.start(train())
    node.run(done)
    (began_s, read_before), (ended_s, read) = taken[batches // 4], taken[-1]
    took_s, batch_s = ended_s - began_s, max(setup.batch_s, 1e-12)
    # Batches come in bursts, a task of each reader at a time: count what is read, unless nobody waits.
    if took_s > (batches - 1 - batches // 4) * batch_s * (1 + _NO_WAIT):
        samples_per_region = ranks[0][-1].first_sample / (len(ranks[0]) - 1)
        batch_s = max(took_s * setup.batch * len(ranks) / max((read - read_before) * samples_per_region, 1.0), batch_s)
    return setup.batch * len(ranks) / batch_s, 1 - setup.batch_s / batch_s


class _Signal:
    """An event that processes wait for; it happens once."""

    def __init__(self, node: _Node) -> None:
        self._node, self.is_set, self.waiting = node, False, list[Process]()

    def set(self) -> None:
        self.is_set = True
        for process in self.waiting:
            self._node.start(process)


class _Slots:
    """A resource of some slots, taken in the order of requests: cores, requests in flight, batches ahead."""

    def __init__(self, node: _Node, count: int) -> None:
        self._node, self._free, self._queue = node, count, deque[_Signal]()

    def take(self) -> Process:
        if self._free:
            self._free -= 1
        else:
            self._queue.append(turn := _Signal(self._node))
            yield turn

    def release(self) -> None:
        if self._queue:
            self._queue.popleft().set()
        else:
            self._free += 1


class _Node:
    """The clock, and what the ranks share: cores, the link to the store, its limit of requests."""

    def __init__(self, setup: NodeSetup) -> None:
        self.setup, self.now_s, self.regions_read = setup, 0.0, 0.0
        self._events: list[tuple[float, int, Process]] = []
        self._count = itertools.count()  # events at the same time happen in the order in which they were planned
        self._cores = _Slots(self, setup.cores)
        self._link_free_s = self._request_free_s = 0.0

    def start(self, process: Process, delay_s: float = 0.0) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._count), process))

    def run(self, until: _Signal) -> None:
        while not until.is_set:
            self.now_s, _, process = heapq.heappop(self._events)
            wanted = next(process, None)
            while isinstance(wanted, _Signal) and wanted.is_set:
                wanted = next(process, None)
            if isinstance(wanted, _Signal):
                wanted.waiting.append(process)
            elif wanted is not None:
                self.start(process, wanted)

    def compute(self, seconds: float) -> Process:
        if seconds:
            yield from self._cores.take()
            yield seconds
            self._cores.release()

    def request(self, pool: _Slots, size: float, done: _Signal) -> Process:
        yield from pool.take()
        self._request_free_s = max(self._request_free_s, self.now_s) + 1 / self.setup.requests_s
        yield self._request_free_s - self.now_s + self.setup.latency_s
        self._link_free_s = max(self._link_free_s, self.now_s) + size / self.setup.node_bytes_s
        yield max(self._link_free_s - self.now_s, size / self.setup.request_bytes_s)
        pool.release()
        done.set()


class _Rank:
    """Starts the readers and the feeder of a rank.  `ready` has its batches, `free` the slots for those ahead."""

    def __init__(self, node: _Node, regions: Sequence[RegionLoad], batches: int) -> None:
        self._node, self._regions = node, regions
        self._asked, self._read = ([_Signal(node) for _ in regions] for _ in range(2))
        self.ready, self.free = [_Signal(node) for _ in range(batches)], _Slots(node, node.setup.batches_ahead)
        for reader in range(node.setup.readers):
            node.start(self._reader([n for n, each in enumerate(regions) if each.task % node.setup.readers == reader]))
        node.start(self._feeder())

    def _feeder(self) -> Process:
        batch, region = self._node.setup.batch, 0
        for number, ready in enumerate(self.ready):
            yield from self.free.take()
            while region < len(self._regions) and self._regions[region].first_sample < (number + 1) * batch:
                self._asked[region].set()
                yield self._read[region]
                region += 1
            ready.set()

    def _reader(self, mine: list[int]) -> Process:
        """Stages, reads in order, and stages again before it waits for the cutter."""
        node, setup, staged = self._node, self._node.setup, dict[int, list[list[_Signal]]]()
        pools = [(_Slots(node, setup.requests), _Slots(node, 1)) for _ in self._regions[0].arrays] if mine else []

        def stage(numbers: list[int]) -> None:
            for number in numbers:
                if number not in staged:
                    arrays = zip(self._regions[number].arrays, pools, strict=True)
                    staged[number] = [self._stage(array, *pool) for array, pool in arrays]

        for turn, number in enumerate(mine):
            if (before := number - setup.regions_ahead * setup.readers) >= 0:
                yield self._asked[before]
            stage(mine[turn : turn + setup.staged])
            for array, fetched in zip(self._regions[number].arrays, staged.pop(number), strict=True):
                for chunk in range(array.chunks):
                    yield fetched[chunk * len(fetched) // array.chunks]
                    yield from node.compute(array.decoded_bytes / array.chunks / setup.decode_bytes_s)
                    node.regions_read += 1 / array.chunks / len(pools)
            self._read[number].set()
            stage(mine[turn + 1 : turn + 1 + setup.staged])

    def _stage(self, array: ArrayLoad, pool: _Slots, stager: _Slots) -> list[_Signal]:
        """Start the requests of a region, after those for the indices of its shards."""
        node, signals = self._node, [_Signal(self._node) for _ in range(max(round(array.requests), 1))]

        def stage() -> Process:
            yield from stager.take()
            indices = [_Signal(node) for _ in range(round(array.indices))]
            for signal in indices:
                node.start(node.request(pool, 0.0, signal))
            yield from indices
            for signal in signals:
                node.start(node.request(pool, array.fetched_bytes / len(signals), signal))
            stager.release()

        node.start(stage())
        return signals
