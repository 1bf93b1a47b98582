"""The machine: memory, swap, pressure, processors, disks and network; other people's processes included."""

from __future__ import annotations

import os
from dataclasses import dataclass

from vesuvius.observe.system.cgroup import Pressure, parse_pressure
from vesuvius.observe.system.files import read_counts, read_text
from vesuvius.observe.system.roots import Roots

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SECTOR_BYTES = 512  # in /proc/diskstats, whatever the disk's own are
_NO_DISKS = ("loop", "ram", "zram", "dm-", "md", "bcache", "drbd", "sr", "fd")


@dataclass(frozen=True)
class MachineUse:
    """Counters of the machine.

    Attributes:
        total_bytes: memory of the machine.
        available_bytes: what may still be had without swapping: free memory and most of the page cache.
        page_cache_bytes: of files, without shared memory.
        shmem_bytes: tmpfs and shared memory, such as Ray's object store.
        swap_used_bytes, swap_total_bytes: of all swap devices.
        pressure: of memory; None where the kernel does not say.
        oom_kills: processes that the kernel has killed for want of memory since boot, for limits of cgroups too.
        core_busy_s, core_total_s: seconds since boot that each core has worked, and has existed.
        disk_read_bytes, disk_written_bytes: since boot, all disks (no partitions, no loops).
        net_received_bytes, net_sent_bytes: since boot, all adapters; where there are none, as in a container, all
            interfaces but the loopback.
    """

    total_bytes: int
    available_bytes: int
    page_cache_bytes: int
    shmem_bytes: int
    swap_used_bytes: int
    swap_total_bytes: int
    pressure: Pressure | None
    oom_kills: int | None
    core_busy_s: tuple[float, ...]
    core_total_s: tuple[float, ...]
    disk_read_bytes: int
    disk_written_bytes: int
    net_received_bytes: int
    net_sent_bytes: int

    @property
    def used_bytes(self) -> int:
        """What cannot be given back: total less available."""
        return self.total_bytes - self.available_bytes


def read_machine(roots: Roots = Roots()) -> MachineUse:
    """Read the machine's counters once.

    Does I/O.  What the system does not tell is 0, or None where the attribute allows it; the machine's size is then
    asked of the C library.
    """
    memory = _meminfo(read_text(roots.proc / "meminfo") or "")
    total = memory.get("MemTotal", 0) or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shmem = memory.get("Shmem", 0)
    cache = max(memory.get("Cached", 0) + memory.get("Buffers", 0) - shmem, 0)  # `Cached` has shared memory in it
    free = memory.get("MemFree", total) + cache  # near enough, for the odd kernel without MemAvailable
    busy, existed = _cores(read_text(roots.proc / "stat") or "")
    disk_read, disk_written = _disks(read_text(roots.proc / "diskstats") or "")
    received, sent = _network(read_text(roots.proc / "net" / "dev") or "", roots)
    return MachineUse(
        total_bytes=total,
        available_bytes=memory.get("MemAvailable", min(free, total)),
        page_cache_bytes=cache,
        shmem_bytes=shmem,
        swap_used_bytes=max(memory.get("SwapTotal", 0) - memory.get("SwapFree", 0), 0),
        swap_total_bytes=memory.get("SwapTotal", 0),
        pressure=parse_pressure(read_text(roots.proc / "pressure" / "memory")),
        oom_kills=read_counts(roots.proc / "vmstat").get("oom_kill"),
        core_busy_s=busy,
        core_total_s=existed,
        disk_read_bytes=disk_read,
        disk_written_bytes=disk_written,
        net_received_bytes=received,
        net_sent_bytes=sent,
    )


def _meminfo(text: str) -> dict[str, int]:
    """Bytes by name.  Pure."""
    sizes = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        figure = rest.split()
        if figure and figure[0].isdigit():
            sizes[name] = int(figure[0]) * 1024
    return sizes


def _cores(text: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Busy seconds and all seconds of each core, from /proc/stat.

    Only the first eight figures count: user, nice, system, idle, iowait, irq, softirq, steal; the time of guests comes
    after them and is part of the user's.
    """
    busy, existed = [], []
    for line in text.splitlines():
        if not line.startswith("cpu"):
            break  # the cores stand on top; the long list of interrupts is not looked at
        name, *figures = line.split()
        if name == "cpu" or len(figures) < 4 or not all(figure.isdigit() for figure in figures):
            continue
        ticks = [int(figure) for figure in figures[:8]]
        busy.append((sum(ticks) - sum(ticks[3:5])) / _TICKS_PER_S)
        existed.append(sum(ticks) / _TICKS_PER_S)
    return tuple(busy), tuple(existed)


def _disks(text: str) -> tuple[int, int]:
    """Bytes read from and written to whole disks, from /proc/diskstats.  Pure.

    Without what is made of other disks or of memory, and without partitions: each byte counts once.
    """
    rows = {fields[2]: fields for fields in map(str.split, text.splitlines()) if len(fields) >= 10}
    disks = [name for name in rows if not name.startswith(_NO_DISKS)]
    whole = [name for name in disks if not any(_is_partition(name, disk) for disk in disks)]
    read, written = (
        sum(int(rows[name][column]) for name in whole if rows[name][column].isdigit()) for column in (5, 9)
    )
    return read * _SECTOR_BYTES, written * _SECTOR_BYTES


def _is_partition(name: str, disk: str) -> bool:
    """Whether it is named after the disk: sda1 of sda, nvme0n1p2 of nvme0n1; nvme0n10 is no part of nvme0n1.  Pure."""
    middle = "p" if disk[-1].isdigit() else ""
    return name.startswith(disk + middle) and name[len(disk + middle) :].isdigit()


def _network(text: str, roots: Roots) -> tuple[int, int]:
    """Bytes received and sent, from /proc/net/dev, by the adapters; by all interfaces but the loopback where there is
    no adapter, as in a container: bridges and tunnels only pass on what an adapter has counted."""
    rows: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, colon, figures = line.partition(":")
        if colon and name.strip() != "lo" and len(figures.split()) >= 9:
            rows[name.strip()] = figures.split()
    adapters = [name for name in rows if os.path.exists(roots.sys / "class" / "net" / name / "device")]
    counted = [rows[name] for name in adapters or rows]
    return sum(int(row[0]) for row in counted), sum(int(row[8]) for row in counted)
