"""Samples compared with the memory that real processes touched, and sums over a recorded machine."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import textured, write_array
from tests.stream.test_stream import make_job
from tests.support.real_cgroup import memory_cgroup_or_skip, popen_in
from tests.support.system_trees import write_machine, write_process, write_v2
from vesuvius.monitor.probes.system_sample import Watcher
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
    with obedient() as parent:
        parent.tell(f"open memfd {64 * MIB}")
        parent.tell(f"touch {64 * MIB}")
        before, resident = Watcher(os.getpid()).sample(), Resident(job)
        for visit in map(job.plan.visit, range(8)):
            resident.volumes[0].keep(visit.region, [np.ones(shape_of(visit.region), np.uint8)])
        after = Watcher(os.getpid()).sample()
        resident.close()
    assert before.kept_bytes == 0
    assert 0 < after.kept_bytes <= Resident.size_bytes(job)
    assert after.shared_bytes == before.shared_bytes + after.kept_bytes


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
