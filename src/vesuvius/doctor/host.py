"""Checks of the machine except its GPU: versions, cores, memory, disk."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vesuvius.monitor.memory.limits import MemoryPolicy, tightest
from vesuvius.monitor.probes.cores import usable_cores
from vesuvius.monitor.probes.system_sample import sample_system
from vesuvius.runlog.files import free_disk_bytes, nearest_existing, take_lock
from vesuvius.runlog.run_dir import installed_version
from vesuvius.runlog.units import GIB, format_count, format_size

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
    for need in (need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})):
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
    value += f" for {format_count(workers, 'reader')} and the trainer{of_ranks}"
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
    path = directory / f".doctor.{uuid.uuid4().hex}"
    try:
        with path.open("wb") as file:
            take_lock(file.fileno(), path)
            file.write(b"doctor")
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
