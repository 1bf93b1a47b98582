"""The figures of `vesuvius plan`: what a run on many GPUs needs, what readers and store give, what it reads and costs.

Regions, requests and bytes follow from the plan of the run.  Unknown rates limit nothing; figures may be None.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from vesuvius.config import Config
from vesuvius.errors import ConfigError
from vesuvius.experiments.capacity.node import READERS_MAX, Machines, NodePlan
from vesuvius.experiments.capacity.rates import Rates, measured
from vesuvius.runlog.units import GIB
from vesuvius.stream.reading.resident import Resident
from vesuvius.stream.start.prepare import amplified_reads, prepare_data
from vesuvius.training.forecast.plan import first_pass_samples, reading_bytes
from vesuvius.volumes.store.objects import is_remote

_GIVE_UP_MINUTES = 0.5  # of an outage
# All ranks and readers of a node are simulated, for some batches.
_GPUS_MAX, _GPUS_PER_NODE_MAX, _BATCH_MAX, _PATCHES_MAX = 100_000, 256, 4096, 10_000


def forecast(
    config: Config, machines: Machines, step_s: float | None, rates: Rates, prices: Mapping[str, float]
) -> dict[str, Any]:
    """Return the figures of a run of `config` on these machines, by section.

    Opens the volumes, without their cache, and measures what is unknown of `rates`.  `step_s` is the time of a step
    without data wait, communication included.  `prices`: of a `gpu_hour`, `gb` (10^9 bytes fetched), `requests_1000`.

    Raises ConfigError: the GPUs cannot be shared evenly; DataError: a volume cannot be opened, or not within a minute.
    """
    gpus, nodes = machines.gpus, machines.nodes
    if gpus % nodes:
        raise ConfigError(f"{gpus} GPUs cannot be shared evenly by {nodes} nodes; change --gpus or --nodes")
    if gpus > _GPUS_MAX or gpus > nodes * _GPUS_PER_NODE_MAX:
        most_gpus = f"at most {_GPUS_MAX}, {_GPUS_PER_NODE_MAX} a node"
        raise ConfigError(f"{gpus} GPUs on {nodes} nodes are too many: {most_gpus}; change --gpus or --nodes")
    for key, value, largest in (
        ("training.workers", config.training.workers, READERS_MAX),
        ("training.train_batch_size", config.training.micro_batch, _BATCH_MAX),
        ("data.patches_per_region", config.data.patches_per_region or 1, _PATCHES_MAX),
    ):
        if value > largest:
            raise ConfigError(f"{key}={value} is too large to plan for: at most {largest}; lower it")
    config = config.with_training(ranks=gpus)
    minutes = min(config.data.store.outage_minutes, _GIVE_UP_MINUTES)
    opened = config.data.with_store(outage_minutes=minutes, cache_dir=None)
    data = prepare_data(config.seed, opened, world_size=gpus)
    rates = measured(data, rates)
    plan, node = data.plan, NodePlan(config, data, machines, rates)
    mean, reads, steps = node.mean, plan.reads_per_region(gpus), config.stop_step
    needed = config.global_batch / step_s if step_s else None
    limits = node.limits(needed)
    most = {limit["limit"]: limit["patches_s"] for limit in limits if limit["patches_s"] is not None}
    paced, wait = node.simulate(step_s) if step_s and most else (None, None)
    # The limits are means of other regions than those simulated.
    available = min(nodes * node.simulate(0.0)[0], *most.values()) if most else None
    if paced and available and needed and nodes * paced > available:
        paced, wait = available / nodes, 1 - available / needed
    readers = node.readers_needed(step_s) if step_s else None
    resident_bytes, read = Resident.size_bytes(data.job), steps * config.global_batch
    if config.data.resident != "auto" and resident_bytes <= config.data.resident * GIB:
        read = min(read, first_pass_samples(config, data, node.ranks))
    regions = len(plan.mixing.slots(0, read)) * reads
    reading = read / config.global_batch  # steps that wait for data
    hours = (step_s * (steps - reading) + read / nodes / paced) / 3600 if step_s and paced else None
    stores = {path.partition("://")[0] if is_remote(path) else "" for path in config.data.paths}
    warnings = {
        "planned as if all in the first remote store: volumes of several stores": len(stores) > 1,
        f"the trainers of {node.ranks} GPUs take all {machines.cores} cores of a node; raise --cores": (
            machines.cores <= node.ranks
        ),
        "not simulated: cluster.worker_nodes=any": config.cluster.worker_nodes == "any",
        "not simulated: data.store.cache_dir": rates.remote and config.data.store.cache_dir is not None,
        **dict.fromkeys(amplified_reads(plan, gpus), True),
    }
    memory = reading_bytes(config, data, machines.cores, node.ranks)
    fetched = regions * mean.fetched_bytes or None
    bought = {
        "gpu_hour": hours and hours * gpus,
        "gb": (fetched and fetched / 1e9) if rates.remote else 0.0,  # nothing leaves a disk
        "requests_1000": regions * mean.requests / 1000 if rates.remote else 0.0,
    }
    cost = {name: None if (count := bought[name]) is None else count * price for name, price in prices.items()}
    if cost:
        cost["sum"] = None if None in cost.values() else sum(part or 0.0 for part in cost.values())
    facts = {
        "run": {
            **asdict(machines),
            "readers_per_node": node.readers * node.ranks,
            "patches_per_step": config.global_batch,
            "steps": steps,
            "step_s": step_s,
        },
        "reading": {
            "patches_per_region": plan.patches_per_region,
            "regions_in_flight": plan.regions_in_flight,
            "reads_per_region": reads,
            "read_amplification": mean.decoded_bytes / mean.patches / data.job.patch_bytes,
            "decoded_bytes": round(mean.decoded_bytes),
            "fetched_bytes": round(mean.fetched_bytes) or None,
            "requests": mean.requests,
            "decode_gb_s": rates.decode_bytes_s and rates.decode_bytes_s / 1e9,
            "compression": rates.compression,
            "source": rates.source,
            "warnings": [text for text, applies in warnings.items() if applies],
        },
        "store": {
            "latency_ms": None if rates.latency_s is None else 1000 * rates.latency_s,
            "request_mb_s": rates.request_bytes_s and rates.request_bytes_s / 1e6,
            "node_gb_s": rates.node_bytes_s and rates.node_bytes_s / 1e9,
            "requests_s": rates.requests_s,
            "in_flight_per_reader": node.requests,
        },
        "limits": limits,
        "result": {
            "needed_patches_s": needed,
            "available_patches_s": available,
            "first_limit": min(most, key=most.__getitem__, default=None),
            "data_wait_percent": None if wait is None else round(100 * wait, 2),
            "readers_needed_per_node": readers and readers * node.ranks,
            "reader_memory_bytes": sum(n * (1 if of == "Ray" else node.ranks) for of, n in memory.items()),
            "resident_bytes": resident_bytes,
        },
        "total": {
            "passes_of_plan": regions / reads / plan.slots_per_pass,
            "decoded_bytes": round(regions * mean.decoded_bytes),
            "fetched_bytes": fetched and round(fetched),
            "requests": round(regions * mean.requests),
            "hours": hours,
        },
        "cost": cost,
    }
    rounded: dict[str, Any] = json.loads(
        json.dumps(facts), parse_float=lambda text: float(f"{float(text):.4g}"), parse_constant=lambda name: None
    )
    return rounded
