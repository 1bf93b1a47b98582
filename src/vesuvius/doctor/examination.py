"""The checks in their order, with what they look at."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vesuvius.config import Config
from vesuvius.doctor import host, trial
from vesuvius.doctor.check import THREADS, Check, Finding, examine
from vesuvius.monitor.probes.task_limits import task_limits
from vesuvius.runlog.find_run import runs_root
from vesuvius.runlog.units import size_text
from vesuvius.stream.options import StreamOptions, store_bytes
from vesuvius.stream.start.prepare import PreparedData

TOTAL_S = 25.0
_CLEAN_UP_S = 0.3
_TRIAL_S = 23.0
_IMPORTS_S = 15.0  # of a check that imports torch and asks a driver
_GPU_HANGS = "the GPU or its driver hangs: see dmesg; restart the machine"
_DRY_RUN = "`vesuvius train --dry-run` takes the time to plan it"


def examination(config: Config | None) -> Iterator[tuple[str, Finding]]:
    """Look at this machine, and with a config at what it needs; name and finding of each check, in order."""
    try:
        yield from examine(_Examination(config).checks(), TOTAL_S, host.busy)
    finally:
        trial.end_all()
        until = time.monotonic() + _CLEAN_UP_S
        for thread in threading.enumerate():
            if thread.name.startswith(THREADS):
                thread.join(max(until - time.monotonic(), 0.0))


class _Examination:
    """Checks that go together: what the first ones open, later ones use."""

    def __init__(self, config: Config | None) -> None:
        self._config = config
        self._directory = runs_root() / (config.name if config else "")
        self._data: PreparedData | None = None
        self._patch_s: float | None = None  # that one reader takes for a patch; None = not measured

    def checks(self) -> list[Check]:
        """Those that measure a speed, or that others need, first; those that import torch beside each other."""
        config, directory = self._config, self._directory
        of_config = [
            Check("volumes", self._volumes, 10.0, "check the network, the mount and the address in data.volumes"),
            Check("memory plan", self._plan, _TRIAL_S, _DRY_RUN, "warn", beside=True),
            Check("checkpoints", self._checkpoints, _TRIAL_S, beside=True),
        ]
        return [
            Check("versions", host.look_at_versions),
            Check("import name", host.look_for_namesake),
            Check("processors", self._cores, _IMPORTS_S, beside=True),
            Check("memory", host.look_at_memory),
            Check("disk", lambda: host.look_at_disk(directory), if_hung="a mount hangs: set VESUVIUS_RUNS elsewhere"),
            *(of_config if config else []),
            Check("/dev/shm", self._shm, _IMPORTS_S, beside=True),
            Check("limits", self._limits, _IMPORTS_S, beside=True),
            Check("torch", lambda: _device("look_at_torch"), _IMPORTS_S, beside=True),
            Check("GPU", lambda: _device("look_at_gpus"), _IMPORTS_S, _GPU_HANGS, beside=True),
            Check("cuDNN", lambda: _device("look_at_cudnn", config), _IMPORTS_S, beside=True),
            Check("kernels", lambda: _device("look_at_kernels", config), _IMPORTS_S + 3, _GPU_HANGS, beside=True),
            Check("Ray", self._ray, TOTAL_S, beside=True),
            Check("one step", self._one_step, TOTAL_S, beside=True),
        ]

    def _volumes(self) -> Finding:
        from vesuvius.doctor.data import open_data, time_reads

        assert self._config is not None
        self._data = data = open_data(self._config)
        found, self._patch_s = time_reads(data, self._config)
        return found

    def _cores(self) -> Finding:
        workers = None if self._config is None else self._config.training.workers
        return host.look_at_cores(workers, self._ranks())

    def _limits(self) -> Finding:
        """Processes and threads that may be started, against the config's, or those of one reader."""
        from vesuvius.training.forecast.limits import task_problem, tasks_needed

        config = self._config
        workers, ranks, cores = config.training.workers if config else 1, self._ranks(), os.cpu_count() or 1
        workers = 0 if config is not None and config.cluster.address else workers
        limits = task_limits()
        problem, remedy = task_problem(workers, ranks, cores, limits)
        if problem:
            return Finding("fail", problem, remedy)
        need = f"about {tasks_needed(workers, ranks, cores)} processes and threads needed"
        return Finding("ok", f"{need}, {limits[0].left} allowed ({limits[0].name})" if limits else f"{need}, no limit")

    def _ranks(self) -> int:
        """That share this machine."""
        config = self._config
        if config is None or config.training.ranks == 1:
            return 1
        from vesuvius.training.forecast.ram_plan import local_ranks  # imports torch

        return local_ranks(config)

    def _shm(self) -> Finding:
        config = self._config
        if config is not None and config.cluster.address is not None:
            return Finding("ok", f"the one of the cluster at {config.cluster.address} is used")
        need = None
        if config is not None and not self._needs_ray():
            need = 0
        elif config is not None and self._data is not None:
            options = StreamOptions.from_config(config.training, config.cluster)
            need = max(self._ranks() * store_bytes(self._data.job, options), host.LEAST_SHM_BYTES)
        return host.look_at_shm(need, host.free_shm())

    def _needs_ray(self) -> bool:
        """For readers, or for several ranks."""
        return self._config is None or self._config.training.workers > 0 or self._ranks() > 1

    def _checkpoints(self) -> Finding:
        from vesuvius.training.forecast.preflight import checkpoint_sizes

        assert self._config is not None
        kept = self._config.training.keep_last + 1  # and the best one
        return host.look_at_checkpoints(self._directory, sum(checkpoint_sizes(self._config)), kept)

    def _plan(self) -> Finding:
        """RAM, and on a GPU its memory, as a dry run has them; tracing the network takes seconds."""
        from vesuvius.doctor.device import look_at_vram
        from vesuvius.training.forecast.memory_plan import plan_memory
        from vesuvius.training.forecast.ram_plan import plan_ram, ram_limit, ram_warning
        from vesuvius.training.step.step import choose_device

        config, data = self._config, self._data
        assert config is not None
        if data is None:
            return _untried()
        plan, limit = plan_ram(config, data), ram_limit(config)
        value = f"RAM {size_text(plan.total_bytes)} planned of {size_text(limit.limit_bytes)} ({limit.name})"
        if warning := ram_warning(config, data, plan, limit):
            short = plan.total_bytes > limit.limit_bytes
            return Finding("fail" if short else "warn", value, warning.rpartition("; ")[2])
        if choose_device().type != "cuda":
            return Finding("ok", value)
        vram = look_at_vram(plan_memory(config).vram_bytes)
        return replace(vram, value=f"{value}; VRAM {vram.value}")

    def _ray(self) -> Finding:
        if not self._needs_ray():
            return Finding("ok", "not needed with training.workers=0")
        return trial.start_ray(self._config.cluster.address if self._config else None, _TRIAL_S - 2)

    def _one_step(self) -> Finding:
        if self._config is not None and self._data is None:
            return _untried()
        from vesuvius.training.step.step import choose_device

        on_gpu = choose_device().type == "cuda"
        with tempfile.TemporaryDirectory(prefix="vesuvius-doctor-") as folder:
            config = self._config or trial.small_experiment(Path(folder))
            return trial.train_one_step(config, on_gpu, _TRIAL_S - 2, self._patch_s)


def _device(look: str, *arguments: Config | None) -> Finding:
    """A check of device.py, which imports torch."""
    from vesuvius.doctor import device

    found: Finding = getattr(device, look)(*arguments)
    return found


def _untried() -> Finding:
    return Finding("warn", "not checked: the volumes could not be read", "see volumes above")
