"""Which processors a process may use, what the quotas of its cgroups allow, and how often these hold it back."""

from __future__ import annotations

import os
from pathlib import Path

from vesuvius.monitor.probes.cgroup import cgroup_chain
from vesuvius.monitor.probes.files import Roots, read_counts, read_text


def bound_cores(pid: int = 0) -> frozenset[int]:
    """Processors that a process is bound to (its cpuset); 0 = this one."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(pid))
    return frozenset(range(os.cpu_count() or 1))


def usable_cores(pid: int, roots: Roots = Roots()) -> float:
    """Processors that a process of this machine may use; a container with a quota of 3.5 has 3.5."""
    version, chain = cgroup_chain(pid, "cpu", roots)
    quota = _quota_v2 if version == 2 else _quota_v1
    quotas = [found for _, directory in chain if (found := quota(directory)) is not None]
    return min([float(len(bound_cores(pid))), *quotas])


def quota_periods(pid: int, roots: Roots = Roots()) -> tuple[int, int]:
    """Periods of processor quota so far, and those in which it was used up; of the cgroup (own or above) where it was
    most often.  (0, 0) without a quota."""
    _, chain = cgroup_chain(pid, "cpu", roots)
    stats = [read_counts(directory / "cpu.stat") for _, directory in chain]
    found = [(stat.get("nr_periods", 0), stat.get("nr_throttled", 0)) for stat in stats]
    return max(found, key=lambda periods: periods[1], default=(0, 0))


def _quota_v2(directory: Path) -> float | None:
    """`cpu.max`: microseconds of processor time in each period, or max."""
    fields = (read_text(directory / "cpu.max") or "").split()
    return _quotient(*fields) if len(fields) == 2 else None


def _quota_v1(directory: Path) -> float | None:
    """-1 microseconds = none."""
    return _quotient(*(read_text(directory / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")))


def _quotient(quota: str, period: str) -> float | None:
    try:
        value = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return value if value > 0 else None
