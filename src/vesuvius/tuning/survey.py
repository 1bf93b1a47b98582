"""The machine, its limits, and the planned memory of each setting: the input of a tune."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import replace

import torch

from vesuvius.config import Config
from vesuvius.errors import ConfigError
from vesuvius.monitor.memory.limits import killers_of, left_bytes
from vesuvius.monitor.probes.cores import usable_cores
from vesuvius.monitor.probes.gpus import Gpus
from vesuvius.monitor.probes.system_sample import sample_system
from vesuvius.runlog.units import GIB
from vesuvius.stream.options import StreamOptions, check_store, check_store_need
from vesuvius.stream.start.prepare import PreparedData
from vesuvius.training.forecast.memory_plan import LARGEST_PLANNED_BATCH, indexable_batch, plan_memory
from vesuvius.training.forecast.preflight import READERS_PER_CORE
from vesuvius.training.forecast.ram_plan import local_ranks, plan_ram
from vesuvius.training.monitoring import memory_limits
from vesuvius.training.step.step import choose_device, resolve_amp
from vesuvius.tuning.ledger import Machine
from vesuvius.tuning.measurement import Goal, Knob, Setting, Space

_MOST_PREFETCH = 16
_MOST_REQUESTS = 256
_VRAM_SHARE = 0.92
_PLANNED_STEPS = 100  # typical steps of a trainer: few tasks, so no handover between Ray executions
_BLOCKS = 180  # of measuring alone that the budget has room for; a third of it is starts and changes
_SHORTEST_BLOCK_S, _LONGEST_BLOCK_S = 2.0, 30.0


def survey(
    config: Config,
    data: PreparedData,
    *,
    goal: Goal,
    scale_batch: bool,
    budget_s: float,
    keep: Sequence[Knob] = (),
) -> Space:
    """Return what a rank of a config may try: its share of this machine.  Does I/O; starts nothing on a GPU.

    Args:
        keep: knobs that nothing changes.
    """
    source, on_gpu, ranks = Setting.of(config), choose_device().type == "cuda", local_ranks(config)
    cores = usable_cores(os.getpid()) / ranks
    is_capped = config.training.prefetch_mib is not None  # then the factor hardly matters
    remote = any(volume.source.remote for volume in (*data.volumes, *data.conditions))
    return Space(
        source=source,
        goal=goal,
        scale_batch=scale_batch,
        budget_s=budget_s,
        block_s=min(max(budget_s / _BLOCKS, _SHORTEST_BLOCK_S), _LONGEST_BLOCK_S),
        on_gpu=on_gpu,
        cores=cores,
        most_workers=_most_workers(config, data, cores, remote, ranks),
        most_prefetch=source.prefetch_factor if is_capped else max(_MOST_PREFETCH, source.prefetch_factor),
        remote=remote,
        most_requests=max(_MOST_REQUESTS, source.requests),
        most_batch=_most_batch(config, scale_batch),
        levels=tuple(range(0 if config.model.full_res_channels else 1, len(config.model.channels) + 1)),
        deterministic=config.training.deterministic,
        ram_limit_bytes=ram_left(config) // ranks,
        vram_limit_bytes=vram_left() if on_gpu else None,
        kept=tuple(keep),
    )


def describe_machine() -> Machine:
    """Describe this machine."""
    device = choose_device()
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return Machine(
        host=platform.node(),
        cores=usable_cores(os.getpid()),
        ram_gib=round(sample_system(os.getpid()).machine.total_bytes / GIB, 2),
        gpu=gpu.name if gpu else None,
        gpu_gib=round(gpu.total_memory / GIB, 2) if gpu else None,
    )


def ram_left(config: Config) -> int:
    """Return the bytes a run may use before the guard's first threshold, given the current use of other processes.

    The smallest over all memory limits: the machine, control groups, Ray's monitor, `monitor.ram_limit_gib`.
    """
    training = config.training.model_copy(update={"workers": max(config.training.workers, 1)})  # includes Ray's monitor
    limits = memory_limits(config.model_copy(update={"training": training}))
    return left_bytes(killers_of(sample_system(os.getpid()), limits), limits)


def vram_left() -> int:
    """Return the GPU bytes a run may use, given what other processes hold now."""
    gpu = torch.cuda.get_device_properties(choose_device())
    with Gpus() as gpus:
        used_bytes = sum(use.used_bytes for use in gpus.sample() if str(getattr(gpu, "uuid", None)) in use.uuid)
    return int(_VRAM_SHARE * gpu.total_memory) - used_bytes


def _most_workers(config: Config, data: PreparedData, cores: float, remote: bool, ranks: int) -> int:
    """Return the most readers: one per core (several on a remote store), with blocks that fit into /dev/shm."""
    source = config.training.workers
    most = max(source, int(cores * (READERS_PER_CORE if remote else 1)), 1)
    while most > source:
        options = replace(StreamOptions.from_config(config.training, config.cluster), workers=most)
        try:
            check_store_need(data.job, options)
            check_store(data.job, options, ranks)
            return most
        except ConfigError:
            most -= 1
    return most


def _most_batch(config: Config, scale_batch: bool) -> int:
    most = LARGEST_PLANNED_BATCH if scale_batch else Setting.of(config).global_batch
    return min(most, max(indexable_batch(config), config.training.train_batch_size))


class ConfigPlanner:
    """Predicts the memory of each setting of a config of one rank with `ram_plan.py` and `memory_plan.py`.

    Caches its results; each takes up to seconds.

    Attributes:
        task_samples: samples of a reader task.
    """

    def __init__(self, config: Config, data: PreparedData, on_gpu: bool) -> None:
        self._config = config
        self._data = data
        self._on_gpu = on_gpu
        self.task_samples = data.plan.samples_per_task
        self._ram: dict[Setting, tuple[int, int]] = {}
        self._vram: dict[Setting, int] = {}

    def ram_bytes(self, setting: Setting) -> int:
        """Peak host memory of a short run."""
        return self._plan_ram(setting)[0]

    def later_bytes(self, setting: Setting) -> int:
        """Additional host memory of the whole run, which is longer."""
        trial_bytes, run_bytes = self._plan_ram(setting)
        return max(run_bytes - trial_bytes, 0)

    def _plan_ram(self, setting: Setting) -> tuple[int, int]:
        """Return the RAM of a trial and of the whole run."""
        if setting not in self._ram:
            run = setting.applied_to(self._config)
            short = run.training.model_copy(update={"max_steps": _PLANNED_STEPS})
            trial = run.model_copy(update={"training": short})
            both = [plan_ram(config, self._data, self._on_gpu).total_bytes for config in (trial, run)]
            self._ram[setting] = both[0], both[1]
        return self._ram[setting]

    def vram_bytes(self, setting: Setting) -> int | None:
        """Peak GPU memory, with the reserve; None on a CPU."""
        if not self._on_gpu:
            return None
        if setting not in self._vram:
            config = setting.applied_to(self._config)
            amp = resolve_amp(config.training.amp, choose_device())
            self._vram[setting] = plan_memory(config, amp=amp).vram_bytes
        return self._vram[setting]
