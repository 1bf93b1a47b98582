"""Processes on recorded machines: members of a run and their memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil
import pytest

from tests.support.system_trees import Roots, empty_roots, write_process
from vesuvius.monitor.probes import processes
from vesuvius.monitor.probes.processes import ProcessTree, read_process
from vesuvius.runlog.units import GIB

MIB = 2**20


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Roots:
    monkeypatch.setattr(processes, "_RESCAN_EVERY_S", 1e9)
    return empty_roots(tmp_path)


def pids(tree: ProcessTree) -> list[int]:
    return [use.pid for use in tree.sample()]


def test_all_figures_of_a_process_are_read(roots: Roots) -> None:
    title = "ray::MapWorker(MapBatches(_RayReader)).submit some more words of no use"
    sizes = {"anon": GIB, "shmem": 2 * MIB, "file": 3 * MIB, "swap": 4 * MIB}
    write_process(roots, 10, 7, name=title, started_s=12.5, state="D", cpu_s=3.25, **sizes)
    use = read_process(10)
    assert use is not None
    assert (use.pid, use.parent, use.name) == (10, 7, title[:60])
    assert (use.started_s, use.status, use.cpu_s) == (12.5, "disk-sleep", 3.25)
    assert (use.anon_bytes, use.shmem_bytes, use.file_bytes, use.swap_bytes) == (GIB, 2 * MIB, 3 * MIB, 4 * MIB)


def test_without_rss_details_file_pages_come_from_statm(roots: Roots) -> None:
    directory = write_process(roots, 10)
    (directory / "status").write_text("Name:\tpython\nVmRSS:\t    4096 kB\nVmSwap:\t 8 kB\n")
    page = os.sysconf("SC_PAGE_SIZE")
    (directory / "statm").write_text(f"9999 {4 * MIB // page} {MIB // page} 1 0 1 0\n")
    use = read_process(10)
    assert use is not None
    assert (use.anon_bytes, use.shmem_bytes, use.file_bytes, use.swap_bytes) == (3 * MIB, 0, MIB, 8192)


def test_new_descendants_are_found_by_the_next_sample(roots: Roots) -> None:
    write_process(roots, 1, parent=0)
    write_process(roots, 10)
    write_process(roots, 20)
    tree = ProcessTree(10)
    assert pids(tree) == [10]
    write_process(roots, 12, parent=11)
    write_process(roots, 11, parent=10)
    write_process(roots, 21, parent=20)
    assert pids(tree) == [10, 11, 12]


def test_a_fresh_fork_does_not_double_the_memory(roots: Roots) -> None:
    write_process(roots, 10, anon=GIB)
    tree = ProcessTree(10)
    tree.sample()
    write_process(roots, 11, parent=10, anon=GIB - MIB)
    write_process(roots, 12, parent=10, anon=GIB, name="another program")
    assert pids(tree) == [10, 12]
    assert set(pids(tree)) == {10, 11, 12}, "it has stayed"
    assert set(pids(ProcessTree(10))) == {10, 11, 12}, "to one who comes later it is no newcomer"


def test_a_descendant_remains_a_member_when_its_parent_ends(roots: Roots) -> None:
    for pid, parent in ((10, 1), (11, 10), (12, 11)):
        write_process(roots, pid, parent)
    tree = ProcessTree(10)
    assert set(pids(tree)) == {10, 11, 12}
    shutil.rmtree(roots.proc / "11")
    write_process(roots, 12, parent=1)
    write_process(roots, 13, parent=12)
    assert set(pids(tree)) == {10, 12, 13}


def test_a_process_that_reuses_the_pid_of_a_child_is_no_member(roots: Roots) -> None:
    write_process(roots, 10)
    write_process(roots, 11, parent=10)
    tree = ProcessTree(10)
    assert pids(tree) == [10, 11]
    write_process(roots, 11, parent=1, started_s=200)
    assert pids(tree) == [10]


def test_a_process_whose_dead_parent_s_pid_was_reused_by_us_is_no_member(roots: Roots) -> None:
    """The kernel has reparented the process to process 1, which only a fresh read shows."""
    write_process(roots, 10)
    write_process(roots, 30, started_s=50)
    write_process(roots, 31, 30, started_s=60)
    tree = ProcessTree(10)
    assert pids(tree) == [10]
    shutil.rmtree(roots.proc / "30")
    write_process(roots, 31, 1, started_s=60)
    assert pids(tree) == [10]
    write_process(roots, 30, 10, started_s=200)
    assert pids(tree) == [10, 30]
    write_process(roots, 32, 30, started_s=210)
    assert pids(tree) == [10, 30, 32], "its own child is"


def test_a_child_of_a_process_that_reuses_a_reader_s_pid_is_no_member(roots: Roots) -> None:
    write_process(roots, 10)
    write_process(roots, 11, 10)
    tree = ProcessTree(10)
    assert pids(tree) == [10, 11]
    write_process(roots, 11, 1, started_s=200)  # the reader has ended, all within one second
    write_process(roots, 12, 11, started_s=201)
    assert pids(tree) == [10]
    assert pids(tree) == [10]


def test_an_included_pid_that_is_reused_is_no_member(roots: Roots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_RESCAN_EVERY_S", 0.0)
    write_process(roots, 10)
    write_process(roots, 40, started_s=50)
    tree = ProcessTree(10)
    tree.include([40])
    assert pids(tree) == [10, 40]
    write_process(roots, 40, started_s=200)
    for _ in range(2):
        tree.include([40])
        assert pids(tree) == [10]
    tree.include([])
    tree.include([40])  # included again
    assert pids(tree) == [10, 40]


def test_processes_of_others_are_opened_once_however_often_the_run_is_sampled(
    roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But a child that was listed before its parent is found."""
    monkeypatch.setattr(processes, "_RESCAN_EVERY_S", 0.0)
    opened: list[int] = []

    class Counted(psutil.Process):
        def __init__(self, pid: int) -> None:
            opened.append(pid)
            super().__init__(pid)

    monkeypatch.setattr(psutil, "Process", Counted)
    write_process(roots, 1, parent=0)
    write_process(roots, 10)
    for pid in range(100, 300):
        write_process(roots, pid)
    tree = ProcessTree(10)
    assert pids(tree) == [10]
    assert set(range(100, 300)) <= set(opened)
    opened.clear()
    for _ in range(20):
        assert pids(tree) == [10]
    assert set(opened) == {10}
    write_process(roots, 31, parent=30)
    assert pids(tree) == [10]
    write_process(roots, 30, parent=10)
    assert pids(tree) == [10, 30, 31]


def test_a_zombie_child_is_no_member(roots: Roots) -> None:
    write_process(roots, 10)
    write_process(roots, 11, parent=10, state="Z")
    assert pids(ProcessTree(10)) == [10]


@pytest.mark.parametrize("end", ["gone", "zombie", "pid given to another"])
def test_sampling_after_the_end_of_the_root_raises(roots: Roots, end: str) -> None:
    write_process(roots, 1, parent=0)
    write_process(roots, 10)
    tree = ProcessTree(10)
    assert pids(tree) == [10]
    if end == "gone":
        shutil.rmtree(roots.proc / "10")
    elif end == "zombie":
        write_process(roots, 10, state="Z")
    else:
        write_process(roots, 10, started_s=200)
    with pytest.raises(ProcessLookupError, match="10"):
        tree.sample()


def test_a_process_that_ends_while_it_is_read_is_skipped(roots: Roots) -> None:
    write_process(roots, 10)
    write_process(roots, 11, parent=10, anon=GIB)
    tree = ProcessTree(10)
    assert pids(tree) == [10, 11]
    (roots.proc / "11" / "stat").unlink()  # the directory is still listed
    assert pids(tree) == [10]


def test_shared_memory_without_a_readable_file_is_the_largest_touched_size(roots: Roots) -> None:
    write_process(roots, 10, shmem=3 * MIB)
    write_process(roots, 11, parent=10, shmem=5 * MIB)
    tree = ProcessTree(10)
    tree.sample()
    assert tree.shared_bytes() == (5 * MIB, 0)
