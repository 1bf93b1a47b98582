"""Limits, use and kills of cgroups, on recorded machines and on this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.system_trees import (
    Roots,
    empty_roots,
    write_cgroup_v1,
    write_cgroup_v2,
    write_process,
    write_v1,
    write_v2,
)
from vesuvius.monitor.probes.cgroup import CgroupLevel, CgroupUse, read_cgroup
from vesuvius.runlog.units import GIB

MIB = 2**20


def read(roots: Roots) -> CgroupUse:
    write_process(roots, pid=10)
    use = read_cgroup(10)
    assert use is not None
    return use


def test_version_2_container_sees_its_own_limit_at_the_root(tmp_path: Path) -> None:
    use = read(write_v2(tmp_path, limit=8 * GIB, anon=GIB, shmem=2 * GIB, file=3 * GIB, oom_kills=2))
    assert (use.path, use.oom_kills) == ("/", 2)
    assert (use.anon_bytes, use.shmem_bytes, use.file_bytes) == (GIB, 2 * GIB, 3 * GIB)
    assert use.levels == (CgroupLevel("/", "memory.max", 8 * GIB, 3 * GIB, kills=True, is_top=True),)


def test_version_2_limits_of_ancestors_apply_with_their_own_use(tmp_path: Path) -> None:
    roots = write_v2(tmp_path, path="/user.slice/user-1.slice/run.scope", limit=8 * GIB, high=7 * GIB, anon=GIB)
    write_cgroup_v2(roots, "/user.slice/user-1.slice", high=4 * GIB, anon=2 * GIB)
    write_cgroup_v2(roots, "/user.slice", limit=6 * GIB, anon=5 * GIB, file=60 * GIB)
    assert read(roots).levels == (
        CgroupLevel("/user.slice/user-1.slice/run.scope", "memory.max", 8 * GIB, GIB, kills=True),
        CgroupLevel("/user.slice/user-1.slice/run.scope", "memory.high", 7 * GIB, GIB, kills=False),
        CgroupLevel("/user.slice/user-1.slice", "memory.high", 4 * GIB, 2 * GIB, kills=False),
        CgroupLevel("/user.slice", "memory.max", 6 * GIB, 5 * GIB, kills=True),
    )


# Parts of a cgroup's memory in MiB, each counted once, as reported by several kernel versions: 4.19, 5.15, 5.17
# (which has `vmalloc` and no sum), 6.1 and 6.18 (with huge pages charged to it).
PARTS = {"anon": 4096, "file": 1024, "shmem": 256, "sock": 8, "hugetlb": 512}
KERNEL = {"kernel_stack": 16, "pagetables": 64, "percpu": 4, "vmalloc": 32, "sec_pagetables": 2, "zswap": 1638}
SLAB = {"slab_reclaimable": 700, "slab_unreclaimable": 120}
KERNELS = {
    "4.19": ({"hugetlb", "percpu", "vmalloc", "sec_pagetables", "zswap", "pagetables"}, False),
    "5.15": ({"hugetlb", "vmalloc", "sec_pagetables", "zswap"}, False),
    "5.17": ({"hugetlb", "sec_pagetables", "zswap"}, False),
    "6.1": ({"hugetlb"}, True),
    "6.18": (set(), True),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_version_2_counts_each_byte_of_memory_current_once_on_every_kernel(tmp_path: Path, kernel: str) -> None:
    lacks, has_sum = KERNELS[kernel]
    pages = {name: size for name, size in PARTS.items() if name not in lacks}
    own = {name: size for name, size in KERNEL.items() if name not in lacks}
    whole = sum(own.values()) + sum(SLAB.values())
    stat = pages | own | SLAB | {"slab": sum(SLAB.values()), "zswapped": 5000, "file_mapped": 900, "swapcached": 3}
    stat |= {"inactive_file": 600, "active_file": 160, "inactive_anon": 9000, "unevictable": 70, "anon_thp": 2048}
    stat |= {"kernel": whole} if has_sum else {}
    current = sum(pages.values()) - pages["shmem"] + whole  # `file` includes `shmem`
    roots = write_v2(tmp_path, limit=12 * GIB)
    folder = roots.sys / "fs/cgroup"
    (folder / "memory.stat").write_text("".join(f"{name} {size * MIB}\n" for name, size in stat.items()))
    (folder / "memory.current").write_text(f"{current * MIB}\n")
    use = read(roots)
    (level,) = use.levels
    assert level.used_bytes + use.file_bytes + SLAB["slab_reclaimable"] * MIB == current * MIB
    assert level.charged_bytes == (current - 760) * MIB, "as Ray counts: all but files, with the caches of file names"
    (folder / "memory.stat").write_text("anon 100\n")
    assert read(roots).levels[0].charged_bytes is None, "the kernel does not say"


def test_version_2_swap_left_follows_from_the_tightest_ancestor(tmp_path: Path) -> None:
    roots = write_v2(tmp_path, path="/pods/run", limit=8 * GIB)
    assert read(roots).levels[0].swap_left_bytes is None, "no swap accounting: all that the machine has"
    inner, outer = (roots.sys / "fs/cgroup" / path for path in ("pods/run", "pods"))
    (inner / "memory.swap.max").write_text("max\n")
    assert read(roots).levels[0].swap_left_bytes is None
    (outer / "memory.swap.max").write_text(f"{3 * GIB}\n")
    (outer / "memory.swap.current").write_text(f"{GIB}\n")
    assert read(roots).levels[0].swap_left_bytes == 2 * GIB
    (inner / "memory.swap.max").write_text("0\n")
    (inner / "memory.swap.current").write_text("4096\n")
    assert read(roots).levels[0].swap_left_bytes == 0


def test_version_1_limits_memory_and_swap_together(tmp_path: Path) -> None:
    roots = write_v1(tmp_path, path="/a", limit=8 * GIB, anon=GIB)
    folder = roots.sys / "fs/cgroup/memory/a"
    with (folder / "memory.stat").open("a") as stat:
        stat.write(f"total_swap {GIB}\ntotal_inactive_file {2 * GIB}\ntotal_active_file {GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{5 * GIB}\n")
    (level,) = read(roots).levels
    assert level.swap_left_bytes is None
    assert level.charged_bytes == 2 * GIB, "Ray counts the kernel's memory, which version 1 does not tell apart"
    (folder / "memory.memsw.limit_in_bytes").write_text(f"{12 * GIB}\n")
    assert read(roots).levels[0].swap_left_bytes == 3 * GIB


def test_a_kill_in_a_sibling_cgroup_is_not_counted(tmp_path: Path) -> None:
    roots = write_v2(tmp_path, path="/pods/ours", oom_kills=0)
    write_cgroup_v2(roots, "/pods", limit=4 * GIB, oom_kills=5)
    assert read(roots).oom_kills == 0


@pytest.mark.parametrize("unified", [True, False], ids=["hybrid", "version 1 alone"])
def test_version_1_reads_limit_use_and_kills(tmp_path: Path, unified: bool) -> None:
    figures = {"limit": 8 * GIB, "anon": GIB, "shmem": 2 * GIB, "file": 3 * GIB, "oom_kills": 1}
    use = read(write_v1(tmp_path, path="/process_api/box", unified=unified, **figures))
    assert (use.path, use.oom_kills) == ("/process_api/box", 1)
    assert (use.anon_bytes, use.shmem_bytes, use.file_bytes) == (GIB, 2 * GIB, 3 * GIB)
    assert use.levels == (CgroupLevel("/process_api/box", "memory.limit_in_bytes", 8 * GIB, 3 * GIB, kills=True),)


def test_version_1_limits_of_ancestors_apply(tmp_path: Path) -> None:
    roots = write_v1(tmp_path, path="/a/b", limit=8 * GIB, hierarchical_limit=4 * GIB, anon=GIB)
    write_cgroup_v1(roots, "/a", limit=4 * GIB, anon=2 * GIB)
    assert read(roots).levels == (
        CgroupLevel("/a/b", "memory.limit_in_bytes", 8 * GIB, GIB, kills=True),
        CgroupLevel("/a", "memory.limit_in_bytes", 4 * GIB, 2 * GIB, kills=True),
    )


@pytest.mark.parametrize("mount_root", ["/docker/abc", "/"], ids=["the mount says so", "the mount does not say so"])
def test_version_1_container_with_the_host_s_cgroup_path(tmp_path: Path, mount_root: str) -> None:
    roots = write_v1(tmp_path, path="/docker/abc", mount_root="/docker/abc", limit=2 * GIB, anon=GIB)
    mountinfo = roots.proc / "self" / "mountinfo"
    mountinfo.write_text(mountinfo.read_text().replace("/docker/abc", mount_root))
    assert read(roots).levels == (
        CgroupLevel("/docker/abc", "memory.limit_in_bytes", 2 * GIB, GIB, kills=True, is_top=True),
    )


def test_without_files_there_is_no_cgroup(tmp_path: Path) -> None:
    roots = empty_roots(tmp_path)
    write_process(roots, pid=10)
    assert read_cgroup(10) is None
    roots = write_v2(tmp_path, limit=GIB)
    assert read_cgroup(99) is None, "no such process"
    write_process(roots, pid=10)
    (roots.proc / "10" / "cgroup").write_text("0::/../another\n")
    assert read_cgroup(10) is None, "outside of the container"
    (roots.proc / "10" / "cgroup").write_text("no cgroup\n")
    assert read_cgroup(10) is None, "garbage"
    (roots.proc / "10" / "cgroup").write_text("0::/\n")
    (roots.sys / "fs/cgroup/memory.stat").write_text("anon\nshmem x\n")
    assert read_cgroup(10) is None, "no figures"
