"""One sample of a run: what the system says of its processes, its cgroup, the machine and the GPUs at one moment."""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import psutil

from vesuvius.monitor.probes.cgroup import CgroupUse, read_cgroup
from vesuvius.monitor.probes.files import read_counts
from vesuvius.monitor.probes.gpus import Gpus, GpuUse
from vesuvius.monitor.probes.processes import ProcessTree, ProcessUse


@dataclass(frozen=True)
class MachineUse:
    """Counters of the machine, the processes of others included."""

    total_bytes: int  # memory of the machine
    available_bytes: int  # memory that can be had without swapping: free memory and most of the page cache
    page_cache_bytes: int  # files and reclaimable kernel memory, without shared memory
    # swap_used_bytes, swap_total_bytes: of all swap devices
    swap_used_bytes: int
    swap_total_bytes: int
    oom_kills: int | None  # processes killed by the OOM killer since boot, including those killed for a cgroup's limit
    # core_busy_s, core_total_s: seconds since boot that each core was busy, and existed
    core_busy_s: tuple[float, ...]
    core_total_s: tuple[float, ...]

    @property
    def used_bytes(self) -> int:
        """Memory that cannot be reclaimed: total less available."""
        return self.total_bytes - self.available_bytes


def read_machine() -> MachineUse:
    """Read the machine's counters once, with psutil.  Does I/O.  What the kernel does not count is 0 or None."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # psutil warns of figures that an unusual kernel lacks
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        cores = psutil.cpu_times(percpu=True)
    # /proc/stat counts the time of guests also as that of the user.
    total = [sum(core) - core.guest - core.guest_nice for core in cores]
    return MachineUse(
        total_bytes=memory.total,
        available_bytes=memory.available,
        page_cache_bytes=max(memory.cached + memory.buffers - memory.shared, 0),  # `cached` includes shared memory
        swap_used_bytes=max(swap.used, 0),
        swap_total_bytes=swap.total,
        oom_kills=read_counts(f"{psutil.PROCFS_PATH}/vmstat").get("oom_kill"),
        core_busy_s=tuple(t - core.idle - core.iowait for t, core in zip(total, cores, strict=True)),
        core_total_s=tuple(total),
    )


@dataclass(frozen=True)
class SystemSample:
    """What was seen at one moment."""

    time: float  # seconds since 1970
    processes: tuple[ProcessUse, ...]  # the root of the run and all its descendants, Ray's among them
    shared_bytes: int  # memory that several of them map (Ray's object store, volumes kept in memory), counted once
    cgroup: CgroupUse | None  # of the root; None without one
    machine: MachineUse  # the whole of it, other people's processes too
    gpus: tuple[GpuUse, ...] = ()  # empty without NVML
    clock_s: float = 0.0  # the monotonic clock, for rates: the other one may be set
    kept_bytes: int = 0  # of the shared memory, volumes kept in memory: filled in one pass, and no larger than planned

    @property
    def anon_bytes(self) -> int:
        """Private and pinned memory of all processes."""
        return sum(process.anon_bytes for process in self.processes)

    @property
    def used_bytes(self) -> int:
        """What the run holds: private memory of all its processes, and what they share, once."""
        return self.anon_bytes + self.shared_bytes


class Watcher:
    """Samples a process, the root of a run, and its descendants; `gpus`: open NVML, None = GPUs are not looked at.

    Raises:
        ProcessLookupError: from `sample`, once the root is gone.
    """

    def __init__(self, pid: int, gpus: Gpus | None = None) -> None:
        self._pid, self._gpus = pid, gpus
        self._tree = ProcessTree(pid)

    def include(self, pids: Collection[int]) -> None:
        """From now on these processes, and their descendants, belong to the run wherever they stem from."""
        self._tree.include(pids)

    def sample(self) -> SystemSample:
        """Read everything once.  Takes milliseconds; never PSS, which takes seconds for large processes."""
        processes = self._tree.sample()
        sample = sample_system(self._pid, self._gpus, processes, self._tree.shared_bytes())
        return replace(sample, kept_bytes=self._tree.kept_bytes())


def sample_system(
    pid: int, gpus: Gpus | None = None, processes: Sequence[ProcessUse] = (), shared_bytes: int = 0
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
    )


@dataclass(frozen=True)
class Rates:
    """What happened between two looks."""

    core_busy: tuple[float, ...]  # share of the time that each core worked, 0 to 1
    # by pid, CPU seconds per second: 1.0 = one core; processes that were there at both looks
    process_cores: Mapping[int, float]

    def idle_cores(self, among: Collection[int]) -> float:
        """How many of some cores had nothing to do, on average; of all where their numbers are unknown."""
        busy = [self.core_busy[core] for core in among if core < len(self.core_busy)]
        return sum(1 - share for share in (busy if len(busy) == len(among) else self.core_busy))


def rates_between(before: SystemSample, after: SystemSample) -> Rates | None:
    """None where no time has passed or a counter ran backwards (the machine was suspended or restored).  Pure."""
    seconds = after.clock_s - before.clock_s
    early, late = before.machine, after.machine
    if seconds <= 0 or len(early.core_total_s) != len(late.core_total_s):  # a core was switched on or off
        return None
    whole = [b - a for a, b in zip(early.core_total_s, late.core_total_s, strict=True)]
    busy = [b - a for a, b in zip(early.core_busy_s, late.core_busy_s, strict=True)]
    if min([*whole, *busy], default=0.0) < 0:
        return None
    was = {(process.pid, process.started_s): process.cpu_s for process in before.processes}
    return Rates(
        # A look may come sooner than the next tick of the clock that counts them.
        tuple(min(work / of, 1.0) if of > 0 else 0.0 for work, of in zip(busy, whole, strict=True)),
        {
            process.pid: max(process.cpu_s - was[process.pid, process.started_s], 0.0) / seconds
            for process in after.processes
            if (process.pid, process.started_s) in was
        },
    )
