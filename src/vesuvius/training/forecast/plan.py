"""Memory plan of a run for train, dry run, doctor, init and tune, and the advice after the GPU ran out of memory.

GPU memory comes from tracing a step (`memory_plan.py`); host memory is computed from the config and the base memory of
empty processes.
"""

import itertools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from vesuvius.accelerator import choose_device, memory_info, properties
from vesuvius.config import Config, TrainingConfig
from vesuvius.errors import GpuMemoryError, one_line
from vesuvius.loader.resident import RESIDENT_SHARE, ram_limit
from vesuvius.monitor.memory.limits import MemoryLimit
from vesuvius.monitor.probes.vram import read_vram
from vesuvius.runlog.units import GIB, format_size
from vesuvius.stream.feeder import BATCHES_IN_USE
from vesuvius.stream.options import (
    READER_RING,
    TASKS_PER_SEGMENT,
    StreamOptions,
    auto_threads,
    batches_ahead,
    store_peak_bytes,
    store_prefetch_bytes,
)
from vesuvius.stream.reading.local import blocks_of_threads
from vesuvius.stream.reading.reader import STAGED_BYTES_MAX
from vesuvius.stream.reading.resident import Resident
from vesuvius.stream.start.prepare import PreparedData, prepare_data
from vesuvius.training.forecast.memory_plan import (
    CONTEXT_BYTES,
    LARGEST_PLANNED_BATCH,
    MemoryPlan,
    largest_batch,
    max_indexable_batch,
    memory_saving_advice,
    plan_memory,
)
from vesuvius.training.step.optimizer import num_saved_copies
from vesuvius.training.step.setup import build_meta_network, resolve_amp
from vesuvius.training.validation.pictures import PREVIEWED

_MIB = 2**20

# Private memory of processes that hold no data yet: RssAnon on Linux 6.18, Python 3.11, ray 2.60, torch 2.13, 2 cores.
_READER_BYTES = 122 * _MIB
_TRAINER_BYTES = 280 * _MIB
_RAY_BYTES = 606 * _MIB  # daemons, Ray Data's three actors, threads in the trainer
_RAY_IDLE_BYTES = 40 * _MIB  # a prestarted worker, one per core
_CUDA_HOST_BYTES = 2 * GIB  # CUDA's context, cuDNN and cuBLAS; assumed
# Freed blocks fragment the object store, and Ray's limit is soft: 1.1 to 1.25 times the need was observed.
_STORE_HOLES = 0.125

VRAM_SHARE = 0.92
"""Share of GPU memory to plan with.  With less left, kernels get smaller workspaces, and are slower."""
_RAM_SHARE = 0.4  # share of host memory for steps on a CPU; readers and volumes use the rest
_WARN_SHARE = 0.8
_NOT_HERE = "--vram-gib"
# Settings to lower for less host memory, by its owner.
_REMEDIES = {
    "workers": "training.workers",
    "store": "data.regions_in_flight",
    "Ray": "training.workers",
    "trainer": "training.train_batch_size and raise training.accumulate_steps, or lower data.regions_in_flight",
    "volumes": "data.resident",
}
_EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True)
class MicroBatchFit:
    """A chosen micro-batch, its planned step and a log line."""

    config: Config  # `auto` replaced
    step: MemoryPlan
    fits: bool
    line: str


def fit_micro_batch(config: Config, available_bytes: int, gpu: bool) -> MicroBatchFit:
    """Choose the largest divisor of a rank's share of the effective batch whose step fits; 1 if none does.

    An explicit micro-batch is kept.  On a GPU, `recompute_norm: auto` becomes false if that step fits as well.
    Takes seconds for a new network.  Raises ConfigError: a tensor of one patch has 2^31 elements.

    `available_bytes` is as from `device_memory_bytes`, `gpu` whether this is GPU memory, here or elsewhere.
    """

    def plan(chosen: Config) -> tuple[MemoryPlan, int]:
        step = plan_memory(chosen, amp=None if gpu else resolve_amp(training.amp, torch.device("cpu")))
        return step, step.vram_bytes if gpu else step.ram_bytes

    training, most_bytes = config.training, (VRAM_SHARE if gpu else _RAM_SHARE) * available_bytes
    patches, micro_batches = training.micro_batch * training.accumulate_steps, [training.micro_batch]
    if training.train_batch_size == "auto":
        largest = max(min(patches, max_indexable_batch(config)), 1)
        micro_batches = [size for size in range(largest, 0, -1) if patches % size == 0]
    for size in micro_batches:
        chosen = config.with_micro_batch(size)
        step, need_bytes = plan(chosen)
        if fits := need_bytes <= most_bytes:
            break
    norms = ""
    if gpu and training.recompute_norm == "auto":
        chosen, storing = (chosen.with_training(recompute_norm=recompute) for recompute in (True, False))
        stored, stored_bytes = plan(storing)
        if stored_bytes <= most_bytes:
            chosen, step, need_bytes, norms = storing, stored, stored_bytes, " with norms stored"
    sizes, room = f"{size} x {chosen.training.accumulate_steps}", format_size(available_bytes)
    none = "" if fits else ", too little" + (" for even one patch" if size == 1 else "")
    line = f"micro-batch {sizes}{norms}: {format_size(need_bytes)} of {room} by the memory plan{none}"
    return MicroBatchFit(chosen, step, fits, line)


def device_memory_bytes(config: Config, device: torch.device) -> int:
    """Memory available to a rank: what other programs leave of its GPU, including CUDA's own share, or its share of the
    host's limit.
    """
    if device.type == "cpu":
        return ram_limit(config.monitor.ram_limit_gib).total_bytes // num_local_ranks(config)
    free_bytes, total_bytes = memory_info(device)
    reserved_bytes: int = torch.get_device_module(device).memory_reserved(device)
    return min(free_bytes + reserved_bytes + CONTEXT_BYTES, total_bytes)


def resolve_micro_batch(
    config: Config, available_bytes: int | None = None, gpu: bool | None = None
) -> tuple[Config, list[str]]:
    """Replace `auto` and return a log line; a config without `auto` is returned unchanged.

    Arguments are those of `fit_micro_batch`; None = this machine's device.
    """
    device = choose_device()
    gpu = device.type != "cpu" if gpu is None else gpu
    if config.training.train_batch_size != "auto" and not (gpu and config.training.recompute_norm == "auto"):
        return config, []
    available_bytes = device_memory_bytes(config, device) if available_bytes is None else available_bytes
    found = fit_micro_batch(config, available_bytes, gpu)
    return found.config, [found.line]


@dataclass(frozen=True)
class Problem:
    """A memory shortage of a run."""

    text: str
    refused: bool  # does not fit; else only tight, or planned for other hardware


@dataclass(frozen=True)
class RunPlan:
    """Peak host and GPU memory of a run (all ranks on this machine), and the memory available."""

    config: Config
    data: PreparedData
    ram: Mapping[str, int]  # bytes of host memory by owner: workers, store, Ray, trainer, volumes
    limit: MemoryLimit  # of host memory
    step: MemoryPlan | None = None  # on a GPU; None = the step runs on the CPU
    vram_bytes: int = 0  # memory of that GPU
    vram_free_bytes: int = 0
    gpu_name: str = ""

    @property
    def ram_bytes(self) -> int:
        return sum(self.ram.values())

    def lines(self) -> list[str]:
        """Report lines: host memory by owner, and GPU memory."""
        owners = ", ".join(f"{owner} {format_size(size)}" for owner, size in self.ram.items())
        ranks = f" by {n} ranks on this machine" if (n := num_local_ranks(self.config)) > 1 else ""
        of = f"{format_size(self.limit.total_bytes)} ({self.limit.name})"
        lines = [f"RAM {format_size(self.ram_bytes)} planned of {of}{ranks}: {owners}"]
        if (step := self.step) is not None:
            need = f"VRAM {format_size(step.vram_bytes)} planned of {format_size(self.vram_bytes)} ({self.gpu_name})"
            peak = f"{format_size(step.peak_bytes)} at the peak of train_batch_size {step.batch}, amp {step.amp}"
            largest = largest_batch(self.config, self.vram_bytes)
            fits = f"{largest} or more" if largest == LARGEST_PLANNED_BATCH else largest
            lines.append(f"{need}: {peak}, the rest for CUDA and fragmentation; largest micro-batch that fits: {fits}")
        return lines

    def problems(self) -> list[Problem]:
        """Shortages with their remedies; empty if everything fits."""
        config, found = self.config, []
        need = 0 if self.step is None else self.step.vram_bytes
        if need > self.vram_bytes:
            largest = largest_batch(config, self.vram_bytes)
            fewer = f"set training.train_batch_size={largest} and raise training.accumulate_steps"
            text = (
                f"training.train_batch_size {config.training.micro_batch} does not fit: {format_size(need)} needed, "
                f"{format_size(self.vram_bytes)} of GPU memory; {fewer if largest else memory_saving_advice(config)}"
            )
            found.append(Problem(text, True))
        elif need > self.vram_free_bytes:
            free = format_size(self.vram_free_bytes)
            found.append(Problem(f"only {free} of GPU memory are free; nvidia-smi shows what uses the rest", False))
        allowed = _WARN_SHARE * self.limit.total_bytes
        if self.ram_bytes > allowed:
            owner, gpu = max(self.ram, key=self.ram.__getitem__), self.step is not None
            plans = {
                n: plan_ram(config.with_training(workers=n), self.data, gpu) for n in range(config.training.workers)
            }
            fit = [n for n, ram in plans.items() if sum(ram.values()) <= allowed]
            text = (
                f"{format_size(self.ram_bytes)} of host memory are planned, more than {100 * _WARN_SHARE:.0f} % of "
                f"{format_size(self.limit.total_bytes)} ({self.limit.name}), most of it for {owner} "
                f"({format_size(self.ram[owner])}); "
                + (f"start with training.workers={fit[-1]}" if fit else f"lower {_REMEDIES[owner]}")
            )
            # The machine with the planned GPU may have more memory.
            here = self.gpu_name != _NOT_HERE or config.monitor.ram_limit_gib is not None
            found.append(Problem(text, here and self.ram_bytes > self.limit.total_bytes))
        return found


def plan_run(config: Config, data: PreparedData | None = None, vram_gib: float | None = None) -> RunPlan:
    """Plan the memory of a run on this machine (all its ranks here), or with a GPU of `vram_gib`.

    Takes a few seconds for a new network.  Opens the volumes if `data` is None.

    Raises ConfigError: a tensor would reach 2^31 elements; DataError: a volume cannot be used.
    """
    data, device = data or prepare_data(config.seed, config.data), choose_device()
    limit = ram_limit(config.monitor.ram_limit_gib)
    if vram_gib is None and device.type == "cpu":
        return RunPlan(config, data, plan_ram(config, data, False), limit)
    ram, step = plan_ram(config, data, True), plan_memory(config)
    if vram_gib is not None:
        size = int(vram_gib * GIB)
        return RunPlan(config, data, ram, limit, step, size, size, _NOT_HERE)
    gpu, free = properties(device), memory_info(device)[0]
    return RunPlan(config, data, ram, limit, step, gpu.total_memory, free, gpu.name)


def plan_ram(config: Config, data: PreparedData, gpu: bool) -> dict[str, int]:
    """Peak host memory of all ranks on this machine, or of one rank in a cluster, by owner.  Raises like `plan_run`."""
    ranks, ram = num_local_ranks(config), reading_bytes(config, data)
    ram["trainer"] = ram.get("trainer", 0) + _trainer_bytes(config, data, gpu)
    ram = {owner: size * (1 if owner == "Ray" else ranks) for owner, size in ram.items()}
    ram["trainer"] += sum(_host_bytes(size, gpu) for size in checkpoint_sizes(config))  # a save's copy, on rank 0
    ram["volumes"] = plan_resident(config, data)[0]
    return {owner: size for owner, size in ram.items() if size}


def plan_resident(config: Config, data: PreparedData, done: int = 0) -> tuple[int, str]:
    """Memory of the decoded volumes if the run keeps them; else 0 and the reason, which is '' for `data.resident=0`.

    `auto` keeps them if the first pass ends within half of the steps after the `done` ones, and volumes and readers
    leave half of the free memory.
    """
    need, wanted = Resident.size_bytes(data.job), config.data.resident
    volumes = f"{format_size(need)} of decoded volumes"
    if wanted != "auto":
        refusal = f"{volumes} exceed data.resident={wanted:g} (GiB)" if wanted else ""
        return (need, "") if need <= wanted * GIB else (0, refusal)
    second_pass_ends = done + math.ceil(2 * first_pass_samples(config, data) / config.global_batch)
    if second_pass_ends > config.stop_step:
        return 0, f"the second pass over the volumes ends only at step {second_pass_ends}"
    limit, ranks = ram_limit(config.monitor.ram_limit_gib), num_local_ranks(config)
    readers = ranks * sum(reading_bytes(config, data).values())
    if need + readers > RESIDENT_SHARE * (limit.total_bytes - limit.used_bytes):
        return 0, f"{volumes} and their workers would take more than half of the free memory"
    return need, ""


def first_pass_samples(config: Config, data: PreparedData, here: int | None = None) -> int:
    """Samples of the run until the ranks of each machine, `here` or as configured, have passed over every volume."""
    ranks, here = config.training.ranks, here or num_local_ranks(config)
    passes = 1.0 if ranks == "auto" else max(ranks / (here * data.plan.reads_per_region(ranks)), 1.0)
    return math.ceil(passes * data.plan.slots_per_pass * data.plan.patches_per_region)


def num_local_ranks(config: Config) -> int:
    """Ranks on this machine; 1 in a cluster."""
    ranks = config.training.ranks
    if config.cluster.address is not None:
        return 1
    return max(torch.accelerator.device_count(), 1) if ranks == "auto" else ranks


def reading_bytes(
    config: Config, data: PreparedData, cores: int | None = None, here: int | None = None
) -> dict[str, int]:
    """Memory of a rank's readers, object store and Ray; with `workers: 0` of the trainer, which reads itself.

    `cores` are those of the machine (None = this one), `here` its ranks (None = as configured).
    """
    workers, here = config.training.workers, here or num_local_ranks(config)
    ranks = here if config.training.ranks == "auto" else config.training.ranks
    job = replace(data.job, rank=0, world_size=ranks)  # the data may have been opened for one rank
    threads, cores = auto_threads(here, cores), cores or os.cpu_count() or 1
    arrays = (*data.volumes, *data.conditions)
    chunk_bytes = max(math.prod(array.chunk_zyx) * array.dtype.itemsize for array in arrays)
    covered = [math.prod(data.array(number, 1)[1].factors) for number in range(len(data.conditions))]
    # A coarser or finer condition also holds its region in its own voxels.
    own = [int(job.dtypes[-1].itemsize * job.plan.region_voxels_max // n) for n in covered if n != 1]
    # Chunks being decoded, one per core, with their compressed bytes.
    scratch = 2 * chunk_bytes * cores
    # At least one region is staged, whatever its size; compression is ignored.
    staged = max(STAGED_BYTES_MAX, job.block_bytes) if any(array.source.remote for array in arrays) else 0
    if workers == 0:
        blocks = blocks_of_threads(job.plan.regions_held(job.world_size), threads) * job.block_bytes
        return {"trainer": blocks + scratch + threads * (max(own, default=0) + staged)}
    # In a longer run, the readers of two Ray Data executions overlap during the handover.
    all_tasks = job.tasks(0, config.stop_step * config.global_batch)
    tasks = sum(1 for _ in itertools.islice(all_tasks, TASKS_PER_SEGMENT + 1))
    executions = 2 if tasks > TASKS_PER_SEGMENT else 1
    readers = min(executions * workers, tasks)
    options = StreamOptions.from_config(config.training, config.cluster)
    need = store_peak_bytes(job, options) + (executions - 1) * store_prefetch_bytes(job, options)
    run_bytes = tasks * job.plan.regions_per_task * job.block_bytes
    store = min(int((1 + _STORE_HOLES) * need), run_bytes) + job.plan.map_bytes
    idle = max(cores - workers - 3, 0) * _RAY_IDLE_BYTES
    ray = _RAY_BYTES + idle if config.cluster.address is None else 0  # a cluster's Ray is not part of the run
    of_reader = _READER_BYTES + READER_RING * job.block_bytes + scratch + max(own, default=0) + staged
    return {"workers": readers * of_reader, "store": store, "Ray": ray}


def _trainer_bytes(config: Config, data: PreparedData, gpu: bool) -> int:
    """Host memory of a rank's trainer, without what it reads and the copy of a checkpoint."""
    options, job = StreamOptions.from_config(config.training, config.cluster), data.job
    batch = options.batch_size * job.patch_bytes
    ahead = (BATCHES_IN_USE + batches_ahead(options)) * batch
    in_hand = config.training.accumulate_steps * batch + gpu * BATCHES_IN_USE * _host_bytes(batch, gpu)
    fixed = fixed_count(config.training, data) * job.patch_bytes + job.plan.map_bytes
    step = _CUDA_HOST_BYTES if gpu else _step_bytes(config)
    return _TRAINER_BYTES + ahead + in_hand + fixed + step


def _step_bytes(config: Config) -> int:
    return plan_memory(config, amp=resolve_amp(config.training.amp, torch.device("cpu"))).ram_bytes


def checkpoint_sizes(config: Config) -> list[int]:
    """Bytes of each tensor of a checkpoint: weights, moments and averages."""
    weights = build_meta_network(config).parameters()
    return [weight.numel() * 4 for weight in weights for _ in range(num_saved_copies(weight, config.training))]


def fixed_count(training: TrainingConfig, data: PreparedData) -> int:
    """Number of patches that validations and previews use.  Pure."""
    validates = training.validate_every > 0 and any(split.validation for split in data.splits)
    return max(training.validate_patches if validates else 0, PREVIEWED if training.preview_every else 0)


def _host_bytes(size: int, gpu: bool) -> int:
    """Size of a buffer; torch rounds pinned ones, for copies to a GPU, up to a power of two."""
    return 1 << (size - 1).bit_length() if gpu and size else size


def gpu_memory_error(
    config: Config, device: torch.device, error: BaseException, saved_step: int | None
) -> GpuMemoryError:
    """Error that ends a run; `saved_step` is that of the checkpoint with all finished steps, if one was saved."""
    use, what_to_do = read_vram(device, new_window=False), remedy(config)
    if saved_step is None:  # a run that failed at its start left nothing to resume
        what_to_do = what_to_do.replace("continue with --resume", "run it again with")
    wanted = re.search(r"Tried to allocate [\d.]+ \w+", str(error))  # torch's other figures are in the table
    cause = f"out of memory ({wanted[0] if wanted else one_line(error)})"
    first = f"A step with train_batch_size {config.training.micro_batch} does not fit the GPU: {cause}; {what_to_do}"
    held = "unknown"
    if use is not None:
        held = (
            f"{format_size(use.allocated_bytes)} in tensors ({format_size(use.peak_bytes)} at the peak), torch held "
            f"{format_size(use.reserved_bytes)}, CUDA itself and other processes {format_size(use.foreign_bytes)}, "
            f"{format_size(use.free_bytes)} of {format_size(use.total_bytes)} are free"
        )
    saved = "none was saved; --resume continues from the last one, if any"
    if saved_step is not None:
        saved = f"step {saved_step} is saved; no steps are lost"
    return GpuMemoryError(f"{first}\nmemory: {held}\ncheckpoint: {saved}", what_to_do)


def remedy(config: Config) -> str:
    """Overrides to continue with: the next smaller micro-batch that divides a rank's patches.  Pure."""
    training = config.training
    patches = training.micro_batch * training.accumulate_steps  # per rank
    batch = next((size for size in range(training.micro_batch - 1, 0, -1) if patches % size == 0), None)
    if batch is None:
        return memory_saving_advice(config)
    overrides = f"training.train_batch_size={batch} training.accumulate_steps={patches // batch}"
    return f"continue with --resume {overrides}, which keeps the effective batch; {_EXPANDABLE} reduces fragmentation"
