"""Reads the cores that a process may use, throttling by CPU quotas, and limits on tasks."""

import os
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from vesuvius.monitor.probes.cgroup import cgroup_chain, read_counts, read_text


@dataclass(frozen=True)
class CpuQuota:
    """CPU quota of a cgroup: of a process or an ancestor."""

    cgroup: str  # its path
    cores: float
    periods: int  # so far
    throttled: int  # those in which it was used up


def bound_cores(pid: int = 0) -> frozenset[int]:
    """Return the cores that a process is bound to (cpuset); 0 = this process."""
    return frozenset(os.sched_getaffinity(pid))


def usable_cores(pid: int) -> float:
    """Return the number of cores that a process may use; with a quota of 3.5 cores, 3.5."""
    return min([float(len(bound_cores(pid))), *(quota.cores for quota in cpu_quotas(pid))])


def cpu_quotas(pid: int) -> tuple[CpuQuota, ...]:
    """Read the CPU quotas of a process: of its cgroup and visible ancestors, innermost first."""
    version, chain = cgroup_chain(pid, "cpu")
    quotas = []
    for path, directory in chain:
        if (cores := _cores(version, directory)) is not None:
            stat = read_counts(directory / "cpu.stat")
            quotas.append(CpuQuota(path, cores, stat.get("nr_periods", 0), stat.get("nr_throttled", 0)))
    return tuple(quotas)


def others_text(others: float, cores: float) -> str:
    """`other programs use 1.1 of 2 cores`; '' below a tenth of them.  Pure."""
    return f"other programs use {others:.1f} of {cores:g} cores" if others >= 0.1 * cores else ""


def throttling(before: Iterable[CpuQuota], after: Iterable[CpuQuota]) -> tuple[float, CpuQuota] | None:
    """Return the quota that was used up most often, with the share of its periods; None if no period passed.  Pure."""
    counted = {quota.cgroup: (quota.periods, quota.throttled) for quota in before}
    shares = []
    for quota in after:
        periods, throttled = counted.get(quota.cgroup, (0, 0))
        if quota.periods > periods:
            shares.append(((quota.throttled - throttled) / (quota.periods - periods), quota))
    return max(shares, key=lambda found: found[0], default=None)


def _cores(version: int | None, directory: Path) -> float | None:
    """Read a quota in cores; None if there is none (`max`, or -1 in version 1)."""
    names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    figures = " ".join(read_text(directory / name) or "" for name in names).split()
    if len(figures) != 2 or not all(figure.isdigit() for figure in figures):
        return None
    quota, period = map(int, figures)
    return quota / period if quota and period else None


@dataclass(frozen=True)
class TaskLimit:
    """A limit on tasks: processes and threads."""

    name: str
    limit: int
    others: int  # tasks that count towards it, without this process's own

    @property
    def left(self) -> int:
        """Tasks that this process and its children may have."""
        return self.limit - self.others


def task_limits() -> list[TaskLimit]:
    """Read the task limits of the user and the cgroups, tightest first.  Reads a small file per process."""
    own = psutil.Process().num_threads()
    limits = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.getuid() != 0:  # root is exempt
        limits.append(TaskLimit("`ulimit -u`", soft, _tasks_of_user() - own))
    _, chain = cgroup_chain(os.getpid(), "pids")
    for path, directory in chain:
        largest, current = ((read_text(directory / name) or "").strip() for name in ("pids.max", "pids.current"))
        if largest.isdigit() and current.isdigit():  # neither `max` nor missing
            limits.append(TaskLimit(f"pids.max of cgroup {path}", int(largest), int(current) - own))
    return sorted(limits, key=lambda limit: limit.left)


def _tasks_of_user() -> int:
    seen = [process.info for process in psutil.process_iter(["uids", "num_threads"])]
    return sum(info["num_threads"] or 0 for info in seen if info["uids"] and info["uids"].real == os.getuid())
