"""The memory plan of a run, before it starts: what dry run, doctor, init and tune ask, and what is printed of it.

What a GPU takes is the traced step's (`memory_plan.py`); the host's memory is that of readers, object store, Ray and
trainer.  What follows from the config is computed; what processes take that hold no data yet was measured once
(`tools/bench/ram_plan.py` compares the sum with real runs).
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass, replace

import torch

from vesuvius.config import Config
from vesuvius.monitor.memory.limits import Limits, MemoryLimit, tightest
from vesuvius.monitor.probes.system_sample import sample_system
from vesuvius.runlog.units import GIB, size_text
from vesuvius.stream.feeder import HELD
from vesuvius.stream.options import (
    READER_RING,
    TASKS_PER_SEGMENT,
    StreamOptions,
    batches_ahead,
    store_ahead_bytes,
    store_need_bytes,
)
from vesuvius.stream.reading.reader import STAGED_BYTES_MAX
from vesuvius.stream.start.prepare import PreparedData, prepare_data
from vesuvius.training.forecast.memory_plan import (
    LARGEST_PLANNED_BATCH,
    MemoryPlan,
    indexable_batch,
    largest_batch,
    leaner,
    plan_memory,
)
from vesuvius.training.forecast.preflight import checkpoint_sizes, fixed_count
from vesuvius.training.step.device import pinned_bytes
from vesuvius.training.step.step import choose_device, resolve_amp

_MIB = 2**20
_TERMS = ("readers", "store", "Ray", "trainer")

# Private memory of processes that hold no data yet: RssAnon on Linux 6.18, Python 3.11, ray 2.60, torch 2.13, 2 cores.
_READER_BYTES = 122 * _MIB
_TRAINER_BYTES = 280 * _MIB
_RAY_BYTES = 606 * _MIB  # its daemons, Ray Data's three actors, and its threads in the trainer
_RAY_IDLE_BYTES = 40 * _MIB  # a process that Ray starts ahead, one a core
_CUDA_HOST_BYTES = 2 * GIB  # CUDA's context, cuDNN and cuBLAS; assumed
# Freed blocks leave holes in the object store's file, and Ray's limit is soft: 1.1 to 1.25 times the need was seen.
_STORE_HOLES = 0.125

_WARN_SHARE = 0.8
_ASSUMED_VRAM_GIB = 80  # of an A100 or H100


@dataclass(frozen=True)
class RamPart:
    """Some of the memory, at its peak."""

    term: str  # who holds it: readers, store, Ray or trainer
    name: str
    size_bytes: int
    lower: str = "training.workers"  # what to change to have less of it
    once: bool = False  # whatever the number of ranks on the machine


@dataclass(frozen=True)
class RamPlan:
    """The host memory that a run takes at its peak, on a GPU or on the CPU, with so many ranks on the machine."""

    gpu: bool
    parts: tuple[RamPart, ...]
    ranks: int = 1

    @property
    def total_bytes(self) -> int:
        """Of all terms."""
        return sum(part.size_bytes for part in self.parts)

    def term_bytes(self, term: str) -> int:
        """Of readers, store, Ray or trainer."""
        return sum(part.size_bytes for part in self.parts if part.term == term)

    def lines(self) -> list[str]:
        """For people: the total, then each term with its parts."""
        place = "a GPU" if self.gpu else "this CPU"
        ranks = f", for {self.ranks} ranks on one machine" if self.ranks > 1 else ""
        lines = [f"host RAM   {size_text(self.total_bytes)} at the peak, planned on {place}{ranks}"]
        for term in _TERMS:
            parts = [f"{part.name} {size_text(part.size_bytes)}" for part in self.parts if part.term == term]
            if parts:
                lines.append(f"  {term:8} {size_text(self.term_bytes(term))}: {', '.join(parts)}")
        return lines


def plan_ram(config: Config, data: PreparedData | None = None, gpu: bool | None = None) -> RamPlan:
    """Predict the memory of a run of `config` on this machine: of all ranks, or of one in a cluster of any size.

    Takes a few seconds for a network that was not planned before.  `data` None opens the volumes; `gpu` None = as this
    machine has one.  Raises DataError, and ConfigError where a tensor would reach 2^31 elements.
    """
    data = data or prepare_data(config.seed, config.data)
    gpu = choose_device().type == "cuda" if gpu is None else gpu
    ranks = local_ranks(config)
    parts = [*_readers(config, data), *_trainer(config, data, gpu), *_network(config, gpu)]
    parts = [part if part.once else replace(part, size_bytes=part.size_bytes * ranks) for part in parts]
    return RamPlan(gpu, tuple(part for part in parts if part.size_bytes), ranks)


def local_ranks(config: Config) -> int:
    """Ranks that share this machine; 1 where a cluster places them."""
    ranks = config.training.ranks
    if config.cluster.address is not None:
        return 1
    return max(torch.cuda.device_count(), 1) if ranks == "auto" else ranks


def ram_warning(config: Config, data: PreparedData, plan: RamPlan, limit: MemoryLimit) -> str | None:
    """A line where a plan takes more than 80 % of a limit: its largest part, and what to change."""
    allowed = _WARN_SHARE * limit.limit_bytes
    if plan.total_bytes <= allowed:
        return None
    largest = max(plan.parts, key=lambda part: part.size_bytes)
    fewer = range(config.training.workers - 1, -1, -1)
    plans = ((n, plan_ram(config.with_training(workers=n), data, plan.gpu)) for n in fewer)
    workers = next((n for n, other in plans if other.total_bytes <= allowed), None)
    remedy = f"lower {largest.lower}" if workers is None else f"start with training.workers={workers}"
    return (
        f"memory should stay below {_WARN_SHARE:.0%} of {size_text(limit.limit_bytes)} ({limit.name}); got "
        f"{size_text(plan.total_bytes)} predicted, most of it for {largest.term}: {largest.name} "
        f"({size_text(largest.size_bytes)}); {remedy}"
    )


def _readers(config: Config, data: PreparedData) -> list[RamPart]:
    """What readers hold, in processes of their own or with `workers: 0` in the trainer, the object store, and Ray."""
    job, workers, cores = data.job, config.training.workers, os.cpu_count() or 1
    arrays = (*data.volumes, *data.conditions)
    chunk_bytes = max(math.prod(array.chunk_zyx) * array.dtype.itemsize for array in arrays)
    covered = [math.prod(data.array("condition", number)[1].factors) for number in range(len(data.conditions))]
    # A region of a coarser or finer condition is held in voxels of its own, too.
    own = [int(job.dtypes[-1].itemsize * job.plan.region_voxels_max // n) for n in covered if n != 1]
    scratch = 2 * chunk_bytes * cores + max(own, default=0)  # chunks in work with their compressed bytes, one a core
    # At least one region is staged whatever its size; bytes that compression saves are not counted on.
    staged = max(STAGED_BYTES_MAX, job.block_bytes) if any(array.source.remote for array in arrays) else 0
    if workers == 0:
        blocks = (job.plan.regions_in_flight + 1) * job.block_bytes
        return [
            RamPart("trainer", "its reader", blocks + scratch + staged, "data.regions_in_flight or data.region_size")
        ]
    # In a longer run, the readers of two executions of Ray Data live while one hands over to the next.
    all_tasks = job.tasks(0, config.stop_step * config.global_batch)
    tasks = sum(1 for _ in itertools.islice(all_tasks, TASKS_PER_SEGMENT + 1))
    executions = 2 if tasks > TASKS_PER_SEGMENT else 1
    readers = min(executions * workers, tasks)
    options = StreamOptions.from_config(config.training, config.cluster)
    need = store_need_bytes(job, options) + (executions - 1) * store_ahead_bytes(job, options)
    run_bytes = tasks * job.plan.regions_per_task * job.block_bytes
    store = min(int((1 + _STORE_HOLES) * need), run_bytes) + job.plan.map_bytes
    idle = max(cores - workers - 3, 0) * _RAY_IDLE_BYTES
    ray = _RAY_BYTES + idle if config.cluster.address is None else 0  # those of a cluster are there anyway
    return [
        RamPart("readers", f"{readers} processes", readers * _READER_BYTES),
        RamPart("readers", "blocks", readers * READER_RING * job.block_bytes, "data.region_size"),
        RamPart("readers", "decoding", readers * scratch),
        RamPart("readers", "fetched ahead", readers * staged),
        RamPart("store", "regions in flight and ahead", store, "data.regions_in_flight or data.region_size"),
        RamPart("Ray", "its own processes", ray, once=True),
    ]


def _trainer(config: Config, data: PreparedData, gpu: bool) -> list[RamPart]:
    """All but the network."""
    options, job = StreamOptions.from_config(config.training, config.cluster), data.job
    batch = options.batch_size * job.patch_bytes
    ring = (HELD + batches_ahead(options)) * _host_bytes(batch, gpu)
    in_hand = config.training.accumulate_steps * batch
    fixed = fixed_count(config.training, data) * job.patch_bytes + job.plan.map_bytes
    return [
        RamPart("trainer", "process", _TRAINER_BYTES),
        RamPart("trainer", "CUDA (assumed)", gpu * _CUDA_HOST_BYTES),
        RamPart("trainer", "batches", ring + in_hand, "training.prefetch_factor or training.train_batch_size"),
        RamPart("trainer", "fixed patches", fixed, "training.validate_patches"),
    ]


def _network(config: Config, gpu: bool) -> list[RamPart]:
    """The step on a CPU, and the copy of a checkpoint that waits for the disk."""
    step = 0 if gpu else plan_memory(config, amp=resolve_amp(config.training.amp, torch.device("cpu"))).ram_bytes
    snapshot = sum(_host_bytes(size, gpu) for size in checkpoint_sizes(config))
    batch = "training.train_batch_size and raise training.accumulate_steps, or lower model.channels"
    return [
        RamPart("trainer", "training step", step, batch),
        RamPart("trainer", "copy of a checkpoint", snapshot, "model.channels", once=True),  # on rank 0
    ]


def _host_bytes(size: int, gpu: bool) -> int:
    """Of a buffer, which is pinned where a GPU copies from it."""
    return pinned_bytes(size) if gpu else size


@dataclass(frozen=True)
class Problem:
    """Memory that a run would lack."""

    text: str
    refused: bool  # it would not fit; else it is only tight, or planned for hardware that is not here


@dataclass(frozen=True)
class RunPlan:
    """What a run takes of GPU and host memory, and what there is."""

    config: Config
    data: PreparedData
    on_gpu: bool  # the step's memory is a GPU's
    step: MemoryPlan
    ram: RamPlan
    limit: MemoryLimit  # of the host's memory
    vram_bytes: int  # memory of the GPU that is planned for
    whose: str  # where that figure is from
    vram_free_bytes: int | None = None  # of the GPU that is here

    def short(self) -> str:
        """`RAM 3 GiB planned of 24 GiB (the machine)`, and on a GPU its memory."""
        ram, limit = size_text(self.ram.total_bytes), self.limit
        text = f"RAM {ram} planned of {size_text(limit.limit_bytes)} ({limit.name})"
        if self.on_gpu:
            text += f"; VRAM {size_text(self.step.vram_bytes)} planned of {size_text(self.vram_bytes)} ({self.whose})"
        return text

    def lines(self) -> list[str]:
        """For people: the GPU's memory, then the host's and its limit."""
        step, largest = self.step, largest_batch(self.config, self.vram_bytes)
        ends = {LARGEST_PLANNED_BATCH: " or more", indexable_batch(self.config): ", where a tensor nears 2^31 elements"}
        return [
            f"memory     planned for {self.vram_bytes / GIB:.1f} GiB of VRAM ({self.whose}), amp {step.amp}",
            f"  fixed    {size_text(step.fixed_bytes)} for weights, gradients, optimizer and EMA",
            f"  peak     {size_text(step.peak_bytes)} with train_batch_size {step.batch}, "
            f"{size_text(step.vram_bytes)} with the reserve for CUDA, cuDNN and fragmentation",
            f"  largest  train_batch_size {largest}{ends.get(largest, '')}",
            *self.ram.lines(),
            f"  limit    {size_text(self.limit.limit_bytes)} ({self.limit.name})",
        ]

    def problems(self) -> list[Problem]:
        """What does not fit, with its remedy; empty where all does."""
        need, found = self.step.vram_bytes, []
        if need > self.vram_bytes:
            largest = largest_batch(self.config, self.vram_bytes)
            remedy = f"set training.train_batch_size={largest} and raise training.accumulate_steps"
            text = (
                f"train_batch_size {self.step.batch} will not fit: {size_text(need)} of GPU memory needed of "
                f"{size_text(self.vram_bytes)}; {remedy if largest else leaner(self.config)}"
            )
            found.append(Problem(text, self.on_gpu))
        elif self.vram_free_bytes is not None and need > self.vram_free_bytes:
            free = size_text(self.vram_free_bytes)
            found.append(Problem(f"only {free} of GPU memory are free; see nvidia-smi for who holds the rest", False))
        if warning := ram_warning(self.config, self.data, self.ram, self.limit):
            # A GPU that is not here may stand in a machine with more memory.
            here = self.whose != "--vram-gib" or self.config.monitor.ram_limit_gib is not None
            found.append(Problem(warning, here and self.ram.total_bytes > self.limit.limit_bytes))
        return found


def plan_run(config: Config, data: PreparedData | None = None, vram_gib: float | None = None) -> RunPlan:
    """Plan the memory of a run on this machine, of all its ranks here, or with a GPU of `vram_gib`.

    Takes a few seconds for a network that was not planned before.  Writes nothing; `data` None opens the volumes.

    Raises:
        ConfigError: a tensor would reach 2^31 elements.
        DataError: a volume cannot be used.
    """
    data, device, free_bytes = data or prepare_data(config.seed, config.data), choose_device(), None
    on_gpu = vram_gib is not None or device.type == "cuda"
    if vram_gib is not None:
        vram_bytes, whose = int(vram_gib * GIB), "--vram-gib"
    elif on_gpu:
        properties = torch.cuda.get_device_properties(device)
        vram_bytes, whose, free_bytes = properties.total_memory, properties.name, torch.cuda.mem_get_info(device)[0]
    else:
        vram_bytes = _ASSUMED_VRAM_GIB * GIB
        whose = "assumed, as this machine has no GPU; --vram-gib N plans for another"
    ram, limit = plan_ram(config, data, on_gpu), ram_limit(config.monitor.ram_limit_gib)
    return RunPlan(config, data, on_gpu, plan_memory(config), ram, limit, vram_bytes, whose, free_bytes)


def ram_limit(configured_gib: float | None) -> MemoryLimit:
    """The smallest of the machine's memory, the limits of this process's cgroups, and `monitor.ram_limit_gib`."""
    limits = Limits(configured_bytes=None if configured_gib is None else int(configured_gib * GIB))
    return tightest(sample_system(os.getpid()), limits)
