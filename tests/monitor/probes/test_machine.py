"""Counters of the machine, on recorded machines and on this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.system_trees import Roots, empty_roots, write_machine
from vesuvius.monitor.probes.system_sample import read_machine
from vesuvius.runlog.units import GIB


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
        cores=((100.0, 1000.0), (400.0, 1000.0)),
    )
    return roots


def test_used_memory_is_what_cannot_be_reclaimed(roots: Roots) -> None:
    machine = read_machine()
    assert (machine.total_bytes, machine.available_bytes, machine.used_bytes) == (64 * GIB, 40 * GIB, 24 * GIB)
    assert machine.page_cache_bytes == 20 * GIB
    assert (machine.swap_used_bytes, machine.swap_total_bytes) == (GIB, 8 * GIB)
    assert machine.oom_kills == 3
    assert machine.core_busy_s == (100.0, 400.0), "a core that waits for a disk is idle, and guests count once"
    assert machine.core_total_s == (1000.0, 1000.0)


def test_figures_that_the_kernel_lacks_are_none(roots: Roots) -> None:
    (roots.proc / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 100 kB\nCached: 300 kB\nShmem: 50 kB\n")
    (roots.proc / "vmstat").unlink()
    machine = read_machine()
    assert machine.total_bytes == 1000 * 1024
    assert 100 * 1024 <= machine.available_bytes <= 400 * 1024
    assert machine.page_cache_bytes == 250 * 1024
    assert machine.oom_kills is None
    assert len(machine.core_busy_s) == len(machine.core_total_s) == 2
