"""How much of the host's memory a run will take, before it starts: readers, object store, Ray, trainer.

What follows from the config is computed; what an interpreter with its libraries takes was measured once
(`tools/bench_ram_plan.py` compares both with a real run).  The parts are those of `ram_parts.py`.  Works without torch,
and then does not know what the network takes.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vesuvius.config import Config
from vesuvius.engine.ram_parts import RamPlan
from vesuvius.observe.risk.killers import Limits, tightest
from vesuvius.observe.system.look import look_around
from vesuvius.observe.system.roots import Roots
from vesuvius.observe.units import GIB, size_text
from vesuvius.stream.feeder import HELD
from vesuvius.stream.options import StreamOptions, batches_ahead, store_ahead_bytes, store_bytes, store_need_bytes
from vesuvius.stream.prepare import PreparedData, prepare_data
from vesuvius.stream.reader import STAGED_BYTES_MAX

if TYPE_CHECKING:
    from vesuvius.engine.memory_plan import MemoryPlan

_MIB = 2**20

# Private memory of processes that hold no data yet: RssAnon on Linux 6.18, Python 3.11, ray 2.60, torch 2.13, 2 cores.
_READER_PROCESS_BYTES = 122 * _MIB
_TRAINER_PROCESS_BYTES = 280 * _MIB  # the network not counted, torch's compiler, which AdamW imports, counted
_TRAINER_RAY_BYTES = 65 * _MIB  # Ray, Ray Data and their threads in the trainer
_PREVIEW_BYTES = 30 * _MIB  # what draws pictures is imported with the first one
_RAY_DAEMONS_BYTES = 270 * _MIB  # gcs_server, raylet, autoscaler, dashboard and its agents, log monitor
_RAY_DATA_ACTORS_BYTES = 266 * _MIB  # Ray Data's three: statistics, autoscaling, where actors are
_RAY_DATA_ACTORS = 3
_RAY_IDLE_BYTES = 40 * _MIB  # a process that Ray starts ahead, one a core, and that nobody has asked for

# Assumed, not measured: CUDA's context, cuDNN and cuBLAS in the host's memory.
_CUDA_HOST_BYTES = 2 * GIB
# A CPU's allocator keeps holes between tensors of a step: 1.3 to 1.6 times the plan's bytes were seen in use.
_CPU_HOLES = 0.5
# Freed blocks leave holes in the object store's file, and Ray's limit is soft: 1.1 to 1.25 times the need was seen.
_STORE_HOLES = 0.125
# Tasks of one execution of Ray Data: in a longer run, the readers of two executions live while one hands over.
_TASKS_PER_EXECUTION = 500
# Blocks that a reader process decodes into, in turn.
_READER_RING = 2
# On a GPU the batches of a step are kept until its figures are read, and the host launches steps ahead.
_STEPS_AHEAD = 3

WARN_SHARE = 0.8
"""Of the limit: a dry run that predicts more says so."""


@dataclass(frozen=True)
class RamLimit:
    """The memory that a run may use, and who says so."""

    limit_bytes: int
    whose: str


@dataclass(frozen=True)
class _Network:
    """What needs torch to be known."""

    gpu: bool
    snapshot_bytes: int
    step_bytes: int
    vram_bytes: int


def plan_ram(config: Config, data: PreparedData | None = None, gpu: bool | None = None) -> RamPlan:
    """Predict the memory of a run of `config`, of one rank.

    Takes a second or two for the network.

    Args:
        config: the experiment.
        data: what `prepare_data` gave; None opens the volumes, which reads metadata.
        gpu: whether it will run on a GPU; None = as this machine has one.

    Raises:
        DataError: a volume cannot be used.
        ConfigError: a tensor would reach 2^31 elements.
    """
    data = data or prepare_data(config.seed, config.data)
    return _plan(config, data, _plan_network(config, gpu), gpu)


def ram_limit(config: Config, roots: Roots = Roots()) -> RamLimit:
    """The smallest of the machine's memory, the limits of this process's cgroups, and `monitor.ram_limit_gib`."""
    gib = config.monitor.ram_limit_gib
    limits = Limits(configured_bytes=None if gib is None else int(gib * GIB))
    smallest = tightest(look_around(os.getpid(), roots), limits)
    return RamLimit(smallest.limit_bytes, smallest.name)


def ram_warning(config: Config, data: PreparedData, plan: RamPlan, limit: RamLimit) -> str | None:
    """A line where a plan takes more than `WARN_SHARE` of a limit, with the override that would fit.  Pure."""
    allowed = WARN_SHARE * limit.limit_bytes
    if plan.total_bytes <= allowed:
        return None
    fitting = next(
        (n for n in range(plan.workers - 1, 0, -1) if _with_workers(config, data, plan, n).total_bytes <= allowed), None
    )
    if fitting is not None:
        remedy = f"start with training.workers={fitting}"
    elif plan.step_bytes and plan.step_bytes > plan.total_bytes / 2:
        remedy = "lower training.train_batch_size and raise training.accumulate_steps"
    else:
        remedy = "lower data.regions_in_flight, data.reader_mib, training.workers or training.prefetch_factor"
    return (
        f"memory should stay below {WARN_SHARE:.0%} of {size_text(limit.limit_bytes)} ({limit.whose}); got "
        f"{size_text(plan.total_bytes)} predicted; {remedy}"
    )


def _with_workers(config: Config, data: PreparedData, plan: RamPlan, workers: int) -> RamPlan:
    """The same with other readers; the network's part is taken over, which takes seconds to plan."""
    training = config.training.model_copy(update={"workers": workers})
    changed = _plan(config.model_copy(update={"training": training}), data, None, plan.gpu)
    return replace(
        changed,
        cuda_bytes=plan.cuda_bytes,
        snapshot_bytes=plan.snapshot_bytes,
        step_bytes=plan.step_bytes,
        vram_bytes=plan.vram_bytes,
    )


def _plan(config: Config, data: PreparedData, network: _Network | None, gpu: bool | None) -> RamPlan:
    job, training = data.job, config.training
    options = StreamOptions.from_config(training, config.cluster)
    on_gpu = network.gpu if network else gpu
    ring = _READER_RING if training.workers else job.plan.regions_in_flight + 1  # ours, not Ray's copy
    reader = {
        "reader_ring_bytes": ring * job.block_bytes,
        "reader_staged_bytes": _staged_bytes(data),
        "reader_scratch_bytes": _scratch_bytes(data),
    }
    maps = job.plan.map_bytes
    return RamPlan(
        workers=training.workers,
        readers_at_once=_readers_at_once(config, data),
        gpu=on_gpu,
        reader_process_bytes=_READER_PROCESS_BYTES,
        **reader,
        store_bytes=_store_bytes(config, data, options),
        store_capacity_bytes=store_bytes(job, options),
        ray_bytes=_ray_bytes(config),
        trainer_process_bytes=_trainer_process_bytes(config),
        cuda_bytes=None if on_gpu is None else on_gpu * _CUDA_HOST_BYTES,
        local_reader_bytes=0 if training.workers else sum(reader.values()),
        batches_bytes=_batches_bytes(config, job.patch_bytes, options, bool(on_gpu)),
        fixed_bytes=_fixed_count(config, data) * job.patch_bytes + maps,
        snapshot_bytes=network.snapshot_bytes if network else None,
        step_bytes=network.step_bytes if network else None,
        vram_bytes=network.vram_bytes if network else None,
    )


def _tasks(config: Config, data: PreparedData) -> int:
    """Of the whole run, as far as they matter: up to one more than an execution has."""
    tasks = data.job.tasks(0, config.stop_step * config.global_batch)
    return sum(1 for _ in itertools.islice(tasks, _TASKS_PER_EXECUTION + 1))


def _executions_at_once(tasks: int) -> int:
    return 2 if tasks > _TASKS_PER_EXECUTION else 1


def _readers_at_once(config: Config, data: PreparedData) -> int:
    tasks = _tasks(config, data)
    return min(_executions_at_once(tasks) * config.training.workers, tasks)


def _store_bytes(config: Config, data: PreparedData, options: StreamOptions) -> int:
    job, tasks = data.job, _tasks(config, data)
    handing_over = (_executions_at_once(tasks) - 1) * store_ahead_bytes(job, options)
    need_bytes = int((1 + _STORE_HOLES) * (store_need_bytes(job, options) + handing_over))
    run_bytes = tasks * job.blocks_per_task * job.block_bytes
    return min(min(need_bytes, run_bytes) + job.plan.map_bytes, store_bytes(job, options))


def _staged_bytes(data: PreparedData) -> int:
    """At least one region is staged whatever its size; bytes that compression saves are not counted on."""
    if not any(volume.source.remote for volume in (*data.volumes, *data.conditions)):
        return 0
    return max(STAGED_BYTES_MAX, data.job.block_bytes)


def _scratch_bytes(data: PreparedData) -> int:
    chunks = [math.prod(v.chunk_zyx) * v.dtype.itemsize for v in (*data.volumes, *data.conditions)]
    return 2 * max(chunks) * (os.cpu_count() or 1)


def _ray_bytes(config: Config) -> int:
    if config.training.workers == 0 or config.cluster.address is not None:
        return 0
    idle = max((os.cpu_count() or 1) - config.training.workers - _RAY_DATA_ACTORS, 0)
    return _RAY_DAEMONS_BYTES + _RAY_DATA_ACTORS_BYTES + idle * _RAY_IDLE_BYTES


def _trainer_process_bytes(config: Config) -> int:
    training = config.training
    ray = _TRAINER_RAY_BYTES if training.workers else 0
    return _TRAINER_PROCESS_BYTES + ray + (_PREVIEW_BYTES if training.preview_every else 0)


def _batches_bytes(config: Config, patch_bytes: int, options: StreamOptions, gpu: bool) -> int:
    """The ring of batches, and those of steps whose figures have not been read; pinned buffers are powers of two."""
    batch = options.batch_size * patch_bytes
    ring = HELD + batches_ahead(patch_bytes, options)
    if gpu:
        return ring * _pinned(batch) + _STEPS_AHEAD * config.training.accumulate_steps * batch
    return (ring + config.training.accumulate_steps) * batch


def _fixed_count(config: Config, data: PreparedData) -> int:
    """As `preflight` reads them."""
    training = config.training
    validates = training.validate_every > 0 and any(split.validation for split in data.splits)
    return max(training.validate_patches if validates else 0, training.preview_count if training.preview_every else 0)


def _plan_network(config: Config, gpu: bool | None) -> _Network | None:
    """None without torch."""
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None
    # Here, because they need torch.
    from vesuvius.engine.memory_plan import plan_memory
    from vesuvius.engine.network import lay_out_network
    from vesuvius.engine.step import AmpMode, choose_device, resolve_amp, saved_copies

    device = choose_device()
    on_gpu = device.type == "cuda" if gpu is None else gpu
    amp: AmpMode = resolve_amp(config.training.amp, device)
    if config.training.amp == "auto" and device.type == "cpu":
        amp = "bf16"  # what a GPU would take
    plan = plan_memory(config, amp=amp)
    weights = list(lay_out_network(config).parameters())
    sizes = [weight.numel() * 4 for weight in weights for _ in range(saved_copies(weight, config.training))]
    return _Network(
        gpu=on_gpu,
        snapshot_bytes=sum(_pinned(size) if on_gpu else size for size in sizes),
        step_bytes=0
        if on_gpu
        else _cpu_bytes(plan_memory(config, amp=resolve_amp(config.training.amp, torch.device("cpu")))),
        vram_bytes=plan.vram_bytes,
    )


def _cpu_bytes(plan: MemoryPlan) -> int:
    return int((1 + _CPU_HOLES) * (plan.peak_bytes + plan.workspace_bytes))


def _pinned(size: int) -> int:
    """What torch takes for a pinned buffer: it rounds up to a power of two."""
    return 1 << (size - 1).bit_length() if size else 0
