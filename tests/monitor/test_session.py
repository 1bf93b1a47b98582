"""Identity of a run's process, and whether it is alive, seen from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from vesuvius.monitor import session
from vesuvius.monitor.memory.limits import MemoryPolicy
from vesuvius.monitor.session import (
    SessionRecord,
    begin_session,
    end_session,
    is_alive,
    machine_id,
    pid_namespace,
    read_session,
)

LIMITS = MemoryPolicy(ray_share=0.95, configured_bytes=3 * 2**30, exit_at=0.5)
BEGIN = """
import sys, time
from pathlib import Path
from vesuvius.monitor.memory.limits import MemoryPolicy
from vesuvius.monitor.session import begin_session
begin_session(Path(sys.argv[1]), "child", 2, MemoryPolicy())
print("begun", flush=True)
time.sleep(600)
"""


@contextmanager
def begun_session(path: Path, *before: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has written its session; `before`: command prefix to start it with."""
    command = [*before, sys.executable, "-c", BEGIN, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "begun\n" and before:
                pytest.skip(f"{' '.join(before)} is not permitted here")
            yield process
        finally:
            process.kill()


def test_a_session_is_read_back_and_its_end_is_added(tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    record = begin_session(path, "tiny", 3, LIMITS)
    assert read_session(path) == record
    assert (record.pid, record.workers, record.limits, record.end_time) == (os.getpid(), 3, LIMITS, None)
    assert record.started_s > 0
    end_session(path, record, 4)
    ended = read_session(path)
    assert ended is not None
    assert ended.exit_code == 4
    assert ended.end_time is not None
    assert ended.end_time >= record.begin_time
    assert replace(ended, end_time=None, exit_code=None) == record
    assert [file.name for file in tmp_path.iterdir()] == ["session.json"]


def test_a_killed_process_is_not_alive_even_before_it_is_reaped(tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    with begun_session(path) as process:
        record = read_session(path)
        assert record is not None
        assert is_alive(record) is True
        assert record.pid == process.pid
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, but still a zombie
        assert is_alive(record) is False
        process.wait()
        assert is_alive(record) is False


def test_a_reused_pid_a_reboot_and_another_machine_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = tmp_path / "machine-id"
    identity.write_text(f"{'a1' * 16}\n")
    monkeypatch.setattr(session, "_MACHINE_ID", identity)
    monkeypatch.setattr(session, "_OUTSIDE_CONTAINERS", pid_namespace())
    record = begin_session(tmp_path / "session.json", "tiny", 0, LIMITS)
    assert "a1a1" not in record.machine, "it is confidential"
    assert is_alive(record) is True
    assert is_alive(replace(record, started_s=record.started_s - 60)) is False
    before = replace(record, boot_id="another")
    assert is_alive(before) is False, "nothing survives a restart"
    assert is_alive(replace(before, host="elsewhere")) is None
    assert is_alive(replace(before, machine="")) is None, "of an earlier version"
    assert is_alive(replace(record, boot_id="")) is None
    identity.write_text(f"{'b2' * 16}\n")
    assert is_alive(before) is None, "another machine of the same name"


@pytest.mark.parametrize(
    ("text", "namespace"), [("", None), ("uninitialized\n", None), ("a1" * 16, "pid:[4026532001]")]
)
def test_machines_without_an_id_and_containers_are_not_identified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, namespace: str | None
) -> None:
    """Images contain ids: two containers on two machines may have the same, and the same host name."""
    identity = tmp_path / "machine-id"
    monkeypatch.setattr(session, "_MACHINE_ID", identity)
    monkeypatch.setattr(session, "_OUTSIDE_CONTAINERS", pid_namespace())
    assert machine_id() == "", "no such file"
    identity.write_text(text)
    if namespace is not None:
        monkeypatch.setattr(session, "pid_namespace", lambda: namespace)
    record = begin_session(tmp_path / "session.json", "tiny", 0, LIMITS)
    assert record.machine == machine_id() == ""
    assert is_alive(replace(record, boot_id="another")) is None


@pytest.mark.parametrize(("here", "expected"), [("pid:[77]", False), ("pid:[88]", None)])
def test_death_is_known_only_within_the_run_s_pid_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, expected: bool | None
) -> None:
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("this\n")
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to(here)
    record = SessionRecord("r", "h", "this", 7, 1.0, 1.0, 0, MemoryPolicy(), pid_namespace="pid:[77]")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert is_alive(record) is expected


def test_a_damaged_file_is_no_session_and_unknown_keys_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "session.json"
    assert read_session(path) is None
    for text in ("", "{", "[]", "null", '{"name": "x"}'):
        path.write_text(text)
        assert read_session(path) is None, text
    record = begin_session(path, "tiny", 0, LIMITS)
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"of_tomorrow": 1, "limits": data["limits"] | {"too": 2}}))
    assert read_session(path) == record
    for change in ({"pid": "x"}, {"limits": {"exit_at": "high"}}, {"limits": 3}, {"begin_time": None}):
        path.write_text(json.dumps(data | change))
        assert read_session(path) is None, change
