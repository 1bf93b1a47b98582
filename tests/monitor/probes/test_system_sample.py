"""Samples compared with the memory that real processes touched, and sums over a recorded machine."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import textured, write_array
from tests.stream.test_stream import make_job
from tests.support.real_cgroup import memory_cgroup_or_skip, popen_in
from tests.support.system_trees import Roots, empty_roots, write_machine, write_process, write_v2
from vesuvius.monitor.memory.limits import MemoryPolicy
from vesuvius.monitor.memory.risk import RiskWatch
from vesuvius.monitor.probes.system_sample import SystemSample, Watcher, rates_between, read_machine, sample_system
from vesuvius.runlog.units import GIB
from vesuvius.stream.reading.resident import Resident
from vesuvius.volumes.box import shape_of

MIB = 2**20

# Memory of a process in addition to the pages it was told to touch: the interpreter allocates, and the kernel counts
# in batches, up to 32 pages per core before 6.16.
SLACK = 2 * MIB + 32 * 4096 * (os.cpu_count() or 1)

# Commands: `anon SIZE` touches private memory, `pinned SIZE` shared memory as CUDA pins it, `open PATH SIZE`
# (or PATH memfd) maps shared memory, `touch END` its pages up to there, `child LINE` passes a line on to a child, made
# on first use, `exit` ends; each gets an answer.
_OBEDIENT = """
import mmap, os, subprocess, sys
held, child, shared = [], None, None
def fill(memory, end):
    for at in range(0, end, 4096 * 16):
        page = min(end - at, 4096 * 16)
        memory[at : at + page] = bytes(page)
for line in sys.stdin:
    word, *rest = line.split(maxsplit=1)
    rest = rest[0].strip() if rest else ''
    answer = 'done'
    if word == 'anon':
        held.append(mmap.mmap(-1, int(rest), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        fill(held[-1], int(rest))
    elif word == 'pinned':
        held.append(mmap.mmap(-1, int(rest)))  # shared, without a file
        fill(held[-1], int(rest))
    elif word == 'open':
        path, size = rest.split()
        file = os.memfd_create('test') if path == 'memfd' else os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(file, int(size))
        os.set_inheritable(file, True)
        shared, answer = mmap.mmap(file, int(size)), f'/proc/{os.getpid()}/fd/{file}'
    elif word == 'touch':
        fill(shared, int(rest))
    elif word == 'child':
        child = child or subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[1]], text=True, bufsize=1,
                                          stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        print(rest, file=child.stdin, flush=True)
        answer = child.stdout.readline().strip()
    elif word == 'exit':
        break
    print(answer, flush=True)
"""
_COMMAND = (sys.executable, "-c", _OBEDIENT, _OBEDIENT)


class Obedient:
    """A process that touches memory on command."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.pid = process, process.pid

    def tell(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@contextmanager
def obedient(cgroup: Path | None = None) -> Iterator[Obedient]:
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = popen_in(cgroup, _COMMAND, **options) if cgroup else subprocess.Popen(_COMMAND, **options)  # type: ignore[call-overload]
    with process:
        yield Obedient(process)
        process.stdin.close()


@pytest.mark.parametrize("where", ["/dev/shm", "memfd"])
def test_shared_memory_counts_once_by_touched_pages(where: str) -> None:
    if where != "memfd" and not os.path.isdir(where):
        pytest.skip("needs /dev/shm")
    path = Path(f"/dev/shm/vesuvius-test-{uuid.uuid4().hex}")
    try:
        with obedient() as parent:
            file = parent.tell(f"open {'memfd' if where == 'memfd' else path} {256 * MIB}")
            parent.tell(f"child open {file} {256 * MIB}")
            path.unlink(missing_ok=True)  # as Ray does with its object store
            watcher = Watcher(parent.pid)
            before = watcher.sample()
            assert before.shared_bytes == 0, "nothing of it was touched"
            parent.tell(f"touch {64 * MIB}")
            after_one = watcher.sample()
            parent.tell(f"child touch {96 * MIB}")
            after_both = watcher.sample()
    finally:
        path.unlink(missing_ok=True)
    # Full pages of a file: nothing is estimated.
    assert after_one.shared_bytes == 64 * MIB
    assert after_both.shared_bytes == 96 * MIB, "64 MiB of them by both"
    assert after_both.anon_bytes - before.anon_bytes <= 2 * SLACK


def test_volumes_kept_in_memory_are_distinguished_from_other_shared_memory(tmp_path: Path) -> None:
    volume = write_array(tmp_path / "v.zarr", textured((64, 64, 64)))
    job = make_job(volume, patch_size=(16, 32, 32))
    gc.collect()  # a copy that another test left behind must not disappear in between
    start = Watcher(os.getpid()).sample()
    with obedient() as parent:
        parent.tell(f"open memfd {64 * MIB}")
        parent.tell(f"touch {64 * MIB}")
        before, resident = Watcher(os.getpid()).sample(), Resident(job)
        for visit in map(job.plan.visit, range(8)):
            resident.volumes[0].keep(visit.region, [np.ones(shape_of(visit.region), np.uint8)])
        after = Watcher(os.getpid()).sample()
        resident.close()
    assert before.kept_bytes == start.kept_bytes
    kept_bytes = after.kept_bytes - before.kept_bytes
    assert 0 < kept_bytes <= Resident.size_bytes(job)
    assert after.shared_bytes == before.shared_bytes + kept_bytes


def test_pinned_buffers_count_as_private_memory_of_the_trainer() -> None:
    """CUDA pins shared memory without a file; the store is a file of which the trainer has touched little."""
    with obedient() as parent:
        parent.tell(f"child open memfd {64 * MIB}")
        parent.tell(f"child touch {64 * MIB}")
        before = Watcher(parent.pid).sample()
        parent.tell(f"pinned {48 * MIB}")
        after = Watcher(parent.pid).sample()
    assert after.processes[0].anon_bytes - before.processes[0].anon_bytes == pytest.approx(48 * MIB, abs=SLACK)
    assert after.shared_bytes == before.shared_bytes == 64 * MIB
    assert after.used_bytes - before.used_bytes == pytest.approx(48 * MIB, abs=2 * SLACK)


def test_the_accounted_memory_equals_the_cgroup_s() -> None:
    with memory_cgroup_or_skip() as group, obedient(group) as parent:
        parent.tell(f"anon {100 * MIB}")
        parent.tell(f"child anon {100 * MIB}")
        file = parent.tell(f"open memfd {100 * MIB}")
        parent.tell(f"child open {file} {100 * MIB}")
        parent.tell(f"touch {100 * MIB}")
        parent.tell(f"child touch {100 * MIB}")
        sample = Watcher(parent.pid).sample()
        assert sample.cgroup is not None
        # The kernel charges a cgroup in batches of 64 pages per core; 3 % is promised for a run.
        assert sample.used_bytes == pytest.approx(sample.cgroup.anon_bytes + sample.cgroup.shmem_bytes, rel=0.03)


def test_a_recorded_run_adds_up(tmp_path: Path) -> None:
    roots = write_v2(tmp_path, limit=8 * GIB, anon=3 * GIB, shmem=GIB, file=4 * GIB)
    write_machine(roots, total=64 * GIB, available=32 * GIB, cached=30 * GIB)
    write_process(roots, 10, anon=GIB, shmem=GIB, file=GIB)
    write_process(roots, 11, parent=10, anon=2 * GIB, shmem=GIB, file=GIB)
    sample = Watcher(10).sample()
    assert sample.anon_bytes == 3 * GIB
    assert sample.shared_bytes == GIB
    assert sample.used_bytes == 4 * GIB, "no page cache, and shared memory once"
    assert sample.cgroup is not None
    assert sample.cgroup.levels[0].used_bytes == 4 * GIB


# ---- counters of a recorded machine


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


@pytest.mark.parametrize("meminfo", ["", "MemTotal: 0 kB\nMemFree: 0 kB\n"])
def test_a_kernel_that_refuses_its_figures_leaves_memory_that_no_limit_is_near(roots: Roots, meminfo: str) -> None:
    """Without them the machine's limit would be 0: a monitor that fails at its start ends the run."""
    write_process(roots, 10)
    for name in ("vmstat", "stat"):
        (roots.proc / name).unlink(missing_ok=True)
    (roots.proc / "meminfo").write_text(meminfo) if meminfo else (roots.proc / "meminfo").unlink()
    machine = read_machine()
    assert machine.available_bytes == machine.total_bytes > 0
    assert machine.core_busy_s == ()
    risk = RiskWatch(MemoryPolicy()).add(replace(sample_system(10), processes=()))
    assert (risk.level.name, risk.limits[0].used_bytes) == ("LOW", 0)


@pytest.fixture
def samples(tmp_path: Path) -> tuple[SystemSample, SystemSample]:
    """Two samples four seconds apart: one core was busy for three seconds, the other for one."""
    roots = empty_roots(tmp_path)
    write_process(roots, 10, cpu_s=50.0)
    write_process(roots, 11, parent=10, cpu_s=7.0)
    write_machine(roots, total=GIB, available=GIB, cores=((10, 100), (10, 100)))
    watcher = Watcher(10)
    first = watcher.sample()
    write_process(roots, 10, cpu_s=56.0)
    write_process(roots, 11, parent=10, cpu_s=8.0)
    write_machine(roots, total=GIB, available=GIB, cores=((13, 104), (11, 104)))
    return replace(first, clock_s=1000.0), replace(watcher.sample(), clock_s=1004.0)


def test_counters_become_shares_and_rates(samples: tuple[SystemSample, SystemSample]) -> None:
    rates = rates_between(*samples)
    assert rates is not None
    assert rates.core_busy == pytest.approx((0.75, 0.25))
    assert rates.idle_cores({0, 1}) == pytest.approx(1.0)
    assert rates.idle_cores({1}) == pytest.approx(0.75), "of those that a cpuset allows"
    assert rates.idle_cores({7}) == pytest.approx(1.0), "numbers that mean nothing here"
    assert rates.process_cores == pytest.approx({10: 1.5, 11: 0.25})


def test_rates_ignore_the_wall_clock_and_are_none_if_a_counter_fell(
    samples: tuple[SystemSample, SystemSample],
) -> None:
    first, second = samples
    assert rates_between(first, replace(second, time=first.time - 3600)) == rates_between(first, second) is not None
    assert rates_between(first, replace(second, clock_s=first.clock_s)) is None
    assert rates_between(first, replace(second, clock_s=first.clock_s - 1)) is None
    higher = replace(first.machine, core_busy_s=(10**6, 10**6))
    assert rates_between(replace(first, machine=higher), second) is None


def test_new_ended_and_pid_reusing_processes_have_no_rate(
    samples: tuple[SystemSample, SystemSample],
) -> None:
    first, second = samples
    root, child = second.processes
    other = replace(child, started_s=child.started_s + 1)
    newcomer = replace(child, pid=12)
    rates = rates_between(first, replace(second, processes=(root, other, newcomer)))
    assert rates is not None
    assert set(rates.process_cores) == {10}
