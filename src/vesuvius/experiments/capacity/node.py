"""The regions and readers of the ranks of one node: simulated, and the limits of each resource.  Reads nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vesuvius.config import Config
from vesuvius.experiments.capacity.rates import ReadingCost, Store
from vesuvius.experiments.capacity.simulate import ArrayLoad, NodeSetup, RegionLoad, simulate
from vesuvius.plan.plan import Visit
from vesuvius.stream.options import TASKS_IN_FLIGHT, auto_threads
from vesuvius.stream.reading.local import REGIONS_AHEAD
from vesuvius.stream.reading.reader import STAGED_BYTES_MAX
from vesuvius.stream.start.prepare import PreparedData

_WAIT_OK = 0.01  # of a step: a shorter data wait counts as none
# Regions simulated per rank: some for each reader, fewer if they have so many chunks that it would take long.
_REGIONS, _REGIONS_PER_READER, _CHUNKS, _BATCHES = 48, 4, 60_000, 24
_VISITS = 1024  # for means
_LOCAL_READS = 4  # chunks that are read ahead from a disk (`volume.py`)


@dataclass(frozen=True)
class Machines:
    gpus: int  # of all nodes
    nodes: int
    cores: int  # of a node


@dataclass(frozen=True)
class Means:
    """Per region that a rank reads, with all arrays."""

    patches: float  # that the rank cuts from it
    decoded_bytes: float
    fetched_bytes: float  # 0 = unknown
    requests: float  # with those for indices
    indices: float  # of shards
    busiest: float  # requests for the array with the most


class NodePlan:
    """Plans one of equal nodes.  An unknown rate limits nothing."""

    def __init__(self, config: Config, data: PreparedData, machines: Machines, store: Store, cost: ReadingCost) -> None:
        plan, self._training = data.plan, (training := config.training)
        self._data, self._machines, self._store, self._cost = data, machines, store, cost
        self.ranks = machines.gpus // machines.nodes
        self.readers = training.workers or auto_threads(self.ranks, machines.cores)  # per rank
        self.requests = config.data.store.requests
        if not store.remote:
            self.requests = 1 if any(array.grid.shard_zyx for array in data.arrays[0]) else _LOCAL_READS
        region_bytes = plan.region_voxels_max * data.job.dtypes[0].itemsize
        staged = min(STAGED_BYTES_MAX // region_bytes, plan.regions_per_task) if store.remote else 1
        self.setup = NodeSetup(
            readers=self.readers,
            regions_ahead=TASKS_IN_FLIGHT * plan.regions_per_task if training.workers else REGIONS_AHEAD,
            staged=max(staged, 1),
            requests=self.requests,
            cores=max(machines.cores - self.ranks, 1),  # a trainer takes one, also to cut patches
            batch=training.micro_batch,
            batches_ahead=max(training.workers, 1) * training.prefetch_factor,
            decode_bytes_s=cost.decode_bytes_s or math.inf,
            latency_s=store.latency_s or 0.0,
            request_bytes_s=store.request_bytes_s or math.inf,
            node_bytes_s=store.node_bytes_s or math.inf,
            requests_s=(store.requests_s or math.inf) / machines.nodes,
        )
        slots = np.linspace(0, max(plan.slots_per_pass, _VISITS), _VISITS, dtype=int).tolist()
        loads = [self._load(plan.visit(slot)) for slot in slots]
        sums = [[math.fsum(getattr(a, name) for a in load) for name in ArrayLoad.__annotations__] for load in loads]
        chunks, requests, indices, decoded_bytes, fetched_bytes = np.mean(sums, axis=0).tolist()
        busiest = float(np.mean([max(a.requests + a.indices for a in load) for load in loads]))
        patches = plan.patches_per_region / plan.reads_per_region(machines.gpus)
        self.mean = Means(patches, decoded_bytes, fetched_bytes, requests + indices, indices, busiest)
        regions = min(max(_REGIONS, _REGIONS_PER_READER * self.readers), int(_CHUNKS / chunks / self.ranks))
        batches = math.ceil(max(regions, 3 * self.readers + 6) * patches / training.micro_batch)
        self._samples = max(batches, _BATCHES) * training.micro_batch
        self._regions = [self._regions_of(rank) for rank in range(self.ranks)]

    def simulate(self, step_s: float, readers: int | None = None) -> tuple[float, float]:
        """Simulate steps that take `step_s` without data wait; 0 = as fast as data arrive.  Returns as `simulate`."""
        batch_s, readers = step_s / self._training.accumulate_steps, readers or self.readers
        return simulate(self._regions, self._samples, replace(self.setup, batch_s=batch_s, readers=readers))

    def readers_needed(self, step_s: float) -> int | None:
        """Readers per GPU without data wait; None if no number suffices, or it is unknown."""
        reader_s = max(self._decode_s, self._fetch_s)
        step = self._training.micro_batch * self._training.accumulate_steps
        least = max(math.ceil(step / step_s * reader_s / self.mean.patches), 1)
        enough = (n for n in range(least, 2 * least + 3) if self.simulate(step_s, n)[1] <= _WAIT_OK)
        return next(enough, None) if reader_s else None

    @property
    def _decode_s(self) -> float:
        """CPU seconds to decode a region."""
        return self.mean.decoded_bytes / self.setup.decode_bytes_s

    @property
    def _fetch_s(self) -> float:
        """Seconds in which a reader fetches a region, with as many requests in flight as it has and may have."""
        request_s = self.setup.latency_s + self.mean.fetched_bytes / self.mean.requests / self.setup.request_bytes_s
        return self.mean.busiest * request_s / min(self.requests, self._staged_requests)

    @property
    def _staged_requests(self) -> float:
        return self.setup.staged * self.mean.busiest

    def limits(self, needed: float | None) -> list[dict[str, Any]]:
        """Return what each resource gives at most, by itself, and what raises it to `needed`; None = unknown."""
        mean, store, nodes = self.mean, self._store, self._machines.nodes
        readers, wanted = nodes * self.ranks * self.readers, 1.2 * (needed or 0.0) / self.mean.patches  # regions/s
        decode_s = self._decode_s if self._cost.decode_bytes_s else 0.0
        fetch_s = self._fetch_s if store.remote and store.latency_s is not None else 0.0
        more = f"training.workers={math.ceil(self.readers * max(wanted * max(decode_s, fetch_s) / readers, 1))}"
        in_flight = math.ceil(self.requests * max(wanted * fetch_s / readers, 1))
        latency = f"data.store.requests={in_flight}, or {more}" if in_flight <= self._staged_requests else more
        cores = max(math.ceil(wanted * decode_s / nodes) + self.ranks, self._machines.cores)
        faster = "a faster network, larger data.stream_gib, data.store.cache_dir or a local copy"
        once = (
            "each region read once (see warnings), "
            if self._data.plan.reads_per_region(self._machines.gpus) > 1
            else ""
        )
        fewer = "larger data.stream_gib, larger chunks or shards, or copies under several prefixes"
        # Regions at a time, seconds that one takes, remedy.
        limits = {
            "decoding: readers": (readers, decode_s, more),
            "decoding: cores": (nodes * self.setup.cores, decode_s, f"{cores} cores a node"),
            "latency": (readers, fetch_s, latency),
            "network": (nodes, mean.fetched_bytes / (store.node_bytes_s or math.inf), once + faster),
            "requests/s": (1, mean.requests / (store.requests_s or math.inf), once + fewer),
        }
        rows = []
        for name, (count, seconds, how) in limits.items():
            rate = count * mean.patches / seconds if seconds else None
            of_needed = rate and needed and rate / needed
            if store.remote or name not in ("latency", "requests/s"):
                rows.append({"limit": name, "patches_s": rate, "of_needed": of_needed, "raised_by": how})
        return rows

    def _load(self, visit: Visit) -> tuple[ArrayLoad, ...]:
        """What a reader fetches and decodes for a visit, of each array; chunks of staged regions are fetched once."""
        loads, volumes = [], self._data.plan.volumes
        share = volumes[visit.entry].weight / math.fsum(volume.weight for volume in volumes)
        for position in range(len(self._data.arrays[visit.volume])):
            array, alignment = self._data.array(visit.volume, position)
            chunks, requests, indices = array.grid.count_requests(alignment.array_box(visit.region))
            new = (1 - share * chunks / math.prod(array.grid.counts_zyx)) ** (self.setup.staged - 1)
            size = chunks * math.prod(array.chunk_zyx) * array.dtype.itemsize
            fetched_bytes = new * size / (self._cost.compression or math.inf)
            loads.append(ArrayLoad(chunks, max(round(new * requests), 1), indices, size, fetched_bytes))
        return tuple(loads)

    def _regions_of(self, rank: int) -> list[RegionLoad]:
        """The regions that a rank reads for its simulated samples, and a quarter more, so that the readers go on."""
        plan, world = self._data.plan, self._machines.gpus
        mixing, per_task = plan.mixing, plan.regions_per_task if self._training.workers else 1
        # Once each region has given all its samples; the window of the first sample counts as read.
        first = -(-2 * mixing.regions * mixing.patches // world) * world + rank
        slots = [mixing.slot_of(first + world * n) for n in range(5 * self._samples // 4)]
        window = mixing.first_slot(first // mixing.regions) + mixing.regions
        coming, regions = sorted({slot for slot in slots if slot >= window}, reverse=True), list[RegionLoad]()
        tasks = dict[int, int]()
        for sample, slot in enumerate(slots):
            while coming and coming[-1] <= slot:
                read = coming.pop()
                task = tasks.setdefault(read // per_task, len(tasks))
                regions.append(RegionLoad(sample, task, self._load(plan.visit(read))))
        return regions
