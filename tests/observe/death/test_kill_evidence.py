"""The kernel's evidence: lines of its log, recorded and of a real kill, and its counts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.real_cgroup import real_cgroup
from vesuvius.observe.death.kill_evidence import KMSG, KillCounts, read_counts_of, read_kernel_log

LIMIT_BYTES = 48 * 2**20

GREEDY = """
import os, sys
open(sys.argv[1], "w").write(str(os.getpid()))
kept = []
while True:
    kept.append(b"x" * 2**20)
"""


def kmsg_line(at: float, text: str, number: int = 1) -> str:
    """A line of the kernel's log of a moment, seconds since 1970."""
    return f"6,{number},{int((time.monotonic() - (time.time() - at)) * 1e6)},-;{text}\n"


def cgroup_kill(pid: int, name: str = "python3", cgroup: str = "/job") -> tuple[str, str]:
    return (
        f"oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg={cgroup},"
        f"task_memcg={cgroup}/step,task={name},pid={pid},uid=0",
        f"Memory cgroup out of memory: Killed process {pid} ({name}) total-vm:75160kB, anon-rss:65280kB, "
        "file-rss:6576kB, shmem-rss:0kB, UID:0 pgtables:192kB oom_score_adj:0",
    )


def test_a_recorded_log_names_who_was_killed_and_whose_limit_it_was(tmp_path: Path) -> None:
    kmsg, now = tmp_path / "kmsg", time.time()
    lines = [
        kmsg_line(now - 90, "IPv6: ADDRCONF"),
        " SUBSYSTEM=net\n",
        *(kmsg_line(now - 20, text) for text in cgroup_kill(30111)),
        kmsg_line(now - 10, "Out of memory: Killed process 77 (my (odd) name) total-vm:1kB, anon-rss:1kB"),
        kmsg_line(now - 9, "oom_reaper: reaped process 77 (python3), now anon-rss:0kB"),
        kmsg_line(now - 5, "python3[55]: segfault at 0 ip 00007f sp 00007f error 4 in libfoo.so"),
        kmsg_line(now - 4, "traps: python3[56] general protection fault ip:7f sp:7f error:0"),
        "torn",
    ]
    kmsg.write_text("".join(lines))
    log = read_kernel_log(now - 60, kmsg)
    assert log is not None
    assert log.whole
    assert [(kill.pid, kill.scope, kill.cgroup) for kill in log.kills] == [
        (30111, "cgroup", "/job"),
        (77, "machine", None),
    ]
    kill = log.kill_of(30111)
    assert kill is not None
    assert "anon-rss:65280kB" in kill.text
    assert log.kill_of(78) is None
    assert set(log.faults) == {55, 56}


def test_old_kernels_words_are_understood(tmp_path: Path) -> None:
    kmsg, now = tmp_path / "kmsg", time.time()
    text = "Memory cgroup out of memory: Kill process 12 (python) score 990 or sacrifice child"
    kmsg.write_text(kmsg_line(now - 1, text))
    log = read_kernel_log(now - 60, kmsg)
    assert log is not None
    assert [(kill.pid, kill.scope) for kill in log.kills] == [(12, "cgroup")]


def test_kills_of_earlier_days_do_not_count_and_a_log_that_begins_later_is_not_whole(tmp_path: Path) -> None:
    kmsg, now = tmp_path / "kmsg", time.time()
    kmsg.write_text(
        kmsg_line(now - 1000, cgroup_kill(1)[1]) + kmsg_line(now - 500, cgroup_kill(2)[1]) + kmsg_line(now, "x")
    )
    log = read_kernel_log(now - 700, kmsg)
    assert log is not None
    assert [kill.pid for kill in log.kills] == [2]
    assert log.whole
    late = read_kernel_log(now - 4000, kmsg)
    assert late is not None
    assert not late.whole


def test_a_log_that_may_not_be_read_is_no_evidence(tmp_path: Path) -> None:
    assert read_kernel_log(0, tmp_path / "kmsg") is None
    assert read_kernel_log(0, tmp_path) is None


@pytest.mark.parametrize(
    ("before", "now", "expected"), [(3, 5, 2), (3, 3, 0), (None, 5, None), (3, None, None), (5, 3, None)]
)
def test_a_count_that_falls_is_another_count(before: int | None, now: int | None, expected: int | None) -> None:
    assert KillCounts(before, before).since(KillCounts()) == KillCounts()
    assert KillCounts(now, now).since(KillCounts(before, before)) == KillCounts(expected, expected)


@pytest.mark.parametrize(("path", "cgroup"), [("/job", 2), ("", 2), ("/other", None)])
def test_counts_of_two_cgroups_are_not_compared_and_those_of_the_machine_are(path: str, cgroup: int | None) -> None:
    assert KillCounts(5, 9, path).since(KillCounts(3, 4, "/job")) == KillCounts(cgroup, 5, path)


def test_the_kernel_s_own_log_and_counts_tell_of_a_real_kill(tmp_path: Path) -> None:
    if not os.access(KMSG, os.R_OK) or read_kernel_log(time.time()) is None:
        pytest.skip("the kernel's log may not be read here")
    began, before = time.time(), read_counts_of(os.getpid())
    with real_cgroup(LIMIT_BYTES) as cgroup:
        enter = f'echo $$ > {cgroup}/cgroup.procs && exec "$0" "$@"'
        command = ["sh", "-c", enter, sys.executable, "-c", GREEDY, str(tmp_path / "pid")]
        assert subprocess.run(command, check=False).returncode == -9
    pid = int((tmp_path / "pid").read_text())
    log = read_kernel_log(began)
    assert log is not None
    kill = log.kill_of(pid)
    assert kill is not None
    assert kill.scope == "cgroup"
    assert kill.cgroup is not None
    assert kill.cgroup.endswith(cgroup.name)
    rise = read_counts_of(os.getpid()).since(before)
    assert rise.machine in (None, *range(1, 1000)), "None: a kernel that does not count"
    assert rise.cgroup in (None, 0), "the victim was in another cgroup"
