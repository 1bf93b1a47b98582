"""A real run with readers: one is killed; the run continues, reports and records the cause, and memcheck shows it
again. Then a scheduler ends all processes at once, and the run still saves."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import run_vesuvius, textured
from tests.support.kill_harness import Session, run_directory
from tests.support.poison import poison, run_armed, write_volume
from tests.support.runs import WriteConfig
from vesuvius.errors import EXIT_MEMORY_WARN
from vesuvius.monitor.post_mortem import read_deaths
from vesuvius.monitor.samples import read_recent
from vesuvius.training.checkpoint.format import find_damage, list_checkpoints, step_of


@pytest.mark.long
def test_a_readers_death_is_recorded_and_reported_and_a_sigterm_to_all_processes_still_saves(
    tmp_path: Path, tiny_config: WriteConfig
) -> None:
    config = tiny_config(
        training={"workers": 1, "epochs": 10_000, "save_every": 100_000}, monitor={"sample_every_s": 0.5}
    )
    run = run_directory(config, tmp_path)

    def readers() -> list[int]:
        return [pid for moment in read_recent(run / "recent.jsonl")[-1:] for pid in moment.readers]

    with Session(config, tmp_path) as session:
        session.wait_for("Train step", count=3)
        session.wait_until(lambda: bool(readers()), "the monitor knew the reader")
        victim = readers()[0]
        os.kill(victim, signal.SIGKILL)
        session.wait_until(lambda: bool(read_deaths(run / "post_mortem.jsonl")), "the death was kept")
        seen = run_vesuvius("memcheck", run, "--once", cwd=tmp_path)
        os.killpg(session.process.pid, signal.SIGTERM)  # as a scheduler does: Ray's processes get it too
        assert session.end() == 75, session.text()
        log = session.text()
    assert "Traceback" not in log
    (checkpoint,) = list_checkpoints(run / "checkpoints")
    assert find_damage(checkpoint) is None
    assert step_of(checkpoint) >= 3
    (death,) = read_deaths(run / "post_mortem.jsonl")
    assert (death.victim, death.pid, death.cause) == ("worker", victim, "signal")
    assert death.step >= 3
    assert death.moments
    assert f"worker {victim} was killed from outside, or crashed" in log
    assert f"worker {victim}" in seen.stdout
    assert seen.returncode == EXIT_MEMORY_WARN
    again = run_vesuvius("memcheck", run, "--post-mortem", cwd=tmp_path)
    assert f"worker {victim}" in again.stdout
    assert "what to change" in again.stdout


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_volume(tmp_path / "sharded.zarr", textured((128, 128, 128)))


def config_of(tiny_config: WriteConfig, path: Path, **data: Any) -> Path:
    volumes = {"volumes": [{"path": str(path)}], **data}
    return tiny_config(data=volumes, training={"save_every": 1})


@pytest.mark.long
def test_a_run_continues_after_reader_deaths_and_reports_their_cause(
    tiny_config: WriteConfig, sharded: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_config, sharded)
    assert run_armed("train", "--config", config, "training.max_steps=1", cwd=tmp_path).returncode == 0
    poison(sharded, (1, 1, 1))  # after the start has read patches in the trainer
    readers = ["training.workers=1", "training.max_steps=15"]
    died = run_armed("train", "--config", config, "--resume", *readers, cwd=tmp_path)  # it reads while Ray starts
    assert died.returncode == -signal.SIGABRT
    done = run_armed("train", "--config", config, "--resume", *readers, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "this time the workers read from the start" in done.stderr
    assert "was killed or died (Aborted; SYSTEM_ERROR: Worker" in done.stderr
    assert f"while decoding chunk [1, 1, 1] of volume {sharded}" in done.stderr
    assert "crashed two workers, the last with Aborted; regions that touch" in done.stderr
    assert "RUST_BACKTRACE" not in done.stderr
    run = tmp_path / "runs" / "tiny"
    deaths = [json.loads(line) for line in (run / "post_mortem.jsonl").read_text().splitlines()]
    assert [each["victim"] for each in deaths] == ["run", "worker", "worker"]
    death = deaths[1]
    assert death["cause"] == "signal"
    assert f"it crashed with Aborted while reading {sharded}, according to its reading log" in death["evidence"]
    quarantined = [json.loads(line) for line in (run / "quarantine.jsonl").read_text().splitlines()]
    assert {tuple(record["chunk"]) for record in quarantined} == {(1, 1, 1)}
    assert "damaged regions in quarantine: 1; list them with `vesuvius quarantine tiny`" in done.stderr
