"""How many more processes and threads this process and its children may start."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from vesuvius.monitor.probes.cgroup import cgroup_chain
from vesuvius.monitor.probes.files import read_text

# Capabilities that the limit of a user's processes does not hold for: CAP_SYS_ADMIN, CAP_SYS_RESOURCE.
_EXEMPT = 1 << 21 | 1 << 24


@dataclass(frozen=True)
class TaskLimit:
    """A limit on tasks, as the kernel calls processes and threads alike."""

    name: str
    limit: int
    others: int  # tasks that count for it and are not this process's own

    @property
    def left(self) -> int:
        """Tasks that this process may have, with its children."""
        return self.limit - self.others


def task_limits() -> list[TaskLimit]:
    """All limits that hold for this process, the tightest first.  Does I/O: a small file for each process.

    Root of the machine is exempt from the user's limit (`ulimit -u`), and nobody from those of a cgroup.
    """
    own = psutil.Process().num_threads()
    limits = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and not _is_exempt():
        limits.append(TaskLimit("`ulimit -u`", soft, _tasks_of_user() - own))
    _, chain = cgroup_chain(os.getpid(), "pids")
    for path, directory in chain:
        largest, current = (_count(directory / name) for name in ("pids.max", "pids.current"))
        if largest is not None and current is not None:
            limits.append(TaskLimit(f"pids.max of cgroup {path}", largest, current - own))
    running = (read_text(f"{psutil.PROCFS_PATH}/loadavg") or "").split()
    if len(running) > 3 and (all_tasks := running[3].rpartition("/")[2]).isdigit():
        counts = {name: _count(Path(psutil.PROCFS_PATH, "sys/kernel", name)) for name in ("threads-max", "pid_max")}
        limits += [TaskLimit(f"kernel.{name}", most, int(all_tasks) - own) for name, most in counts.items() if most]
    return sorted(limits, key=lambda limit: limit.left)


def _count(path: Path) -> int | None:
    text = (read_text(path) or "").strip()
    return int(text) if text.isdigit() else None  # `max`, or no such file


def _is_exempt() -> bool:
    """Root or a capability of the machine's own user namespace; root of another one is a user as any other."""
    if (read_text("/proc/self/uid_map") or "").split() != ["0", "0", "4294967295"]:
        return False
    effective = next(
        (line.split()[1] for line in (read_text("/proc/self/status") or "").splitlines() if line.startswith("CapEff:")),
        "0",
    )
    return os.getuid() == 0 or bool(int(effective, 16) & _EXEMPT)


def _tasks_of_user() -> int:
    """Threads of all visible processes of the real user of this one."""
    user, count = os.getuid(), 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == user:
                count += process.num_threads()
    return count
