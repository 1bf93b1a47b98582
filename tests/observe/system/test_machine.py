"""The machine's counters, on recorded machines and on this one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.system_trees import empty_roots, write_machine
from vesuvius.observe.system.cgroup import Pressure
from vesuvius.observe.system.machine import read_machine
from vesuvius.observe.system.roots import Roots
from vesuvius.observe.units import GIB


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    roots = empty_roots(tmp_path)
    write_machine(
        roots,
        total=64 * GIB,
        available=40 * GIB,
        shmem=2 * GIB,
        cached=20 * GIB,
        swap_total=8 * GIB,
        swap_used=GIB,
        oom_kills=3,
        some_10s=0.25,
        cores=((100.0, 1000.0), (400.0, 1000.0)),
        disk=(51200, 102400),
        net=(1000, 2000),
    )
    return roots


def test_memory_is_used_as_far_as_it_cannot_be_given_back(roots: Roots) -> None:
    machine = read_machine(roots)
    assert (machine.total_bytes, machine.available_bytes, machine.used_bytes) == (64 * GIB, 40 * GIB, 24 * GIB)
    assert (machine.shmem_bytes, machine.page_cache_bytes) == (2 * GIB, 20 * GIB)
    assert (machine.swap_used_bytes, machine.swap_total_bytes) == (GIB, 8 * GIB)
    assert machine.oom_kills == 3
    assert machine.pressure == Pressure(0.25, 0)


def test_a_core_that_waits_for_a_disk_is_idle_and_guests_count_once(roots: Roots) -> None:
    machine = read_machine(roots)
    assert machine.core_busy_s == (100.0, 400.0)
    assert machine.core_total_s == (1000.0, 1000.0)


def test_each_byte_of_the_disks_counts_once(roots: Roots) -> None:
    names = ("sda", "sda1", "sda12", "nvme0n1", "nvme0n1p2", "nvme0n10", "loop0", "ram1", "zram0", "dm-0", "md127")
    rows = [f"8 0 {name} 1 0 {10**i} 0 1 0 {2 * 10**i} 0 0 0 0" for i, name in enumerate(names)]
    (roots.proc / "diskstats").write_text("\n".join([*rows, "8 0 torn 1", ""]))
    whole = 10**0 + 10**3 + 10**5  # sda, nvme0n1, nvme0n10
    machine = read_machine(roots)
    assert (machine.disk_read_bytes, machine.disk_written_bytes) == (512 * whole, 512 * 2 * whole)


def test_the_loopback_is_no_network(roots: Roots) -> None:
    machine = read_machine(roots)
    assert (machine.net_received_bytes, machine.net_sent_bytes) == (1000, 2000)


def test_bridges_pass_on_what_the_adapter_has_counted(roots: Roots) -> None:
    rows = "  eth0: 10 1 0 0 0 0 0 0 20 1\n docker0: 5 1 0 0 0 0 0 0 5 1\n veth1: 5 1 0 0 0 0 0 0 5 1\n"
    (roots.proc / "net" / "dev").write_text(rows)
    assert read_machine(roots).net_received_bytes == 20, "a container: no adapter, so all of them"
    (roots.sys / "class/net/eth0/device").mkdir(parents=True)
    machine = read_machine(roots)
    assert (machine.net_received_bytes, machine.net_sent_bytes) == (10, 20)


def test_an_odd_kernel_says_less(tmp_path: Path) -> None:
    roots = empty_roots(tmp_path)
    (roots.proc / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 100 kB\nCached: 300 kB\nShmem: 50 kB\nodd\n")
    (roots.proc / "stat").write_text("cpu 1 2\ncpu0 10 0 10 80\ncpu1 x\n")
    machine = read_machine(roots)
    assert machine.total_bytes == 1000 * 1024
    assert machine.available_bytes == (100 + 300 - 50) * 1024
    assert (machine.pressure, machine.oom_kills) == (None, None)
    assert len(machine.core_busy_s) == len(machine.core_total_s) == 1
    assert (machine.disk_read_bytes, machine.net_sent_bytes) == (0, 0)


def test_without_proc_the_size_is_known_all_the_same(tmp_path: Path) -> None:
    machine = read_machine(empty_roots(tmp_path))
    assert machine.total_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.used_bytes == 0


def test_this_machine_is_read() -> None:
    first = read_machine()
    assert 0 < first.available_bytes < first.total_bytes
    assert len(first.core_busy_s) == len(first.core_total_s) > 0
    # The counters are kept core by core, in hundredths of a second; idle and worked time add up to at most the uptime.
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    for busy_s, total_s in zip(first.core_busy_s, first.core_total_s, strict=True):
        assert 0 <= busy_s <= total_s <= uptime_s * 1.05 + 1
