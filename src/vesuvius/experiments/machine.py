"""The machine and the folder of an experiment, its free memory, and the planned memory of a trial."""

import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vesuvius.accelerator import choose_device, properties
from vesuvius.config import Config
from vesuvius.errors import storage_errors
from vesuvius.monitor.memory.limits import left_bytes, limits_of
from vesuvius.monitor.probes.cores import usable_cores
from vesuvius.monitor.probes.gpus import Gpus
from vesuvius.monitor.probes.system_sample import sample_system
from vesuvius.report.model import commit_text
from vesuvius.runlog.files import write_atomically
from vesuvius.runlog.redact import redacted
from vesuvius.runlog.run_dir import RunDir, describe_environment
from vesuvius.runlog.units import GIB
from vesuvius.stream.start.prepare import PreparedData
from vesuvius.training.forecast.plan import VRAM_SHARE, plan_run, resolve_micro_batch
from vesuvius.training.reporting.monitoring import memory_policy

_OF_OTHERS = (ConnectionError, TimeoutError, BlockingIOError)  # network errors, or a process that cannot start
_PLANNED_STEPS = 100  # typical steps of a trial: few tasks, so no handover between Ray executions


def machine_words() -> str:
    """`box: 12 cores, 170 GiB of RAM, NVIDIA A100 (80 GiB)`."""
    device, ram_bytes = choose_device(), sample_system(os.getpid()).machine.total_bytes
    gpu = properties(device) if device.type != "cpu" else None
    words = f"{gpu.name} ({gpu.total_memory / GIB:.0f} GiB)" if gpu else "no GPU"
    return f"{platform.node()}: {usable_cores(os.getpid()):g} cores, {ram_bytes / GIB:.0f} GiB of RAM, {words}"


def facts_of_this_place() -> dict[str, str]:
    environment = describe_environment()
    packages = {name: version for name, version in environment["packages"].items() if version}
    return {
        "machine": f"{machine_words()}; {environment['platform']}",
        "versions": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "commit": commit_text(environment),
    }


def ram_left(config: Config) -> int:
    """The bytes a run may use before the guard's first threshold, given the current use of other processes."""
    limits = memory_policy(config.with_training(workers=max(config.training.workers, 1)))  # includes Ray's monitor
    return left_bytes(limits_of(sample_system(os.getpid()), limits), limits)


def vram_left() -> int:
    """The GPU bytes a run may use, given what other processes hold now."""
    total_bytes, used_bytes = _vram()
    return int(VRAM_SHARE * total_bytes) - used_bytes


def with_micro_batch(config: Config) -> Config:
    """The config with the number that a run would choose now for `training.train_batch_size: auto`."""
    if config.training.train_batch_size != "auto":
        return config
    available_bytes = None
    if choose_device().type != "cpu":
        total_bytes, used_bytes = _vram()
        available_bytes = total_bytes - used_bytes
    return config.with_micro_batch(resolve_micro_batch(config, available_bytes)[0].training.micro_batch)


def _vram() -> tuple[int, int]:
    gpu = properties(choose_device())
    with Gpus(within_s=10.0) as gpus:
        used_bytes = sum(use.used_bytes or 0 for use in gpus.sample() if str(gpu.uuid) in use.uuid)
    return gpu.total_memory, used_bytes


def planned_bytes(config: Config, data: PreparedData) -> tuple[int, int | None]:
    """The planned peak bytes of host and GPU (None on a CPU, else with the reserve) of a short trial."""
    plan = plan_run(config.with_training(max_steps=_PLANNED_STEPS), data)
    return plan.ram_bytes, plan.step.vram_bytes if plan.step else None


@contextmanager
def locked(directory: Path) -> Iterator[int]:
    """Lock the directory, yielding the lock's descriptor.  Raises ConfigError if it is in use, and StorageError."""
    locked, remedy = RunDir(directory).locked(new=False), "free some space and start again, or set VESUVIUS_RUNS"
    with storage_errors(f"the run directory {directory}", remedy, but=_OF_OTHERS), locked as lock:
        yield lock


def write_figures(path: Path, figures: Mapping[str, Any]) -> None:
    """Write all figures of an experiment as JSON, atomically and without secrets.  Raises OSError."""
    write_atomically(path, (json.dumps(redacted(figures), indent=1, allow_nan=False) + "\n").encode())
