"""`vesuvius doctor`: checks of this machine, and of a config on it; each runs on a thread, as it may fail or hang."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from vesuvius.config import Config, TrainingConfig
from vesuvius.errors import needs_extra, one_line
from vesuvius.monitor.memory.limits import MemoryPolicy, tightest
from vesuvius.monitor.probes.cores import usable_cores
from vesuvius.monitor.probes.gpus import Gpus
from vesuvius.monitor.probes.system_sample import sample_system
from vesuvius.runlog.files import free_disk_bytes, nearest_existing, take_lock
from vesuvius.runlog.find_run import runs_root
from vesuvius.runlog.run_dir import installed_version
from vesuvius.runlog.units import GIB, format_count, format_size, format_sizes
from vesuvius.stream.options import StreamOptions, store_bytes
from vesuvius.threads import on_thread

if TYPE_CHECKING:
    from vesuvius.stream.start.prepare import PreparedData

WITHIN_S = 25.0
_RAY_S = 22.0
_GIVE_UP_MINUTES = 0.15  # do not wait for the end of an outage
_GPU_HANGS = "the GPU or its driver hangs: see dmesg; restart the machine"
_DRY_RUN = "run `vesuvius train --dry-run`, which has no time limit"
_STORE_HANGS = "check the network, the mount and the address in data.volumes"
_RAY = """
import sys
from vesuvius.config import ClusterConfig
from vesuvius.stream.ray.session import Session
address = sys.argv[1] or None
Session(ClusterConfig(address=address), workers=1, ranks=1, store_bytes=2**28).close()
"""

DISTRIBUTION = "vesuvius-diffusion"

Level = Literal["ok", "warn", "fail"]

_SHOWN = ("torch", "ray", "zarr", "numpy")
_FEW_BYTES = 4 * GIB
_RAM_LEFT_SHARE = 0.2
LEAST_SHM_BYTES = 2**28
"""Least size that Ray needs."""


@dataclass(frozen=True)
class Finding:
    level: Level
    value: str  # with its unit
    remedy: str = ""  # empty if all is well


@dataclass(frozen=True)
class Check:
    name: str
    run: Callable[[], Finding]  # an exception counts as a failure
    if_late: str = "find out what it is waiting for"  # remedy if it hangs
    late: Level = "fail"  # level if it hangs


def examine(checks: Sequence[Check], within_s: float) -> Iterator[tuple[str, Finding]]:
    """Run all checks at once, within `within_s` together, and yield their names and findings in order.

    A check that hangs is left in its daemon thread and counts as a failure, or as a warning on an overloaded machine.
    """
    until = time.monotonic() + within_s
    begun = [(check, on_thread(_run, check, name=f"doctor: {check.name}")) for check in checks]
    for check, pending in begun:
        try:
            yield check.name, pending.result(max(until - time.monotonic(), 0.0))
        except TimeoutError:
            yield check.name, _late(check.late, f"no result within {within_s:.0f} s", check.if_late)


def _late(level: Level, value: str, remedy: str) -> Finding:
    """Return the finding of a check without an answer: only a warning on an overloaded machine."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores + 1:  # this program is one of them
        return Finding("warn", f"{value}, load {load:.1f} on {cores} cores", "try again when the cores are idle")
    return Finding(level, value, remedy)


def _run(check: Check) -> Finding:
    try:
        with needs_extra(f"The check of {check.name}"):
            return check.run()
    except BaseException as error:  # nobody else sees exceptions of this thread
        value, _, remedy = one_line(error, 400).rpartition("; ")  # our messages end with what to do
        if value:
            return Finding("fail", value, remedy)
        return Finding("fail", f"{type(error).__name__}: {remedy or 'no message'}")


def checks_of(config: Config | None) -> list[Check]:
    """Return the checks in the order shown; those of a config share the opened volumes."""
    needs_ray = config is None or config.training.workers > 0 or _ranks(config) > 1
    no_ray = Finding("ok", "not needed with training.workers=0")
    opened = None if config is None else on_thread(_open_data, config, name="doctor: volumes")
    of_config = []
    if config is not None and opened is not None:
        of_config = [
            Check("volumes", lambda: _volumes(opened.result()), _STORE_HANGS),
            Check("memory plan", lambda: _plan(config, opened), _DRY_RUN, "warn"),
            Check("limits", lambda: _limits(config)),
        ]
    return [
        Check("versions", check_versions),
        Check("cores", lambda: check_cores(config.training.workers if config else None, _ranks(config))),
        Check("memory", check_memory),
        Check("disk", lambda: _disk(config), "a mount hangs; set VESUVIUS_RUNS to another folder"),
        *of_config,
        Check("/dev/shm", lambda: _shm(config, opened) if needs_ray else no_ray),
        Check("torch", check_torch),
        Check("GPU", lambda: check_gpus(config), _GPU_HANGS),
        Check("Ray", lambda: start_ray(config.cluster.address if config else None, _RAY_S) if needs_ray else no_ray),
    ]


def _open_data(config: Config) -> PreparedData:
    """Open the volumes without the disk cache.  Raises DataError, soon if a store does not respond."""
    from vesuvius.stream.start.prepare import prepare_data

    data = config.data.with_store(outage_minutes=_GIVE_UP_MINUTES, cache_dir=None)
    return prepare_data(config.seed, data, world_size=_ranks(config))


def _ranks(config: Config | None) -> int:
    if config is None or config.training.ranks == 1:
        return 1
    from vesuvius.training.forecast.plan import num_local_ranks  # imports torch

    return num_local_ranks(config)


def _disk(config: Config | None) -> Finding:
    if config is None:
        return check_disk(runs_root())
    from vesuvius.training.forecast.plan import checkpoint_sizes

    kept = config.training.keep_last + 1  # and the best one
    return check_disk(runs_root() / config.name, sum(checkpoint_sizes(config)), kept)


def _volumes(data: PreparedData) -> Finding:
    texts = []
    for number, volume in enumerate(data.volumes):
        data.read_patch(number, data.plan.uniform_patch(number, 0))
        texts.append(f"{volume.name}: {format_sizes(volume.shape_zyx)} {volume.dtype}")
    return Finding("ok", f"{'; '.join(texts)}; a patch of each was read")


def _plan(config: Config, opened: Future[PreparedData]) -> Finding:
    """Plan RAM and GPU memory as in a dry run; tracing the network takes seconds."""
    from vesuvius.training.forecast.plan import plan_run, resolve_micro_batch

    if opened.exception():
        return Finding("warn", "not checked: the volumes could not be read", "see volumes above")
    config, chosen = resolve_micro_batch(config)
    plan = plan_run(config, opened.result())
    value = "; ".join([*chosen, *plan.lines()])
    problems = sorted(plan.problems(), key=lambda problem: not problem.refused)
    if problems:
        return Finding("fail" if problems[0].refused else "warn", value, problems[0].text.rpartition("; ")[2])
    return Finding("ok", value)


def _limits(config: Config) -> Finding:
    from vesuvius.training.forecast.preflight import check_limits

    check_limits(config, _ranks(config), 0)
    return Finding("ok", "the limit on processes and threads is high enough")


def _shm(config: Config | None, opened: Future[PreparedData] | None) -> Finding:
    if config is not None and config.cluster.address is not None:
        return Finding("ok", f"not needed: the cluster at {config.cluster.address} has its own")
    need = 0
    if config is not None and opened is not None and not opened.exception():
        options = StreamOptions.from_config(config.training, config.cluster)
        need = _ranks(config) * store_bytes(opened.result().job, options)
    return check_shm(max(need, LEAST_SHM_BYTES))


def check_torch() -> Finding:
    import torch

    return Finding("ok", f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none: built for CPUs'}")


def check_gpus(config: Config | None) -> Finding:
    """Check that torch can use the GPUs that NVML finds, and that 16-bit convolutions run on cuDNN."""
    import torch

    from vesuvius.accelerator import choose_device, device_names
    from vesuvius.training.step.self_test import cudnn_problem
    from vesuvius.training.step.setup import resolve_amp, uses_channels_last

    device = choose_device()
    if device.type == "cpu":
        with Gpus(within_s=5.0) as gpus:
            seen = ", ".join(use.name for use in gpus.sample())
        if not seen:
            return Finding("ok", f"none ({gpus.reason}): training computes on the CPU; docker run needs --gpus all")
        remedy = "install a torch whose CUDA the driver supports (`nvidia-smi` names it), or a newer driver"
        return Finding("fail", f"{seen}, which this torch cannot use", remedy)
    training = TrainingConfig() if config is None else config.training
    amp = resolve_amp(training.amp, device)
    if problem := cudnn_problem(device, amp, uses_channels_last(training, device)):
        value, _, remedy = problem.rpartition("; ")
        return Finding("fail", value, remedy)
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return Finding("ok", f"{', '.join(device_names())}, cuDNN {cudnn}, amp {amp}")


def start_ray(address: str | None, within_s: float) -> Finding:
    """Start and stop a private Ray, or connect to the cluster, in a process of its own."""
    began, where = time.monotonic(), f"the cluster at {address}" if address else "a private Ray"
    with needs_extra(where, "ray"):
        command = [sys.executable, "-c", _RAY, address or ""]
    # Not a pipe: Ray's daemons would keep it open.
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        try:
            code = process.wait(within_s)
        except subprocess.TimeoutExpired:
            for each in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    each.kill()
            process.kill()
            return _late("fail", f"{where} did not start in {within_s:.0f} s", "training.workers=0 runs without Ray")
        output.seek(0)
        lines = output.read().decode("utf-8", "replace").strip().splitlines() or [f"exit code {code}"]
    if code != 0:
        remedy = "correct this, or set training.workers=0 to run without Ray"
        return Finding("fail", f"{where} did not start: {one_line(lines[-1], 300)}", remedy)
    return Finding("ok", f"{where} started and ended in {time.monotonic() - began:.1f} s")


def check_versions() -> Finding:
    """Check Python and packages against the requirements, and that no other distribution has our import name."""
    if (version := installed_version("vesuvius")) is not None:  # they overwrite each other
        value = f"the distribution 'vesuvius' {version} is installed as well and uses the same import name"
        return Finding("fail", value, "uninstall it and reinstall this one, or use a fresh virtual environment")
    from packaging.requirements import Requirement  # a dependency of Ray's

    try:
        needs = [Requirement(line) for line in importlib.metadata.requires(DISTRIBUTION) or []]
    except importlib.metadata.PackageNotFoundError:
        return Finding("warn", f"{DISTRIBUTION} is not installed, so versions cannot be checked", "run `make install`")
    wrong = []
    for need in (need for need in needs if need.marker is None or need.marker.evaluate({"extra": "train"})):
        version = installed_version(need.name)
        if version is None or not need.specifier.contains(version, prereleases=True):
            wrong.append((f"{need.name} {version or 'missing'}", f"'{need.name}{need.specifier}'"))
    if wrong:
        value = f"{', '.join(have for have, _ in wrong)} instead of {', '.join(want for _, want in wrong)}"
        return Finding("fail", value, f"pip install {' '.join(want for _, want in wrong)}")
    shown = ", ".join(f"{name} {installed_version(name) or 'missing'}" for name in _SHOWN)
    return Finding("ok", f"Python {platform.python_version()}, {shown}")


def check_cores(workers: int | None, ranks: int = 1) -> Finding:
    """Compare the cores (affinity and quota) with the trainers and readers; `workers` None = no config."""
    cores = usable_cores(os.getpid())
    value = f"{cores:g} of {os.cpu_count()} cores"
    if workers is None:
        return Finding("ok", value)
    of_ranks = f" of each of {ranks} ranks" if ranks > 1 else ""
    value += f" for {format_count(workers, 'worker')} and the trainer{of_ranks}"
    if ranks * (workers + 1) <= cores:
        return Finding("ok", value)
    fit, more = max(math.floor(cores / ranks) - 1, 0), f"(docker run --cpus={ranks * (workers + 1)})"
    return Finding("warn", value, f"set training.workers={fit}, or provide more cores {more}")


def check_memory() -> Finding:
    limit = tightest(sample_system(os.getpid()), MemoryPolicy())
    value = f"{format_size(limit.total_bytes)} ({limit.name}), {format_size(limit.used_bytes)} in use"
    if limit.left_bytes < _RAM_LEFT_SHARE * limit.total_bytes:
        return Finding("warn", value, "stop other programs, or raise the limit (docker run --memory)")
    return Finding("ok", value)


def check_shm(need_bytes: int) -> Finding:
    """Compare the free space in /dev/shm with the need of Ray's object stores."""
    shared = Path("/dev/shm")
    option = f"--shm-size={math.ceil(1.1 * need_bytes / GIB)}g"  # with room for other files
    if not shared.is_dir():
        remedy = f"start the container with {option}"
        return Finding("warn", "/dev/shm does not exist, so Ray would keep its object store on disk", remedy)
    free = shutil.disk_usage(shared).free
    value = f"{format_size(free)} free in /dev/shm, {format_size(need_bytes)} needed"
    if need_bytes > free:
        lower = "lower data.regions_in_flight or training.workers"
        return Finding("fail", value, f"start the container with {option}, or {lower}")
    return Finding("ok", f"{value} (docker run {option})")


def check_disk(directory: Path, checkpoint_bytes: int = 0, kept: int = 0) -> Finding:
    """Check that the run directory, or its nearest parent, can be written, locked, and hold `kept` + 1 checkpoints."""
    there = nearest_existing(directory)
    if not there.is_dir():
        return Finding("fail", f"{there} is a file, not a folder", "move it away, or set VESUVIUS_RUNS")
    try:
        _try_disk(there)
    except OSError as error:
        remedy = "give this user permission (docker run --user, or chown), or set VESUVIUS_RUNS to another folder"
        return Finding("fail", f"{there} is not writable: {error.strerror or error}", remedy)
    free, need = free_disk_bytes(there), max((kept + 1) * checkpoint_bytes, _FEW_BYTES)
    value = f"{there}: writable, {format_size(free)} free"
    if checkpoint_bytes:
        value += f", {format_size((kept + 1) * checkpoint_bytes)} for {kept + 1} checkpoints"
    if need <= free:
        return Finding("ok", value)
    remedy = "free some space, lower training.keep_last, or set VESUVIUS_RUNS to a larger disk"
    return Finding("fail" if checkpoint_bytes > free else "warn", value, remedy)


def _try_disk(directory: Path) -> None:
    """Write, flush and lock a temporary file.  Raises OSError, and StorageError without locks."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".doctor.") as file:
        take_lock(file.fileno(), Path(file.name))
        file.write(b"doctor")
        file.flush()
        os.fsync(file.fileno())
