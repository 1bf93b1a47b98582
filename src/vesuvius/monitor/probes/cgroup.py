"""Reads cgroups, version 2 and 1: limits, use without page cache, and kills by the kernel.

Also small files of /proc (`psutil.PROCFS_PATH`) and /sys, which may vanish at any time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

SYSFS_PATH = Path("/sys")
# Version 1 expresses "no limit" as the largest multiple of the page size.
_NO_LIMIT_BYTES = 2**60


@dataclass(frozen=True)
class CgroupLevel:
    """A cgroup with a limit: that of the process or an ancestor."""

    path: str  # of the cgroup in its hierarchy, such as `/user.slice`
    file: str  # that sets the limit: `memory.max`, `memory.high` or `memory.limit_in_bytes`
    limit_bytes: int
    # unreclaimable use: private, shared and kernel memory, without page cache
    used_bytes: int
    kills: bool  # whether the kernel kills beyond the limit; beyond `memory.high` it throttles instead
    # whether it is the root of the mounted hierarchy, as a container's own cgroup is
    is_top: bool = False
    # everything charged except file pages, as Ray counts it, including kernel caches; None = unknown
    charged_bytes: int | None = None
    # swap left under the limits of the cgroup and its ancestors; None = no limit but the machine's
    swap_left_bytes: int | None = None


@dataclass(frozen=True)
class CgroupUse:
    path: str  # of the cgroup in the hierarchy that holds the memory controller
    # anon_bytes, shmem_bytes, file_bytes: private memory, shared memory and page cache, including descendants
    anon_bytes: int
    shmem_bytes: int
    file_bytes: int
    levels: tuple[CgroupLevel, ...]  # itself and its ancestors if they have a limit, innermost first
    # processes killed by the kernel for its limits (v2 `memory.events`, v1 `memory.oom_control`); None if not counted
    oom_kills: int | None


class _Names(NamedTuple):
    """Names of files and figures in a version of the hierarchy."""

    prefix: str  # of the figures in `memory.stat` that include descendants
    anon: str
    file: str  # includes shared memory
    kills: str  # file with the kill count
    charged: str  # file with the total charge
    limits: Mapping[str, bool]  # by file: whether the kernel kills beyond the limit


_V2 = _Names("", "anon", "file", "memory.events", "memory.current", {"memory.max": True, "memory.high": False})
_V1 = _Names(
    *("total_", "total_rss", "total_cache", "memory.oom_control", "memory.usage_in_bytes"),
    {"memory.limit_in_bytes": True},
)


def read_cgroup(pid: int) -> CgroupUse | None:
    """Read the memory cgroup of a process; None if there is none or it cannot be read.

    Used memory is what the kernel cannot reclaim: private and shared memory, and in version 2 kernel memory without its
    caches of file names (version 1 reports only one sum, mostly such caches).  Page cache is not counted: it can be
    written and dropped.  Reads about ten small files.
    """
    version, chain = cgroup_chain(pid, "memory")
    names = _V2 if version == 2 else _V1
    use, levels, used, hidden_limit = None, [], 0, None
    for number, (path, directory) in enumerate(chain):
        stat = read_counts(directory / "memory.stat")
        if names.anon not in stat:  # the controller is not enabled this far down: an ancestor is charged
            continue
        anon, shmem = stat[names.anon], stat.get(f"{names.prefix}shmem", 0)
        used = _unreclaimable_v2(stat) if version == 2 else anon + shmem
        if use is None:
            # Counts victims in this cgroup (version 2: and its descendants), whichever limit was reached.  Counts of
            # ancestors would only add processes of others.
            kills = read_counts(directory / names.kills).get("oom_kill")
            use = CgroupUse(path, anon, shmem, max(stat.get(names.file, 0) - shmem, 0), (), kills)
            hidden_limit = _as_limit(str(stat.get("hierarchical_memory_limit")))  # version 1 only
        for file, kills_beyond in names.limits.items():
            if (limit := _limit(directory / file)) is not None:
                above = [each for _, each in chain[number:]]
                swap_left = _swap_left_v2(above) if version == 2 else _swap_left_v1(directory, stat, limit)
                is_top, charged = directory == chain[-1][1], _charged(directory, stat, names)
                levels.append(CgroupLevel(path, file, limit, used, kills_beyond, is_top, charged, swap_left))
    if use is not None and hidden_limit is not None and all(level.limit_bytes > hidden_limit for level in levels):
        # A container sees only its own subtree, but knows the limit above it.
        above_it = f"an ancestor of {use.path}"
        levels.append(CgroupLevel(above_it, "memory.limit_in_bytes", hidden_limit, used, kills=True))
    return use and replace(use, levels=tuple(levels))


def _unreclaimable_v2(stat: Mapping[str, int]) -> int:
    """Return private, shared and huge pages, socket buffers, and unreclaimable kernel memory.

    `memory.current` is `anon` + `file` (with `shmem`) + `kernel` + `sock` + `hugetlb` (if it is charged).  Everything
    else is part of one of these: of `kernel` its stacks, page tables, `percpu`, `vmalloc`, `slab` and, although
    undocumented, `sec_pagetables` and `zswap`.  Kernels before 5.18 give the parts of `kernel` alone.
    """
    parts = ("slab", "kernel_stack", "pagetables", "percpu", "vmalloc")
    kernel = stat.get("kernel", sum(stat.get(part, 0) for part in parts))
    pages = sum(stat.get(name, 0) for name in ("anon", "shmem", "sock", "hugetlb"))
    return pages + max(kernel - stat.get("slab_reclaimable", 0), 0)


def _charged(directory: Path, stat: Mapping[str, int], names: _Names) -> int | None:
    """Return everything charged to a cgroup except file pages, as Ray counts; None if unknown."""
    charged = _limit(directory / names.charged)
    inactive, active = (stat.get(f"{names.prefix}{name}") for name in ("inactive_file", "active_file"))
    return None if charged is None or inactive is None or active is None else max(charged - inactive - active, 0)


def _swap_left_v2(directories: Sequence[Path]) -> int | None:
    """`directories`: a cgroup and its ancestors, each of which may have a limit."""
    limits = {directory: _limit(directory / "memory.swap.max") for directory in directories}
    used = {directory: _limit(directory / "memory.swap.current") or 0 for directory in directories}
    return min((max(most - used[each], 0) for each, most in limits.items() if most is not None), default=None)


def _swap_left_v1(directory: Path, stat: Mapping[str, int], limit: int) -> int | None:
    both = _limit(directory / "memory.memsw.limit_in_bytes")  # of memory and swap together
    return None if both is None else both - stat.get("total_swap", 0) - limit


def _limit(path: Path) -> int | None:
    return _as_limit((read_text(path) or "").strip())


def _as_limit(text: str) -> int | None:
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT_BYTES else None


def cgroup_chain(pid: int, controller: str) -> tuple[Literal[1, 2] | None, list[tuple[str, Path]]]:
    """Return the version of a controller's hierarchy, and the cgroup of a process there with its visible ancestors.

    The innermost comes first, each as its path in the hierarchy and the directory to read; empty if unreadable.
    """
    version, path = _place(pid, controller)
    if version is None or path.startswith("/.."):  # outside of this container
        return version, []
    mounts = _mounts(version, controller)
    for top, root in mounts:
        below = Path(path).relative_to(root).parts if Path(path).is_relative_to(root) else None
        if below is not None and top.joinpath(*below).is_dir():
            ends = range(len(below), -1, -1)
            return version, [(str(Path(root, *below[:end])), top.joinpath(*below[:end])) for end in ends]
    # In some containers the path is that of the host, while the root of the mount is the container's own cgroup.
    return version, [(path, mounts[0][0])] if mounts else []


def _place(pid: int, controller: str) -> tuple[Literal[1, 2] | None, str]:
    """Return the version of a controller's hierarchy, also if version 2 is mounted as well, and a process's path."""
    unified = ""
    for line in (read_text(f"{psutil.PROCFS_PATH}/{pid}/cgroup") or "").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controller in controllers.split(",") and path:
            return 1, path
        if line.startswith("0::/"):
            unified = path
    return (2, unified) if unified else (None, "")


def _mounts(version: Literal[1, 2], controller: str) -> list[tuple[Path, str]]:
    """Return the mounts of the hierarchy that this process sees, and the cgroup at the root of each."""
    mounts = []
    for line in (read_text(f"{psutil.PROCFS_PATH}/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == ("cgroup2" if version == 2 else "cgroup") and (version == 2 or controller in kind[2].split(",")):
            root, point = (field.replace("\\040", " ") for field in fields[3:5])
            inside = Path(point).is_relative_to("/sys")
            mounts.append((SYSFS_PATH / Path(point).relative_to("/sys") if inside else Path(point), root))
    return mounts


def read_text(path: Path | str) -> str | None:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return None


def read_counts(path: Path | str) -> dict[str, int]:
    """Read a file with a name and an integer per line, such as `memory.stat`; other lines are ignored."""
    counts = {}
    for line in (read_text(path) or "").splitlines():
        name, _, figure = line.partition(" ")
        if figure.strip().isdigit():
            counts[name] = int(figure)
    return counts
