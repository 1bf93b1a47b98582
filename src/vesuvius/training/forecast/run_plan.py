"""The memory plan of a run: what dry run, doctor, init and tune ask before it starts, and what is printed of it; and
what to change when the GPU's memory runs out all the same.

What a GPU takes is the traced step's (`memory_plan.py`); the host's memory is that of readers, object store, Ray and
trainer.  What follows from the config is computed; what processes take that hold no data yet was measured once
(`tools/bench/ram_plan.py` compares the sum with real runs).
"""

from __future__ import annotations

import itertools
import math
import os
import re
from dataclasses import dataclass, replace

import torch

from vesuvius.config import Config
from vesuvius.errors import GpuMemoryError, one_line
from vesuvius.loader.device import pinned_bytes
from vesuvius.monitor.memory.limits import MemoryLimit, MemoryPolicy, tightest
from vesuvius.monitor.probes.system_sample import sample_system
from vesuvius.monitor.probes.vram import Vram
from vesuvius.runlog.units import GIB, format_size
from vesuvius.stream.feeder import BUFFERS_IN_USE
from vesuvius.stream.options import (
    READER_RING,
    TASKS_PER_SEGMENT,
    StreamOptions,
    batches_ahead,
    store_peak_bytes,
    store_prefetch_bytes,
)
from vesuvius.stream.reading.local import REGIONS_AHEAD
from vesuvius.stream.reading.reader import STAGED_BYTES_MAX
from vesuvius.stream.reading.resident import Resident
from vesuvius.stream.start.prepare import PreparedData, prepare_data
from vesuvius.training.forecast.memory_plan import (
    LARGEST_PLANNED_BATCH,
    MemoryPlan,
    largest_batch,
    memory_saving_advice,
    plan_memory,
)
from vesuvius.training.forecast.preflight import checkpoint_sizes, fixed_count
from vesuvius.training.step.setup import choose_device, resolve_amp

_MIB = 2**20

# Private memory of processes that hold no data yet: RssAnon on Linux 6.18, Python 3.11, ray 2.60, torch 2.13, 2 cores.
_READER_BYTES = 122 * _MIB
_TRAINER_BYTES = 280 * _MIB
_RAY_BYTES = 606 * _MIB  # its daemons, Ray Data's three actors, and its threads in the trainer
_RAY_IDLE_BYTES = 40 * _MIB  # a process that Ray starts ahead, one a core
_CUDA_HOST_BYTES = 2 * GIB  # CUDA's context, cuDNN and cuBLAS; assumed
# Freed blocks leave holes in the object store's file, and Ray's limit is soft: 1.1 to 1.25 times the need was seen.
_STORE_HOLES = 0.125

_WARN_SHARE = 0.8
_RESIDENT_SHARE = 0.5
_NOT_HERE = "--vram-gib"

_EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True)
class RamItem:
    """Some of the host's memory, at its peak."""

    term: str  # who holds it: readers, store, Ray or trainer
    name: str
    size_bytes: int
    lower: str = "training.workers"  # what to change to have less of it
    once: bool = False  # whatever the number of ranks on the machine


@dataclass(frozen=True)
class Problem:
    """Memory that a run would lack."""

    text: str
    refused: bool  # it would not fit; else it is only tight, or planned for hardware that is not here


@dataclass(frozen=True)
class RunPlan:
    """What a run, of all its ranks here, takes of host and GPU memory at its peak, and what there is."""

    config: Config
    data: PreparedData
    parts: tuple[RamItem, ...]  # of the host's memory
    limit: MemoryLimit  # of the host's memory
    step: MemoryPlan | None = None  # on a GPU; None = the CPU computes, and `parts` has it
    vram_bytes: int = 0  # memory of that GPU
    vram_free_bytes: int = 0
    whose: str = ""  # the GPU's name

    @property
    def ram_bytes(self) -> int:
        """Of all parts."""
        return sum(part.size_bytes for part in self.parts)

    def owner_bytes(self, term: str) -> int:
        """Of readers, store, Ray or trainer."""
        return sum(part.size_bytes for part in self.parts if part.term == term)

    def lines(self) -> list[str]:
        """For people: the host's memory by who holds it, and the GPU's."""
        terms = ", ".join(f"{t} {format_size(self.owner_bytes(t))}" for t in dict.fromkeys(p.term for p in self.parts))
        ranks = f" by {n} ranks on this machine" if (n := num_local_ranks(self.config)) > 1 else ""
        of = f"{format_size(self.limit.limit_bytes)} ({self.limit.name})"
        lines = [f"RAM {format_size(self.ram_bytes)} planned of {of}{ranks}: {terms}"]
        if (step := self.step) is not None:
            need = f"VRAM {format_size(step.vram_bytes)} planned of {format_size(self.vram_bytes)} ({self.whose})"
            peak = f"{format_size(step.peak_bytes)} at the peak of train_batch_size {step.batch}, amp {step.amp}"
            largest = largest_batch(self.config, self.vram_bytes)
            fits = f"{largest} or more" if largest == LARGEST_PLANNED_BATCH else largest
            lines.append(f"{need}: {peak}, the rest for CUDA and fragmentation; the largest that fits is {fits}")
        return lines

    def problems(self) -> list[Problem]:
        """What does not fit, with its remedy; empty where all does."""
        config, found = self.config, []
        need = 0 if self.step is None else self.step.vram_bytes
        if need > self.vram_bytes:
            largest = largest_batch(config, self.vram_bytes)
            remedy = f"set training.train_batch_size={largest} and raise training.accumulate_steps"
            text = (
                f"train_batch_size {config.training.micro_batch} will not fit: {format_size(need)} of GPU memory "
                f"needed of {format_size(self.vram_bytes)}; {remedy if largest else memory_saving_advice(config)}"
            )
            found.append(Problem(text, True))
        elif need > self.vram_free_bytes:
            free = format_size(self.vram_free_bytes)
            found.append(Problem(f"only {free} of GPU memory are free; see nvidia-smi for who holds the rest", False))
        allowed, limit = (
            _WARN_SHARE * self.limit.limit_bytes,
            f"{format_size(self.limit.limit_bytes)} ({self.limit.name})",
        )
        if self.ram_bytes > allowed:
            largest_part, fewer = max(self.parts, key=lambda part: part.size_bytes), range(config.training.workers)
            plans = {n: plan_ram(config.with_training(workers=n), self.data, self.step is not None) for n in fewer}
            fit = [n for n, parts in plans.items() if sum(part.size_bytes for part in parts) <= allowed]
            text = (
                f"{format_size(self.ram_bytes)} of host memory are planned, more than {_WARN_SHARE:.0%} of {limit}, "
                f"most of it for {largest_part.term}: {largest_part.name} ({format_size(largest_part.size_bytes)}); "
                + (f"start with training.workers={fit[-1]}" if fit else f"lower {largest_part.lower}")
            )
            # A GPU that is not here may stand in a machine with more memory.
            here = self.whose != _NOT_HERE or config.monitor.ram_limit_gib is not None
            found.append(Problem(text, here and self.ram_bytes > self.limit.limit_bytes))
        return found


def plan_run(config: Config, data: PreparedData | None = None, vram_gib: float | None = None) -> RunPlan:
    """Plan the memory of a run on this machine, of all its ranks here, or with a GPU of `vram_gib`.

    Takes a few seconds for a network that was not planned before.  Writes nothing; `data` None opens the volumes.

    Raises:
        ConfigError: a tensor would reach 2^31 elements.
        DataError: a volume cannot be used.
    """
    data, device = data or prepare_data(config.seed, config.data), choose_device()
    limit = ram_limit(config.monitor.ram_limit_gib)
    if vram_gib is None and device.type == "cpu":
        return RunPlan(config, data, plan_ram(config, data, False), limit)
    parts, step = plan_ram(config, data, True), plan_memory(config)
    if vram_gib is not None:
        size = int(vram_gib * GIB)
        return RunPlan(config, data, parts, limit, step, size, size, _NOT_HERE)
    gpu, free = torch.cuda.get_device_properties(device), torch.cuda.mem_get_info(device)[0]
    return RunPlan(config, data, parts, limit, step, gpu.total_memory, free, gpu.name)


def plan_ram(config: Config, data: PreparedData, gpu: bool) -> tuple[RamItem, ...]:
    """Host memory of all ranks here, or of one in a cluster of any size.  Raises as `plan_run`."""
    ranks, parts = (
        num_local_ranks(config),
        [*_readers(config, data), *_trainer(config, data, gpu), *_network(config, gpu)],
    )
    parts = [part if part.once else replace(part, size_bytes=part.size_bytes * ranks) for part in parts]
    parts.append(RamItem("volumes", "decoded", resident_bytes(config, data), "data.resident", once=True))
    return tuple(part for part in parts if part.size_bytes)


def resident_bytes(config: Config, data: PreparedData) -> int:
    """Memory of the volumes where the run keeps them decoded; else 0.

    By itself it does where that and what reads them leave half of the free memory to the rest, and the first pass is
    over before half of the run is.
    """
    need, wanted = Resident.size_bytes(data.job), config.data.resident
    if wanted != "auto":
        return need if need <= wanted * GIB else 0
    limit, ranks = ram_limit(config.monitor.ram_limit_gib), num_local_ranks(config)
    readers = ranks * sum(part.size_bytes for part in _readers(config, data))
    if need + readers > _RESIDENT_SHARE * (limit.limit_bytes - limit.used_bytes):
        return 0
    return need if 2 * first_pass_samples(config, data) <= config.stop_step * config.global_batch else 0


def first_pass_samples(config: Config, data: PreparedData) -> int:
    """Samples of the run after which the ranks of each machine have passed over each volume once."""
    ranks, here = config.training.ranks, num_local_ranks(config)
    passes = 1.0 if ranks == "auto" else max(ranks / (here * data.plan.reads_per_region(ranks)), 1.0)
    return math.ceil(passes * data.plan.slots_per_pass * data.plan.patches_per_region)


def num_local_ranks(config: Config) -> int:
    """Ranks that share this machine; 1 where a cluster places them."""
    ranks = config.training.ranks
    if config.cluster.address is not None:
        return 1
    return max(torch.cuda.device_count(), 1) if ranks == "auto" else ranks


def ram_limit(configured_gib: float | None) -> MemoryLimit:
    """The smallest of the machine's memory, the limits of this process's cgroups, and `monitor.ram_limit_gib`."""
    limits = MemoryPolicy(configured_bytes=None if configured_gib is None else int(configured_gib * GIB))
    return tightest(sample_system(os.getpid()), limits)


def _readers(config: Config, data: PreparedData) -> list[RamItem]:
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
        blocks = (job.plan.regions_in_flight + REGIONS_AHEAD) * job.block_bytes
        return [
            RamItem("trainer", "its reader", blocks + scratch + staged, "data.regions_in_flight or data.region_size")
        ]
    # In a longer run, the readers of two executions of Ray Data live while one hands over to the next.
    all_tasks = job.tasks(0, config.stop_step * config.global_batch)
    tasks = sum(1 for _ in itertools.islice(all_tasks, TASKS_PER_SEGMENT + 1))
    executions = 2 if tasks > TASKS_PER_SEGMENT else 1
    readers = min(executions * workers, tasks)
    options = StreamOptions.from_config(config.training, config.cluster)
    need = store_peak_bytes(job, options) + (executions - 1) * store_prefetch_bytes(job, options)
    run_bytes = tasks * job.plan.regions_per_task * job.block_bytes
    store = min(int((1 + _STORE_HOLES) * need), run_bytes) + job.plan.map_bytes
    idle = max(cores - workers - 3, 0) * _RAY_IDLE_BYTES
    ray = _RAY_BYTES + idle if config.cluster.address is None else 0  # those of a cluster are there anyway
    return [
        RamItem("readers", f"{readers} processes", readers * _READER_BYTES),
        RamItem("readers", "blocks", readers * READER_RING * job.block_bytes, "data.region_size"),
        RamItem("readers", "decoding", readers * scratch),
        RamItem("readers", "fetched ahead", readers * staged),
        RamItem("store", "regions in flight and ahead", store, "data.regions_in_flight or data.region_size"),
        RamItem("Ray", "its own processes", ray, once=True),
    ]


def _trainer(config: Config, data: PreparedData, gpu: bool) -> list[RamItem]:
    """All but the network."""
    options, job = StreamOptions.from_config(config.training, config.cluster), data.job
    batch = options.batch_size * job.patch_bytes
    ring = (BUFFERS_IN_USE + batches_ahead(options)) * _host_bytes(batch, gpu)
    in_hand = config.training.accumulate_steps * batch
    fixed = fixed_count(config.training, data) * job.patch_bytes + job.plan.map_bytes
    return [
        RamItem("trainer", "process", _TRAINER_BYTES),
        RamItem("trainer", "CUDA (assumed)", gpu * _CUDA_HOST_BYTES),
        RamItem("trainer", "batches", ring + in_hand, "training.prefetch_factor or training.train_batch_size"),
        RamItem("trainer", "fixed patches", fixed, "training.validate_patches"),
    ]


def _network(config: Config, gpu: bool) -> list[RamItem]:
    """The step on a CPU, and the copy of a checkpoint that waits for the disk."""
    step = 0 if gpu else plan_memory(config, amp=resolve_amp(config.training.amp, torch.device("cpu"))).ram_bytes
    snapshot = sum(_host_bytes(size, gpu) for size in checkpoint_sizes(config))
    batch = "training.train_batch_size and raise training.accumulate_steps, or lower model.channels"
    return [
        RamItem("trainer", "training step", step, batch),
        RamItem("trainer", "copy of a checkpoint", snapshot, "model.channels", once=True),  # on rank 0
    ]


def _host_bytes(size: int, gpu: bool) -> int:
    """Of a buffer, which is pinned where a GPU copies from it."""
    return pinned_bytes(size) if gpu else size


def gpu_memory_error(
    config: Config, device: torch.device, error: BaseException, saved_step: int | None, vram: Vram | None = None
) -> GpuMemoryError:
    """The error to end a run with: what failed, value and remedy in its first line, who held the memory below.

    Raises nothing.  `saved_step` is of the checkpoint that holds all finished steps, None where none could be saved.
    """
    use = (vram or Vram(device)).read(new_window=False)
    what_to_do = remedy(config)
    wanted = re.search(r"Tried to allocate [\d.]+ \w+", str(error))  # the rest of torch's text is in the table
    first = (
        f"A step with train_batch_size {config.training.micro_batch} does not fit the GPU: out of memory "
        f"({wanted[0] if wanted else one_line(error)}); {what_to_do}"
    )
    held = "unknown, no GPU reports it"
    if use is not None:
        held = (
            f"{format_size(use.allocated_bytes)} in tensors ({format_size(use.peak_bytes)} at the peak), torch held "
            f"{format_size(use.reserved_bytes)}, CUDA itself and other processes {format_size(use.foreign_bytes)}, "
            f"{format_size(use.free_bytes)} of {format_size(use.total_bytes)} are free"
        )
    saved = "none could be saved now; --resume continues from the last one"
    if saved_step is not None:
        saved = f"step {saved_step} is saved, and nothing is lost"
    return GpuMemoryError(f"{first}\nmemory: {held}\ncheckpoint: {saved}", what_to_do)


def remedy(config: Config) -> str:
    """The overrides with which to go on: the next smaller micro-batch that divides a rank's patches.  Pure."""
    training = config.training
    patches = training.micro_batch * training.accumulate_steps  # of a rank
    batch = next((size for size in range(training.micro_batch - 1, 0, -1) if patches % size == 0), None)
    if batch is None:
        return memory_saving_advice(config)
    overrides = f"training.train_batch_size={batch} training.accumulate_steps={patches // batch}"
    return f"continue with --resume {overrides}, which keeps the effective batch; {_EXPANDABLE} helps against fragments"
