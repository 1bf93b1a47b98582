"""Checks of the machine without its GPU: versions, processors, memory, disk.  What they look at can be given."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
import shutil
import uuid
from pathlib import Path

import psutil

from vesuvius.doctor.check import Finding
from vesuvius.monitor.memory.limits import Limits, tightest
from vesuvius.monitor.probes.cgroup import cgroup_chain
from vesuvius.monitor.probes.cores import cpu_quotas, throttling, usable_cores
from vesuvius.monitor.probes.files import read_text
from vesuvius.monitor.probes.system_sample import sample_system
from vesuvius.monitor.window import THROTTLED
from vesuvius.runlog.environment import installed_version
from vesuvius.runlog.files.disk_use import free_disk_bytes, nearest_existing
from vesuvius.runlog.files.file_lock import take_lock
from vesuvius.runlog.units import GIB, format_percent, size_text

DISTRIBUTION = "vesuvius-diffusion"

_SHOWN = ("torch", "ray", "zarr", "numpy")
_FEW_BYTES = 4 * GIB
_RAM_LEFT_SHARE = 0.2
LEAST_SHM_BYTES = 2**28
"""What Ray asks for at least."""


def look_at_versions() -> Finding:
    """Python and the packages, held to what this distribution asks for."""
    from packaging.requirements import Requirement  # a dependency of Ray's

    try:
        needs = [Requirement(line) for line in importlib.metadata.requires(DISTRIBUTION) or []]
    except importlib.metadata.PackageNotFoundError:
        return Finding("warn", f"{DISTRIBUTION} is not installed: versions cannot be checked", "run `make install`")
    found = {name: installed_version(name) for name in _SHOWN}
    value = f"Python {platform.python_version()}, " + ", ".join(f"{name} {v or 'missing'}" for name, v in found.items())
    wrong = []
    for need in needs:
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        version = installed_version(need.name)
        if version is None or not need.specifier.contains(version, prereleases=True):
            wrong.append((f"{need.name} {version or 'missing'}", f"'{need.name}{need.specifier}'"))
    if wrong:
        value = f"{', '.join(have for have, _ in wrong)} where {', '.join(want for _, want in wrong)} must be installed"
        return Finding("fail", value, f"pip install {' '.join(want for _, want in wrong)}")
    return Finding("ok", value)


def look_for_namesake() -> Finding:
    """Another distribution of the same import name: one overwrites the other."""
    if (version := installed_version("vesuvius")) is None:
        return Finding("ok", "no conflicting distribution")
    return Finding(
        "fail",
        f"the distribution 'vesuvius' {version} is installed alongside ours ('vesuvius-diffusion') and both use the "
        "import name vesuvius",
        "uninstall it and reinstall ours, or use a fresh virtual environment",
    )


def look_at_cores(workers: int | None, ranks: int = 1) -> Finding:
    """Processors, by affinity and quota, against the trainers and their readers; how often a quota brakes.

    Args:
        workers: readers of a rank; None = no config.
        ranks: that share this machine.
    """
    pid = os.getpid()
    cores, (throttled, quota) = usable_cores(pid), throttling((), cpu_quotas(pid)) or (0.0, None)
    value = f"{cores:g} of {os.cpu_count()} processors"
    if workers is not None:
        value += f" for {workers} readers and the trainer" + (f" of each of {ranks} ranks" if ranks > 1 else "")
    if quota is not None:
        value += f", quota of {quota.cores:g} used up in {format_percent(throttled)} of its periods so far"
    if workers is not None and ranks * (workers + 1) > cores:
        fit, more = max(math.floor(cores / ranks) - 1, 0), f"(docker run --cpus={ranks * (workers + 1)})"
        return Finding("warn", value, f"set training.workers={fit}, or give more processors {more}")
    if throttled > THROTTLED:
        return Finding("warn", value, "raise the quota (docker run --cpus), or check what else runs in this cgroup")
    return Finding("ok", value)


def busy() -> str:
    """How busy the processors are where other work keeps them so; '' where it does not.

    By pressure stall information of the own cgroup or the machine (in a container these differ), averaged over a
    minute, in which this examination is too short to reach the limit; by the load where the kernel has none.
    """
    _, chain = cgroup_chain(os.getpid(), "cpu")
    for path in (*(directory / "cpu.pressure" for _, directory in chain), Path(psutil.PROCFS_PATH, "pressure/cpu")):
        if found := re.search(r"^some .*avg60=([\d.]+)", read_text(path) or "", re.MULTILINE):
            waited = float(found[1]) / 100
            return f"tasks waited for a processor {format_percent(waited)} of the last minute" if waited > 0.5 else ""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"load {load:.1f} on {cores} processors" if load > cores + 1 else ""  # one of them is this examination


def look_at_memory() -> Finding:
    """What kills for memory first, and how much is left to it."""
    limit = tightest(sample_system(os.getpid()), Limits())
    value = f"{size_text(limit.limit_bytes)} ({limit.name}), {size_text(limit.used_bytes)} in use"
    if limit.left_bytes < _RAM_LEFT_SHARE * limit.limit_bytes:
        return Finding("warn", value, "stop what else runs here, or raise the limit (docker run --memory)")
    return Finding("ok", value)


def look_at_shm(need_bytes: int | None, free_bytes: int | None) -> Finding:
    """/dev/shm against the object store of a config.

    Args:
        need_bytes: None = no config: no more than Ray's least is asked for; 0 = no readers.
        free_bytes: None = there is no /dev/shm.
    """
    if need_bytes == 0:
        return Finding("ok", "not needed with training.workers=0")
    need = need_bytes or LEAST_SHM_BYTES
    what = "needed by this config" if need_bytes else "needed at least"
    option = f"--shm-size={shm_gib(need)}g"
    docker = f"start the container with {option}"
    if free_bytes is None:
        return Finding("warn", "there is no /dev/shm: Ray would keep its object store on disk", docker)
    value = f"{size_text(free_bytes)} free in /dev/shm, {size_text(need)} {what}"
    if need > free_bytes:
        smaller = ", or lower data.regions_in_flight, training.workers or data.reader_mib" if need_bytes else ""
        return Finding("fail", value, docker + smaller)
    return Finding("ok", f"{value} (docker run {option})" if need_bytes else value)


def shm_gib(need_bytes: int) -> int:
    """GiB for `docker run --shm-size`: the need with room for what else lies there."""
    return math.ceil(1.1 * need_bytes / GIB)


def free_shm() -> int | None:
    """Free bytes of /dev/shm; None where there is no such folder."""
    path = Path("/dev/shm")
    return shutil.disk_usage(path).free if path.is_dir() else None


def look_at_disk(directory: Path) -> Finding:
    """Whether the run directory can be written and locked, and how much room it has.

    Args:
        directory: that will be; its nearest existing parent is tried.
    """
    there = nearest_existing(directory)
    if not there.is_dir():
        return Finding("fail", f"{there} must be a folder; got a file", "move it away, or set VESUVIUS_RUNS")
    try:
        _try_disk(there)
    except OSError as error:
        remedy = "give this user permission (docker run --user, or chown), or set VESUVIUS_RUNS to another folder"
        return Finding("fail", f"{there} must be writable; got {error.strerror or error}", remedy)
    free = free_disk_bytes(there)
    value = f"{there}: {size_text(free)} free, writable"
    if free < _FEW_BYTES:
        return Finding("warn", value, "free some space, or set VESUVIUS_RUNS to a larger disk")
    return Finding("ok", value)


def look_at_checkpoints(directory: Path, checkpoint_bytes: int, kept: int) -> Finding:
    """Room for the checkpoints that are kept, and for one that is being written."""
    free = free_disk_bytes(directory)
    need = (kept + 1) * checkpoint_bytes
    value = f"{size_text(need)} for {kept + 1} checkpoints of {size_text(checkpoint_bytes)}, {size_text(free)} free"
    if need <= free:
        return Finding("ok", value)
    remedy = "free some space, lower training.keep_last, or set VESUVIUS_RUNS to a larger disk"
    return Finding("fail" if checkpoint_bytes > free else "warn", value, remedy)


def _try_disk(directory: Path) -> None:
    """Write, flush and lock a file for a moment.  Raises OSError, and StorageError without locks."""
    path = directory / f".doctor.{uuid.uuid4().hex}"
    try:
        with path.open("wb") as file:
            take_lock(file.fileno(), path)
            file.write(b"doctor")
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
