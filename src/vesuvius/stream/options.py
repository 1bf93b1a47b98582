"""Options of a stream and the memory they take; only the batch size changes the batches."""

import os
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypedDict

from vesuvius.config import ClusterConfig, TrainingConfig
from vesuvius.config.section import natural
from vesuvius.errors import ConfigError, needs_extra, one_line
from vesuvius.monitor.probes.cores import usable_cores
from vesuvius.stream.reading.reader import ReaderJob

TASKS_IN_FLIGHT = 2  # per reader, so that it never waits for the next one
# Each row of the input costs Ray's driver time (0.5 ms) and memory for as long as an execution lasts, so a run is a
# chain of executions of this many tasks.
TASKS_PER_SEGMENT = 500
AUTO_THREADS_MAX = 16  # beyond, cutting and copying in this process are slower than decoding
READER_RING = 2  # block buffers: Ray has copied one before it asks for the next; one more to be safe


@dataclass(frozen=True)
class StreamOptions:
    """Options of a stream; only `batch_size` changes batches.  Raises ConfigError: no integer, or one too small."""

    batch_size: int  # samples per batch of this rank
    num_workers: int = 2  # threads of this process that read, or with `processes` Ray processes; 0 = `auto_threads`
    prefetch_factor: int = 2  # batches assembled ahead per worker (or for this process with `num_workers=0`)
    requests: int | None = None  # in flight per reader on remote stores; None = `data.store.requests`
    cluster: ClusterConfig = ClusterConfig()
    cache_in_memory: bool = True  # whether to use the resident copy passed to the stream
    processes: bool = False

    def __post_init__(self) -> None:
        for name, minimum in {"batch_size": 1, "num_workers": 0, "prefetch_factor": 1, "requests": 1}.items():
            value = getattr(self, name)
            if name != "requests" or value is not None:
                object.__setattr__(self, name, to_integer(name, value, minimum))  # an int, as Ray refuses numpy's
        for name in ("cache_in_memory", "processes"):
            if not isinstance(value := natural(getattr(self, name)), bool):
                raise ConfigError(f"{name} {value!r} is not valid; set it to True or False")
            object.__setattr__(self, name, value)
        if not self.processes:
            return
        if self.num_workers == 0:
            raise ConfigError(
                "processes=True with num_workers=0 starts no reader; set num_workers to at least 1, or processes=False"
            )
        with needs_extra("processes=True", "ray"):
            pass

    @property
    def num_processes(self) -> int:
        """Number of Ray reader processes; 0 = threads of this process read."""
        return self.num_workers if self.processes else 0

    @property
    def num_threads(self) -> int:
        """Number of threads of this process that read; with processes, while these start."""
        if self.num_workers and not self.processes:
            return self.num_workers
        return auto_threads(local_ranks())

    @classmethod
    def from_config(cls, training: TrainingConfig, cluster: ClusterConfig) -> Self:
        if training.ranks != 1 and cluster.worker_nodes == "auto":
            # Also for the one rank that `min_ranks: 1` may leave: it has reserved the cores of its readers.
            cluster = cluster.model_copy(update={"worker_nodes": "same"})
        workers = training.workers
        return cls(training.micro_batch, workers, training.prefetch_factor, cluster=cluster, processes=workers > 0)


class StreamChanges(TypedDict, total=False):
    """Options that can be changed while a stream runs."""

    num_workers: int
    prefetch_factor: int
    requests: int
    cache_in_memory: bool
    processes: bool


def local_ranks() -> int:
    """Return the number of ranks on this machine, as their launcher says.  Raises ConfigError: that is no number."""
    text = os.environ.get("LOCAL_WORLD_SIZE") or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"LOCAL_WORLD_SIZE={text} is not a number of ranks; unset it, or start ranks with torchrun")
    return int(text)


def auto_threads(local_ranks: int, cores: float | None = None) -> int:
    """Return the number of reader threads of each rank of a machine: one per core, at most 16; None = usable here."""
    cores = usable_cores(os.getpid()) if cores is None else cores
    return max(1, min(int(cores / local_ranks), AUTO_THREADS_MAX))


def readers_are_local(cluster: ClusterConfig, world: int) -> bool:
    """Whether the readers of a rank run on its own node.  Pure."""
    return cluster.worker_nodes == "same" or (cluster.worker_nodes == "auto" and world > 1)


def store_peak_bytes(job: ReaderJob, options: StreamOptions) -> int:
    """Peak bytes in the object store: the regions in flight of this rank, and prefetched blocks.  Pure."""
    return job.plan.regions_held(job.world_size) * job.block_bytes + store_prefetch_bytes(job, options)


def store_prefetch_bytes(job: ReaderJob, options: StreamOptions) -> int:
    """Bytes of the blocks between readers and trainer: the tasks that each worker may finish ahead, its current block,
    and a task being fetched to the trainer's machine.  Pure."""
    per_worker = TASKS_IN_FLIGHT * job.plan.regions_per_task + 1
    return (options.num_processes * per_worker + job.plan.regions_per_task) * job.block_bytes


def batches_ahead(options: StreamOptions) -> int:
    return max(options.num_workers, 1) * options.prefetch_factor


def store_bytes(job: ReaderJob, options: StreamOptions) -> int:
    """Size of a private Ray's object store; 0 without processes.  Pure.

    The peak, plus the prefetched blocks again, because two executions overlap; plus a quarter, because Ray's limit is
    soft (0.25 GiB configured, 0.64 GiB measured); plus the plan's foreground maps, once for all readers.
    """
    if options.num_processes == 0:
        return 0
    need = store_peak_bytes(job, options) + store_prefetch_bytes(job, options)
    return max(5 * need // 4, 2**28) + job.plan.map_bytes


def is_ray_connected() -> bool:
    """Whether this process is connected to Ray, whose object store already occupies /dev/shm."""
    ray = sys.modules.get("ray")
    started = getattr(ray, "is_initialized", None)  # absent while another thread imports it
    return started is not None and started()


def check_store(job: ReaderJob, options: StreamOptions, ranks: int = 1) -> None:
    """Raise ConfigError if /dev/shm cannot hold the object stores of all local ranks: Ray would silently use /tmp."""
    shared = Path("/dev/shm")
    if options.num_processes == 0 or options.cluster.address is not None or not shared.is_dir():
        return
    size = ranks * store_bytes(job, options)
    free = shutil.disk_usage(shared).free
    if size > free:
        raise ConfigError(
            f"The object store{f' of {ranks} ranks' if ranks > 1 else ''} needs {size / 2**30:.2f} GiB, but /dev/shm "
            f"has {free / 2**30:.2f} GiB free; start the container with a larger --shm-size, or lower "
            f"data.regions_in_flight ({job.plan.regions_in_flight}) or training.workers ({options.num_workers})"
        )


def to_integer(name: str, value: Any, minimum: int) -> int:
    """Convert an integer of any type to int.  Raises ConfigError for other types and for values below `minimum`."""
    integer = natural(value)
    if not isinstance(integer, int) or isinstance(integer, bool) or integer < minimum:
        raise ConfigError(f"{name} {value!r} is not an integer of at least {minimum}; change it")
    return int(integer)


def check_cluster(address: str) -> None:
    """Raise ConfigError if nothing listens at `host:port`; Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # 'auto' and the like
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"Cannot reach the Ray cluster at cluster.address={address}: {one_line(error)}; start it with "
            "`ray start --head`, or set cluster.address=null for a private Ray"
        ) from error
