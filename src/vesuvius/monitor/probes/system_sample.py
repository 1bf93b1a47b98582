"""One sample of a run: what the system says of its processes, its cgroup, the machine and the GPUs at one moment."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vesuvius.monitor.probes.cgroup import CgroupUse, read_cgroup
from vesuvius.monitor.probes.gpus import Gpus, GpuUse
from vesuvius.monitor.probes.machine import MachineUse, read_machine
from vesuvius.monitor.probes.processes import ProcessTree, ProcessUse, largest_processes
from vesuvius.monitor.probes.roots import Roots


@dataclass(frozen=True)
class SystemSample:
    """What was seen at one moment."""

    time: float  # seconds since 1970
    processes: tuple[ProcessUse, ...]  # the root of the run and all its descendants, Ray's among them
    shared_bytes: int  # memory that several of them map (Ray's object store), counted once
    cgroup: CgroupUse | None  # of the root; None without one
    machine: MachineUse  # the whole of it, other people's processes too
    gpus: tuple[GpuUse, ...] = ()  # empty without NVML
    clock_s: float = 0.0  # the monotonic clock, for rates: the other one may be set

    @property
    def anon_bytes(self) -> int:
        """Private and pinned memory of all processes."""
        return sum(process.anon_bytes for process in self.processes)

    @property
    def used_bytes(self) -> int:
        """What the run holds: private memory of all its processes, and what they share, once."""
        return self.anon_bytes + self.shared_bytes


class Watcher:
    """Samples a process and its descendants.

    Args:
        pid: the root of the run.
        roots: where the system is read from.
        gpus: open NVML; None = GPUs are not looked at.

    Raises:
        ProcessLookupError: from `sample`, once the root is gone.
    """

    def __init__(self, pid: int, roots: Roots = Roots(), gpus: Gpus | None = None) -> None:
        self._pid = pid
        self._roots = roots
        self._gpus = gpus
        self._tree = ProcessTree(pid, roots)

    def also(self, pids: Collection[int]) -> None:
        """From now on these processes, and their descendants, belong to the run wherever they stem from."""
        self._tree.also(pids)

    def sample(self) -> SystemSample:
        """Read everything once.  Takes milliseconds; never PSS, which takes seconds for large processes."""
        processes = self._tree.sample()
        return sample_system(self._pid, self._roots, self._gpus, processes, self._tree.shared_bytes())

    def largest_others(self, sample: SystemSample, count: int) -> list[ProcessUse]:
        """Processes that are none of the run's, largest first.  Reads all that can be seen."""
        return largest_processes(count, {process.pid for process in sample.processes}, self._roots)


def sample_system(
    pid: int,
    roots: Roots = Roots(),
    gpus: Gpus | None = None,
    processes: Sequence[ProcessUse] = (),
    shared_bytes: int = 0,
) -> SystemSample:
    """A sample of the machine, its GPUs and the cgroup of a process, with the processes that the caller has found."""
    return SystemSample(
        time=time.time(),
        processes=tuple(processes),
        shared_bytes=shared_bytes,
        cgroup=read_cgroup(pid, roots),
        machine=read_machine(roots),
        gpus=tuple(gpus.sample()) if gpus else (),
        clock_s=time.monotonic(),
    )
