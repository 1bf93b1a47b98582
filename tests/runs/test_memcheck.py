"""`vesuvius memcheck` on real processes: alive, growing, hung, dead, killed, missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.monitor.test_verdict import CPU, window
from tests.support.memcheck_runs import (
    BUFFERS_IN_USE,
    HYGIENE,
    MIB,
    found_in,
    grow,
    memcheck_command,
    part,
    run_memcheck,
    trainer,
)
from vesuvius.monitor.memory.limits import MemoryPolicy
from vesuvius.monitor.post_mortem import Cause, Death, append_death
from vesuvius.monitor.samples import MemorySample, RecentFile
from vesuvius.monitor.session import begin_session, read_session
from vesuvius.monitor.verdict import diagnose


def write_metrics(directory: Path, *records: dict[str, Any]) -> None:
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def death(**figures: Any) -> Death:
    known: dict[str, Any] = {"time": time.time(), "victim": "worker", "pid": 77, "step": 5, "cause": "ray"}
    return Death(**known | {"evidence": ("Ray says so",), "moments": (), "remedy": "training.workers=1"} | figures)


def test_a_live_run_is_found_by_name_and_directory_with_correct_memory(tmp_path: Path) -> None:
    with trainer(tmp_path / "runs/tiny") as process:
        found = found_in(run_memcheck("tiny", "--once", "--json", cwd=tmp_path))
        table = run_memcheck("runs/tiny", cwd=tmp_path)
    assert (found["what"], found["name"], found["state"], found["level"]) == ("run", "run tiny", "running", "LOW")
    # The interpreter with what it imports takes 6 to 60 MiB beside what the process holds on purpose.
    assert BUFFERS_IN_USE < part(found, "root")["now_bytes"] < BUFFERS_IN_USE + 60 * MIB
    assert part(found, "total")["now_bytes"] >= part(found, "root")["now_bytes"]
    assert found["state_text"] == f"process {process.pid} is running, no step yet"
    assert found["limits"][0]["left_bytes"] > 0
    assert (table.returncode, table.stderr) == (0, "")
    assert "\x1b" not in table.stdout
    assert "run tiny" in table.stdout
    assert not HYGIENE.search(table.stdout)
    assert not HYGIENE.search(json.dumps(found))


def test_a_missing_run_is_13_and_the_message_names_existing_runs(tmp_path: Path) -> None:
    (tmp_path / "runs/demo").mkdir(parents=True)
    (tmp_path / "runs/demo/metrics.jsonl").touch()
    done = run_memcheck("dmeo", cwd=tmp_path)
    assert done.returncode == 13
    assert "no run 'dmeo' in " in done.stderr
    assert "runs are demo" in done.stderr


def test_a_watch_of_a_leaking_run_turns_critical_and_ends_with_the_run(tmp_path: Path) -> None:
    with trainer(tmp_path / "runs/tiny", configured_bytes=200 * MIB) as process:
        command = memcheck_command("tiny", "--watch", "0.1", "--json")
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as watching:
            assert watching.stdout is not None
            assert json.loads(watching.stdout.readline())["level"] == "LOW"
            grow(process, 150 * MIB)
            found = next(each for line in watching.stdout if (each := json.loads(line))["level"] == "CRITICAL")
            assert (found["limits"][0]["name"], found["limit_bytes"]) == ("monitor.ram_limit_gib", 200 * MIB)
            assert (found["exit_code"], bool(HYGIENE.search(found["reason"]))) == (11, True)
            process.kill()
            last = json.loads(watching.stdout.read().splitlines()[-1])
    assert (last["state"], last["kills"], watching.returncode) == ("died", [], 10), "memory ran out nowhere"


def test_a_run_killed_by_hand_is_dead_but_no_oom_kill_and_its_last_minute_is_shown(tmp_path: Path) -> None:
    directory = tmp_path / "runs/tiny"
    with trainer(directory) as process:
        begin = time.time()
        ring = RecentFile(directory / "recent.jsonl")
        for i in range(3):
            ring.write(MemorySample(begin + i, 40 + i, (300 + i) * MIB, 20 * MIB, 200 * MIB, {5: 60 * MIB}))
        ring.close()
        process.send_signal(signal.SIGKILL)
    done = run_memcheck("tiny", "--json", cwd=tmp_path)
    found = found_in(done)
    assert (done.returncode, found["state"], found["level"]) == (10, "died", None)
    assert part(found, "total")["now_bytes"] == 302 * MIB
    assert part(found, "others")["now_bytes"] == 22 * MIB
    assert (found["kills"], len(found["deaths"])) == ([], 1)
    table = run_memcheck("tiny", cwd=tmp_path).stdout
    assert "last GiB" in table
    assert "OOM kill" not in table
    assert HYGIENE.search(table)
    post_mortem = run_memcheck("tiny", "--post-mortem", cwd=tmp_path)
    assert post_mortem.returncode == 10
    assert f"(pid {process.pid}) was killed" in post_mortem.stdout
    assert not (directory / "post_mortem.jsonl").exists(), "memcheck only reads"


@pytest.mark.parametrize("cause", get_args(Cause))
def test_a_death_is_an_oom_kill_only_if_memory_ran_out(tmp_path: Path, cause: Cause) -> None:
    """A crash, kill -9, a power cut and an unknown end are deaths of their own cause."""
    code = {"kernel": 12, "ray": 12, "gpu": 12, "guard": 0}.get(cause, 10)
    with trainer(tmp_path / "runs/tiny"):
        append_death(tmp_path / "runs/tiny/post_mortem.jsonl", death(cause=cause))
        found = found_in(run_memcheck("tiny", "--json", cwd=tmp_path))
        table = run_memcheck("tiny", cwd=tmp_path).stdout
        post_mortem = run_memcheck("tiny", "--post-mortem", cwd=tmp_path)
    assert (found["exit_code"], len(found["kills"]), len(found["deaths"])) == (code, code == 12, code == 10)
    assert ("OOM kill" in table) == (code == 12)
    assert post_mortem.returncode == (code or 11), "the guard's own end"


def test_a_reader_death_in_this_session_is_12_and_one_in_an_earlier_session_is_not(tmp_path: Path) -> None:
    directory = tmp_path / "runs/tiny"
    directory.mkdir(parents=True)
    append_death(directory / "post_mortem.jsonl", death(time=time.time() - 1000))
    with trainer(directory):
        assert run_memcheck("tiny", cwd=tmp_path).returncode == 0
        append_death(directory / "post_mortem.jsonl", death(pid=78))
        done = run_memcheck("tiny", cwd=tmp_path)
        shown = run_memcheck("tiny", "--post-mortem", "--json", cwd=tmp_path)
    assert done.returncode == 12
    assert "worker 78 was killed" in done.stdout.replace("\n", " ")
    assert "worker 77" not in done.stdout
    assert [each["pid"] for each in json.loads(shown.stdout)] == [77, 78]


def test_an_oom_kill_counted_by_the_kernel_during_the_session_is_12(tmp_path: Path) -> None:
    with trainer(tmp_path / "runs/tiny"):
        path = tmp_path / "runs/tiny/session.json"
        record = read_session(path)
        assert record is not None
        if record.cgroup_oom_kills is None and record.machine_oom_kills is None:
            pytest.skip("needs a kernel that counts its OOM kills")
        one_less = {
            name: getattr(record, name) - 1
            for name in ("cgroup_oom_kills", "machine_oom_kills")
            if getattr(record, name) is not None
        }
        path.write_text(json.dumps(asdict(record) | one_less))
        found = found_in(run_memcheck("tiny", "--json", cwd=tmp_path))
    assert found["exit_code"] == 12
    assert HYGIENE.search(found["kills"][0])


def test_a_hung_run_differs_from_a_slow_and_a_validating_one(tmp_path: Path) -> None:
    directory = tmp_path / "runs/tiny"
    with trainer(directory) as process:
        path = directory / "session.json"
        record = read_session(path)
        assert record is not None
        now = time.time()
        path.write_text(json.dumps(asdict(record) | {"begin_time": now - 1000}))

        def state(step_s: float, age_s: float, *more: dict[str, Any]) -> dict[str, Any]:
            steps = [
                {"kind": "step", "time": now - age_s - i, "step": 9 - i, "step_s": step_s} for i in range(9, -1, -1)
            ]
            write_metrics(directory, *steps, *more)
            return found_in(run_memcheck("tiny", "--json", cwd=tmp_path))

        hung = state(1.0, 200)
        assert (hung["state"], hung["exit_code"]) == ("hung", 10)
        assert "no step for 3m2" in hung["state_text"]
        assert hung["steps"]["step"] == 9
        assert 200 <= hung["steps"]["age_s"] < 260
        assert state(1.0, 30)["state"] == "running"
        assert state(30.0, 200)["state"] == "running"
        verdict = diagnose(window(), CPU)
        watched = state(1.0, 200, {"kind": "verdict", "time": now - 5} | verdict.record())
        assert (watched["state"], watched["steps"]["verdict"]) == ("running", verdict.text)
        ring = RecentFile(directory / "recent.jsonl")
        sample = MemorySample(now, 9, 300 * MIB, 0, 300 * MIB, awaits="batch of a validation", silent_s=5.0)
        ring.write(sample)
        assert state(1.0, 200)["state"] == "running", "it validates, and goes on"
        ring.write(replace(sample, silent_s=180.0))
        ring.close()
        assert "no batch of a validation for 3m0" in state(1.0, 200)["state_text"]
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # until it has stopped
        stopped = state(1.0, 0)
        assert (stopped["state"], stopped["exit_code"]) == ("hung", 10)
        assert "is stopped (SIGSTOP" in stopped["state_text"]


def test_runs_on_another_machine_or_without_a_session_are_shown_from_their_files(tmp_path: Path) -> None:
    directory = tmp_path / "runs/tiny"
    directory.mkdir(parents=True)
    write_metrics(directory, {"kind": "step", "time": 5.0, "step": 3})
    found = found_in(run_memcheck("tiny", "--json", cwd=tmp_path))
    assert (found["state"], found["level"], found["exit_code"], found["steps"]["step"]) == ("unknown", None, 0, 3)
    record = begin_session(directory / "session.json", "tiny", 0, MemoryPolicy())
    elsewhere = asdict(record) | {"host": "far", "boot_id": "another"}
    (directory / "session.json").write_text(json.dumps(elsewhere))
    ring = RecentFile(directory / "recent.jsonl")
    ring.write(MemorySample(time.time(), 4, 300 * MIB, 0, 300 * MIB, risk="WARN"))
    ring.close()
    found = found_in(run_memcheck("tiny", "--json", cwd=tmp_path))
    assert (found["state"], found["level"], found["exit_code"]) == ("elsewhere", "WARN", 10)
    assert found["state_text"].startswith("on far")
    assert part(found, "total")["now_bytes"] == 300 * MIB
