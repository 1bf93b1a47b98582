"""The regions and readers of the ranks of one node: simulated, and the limits of each resource.  Reads nothing."""

import math
from dataclasses import astuple, dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from vesuvius.config import Config
from vesuvius.experiments.capacity.rates import Rates
from vesuvius.experiments.capacity.simulate import ArrayLoad, NodeSetup, RegionLoad, simulate
from vesuvius.plan.plan import Visit
from vesuvius.stream.options import TASKS_IN_FLIGHT, auto_threads
from vesuvius.stream.reading.local import REGIONS_AHEAD
from vesuvius.stream.reading.reader import STAGED_BYTES_MAX
from vesuvius.stream.start.prepare import PreparedData

_WAIT_OK = 0.01  # of a step: a shorter data wait counts as none
# Simulated per rank: regions, or tasks of each reader; fewer or shorter ones if so many chunks would take long.
_REGIONS, _TASKS, _CHUNKS, _BATCHES = 128, 2, 20_000, 24
_VISITS = 1024  # for means
_LOCAL_READS = 4  # chunks that are read ahead from a disk (`volume.py`)
_OF_READERS = "decoding: readers", "latency", "rate of a request"  # limits that more readers raise
_UNKNOWN = {"network": "unknown; give --node-gb-s and --compression", "requests/s": "unknown; give --requests-s"}
READERS_MAX = 512  # per GPU
_SPARE = 1.2  # times the need is enough
_FEWER_BYTES = "larger data.stream_gib, data.store.cache_dir or a local copy"
_FEWER_REQUESTS = "larger data.stream_gib, larger chunks or shards, or copies under several prefixes"


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


class NodePlan:
    """Plans one of equal nodes.  An unknown rate limits nothing."""

    def __init__(self, config: Config, data: PreparedData, machines: Machines, rates: Rates) -> None:
        plan, self._training = data.plan, (training := config.training)
        self._data, self._machines, self._rates = data, machines, rates
        self.ranks = machines.gpus // machines.nodes
        self.readers = training.workers or auto_threads(self.ranks, machines.cores)  # per rank
        self.requests = config.data.store.requests
        if not rates.remote:
            self.requests = 1 if any(array.grid.shard_zyx for array in data.arrays[0]) else _LOCAL_READS
        region_bytes = plan.region_voxels_max * data.job.dtypes[0].itemsize
        staged = min(STAGED_BYTES_MAX // region_bytes, plan.regions_per_task) if rates.remote else 1
        self.setup = NodeSetup(
            readers=self.readers,
            regions_ahead=TASKS_IN_FLIGHT * plan.regions_per_task if training.workers else REGIONS_AHEAD,
            staged=max(staged, 1),
            requests=self.requests,
            cores=max(machines.cores - self.ranks, 1),  # a trainer takes one, also to cut patches
            batch=training.micro_batch,
            batches_ahead=max(training.workers, 1) * training.prefetch_factor,
            decode_bytes_s=rates.decode_bytes_s or math.inf,
            latency_s=rates.latency_s or 0.0,
            request_bytes_s=rates.request_bytes_s or math.inf,
            node_bytes_s=rates.node_bytes_s or math.inf,
            requests_s=(rates.requests_s or math.inf) / machines.nodes,
        )
        slots = np.linspace(0, max(plan.slots_per_pass, _VISITS), _VISITS, dtype=int).tolist()
        loads = [self._load(plan.visit(slot)) for slot in slots]
        sums = [[math.fsum(getattr(a, name) for a in load) for name in ArrayLoad.__annotations__] for load in loads]
        chunks, requests, indices, decoded_bytes, fetched_bytes = np.mean(sums, axis=0).tolist()
        busiest = float(np.mean([max(a.requests + a.indices for a in load) for load in loads]))
        patches = plan.patches_per_region / plan.reads_per_region(machines.gpus)
        self.mean = Means(patches, decoded_bytes, fetched_bytes, requests + indices)
        # Seconds in which a reader decodes a region, and fetches it with as many requests in flight as it may have.
        self._decode_s = decoded_bytes / self.setup.decode_bytes_s
        self._requests_max = max(self.setup.staged * busiest, 1.0)
        request_s = self.setup.latency_s + fetched_bytes / (requests + indices) / self.setup.request_bytes_s
        self._fetching = _OF_READERS[1 if 2 * self.setup.latency_s >= request_s else 2]
        self._fetch_s = busiest * request_s / min(self.requests, self._requests_max)
        self._chunks, self._work = chunks, cache(self._work_of)

    def simulate(self, step_s: float, readers: int | None = None) -> tuple[float, float]:
        """Simulate steps that take `step_s` without data wait; 0 = as fast as data arrive.  Returns as `simulate`."""
        batch_s, readers = step_s / self._training.accumulate_steps, readers or self.readers
        ranks, samples, ahead = self._work(readers)
        return simulate(ranks, samples, replace(self.setup, batch_s=batch_s, readers=readers, regions_ahead=ahead))

    def readers_needed(self, step_s: float) -> int | None:
        """Readers per GPU without data wait; None if no number, at most 512, suffices, or it is unknown."""
        reader_s = max(self._decode_s, self._fetch_s)
        step = self._training.micro_batch * self._training.accumulate_steps
        limits = self.limits(self._machines.gpus * step / step_s)
        if not reader_s or any((each["of_needed"] or 1.0) < 1 for each in limits if each["limit"] not in _OF_READERS):
            return None
        least = max(math.ceil(step / step_s * reader_s / self.mean.patches), 1)
        tried = sorted({math.ceil(least * eighths / 8) for eighths in range(8, 25, 2)})
        return next((n for n in tried if n <= READERS_MAX and self.simulate(step_s, n)[1] <= _WAIT_OK), None)

    def limits(self, needed: float | None) -> list[dict[str, Any]]:
        """Return what each resource gives at most, by itself, and what raises it to `needed`; None = unknown."""
        mean, rates, (gpus, nodes, _) = self.mean, self._rates, astuple(self._machines)
        decode_s, fetch_s = self._decode_s, self._fetch_s
        readers, wanted = gpus * self.readers, _SPARE * (needed or 0.0) / mean.patches  # regions/s
        workers = max(math.ceil(wanted * max(decode_s, fetch_s) / gpus), self.readers + 1)
        more = f"training.workers={workers}" if workers <= READERS_MAX else f"not by {READERS_MAX} readers per GPU"
        in_flight = max(math.ceil(self.requests * wanted * fetch_s / readers), 2 * self.requests)
        remedies = f"data.store.requests={in_flight}, or " * (in_flight <= self._requests_max)
        latency = remedies + more if workers <= READERS_MAX else remedies.removesuffix(", or ") or more
        cores = max(math.ceil(wanted * decode_s / nodes) + self.ranks, self._machines.cores + 1)
        shared = self._data.plan.reads_per_region(gpus) > 1
        once = f"data.regions_in_flight that is a multiple of {gpus}, " if shared else ""
        # Regions at a time, seconds that one takes, remedy.
        limits = {
            _OF_READERS[0]: (readers, decode_s, more),
            "decoding: cores": (nodes * self.setup.cores, decode_s, f"{cores} cores a node"),
            self._fetching: (readers, fetch_s, latency),
            "network": (nodes, mean.fetched_bytes / self.setup.node_bytes_s, f"{once}a faster network, {_FEWER_BYTES}"),
            "requests/s": (1, mean.requests / (rates.requests_s or math.inf), f"{once}{_FEWER_REQUESTS}"),
        }
        rows = list[dict[str, Any]]()
        for name, (count, seconds, how) in limits.items():
            rate = count * mean.patches / seconds if seconds else None
            if rates.remote or name not in (self._fetching, "requests/s"):
                how = _UNKNOWN.get(name, how) if rate is None else how
                of_needed = rate and needed and rate / needed
                rows.append({"limit": name, "patches_s": rate, "of_needed": of_needed, "raised_by": how})
        first = min(row["patches_s"] or math.inf for row in rows)
        for row in rows:
            if (row["of_needed"] or 0.0) >= _SPARE:
                row["raised_by"] = "enough" if row["patches_s"] > first else "enough; the GPUs limit the run"
        return rows

    def _load(self, visit: Visit) -> tuple[ArrayLoad, ...]:
        """Return the need of a visit for each array; chunks of staged regions are fetched once."""
        loads, volumes = [], self._data.plan.volumes
        share = volumes[visit.entry].weight / math.fsum(volume.weight for volume in volumes)
        for position in range(len(self._data.arrays[visit.volume])):
            array, alignment = self._data.array(visit.volume, position)
            chunks, requests, indices = array.grid.count_requests(alignment.array_box(visit.region))
            new = max(1 - share * chunks / math.prod(array.grid.counts_zyx), 0.1) ** (self.setup.staged - 1)
            size = chunks * math.prod(array.chunk_zyx) * array.dtype.itemsize
            fetched_bytes = new * size / (self._rates.compression or math.inf)
            loads.append(ArrayLoad(chunks, new * requests, indices, size, fetched_bytes))
        return tuple(loads)

    def _work_of(self, readers: int) -> tuple[list[list[RegionLoad]], int, int]:
        """The regions of each rank, enough for so many readers, the samples to simulate, regions ahead per reader."""
        batch, patches, ahead = self.setup.batch, self.mean.patches, self.setup.regions_ahead
        longest = int(_CHUNKS / self._chunks / self.ranks)
        per_task = self._data.plan.regions_per_task if self._training.workers else 1
        if (shorter := max(longest // (_TASKS * readers), 1)) < per_task:
            per_task, ahead = shorter, ahead * shorter // per_task
        regions = max(min(_REGIONS, longest), _TASKS * per_task * readers, 6)
        batches = max(math.ceil(regions * patches / batch), _BATCHES)
        # More than simulated, so that the readers go on.
        more = math.ceil(max(regions / 4, max(ahead, self.setup.staged) * readers) * patches)
        work = [self._regions_of(rank, batches * batch + more, per_task) for rank in range(self.ranks)]
        return work, batches * batch, ahead

    def _regions_of(self, rank: int, samples: int, per_task: int) -> list[RegionLoad]:
        """The regions that a rank reads for its samples."""
        plan, world = self._data.plan, self._machines.gpus
        mixing = plan.mixing
        # Once each region has given all its samples; the window of the first sample counts as read.
        first = -(-2 * mixing.regions * mixing.patches // world) * world + rank
        slots = [mixing.slot_of(first + world * n) for n in range(samples)]
        window, stop = mixing.first_slot(first // mixing.regions) + mixing.regions, max(slots) + 1
        later = mixing.samples_of(stop).stop  # a region is read before later ones, also if it is needed after them
        coming = [s for task in plan.tasks(first, later, rank, world) for s in task if window <= s < stop][::-1]
        regions, tasks = list[RegionLoad](), dict[int, int]()
        for sample, slot in enumerate(slots):
            while coming and coming[-1] <= slot:
                read = coming.pop()
                task = tasks.setdefault(read // per_task, len(tasks))
                regions.append(RegionLoad(sample, task, self._load(plan.visit(read))))
        return regions
