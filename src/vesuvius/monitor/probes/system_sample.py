"""Samples a run: its processes, cgroup, machine and GPUs."""

import os
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil

from vesuvius.errors import warn_once
from vesuvius.monitor.probes.cgroup import CgroupUse, read_cgroup, read_counts
from vesuvius.monitor.probes.gpus import Gpus, GpuUse
from vesuvius.monitor.probes.processes import ProcessTree, ProcessUse


@dataclass(frozen=True)
class MachineUse:
    """Counters of the machine, including other users' processes."""

    total_bytes: int  # memory of the machine
    available_bytes: int  # without swapping: free memory and most of the page cache
    page_cache_bytes: int  # files and reclaimable kernel memory, without shared memory
    # swap_used_bytes, swap_total_bytes: of all swap devices
    swap_used_bytes: int
    swap_total_bytes: int
    oom_kills: int | None  # processes killed by the OOM killer since boot, including those killed for a cgroup's limit
    # core_busy_s, core_total_s: busy and total seconds of each core since boot
    core_busy_s: tuple[float, ...]
    core_total_s: tuple[float, ...]

    @property
    def used_bytes(self) -> int:
        return self.total_bytes - self.available_bytes


def read_machine() -> MachineUse:
    """Read the machine's counters; what the kernel lacks or refuses is 0 or None, and memory free."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    unknown = SimpleNamespace(total=pages, available=pages, cached=0, buffers=0, shared=0, used=0)
    memory = _known(psutil.virtual_memory, "memory (counts as free)", unknown)
    memory = memory if memory.total > 0 else unknown
    swap = _known(psutil.swap_memory, "swap", SimpleNamespace(used=0, total=0))
    cores = _known(partial(psutil.cpu_times, percpu=True), "cores", [])
    # /proc/stat includes guest time in user time.
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


def _known(read: Callable[[], Any], what: str, unknown: Any) -> Any:
    """Return what psutil reads; if it raises, `unknown`, with a warning."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # psutil warns about figures that an unusual kernel lacks
            return read()
    except Exception as error:
        warn_once("psutil does not know the %s of this machine: %s", what, f"{type(error).__name__}: {error}")
        return unknown


@dataclass(frozen=True)
class SystemSample:
    time: float  # seconds since 1970
    processes: tuple[ProcessUse, ...]  # the root of the run and all its descendants, including Ray's
    shared_bytes: int  # shared memory (Ray's object store, volumes kept in memory), counted once
    cgroup: CgroupUse | None  # of the root
    machine: MachineUse
    gpus: tuple[GpuUse, ...] = ()  # empty without NVML
    clock_s: float = 0.0  # monotonic clock, for rates
    kept_bytes: int = 0  # part of shared_bytes: volumes kept in memory, which grow to a planned size

    @property
    def anon_bytes(self) -> int:
        """Private and pinned memory of all processes, in bytes."""
        return sum(process.anon_bytes for process in self.processes)

    @property
    def used_bytes(self) -> int:
        """Memory of the run: private memory of all processes, and shared memory once."""
        return self.anon_bytes + self.shared_bytes


class Watcher:
    """Samples the root process of a run and its descendants; with `gpus`, GPUs, too."""

    def __init__(self, pid: int, gpus: Gpus | None = None) -> None:
        self._pid, self._gpus = pid, gpus
        self._tree = ProcessTree(pid)

    def include(self, pids: Collection[int]) -> None:
        """Include these processes and their descendants from now on."""
        self._tree.include(pids)

    def sample(self) -> SystemSample:
        """Sample everything.  Takes milliseconds; PSS, which takes seconds for large processes, is not read.

        Raises ProcessLookupError: the root has ended.
        """
        return sample_system(self._pid, self._gpus, self._tree)


def sample_system(pid: int, gpus: Gpus | None = None, tree: ProcessTree | None = None) -> SystemSample:
    """Sample the machine, its GPUs, the cgroup of a process and the processes of a tree."""
    processes = tuple(tree.sample()) if tree else ()
    shared_bytes, kept_bytes = tree.shared_bytes() if tree else (0, 0)
    return SystemSample(
        time=time.time(),
        processes=processes,
        shared_bytes=shared_bytes,
        kept_bytes=kept_bytes,
        cgroup=read_cgroup(pid),
        machine=read_machine(),
        gpus=tuple(gpus.sample()) if gpus else (),
        clock_s=time.monotonic(),
    )


@dataclass(frozen=True)
class Rates:
    core_busy: tuple[float, ...]  # busy share of each core, 0 to 1
    # by pid, cores used (CPU seconds per second), for processes in both samples
    process_cores: Mapping[int, float]

    def idle_cores(self, among: Collection[int]) -> float:
        """Return how many of these cores were idle, on average; of all cores if some of these are unknown."""
        busy = [self.core_busy[core] for core in among if core < len(self.core_busy)]
        return sum(1 - share for share in (busy if len(busy) == len(among) else self.core_busy))


def rates_between(before: SystemSample, after: SystemSample) -> Rates | None:
    """Return the rates; None if no time has passed or a counter ran backwards (suspend, restore).  Pure."""
    seconds = after.clock_s - before.clock_s
    early, late = before.machine, after.machine
    if seconds <= 0 or len(early.core_total_s) != len(late.core_total_s):  # a core went online or offline
        return None
    total = [b - a for a, b in zip(early.core_total_s, late.core_total_s, strict=True)]
    busy = [b - a for a, b in zip(early.core_busy_s, late.core_busy_s, strict=True)]
    if min([*total, *busy], default=0.0) < 0:
        return None
    was = {(each.pid, each.started_s): each.cpu_s for each in before.processes}
    both = [each for each in after.processes if (each.pid, each.started_s) in was]
    return Rates(
        # Samples may be closer than a tick of the kernel's clock.
        tuple(min(work / of, 1.0) if of > 0 else 0.0 for work, of in zip(busy, total, strict=True)),
        {each.pid: max(each.cpu_s - was[each.pid, each.started_s], 0.0) / seconds for each in both},
    )
