"""Control groups, version 2 and 1: limits, use without page cache, and how often the kernel has killed for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from vesuvius.monitor.probes import files
from vesuvius.monitor.probes.files import read_counts, read_text

# Version 1 says "no limit" with the largest number of bytes that are whole pages, which depends on the page.
_NO_LIMIT_BYTES = 2**60


@dataclass(frozen=True)
class CgroupLevel:
    """A cgroup with a limit: the process's own, or an ancestor, whose limit holds for all below it."""

    path: str  # of the cgroup in its hierarchy, such as `/user.slice`
    file: str  # what sets the limit: `memory.max`, `memory.high` or `memory.limit_in_bytes`
    limit_bytes: int
    # what cannot be given back of the level's use: private and shared memory and the kernel's own, no page cache
    used_bytes: int
    kills: bool  # whether the kernel kills beyond the limit; beyond `memory.high` it slows down instead
    # whether it is at the top of the mounted hierarchy, as a container's own is, whatever its path
    is_top: bool = False
    # all that is charged to it but file pages: what Ray counts, caches of the kernel among it; None = not known
    charged_bytes: int | None = None
    # that may still be swapped out under the limits of the cgroup and its ancestors; None = all that the machine has
    swap_left_bytes: int | None = None


@dataclass(frozen=True)
class CgroupUse:
    """The cgroup of a process."""

    path: str  # of the cgroup in the hierarchy that holds the memory controller
    # anon_bytes, shmem_bytes, file_bytes: private and shared memory and page cache, of the cgroup and those below it
    anon_bytes: int
    shmem_bytes: int
    file_bytes: int
    levels: tuple[CgroupLevel, ...]  # itself and its ancestors, those that have a limit; the innermost first
    # processes that the kernel has killed for its limits (v2 `memory.events`, v1 `memory.oom_control`); None where it
    # does not count
    oom_kills: int | None


class _Names(NamedTuple):
    """How a version of the hierarchy calls what is read."""

    prefix: str  # of the figures of `memory.stat` that hold for a cgroup with those below it
    anon: str
    file: str  # with shared memory in it
    kills: str  # file that counts them
    charged: str  # file of all that is charged
    limits: Mapping[str, bool]  # files, and whether the kernel kills beyond them


_V2 = _Names("", "anon", "file", "memory.events", "memory.current", {"memory.max": True, "memory.high": False})
_V1 = _Names(
    *("total_", "total_rss", "total_cache", "memory.oom_control", "memory.usage_in_bytes"),
    {"memory.limit_in_bytes": True},
)


def read_cgroup(pid: int) -> CgroupUse | None:
    """The memory cgroup of a process; None where there is none or it cannot be read.

    What counts as used is what the kernel could not give back if it had to: private memory (version 2 `anon`, version 1
    `total_rss`) and shared memory (`shmem`, `total_shmem`), which live in memory or swap only.  Page cache is not
    counted, dirty or not: it can be written and dropped.  Of the kernel's own memory version 2 tells what are caches of
    file names (`slab_reclaimable`), so the rest of it is counted (`_unreclaimable_v2`).  Version 1 tells one sum, most
    of which are such caches where many files are read; it is left out.

    Does I/O: some ten small files.
    """
    version, chain = cgroup_chain(pid, "memory")
    names = _V2 if version == 2 else _V1
    use, levels, used, hidden_limit = None, [], 0, None
    for number, (path, directory) in enumerate(chain):
        stat = read_counts(directory / "memory.stat")
        if names.anon not in stat:  # the controller is not switched on so far down: an ancestor is charged
            continue
        anon, shmem = stat[names.anon], stat.get(f"{names.prefix}shmem", 0)
        used = _unreclaimable_v2(stat) if version == 2 else anon + shmem
        if use is None:
            # Counts the victims that belonged to this cgroup (version 2: or to one below), whoever's limit it was.  The
            # ancestors' counts would add the deaths of strangers only.
            kills = read_counts(directory / names.kills).get("oom_kill")
            use = CgroupUse(path, anon, shmem, max(stat.get(names.file, 0) - shmem, 0), (), kills)
            hidden_limit = _as_limit(str(stat.get("hierarchical_memory_limit")))  # of version 1
        for file, kills_beyond in names.limits.items():
            if (limit := _limit(directory / file)) is not None:
                above = [each for _, each in chain[number:]]
                swap_left = _swap_left_v2(above) if version == 2 else _swap_left_v1(directory, stat, limit)
                is_top, charged = directory == chain[-1][1], _charged(directory, stat, names)
                levels.append(CgroupLevel(path, file, limit, used, kills_beyond, is_top, charged, swap_left))
    if use is not None and hidden_limit is not None and all(level.limit_bytes > hidden_limit for level in levels):
        # A container sees its own part of the tree, but is told of a limit above it.
        above_it = f"an ancestor of {use.path}"
        levels.append(CgroupLevel(above_it, "memory.limit_in_bytes", hidden_limit, used, kills=True))
    return use and replace(use, levels=tuple(levels))


def _unreclaimable_v2(stat: Mapping[str, int]) -> int:
    """Private, shared and huge pages, buffers of sockets, and the kernel's own memory without what it can give back.

    `memory.current` is `anon` + `file` (with `shmem`) + `kernel` + `sock` + `hugetlb` (where that is charged).
    Everything else in the file is part of one of these: of `kernel` its stacks, page tables, `percpu`, `vmalloc`,
    `slab` and, also where the documentation does not say so, `sec_pagetables` and `zswap`, which are charged as the
    kernel's.  `zswapped` is what the pages in zswap would take uncompressed.  Kernels before 5.18 give the parts of
    `kernel` alone.
    """
    parts = ("slab", "kernel_stack", "pagetables", "percpu", "vmalloc")
    kernel = stat.get("kernel", sum(stat.get(part, 0) for part in parts))
    pages = sum(stat.get(name, 0) for name in ("anon", "shmem", "sock", "hugetlb"))
    return pages + max(kernel - stat.get("slab_reclaimable", 0), 0)


def _charged(directory: Path, stat: Mapping[str, int], names: _Names) -> int | None:
    """All that is charged to a cgroup but the pages of files, as Ray counts; None where the kernel does not say."""
    charged = _limit(directory / names.charged)
    inactive, active = (stat.get(f"{names.prefix}{name}") for name in ("inactive_file", "active_file"))
    return None if charged is None or inactive is None or active is None else max(charged - inactive - active, 0)


def _swap_left_v2(directories: Sequence[Path]) -> int | None:
    """`directories`: of a cgroup and its ancestors; each may have a limit of its own."""
    limits = {directory: _limit(directory / "memory.swap.max") for directory in directories}
    used = {directory: _limit(directory / "memory.swap.current") or 0 for directory in directories}
    return min((max(most - used[each], 0) for each, most in limits.items() if most is not None), default=None)


def _swap_left_v1(directory: Path, stat: Mapping[str, int], limit: int) -> int | None:
    both = _limit(directory / "memory.memsw.limit_in_bytes")  # of memory and swap together
    return None if both is None else both - stat.get("total_swap", 0) - limit


def _limit(path: Path) -> int | None:
    """The figure of a file; None for `max`, for version 1's largest page count, and where there is no such file."""
    return _as_limit((read_text(path) or "").strip())


def _as_limit(text: str) -> int | None:
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT_BYTES else None


def cgroup_chain(pid: int, controller: str) -> tuple[Literal[1, 2] | None, list[tuple[str, Path]]]:
    """Version of the hierarchy that has a controller, and there the cgroup of a process and its visible ancestors.

    Itself first, each with its path in the hierarchy and the directory where it can be read; none where it cannot.
    """
    version, path = _place(pid, controller)
    if version is None or path.startswith("/.."):  # the latter: outside of this container
        return version, []
    mounts = _mounts(version, controller)
    for top, root in mounts:
        below = Path(path).relative_to(root).parts if Path(path).is_relative_to(root) else None
        if below is not None and top.joinpath(*below).is_dir():
            ends = range(len(below), -1, -1)
            return version, [(str(Path(root, *below[:end])), top.joinpath(*below[:end])) for end in ends]
    # In some containers a process has the name that its cgroup has outside, while the mount shows, without saying so,
    # the container's own as its top.
    return version, [(path, mounts[0][0])] if mounts else []


def _place(pid: int, controller: str) -> tuple[Literal[1, 2] | None, str]:
    """Version of the hierarchy that has a controller, also where version 2 is mounted beside it without any, and the
    path of a process there."""
    unified = ""
    for line in (read_text(f"{psutil.PROCFS_PATH}/{pid}/cgroup") or "").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controller in controllers.split(",") and path:
            return 1, path
        if line.startswith("0::/"):
            unified = path
    return (2, unified) if unified else (None, "")


def _mounts(version: Literal[1, 2], controller: str) -> list[tuple[Path, str]]:
    """Where this process, not the one looked at, sees the hierarchy: directories, and the path of the cgroup that each
    shows at its top."""
    mounts = []
    for line in (read_text(f"{psutil.PROCFS_PATH}/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == ("cgroup2" if version == 2 else "cgroup") and (version == 2 or controller in kind[2].split(",")):
            root, point = (field.replace("\\040", " ") for field in fields[3:5])
            inside = Path(point).is_relative_to("/sys")
            mounts.append((files.SYSFS_PATH / Path(point).relative_to("/sys") if inside else Path(point), root))
    return mounts
