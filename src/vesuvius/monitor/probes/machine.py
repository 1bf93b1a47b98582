"""The machine: memory, swap and cores, including the processes of others."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import psutil

from vesuvius.monitor.probes.files import read_counts


@dataclass(frozen=True)
class MachineUse:
    """Counters of the machine."""

    total_bytes: int  # memory of the machine
    available_bytes: int  # memory that can be had without swapping: free memory and most of the page cache
    page_cache_bytes: int  # files and reclaimable kernel memory, without shared memory
    shmem_bytes: int  # tmpfs and shared memory, such as Ray's object store
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
        shmem_bytes=memory.shared,
        swap_used_bytes=max(swap.used, 0),
        swap_total_bytes=swap.total,
        oom_kills=read_counts(f"{psutil.PROCFS_PATH}/vmstat").get("oom_kill"),
        core_busy_s=tuple(t - core.idle - core.iowait for t, core in zip(total, cores, strict=True)),
        core_total_s=tuple(total),
    )
