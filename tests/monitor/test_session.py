"""Identity of a run's process, and whether it is alive, seen from outside."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from vesuvius.monitor.memory.limits import MemoryPolicy
from vesuvius.monitor.session import (
    begin_session,
    end_session,
    is_alive,
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


def test_a_reused_pid_another_boot_and_another_namespace_are_distinguished(tmp_path: Path) -> None:
    record = begin_session(tmp_path / "session.json", "tiny", 0, LIMITS)
    assert is_alive(record) is True
    assert is_alive(replace(record, started_s=record.started_s - 60)) is False
    for elsewhere in ({"boot_id": "another"}, {"boot_id": ""}, {"pid_namespace": "pid:[1]"}):
        assert is_alive(replace(record, **elsewhere)) is None


def test_a_process_is_the_same_while_the_clock_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, boots = begin_session(tmp_path / "session.json", "tiny", 0, LIMITS), itertools.count(10**9)
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: float(next(boots)))
    assert is_alive(record) is True


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
    wrong = ({"pid": "x"}, {"pid": -1}, {"limits": {"exit_at": "high"}}, {"limits": 3}, {"begin_time": None})
    for change in (*wrong, {"begin_time": math.nan}, {"begin_time": 1e300}):
        path.write_text(json.dumps(data | change))
        assert read_session(path) is None, change
