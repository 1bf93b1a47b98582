"""How many processors a process may use: those it is bound to, and what the quotas of its cgroups allow."""

from __future__ import annotations

import os
from pathlib import Path

from vesuvius.observe.system.cgroup import cgroup_chain
from vesuvius.observe.system.files import read_text
from vesuvius.observe.system.roots import Roots


def usable_cores(pid: int, roots: Roots = Roots()) -> float:
    """Processors that a process of this machine may use; a container with a quota of 3.5 has 3.5."""
    bound = len(os.sched_getaffinity(pid)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    version, chain = cgroup_chain(pid, "cpu", roots)
    quota = _quota_v2 if version == 2 else _quota_v1
    quotas = [found for _, directory in chain if (found := quota(directory)) is not None]
    return min([float(bound), *quotas])


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
