"""How many more processes and threads this process and its children may start."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from dataclasses import dataclass

import psutil

from vesuvius.monitor.probes.cgroup import cgroup_chain
from vesuvius.monitor.probes.files import read_text


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
    """The limits of the user and of the cgroups, the tightest first.  Does I/O: a small file for each process."""
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
    """Threads of all visible processes of the real user of this one."""
    user, count = os.getuid(), 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.uids().real == user:
                count += process.num_threads()
    return count
