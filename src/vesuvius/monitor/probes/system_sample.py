"""One sample of a run: what the system says of its processes, its cgroup, the machine and the GPUs at one moment."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from vesuvius.monitor.probes.cgroup import CgroupUse, read_cgroup
from vesuvius.monitor.probes.gpus import Gpus, GpuUse
from vesuvius.monitor.probes.machine import MachineUse, read_machine
from vesuvius.monitor.probes.processes import ProcessTree, ProcessUse, largest_processes


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
    gpus_silent_s: float = 0.0  # for how long NVML has not answered; 0 = it has

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
        gpus: open NVML; None = GPUs are not looked at.

    Raises:
        ProcessLookupError: from `sample`, once the root is gone.
    """

    def __init__(self, pid: int, gpus: Gpus | None = None) -> None:
        self._pid = pid
        self._gpus = gpus
        self._tree = ProcessTree(pid)

    def also(self, pids: Collection[int]) -> None:
        """From now on these processes, and their descendants, belong to the run wherever they stem from."""
        self._tree.also(pids)

    def sample(self) -> SystemSample:
        """Read everything once.  Takes milliseconds; never PSS, which takes seconds for large processes."""
        processes = self._tree.sample()
        return sample_system(self._pid, self._gpus, processes, self._tree.shared_bytes())

    def largest_others(self, sample: SystemSample, count: int) -> list[ProcessUse]:
        """Processes that are none of the run's, largest first.  Reads all that can be seen."""
        return largest_processes(count, {process.pid for process in sample.processes})


def sample_system(
    pid: int,
    gpus: Gpus | None = None,
    processes: Sequence[ProcessUse] = (),
    shared_bytes: int = 0,
) -> SystemSample:
    """A sample of the machine, its GPUs and the cgroup of a process, with the processes that the caller has found."""
    return SystemSample(
        time=time.time(),
        processes=tuple(processes),
        shared_bytes=shared_bytes,
        cgroup=read_cgroup(pid),
        machine=read_machine(),
        gpus=tuple(gpus.sample()) if gpus else (),
        clock_s=time.monotonic(),
        gpus_silent_s=gpus.silent_s if gpus else 0.0,
    )


@dataclass(frozen=True)
class Rates:
    """What happened between two looks."""

    core_busy: tuple[float, ...]  # share of the time that each core worked, 0 to 1
    # by pid, processor seconds per second: 1.0 = one core; processes that were there at both looks
    process_cores: Mapping[int, float]

    def idle_cores(self, among: Collection[int]) -> float:
        """How many of some processors had nothing to do, on average; of all where their numbers are unknown."""
        busy = [self.core_busy[core] for core in among if core < len(self.core_busy)]
        return sum(1 - share for share in (busy if len(busy) == len(among) else self.core_busy))


def rates_between(before: SystemSample, after: SystemSample) -> Rates | None:
    """None where no time has passed or a counter ran backwards (the machine was suspended or restored).  Pure."""
    seconds = after.clock_s - before.clock_s
    cores = _differences(before.machine.core_total_s, after.machine.core_total_s)
    busy = _differences(before.machine.core_busy_s, after.machine.core_busy_s)
    if seconds <= 0 or cores is None or busy is None:
        return None
    return Rates(
        # A look may come sooner than the next tick of the clock that counts them.
        core_busy=tuple(min(work / whole, 1.0) if whole > 0 else 0.0 for work, whole in zip(busy, cores, strict=True)),
        process_cores=_process_cores(before, after, seconds),
    )


def _differences(before: Sequence[float], after: Sequence[float]) -> list[float] | None:
    """None where one fell, or where there are more or fewer than before: a core was switched on or off."""
    if len(before) != len(after):
        return None
    differences = [late - early for early, late in zip(before, after, strict=True)]
    return None if any(difference < 0 for difference in differences) else differences


def _process_cores(before: SystemSample, after: SystemSample, seconds: float) -> dict[int, float]:
    early = {(process.pid, process.started_s): process.cpu_s for process in before.processes}
    return {
        process.pid: max(process.cpu_s - early[process.pid, process.started_s], 0.0) / seconds
        for process in after.processes
        if (process.pid, process.started_s) in early
    }
