"""What a tune begins with: the machine, the limits it stays below, and what each setting should take of them."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import replace

import torch

from vesuvius.config import Config
from vesuvius.engine.memory_plan import LARGEST_PLANNED_BATCH, indexable_batch, plan_memory
from vesuvius.engine.ram_plan import plan_ram
from vesuvius.engine.step import choose_device, resolve_amp
from vesuvius.engine.watching import memory_limits
from vesuvius.errors import ConfigError
from vesuvius.lab.tune.ledger import Machine
from vesuvius.lab.tune.terms.setting import Knob, Setting
from vesuvius.lab.tune.terms.space import Goal, Space
from vesuvius.observe.risk.killers import killers_of, left_bytes
from vesuvius.observe.system.cores import usable_cores
from vesuvius.observe.system.gpus import Gpus
from vesuvius.observe.system.look import look_around
from vesuvius.observe.units import GIB
from vesuvius.stream.options import StreamOptions, check_store, check_store_need
from vesuvius.stream.prepare import PreparedData

_MOST_PREFETCH = 16
_MOST_REQUESTS = 256
# Readers of a remote store wait for it most of the time: more of them than processors are of use.
_READERS_PER_CORE_REMOTE = 4
_VRAM_SHARE = 0.92
_FIRST_TRIAL_S = 90.0
_SHORTEST_LIMIT_S = 30.0
_PLANNED_STEPS = 100  # of a trial, mostly: few tasks, so that no execution of Ray hands over to another


def survey(
    config: Config,
    data: PreparedData,
    *,
    goal: Goal,
    scale_batch: bool,
    budget_s: float,
    steps: int,
    keep: Sequence[Knob] = (),
) -> Space:
    """What may be tried with a config on this machine.  Does I/O; starts nothing on a GPU.

    Args:
        steps: measured in a trial at most; half as many where they agree well.
        keep: knobs that no trial turns.
    """
    source, on_gpu = Setting.of(config), choose_device().type == "cuda"
    cores = usable_cores(os.getpid())
    limit_s = max(budget_s / 6, _SHORTEST_LIMIT_S)
    remote = any(volume.source.remote for volume in (*data.volumes, *data.conditions))
    return Space(
        source=source,
        goal=goal,
        scale_batch=scale_batch,
        budget_s=budget_s,
        on_gpu=on_gpu,
        cores=cores,
        most_workers=_most_workers(config, data, cores, remote),
        most_prefetch=max(_MOST_PREFETCH, source.prefetch_factor),
        remote=remote,
        most_requests=max(_MOST_REQUESTS, source.requests),
        most_batch=_most_batch(config, scale_batch),
        levels=tuple(range(0 if config.model.full_res_channels else 1, len(config.model.channels) + 1)),
        deterministic=config.training.deterministic,
        ram_limit_bytes=ram_left(config),
        vram_limit_bytes=vram_left() if on_gpu else None,
        trial_s=min(_FIRST_TRIAL_S, limit_s),
        trial_steps=(steps // 2, steps),
        trial_limit_s=limit_s,
        most_ahead=_most_ahead(config, data),
        kept=tuple(keep),
    )


def describe_machine() -> Machine:
    """This one."""
    device = choose_device()
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return Machine(
        host=platform.node(),
        cores=usable_cores(os.getpid()),
        ram_gib=round(look_around(os.getpid()).machine.total_bytes / GIB, 2),
        gpu=gpu.name if gpu else None,
        gpu_gib=round(gpu.total_memory / GIB, 2) if gpu else None,
    )


def ram_left(config: Config) -> int:
    """Bytes of memory that a run may take before the guard's first rung, beside what others use now.

    The smallest over all killers: the machine, control groups, Ray's monitor, `monitor.ram_limit_gib`.
    """
    training = config.training.model_copy(update={"workers": max(config.training.workers, 1)})  # Ray's monitor counts
    limits = memory_limits(config.model_copy(update={"training": training}))
    return left_bytes(killers_of(look_around(os.getpid()), limits), limits)


def vram_left() -> int:
    """Bytes of the GPU that a run may take beside what other processes hold on it now."""
    gpu = torch.cuda.get_device_properties(choose_device())
    with Gpus() as gpus:
        used_bytes = sum(use.used_bytes for use in gpus.look() if str(getattr(gpu, "uuid", None)) in use.uuid)
    return int(_VRAM_SHARE * gpu.total_memory) - used_bytes


def _most_workers(config: Config, data: PreparedData, cores: float, remote: bool) -> int:
    """Readers that have a processor each, or a request, and whose blocks fit into /dev/shm."""
    source = config.training.workers
    most = max(source, int(cores * (_READERS_PER_CORE_REMOTE if remote else 1)), 1)
    while most > source:
        options = replace(StreamOptions.from_config(config.training, config.cluster), workers=most)
        try:
            check_store_need(data.job, options)
            check_store(data.job, options)
            return most
        except ConfigError:
            most -= 1
    return most


def _most_batch(config: Config, scale_batch: bool) -> int:
    most = LARGEST_PLANNED_BATCH if scale_batch else config.global_batch
    return min(most, max(indexable_batch(config), config.training.train_batch_size))


def _most_ahead(config: Config, data: PreparedData) -> int | None:
    """Batches ahead that `training.prefetch_mib` allows."""
    mib, batch_bytes = config.training.prefetch_mib, config.training.train_batch_size * data.job.patch_bytes
    return None if mib is None else max(mib * 2**20 // batch_bytes, 1)


class ConfigPlanner:
    """What the plans of memory (`ram_plan.py`, `memory_plan.py`) say of each setting of a config.

    Remembers its answers, each of which takes up to seconds.

    Attributes:
        task_samples: that a reader reads at once.
    """

    def __init__(self, config: Config, data: PreparedData, on_gpu: bool) -> None:
        self._config = config
        self._data = data
        self._on_gpu = on_gpu
        self.task_samples = data.plan.samples_per_task
        self._ram: dict[Setting, tuple[int, int]] = {}
        self._vram: dict[Setting, int] = {}

    def ram_bytes(self, setting: Setting) -> int:
        """Host memory of a trial, at its peak."""
        return self._plan_ram(setting)[0]

    def later_bytes(self, setting: Setting) -> int:
        """What the run takes more, being longer."""
        trial_bytes, run_bytes = self._plan_ram(setting)
        return max(run_bytes - trial_bytes, 0)

    def _plan_ram(self, setting: Setting) -> tuple[int, int]:
        """Of a trial, and of the whole run."""
        if setting not in self._ram:
            run = setting.applied_to(self._config)
            short = run.training.model_copy(update={"max_steps": _PLANNED_STEPS})
            trial = run.model_copy(update={"training": short})
            both = [plan_ram(config, self._data, self._on_gpu).total_bytes for config in (trial, run)]
            self._ram[setting] = both[0], both[1]
        return self._ram[setting]

    def vram_bytes(self, setting: Setting) -> int | None:
        """GPU memory with the reserve; None on a CPU."""
        if not self._on_gpu:
            return None
        if setting not in self._vram:
            config = setting.applied_to(self._config)
            amp = resolve_amp(config.training.amp, choose_device())
            self._vram[setting] = plan_memory(config, amp=amp).vram_bytes
        return self._vram[setting]
