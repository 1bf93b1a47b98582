"""How a stream runs, and how much memory it takes; nothing here changes what it delivers."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Self, TypedDict

from vesuvius.config import ClusterConfig, TrainingConfig
from vesuvius.errors import ConfigError, one_line
from vesuvius.stream.reading.reader import ReaderJob
from vesuvius.stream.reading.resident import Resident

# Dispatched to a reader at once, so that it never waits for the next one; it may finish them early.
TASKS_IN_FLIGHT = 2
# Each row of the input costs Ray's driver time (0.5 ms) and memory for as long as an execution lasts, so a run is a
# chain of executions of this many tasks.
TASKS_PER_SEGMENT = 500
READER_RING = 2  # blocks decoded into in turn: Ray has copied one before it asks for the next; one more to be safe


@dataclass(frozen=True)
class StreamOptions:
    """How a stream delivers; only `batch_size` changes what it delivers.

    Raises:
        ConfigError: a value is not an integer, or too small.
    """

    batch_size: int  # samples per batch of this rank
    workers: int = 2  # Ray reader processes; 0 reads in this process, without Ray
    prefetch_factor: int = 2  # batches assembled ahead per worker (or for this process with `workers: 0`)
    requests: int | None = None  # in flight per reader on remote stores; None = as the job's store section says
    cluster: ClusterConfig = ClusterConfig()  # where Ray runs
    resident: bool = True  # whether a resident copy that the stream was given is used

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "workers": 0, "prefetch_factor": 1, "requests": 1}
        for name, minimum in least.items():
            value = getattr(self, name)
            if name == "requests" and value is None:
                continue
            if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < minimum:
                raise ConfigError(f"{name} must be an integer of at least {minimum}; got {value!r}; change it")

    @classmethod
    def from_config(cls, training: TrainingConfig, cluster: ClusterConfig) -> Self:
        """The options of a config."""
        if training.ranks != 1 and cluster.reader_nodes == "auto":
            # Also of the one rank that `min_ranks: 1` may leave: it has reserved the cores of its readers.
            cluster = cluster.model_copy(update={"reader_nodes": "same"})
        return cls(training.micro_batch, training.workers, training.prefetch_factor, cluster=cluster)


class StreamStart(TypedDict, total=False):
    """Where and how a stream begins: parameters of `PatchStream`."""

    first: int
    stop: int | None
    quarantined: Sequence[dict[str, Any]]
    interrupted: Callable[[], bool]
    resident: Resident | None


class StreamChanges(TypedDict, total=False):
    """The options that a running stream can change."""

    workers: int
    prefetch_factor: int
    requests: int
    resident: bool


def readers_are_local(cluster: ClusterConfig, world: int) -> bool:
    """Whether the readers of a rank run on its own node of the cluster.  Pure."""
    return cluster.reader_nodes == "same" or (cluster.reader_nodes == "auto" and world > 1)


def store_peak_bytes(job: ReaderJob, options: StreamOptions) -> int:
    """Most bytes of the object store in use at once: the regions in flight, which the trainer holds, and what is ahead.

    0 with `workers: 0`.  Pure.
    """
    if options.workers == 0:
        return 0
    return job.plan.regions_in_flight * job.block_bytes + store_prefetch_bytes(job, options)


def store_prefetch_bytes(job: ReaderJob, options: StreamOptions) -> int:
    """Bytes of the blocks between readers and trainer: the tasks that each worker may finish ahead, the block that it
    works on, and a task that is fetched to the trainer's machine.  Pure."""
    per_worker = TASKS_IN_FLIGHT * job.plan.regions_per_task + 1
    return (options.workers * per_worker + job.plan.regions_per_task) * job.block_bytes


def batches_ahead(options: StreamOptions) -> int:
    """Batches assembled ahead of the trainer.  Pure."""
    return max(options.workers, 1) * options.prefetch_factor


def store_bytes(job: ReaderJob, options: StreamOptions) -> int:
    """Size of a private Ray's object store; 0 with `workers: 0`.  Pure.

    The need; what is ahead once more, because one execution of readers hands over to the next; a quarter of both,
    because Ray's limit is soft (0.25 GiB configured, 0.64 GiB seen in use); and the plan's maps, once for all readers.
    """
    if options.workers == 0:
        return 0
    need = store_peak_bytes(job, options) + store_prefetch_bytes(job, options)
    return max(5 * need // 4, 2**28) + job.plan.map_bytes


def is_ray_connected() -> bool:
    """Whether this process is connected to a Ray, whose store has its place in /dev/shm: it keeps what it once used."""
    ray = sys.modules.get("ray")
    started = getattr(ray, "is_initialized", None)  # not there while another thread imports it
    return started is not None and started()


def check_store(job: ReaderJob, options: StreamOptions, ranks: int = 1) -> None:
    """Raises ConfigError where /dev/shm cannot hold the stores of all ranks here, which would silently use /tmp.

    Of stores that are yet to be made.
    """
    shared = Path("/dev/shm")
    if options.workers == 0 or options.cluster.address is not None or not shared.is_dir():
        return
    size = ranks * store_bytes(job, options)
    free = shutil.disk_usage(shared).free
    if size > free:
        raise ConfigError(
            f"the object store must fit in /dev/shm; got {size / 2**30:.2f} GiB needed"
            f"{f' by {ranks} ranks' if ranks > 1 else ''} and {free / 2**30:.2f} GiB free; start the container with a "
            f"larger --shm-size, or lower data.regions_in_flight (now {job.plan.regions_in_flight}) or training.workers"
        )


def check_cluster(address: str) -> None:
    """Raises ConfigError where nothing listens at `host:port`; Ray itself waits minutes for it."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # 'auto' and the like
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cluster.address must name a running Ray cluster; got {address!r}: {one_line(error)}; start one with "
            "`ray start --head`, or set cluster.address=null for a private one"
        ) from error
