"""Recorded machines: small trees of files that stand for /proc and /sys, with figures of your choice.

    roots = write_v2(tmp_path, limit=8 * GIB, anon=GIB, shmem=GIB, file=3 * GIB)
    write_machine(roots, total=64 * GIB, available=40 * GIB)
    write_process(roots, pid=10, parent=1, anon=GIB)
    Watcher(10).sample()

Once it is built, psutil and the probes read it instead of this machine, until the test ends (`real_system` in
conftest.py).  Each function may be called again to change what it has written.  The files are those of real machines,
cut to the figures that matter and some beside them; the version 1 ones are those of a machine with Linux 6.18.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from vesuvius.monitor.probes import cgroup

NO_LIMIT_V1 = 9223372036854771712
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Roots:
    """Directories that stand for /proc and /sys."""

    proc: Path
    sys: Path


def empty_roots(directory: Path) -> Roots:
    """A machine without memory in use, a memory cgroup or processes."""
    roots = Roots(directory / "proc", directory / "sys")
    psutil.PROCFS_PATH, cgroup.SYSFS_PATH = str(roots.proc), roots.sys
    if not (roots.proc / "meminfo").exists():
        write_machine(roots, total=64 * 2**30, available=64 * 2**30)
    return roots


def write_v2(
    directory: Path,
    *,
    limit: int | None = None,
    high: int | None = None,
    path: str = "/",
    mount_root: str = "/",
    **figures: Any,
) -> Roots:
    """A box with control groups version 2, all of whose processes live in one of them.

    Args:
        path: the cgroup of the processes, as /proc/PID/cgroup names it; `/` is what a container sees.
        mount_root: what the mount shows at its top.
        limit, high, figures: of that cgroup, see `write_cgroup_v2`; its ancestors are made without limits.
    """
    roots = empty_roots(directory)
    _write(roots.proc / "self" / "cgroup", f"0::{path}\n")
    mount = f"35 31 0:29 {mount_root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
    _write(roots.proc / "self" / "mountinfo", _OTHER_MOUNTS + mount)
    below = _below(path, mount_root)
    for ancestor in below.parents:
        if mount_root != "/" or ancestor != Path("/"):  # the top of the whole hierarchy has no such files
            write_cgroup_v2(roots, str(ancestor))
    write_cgroup_v2(roots, str(below), limit=limit, high=high, **figures)
    return roots


def write_cgroup_v2(
    roots: Roots,
    path: str,
    *,
    limit: int | None = None,
    high: int | None = None,
    anon: int = 0,
    shmem: int = 0,
    file: int = 0,
    oom_kills: int | None = 0,
) -> Path:
    """One cgroup of a version 2 box; returns its directory.

    Args:
        path: below the mount.
        limit, high: `memory.max` and `memory.high`; None = `max`.
        file: page cache without shared memory (the kernel's own figure includes it).
        oom_kills: of `memory.events`; None = an old kernel that does not count.
    """
    directory = roots.sys / "fs" / "cgroup" / path.strip("/")
    _write(directory / "memory.max", f"{'max' if limit is None else limit}\n")
    _write(directory / "memory.high", f"{'max' if high is None else high}\n")
    stat = {"anon": anon, "file": file + shmem, "kernel": 0, "kernel_stack": 0, "sock": 0, "shmem": shmem}
    _write_counts(directory / "memory.stat", stat | {"slab_reclaimable": 0, "pgfault": 12345})
    counted = {} if oom_kills is None else {"oom_kill": oom_kills}
    _write_counts(directory / "memory.events", {"low": 0, "high": 3, "max": 7, "oom": 0} | counted)
    return directory


def write_v1(
    directory: Path, *, path: str = "/box", mount_root: str = "/", unified: bool = True, **figures: Any
) -> Roots:
    """A box with control groups version 1, as this project's test machine has them.

    Args:
        path: the cgroup of the processes, as /proc/PID/cgroup names it.
        mount_root: what the mount shows at its top.
        unified: version 2 is mounted beside it, without controllers (hybrid).
        figures: of the cgroup of the processes, see `write_cgroup_v1`; its ancestors are made without limits.
    """
    roots = empty_roots(directory)
    _write(roots.proc / "self" / "cgroup", f"9:name=systemd:/\n4:memory:{path}\n2:cpuacct:/\n" + "0::/\n" * unified)
    mounts = (
        "34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"
        f"35 31 0:32 {mount_root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    )
    beside = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n" * unified
    _write(roots.proc / "self" / "mountinfo", _OTHER_MOUNTS + mounts + beside)
    below = _below(path, mount_root)
    for ancestor in below.parents:
        write_cgroup_v1(roots, str(ancestor))
    write_cgroup_v1(roots, str(below), **figures)
    return roots


def write_cgroup_v1(
    roots: Roots,
    path: str,
    *,
    limit: int | None = None,
    hierarchical_limit: int | None = None,
    anon: int = 0,
    shmem: int = 0,
    file: int = 0,
    oom_kills: int | None = 0,
) -> Path:
    """One cgroup of a version 1 box; returns its directory.

    Args:
        path: below the mount.
        limit: `memory.limit_in_bytes`; None = the number that stands for none.
        hierarchical_limit: the smallest of its own limit and all ancestors'; its own by default.
        file: page cache without shared memory (the kernel's own figure includes it).
        oom_kills: of `memory.oom_control`; None = an old kernel that does not count.
    """
    directory = roots.sys / "fs" / "cgroup" / "memory" / path.strip("/")
    own = NO_LIMIT_V1 if limit is None else limit
    effective = own if hierarchical_limit is None else hierarchical_limit
    # Without `total_` the figures are of the cgroup alone, which says little: most processes are in those below.
    stat = {"cache": 9457664, "rss": 11259904, "shmem": 9068544, "hierarchical_memory_limit": effective}
    stat |= {"total_cache": file + shmem, "total_rss": anon, "total_shmem": shmem, "total_mapped_file": 11075584}
    _write_counts(directory / "memory.stat", stat)
    _write(directory / "memory.limit_in_bytes", f"{own}\n")
    counted = {} if oom_kills is None else {"oom_kill": oom_kills}
    _write_counts(directory / "memory.oom_control", {"oom_kill_disable": 0, "under_oom": 0} | counted)
    return directory


def write_machine(
    roots: Roots,
    *,
    total: int,
    available: int,
    shmem: int = 0,
    cached: int = 0,
    swap_total: int = 0,
    swap_used: int = 0,
    oom_kills: int | None = 0,
    cores: Sequence[tuple[float, float]] = ((100.0, 1000.0), (200.0, 1000.0)),
) -> None:
    """The machine as a whole.

    Args:
        total, available: memory; whole KiB, as in the file.
        cached: page cache without shared memory.
        cores: busy and all seconds of each.
    """
    sizes = {"MemTotal": total, "MemFree": 0, "MemAvailable": available, "Buffers": 0, "Cached": cached + shmem}
    sizes |= {"Shmem": shmem, "SwapTotal": swap_total, "SwapFree": swap_total - swap_used}
    _write(roots.proc / "meminfo", "".join(f"{name}: {size // 1024:>10} kB\n" for name, size in sizes.items()))
    _write_counts(roots.proc / "vmstat", {"nr_free_pages": 1} | ({} if oom_kills is None else {"oom_kill": oom_kills}))
    rows = [_core_row(f"cpu{i}", busy, whole) for i, (busy, whole) in enumerate(cores)]
    _write(
        roots.proc / "stat",
        "\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *rows, "intr 43431647 0 0", "ctxt 5", "btime 1795000000", ""]),
    )


def write_process(
    roots: Roots,
    pid: int,
    parent: int = 1,
    *,
    name: str = "python -m vesuvius.train",
    anon: int = 0,
    shmem: int = 0,
    file: int = 0,
    swap: int = 0,
    started_s: float = 100.0,
    state: str = "S",
    cpu_s: float = 0.0,
) -> Path:
    """One process, in the cgroup of the recorded box; returns its directory.  Sizes are whole KiB, as in the file."""
    directory = roots.proc / str(pid)
    command = name.split(maxsplit=1)[0][:15] if name else "kworker"
    ticks, started = round(cpu_s * TICKS_PER_S), round(started_s * TICKS_PER_S)
    fields = f"{parent} {pid} {pid} 0 -1 4194304 99 0 0 0 {ticks} 0 0 0 20 0 1 0 {started} 3133440 381"
    _write(directory / "stat", f"{pid} ({command}) {state} {fields} 18446744073709551615 {'0 ' * 26}0\n")
    sizes = {"VmRSS": anon + shmem + file, "RssAnon": anon, "RssFile": file, "RssShmem": shmem, "VmSwap": swap}
    status = "".join(f"{key}:\t{size // 1024:>8} kB\n" for key, size in sizes.items())
    _write(directory / "status", f"Name:\t{command}\nState:\t{state} (sleeping)\nPid:\t{pid}\n{status}Threads:\t1\n")
    _write(directory / "cmdline", name.replace(" ", "\0") + "\0" * 3 if name else "")
    cgroup = roots.proc / "self" / "cgroup"
    if cgroup.is_file():
        _write(directory / "cgroup", cgroup.read_text())
    return directory


_OTHER_MOUNTS = (
    "22 27 0:21 / /proc rw,relatime - proc proc rw\n"
    "23 27 0:22 / /sys rw,relatime - sysfs sysfs rw\n"
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
)


def _below(path: str, mount_root: str) -> Path:
    return Path("/") / path.removeprefix(mount_root).lstrip("/")


def _core_row(name: str, busy_s: float, total_s: float) -> str:
    busy, idle = round(busy_s * TICKS_PER_S), round((total_s - busy_s) * TICKS_PER_S)
    # Half of the idle time waits for a disk; half of the busy time is the system's; the last two are of guests.
    parts = (busy - busy // 2, 0, busy // 2, idle - idle // 2, idle // 2, 0, 0, 0, busy // 4, 0)
    return " ".join([name, *map(str, parts)])


def _write_counts(path: Path, counts: Mapping[str, int]) -> None:
    _write(path, "".join(f"{name} {count}\n" for name, count in counts.items()))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
