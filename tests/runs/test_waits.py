"""A run whose store or readers stop responding still stops on request and loses nothing."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import run_vesuvius, wait_until_gone
from tests.support.chunk_server import ChunkServer
from tests.support.kill_harness import Session
from tests.support.runs import WriteConfig, records_of, vesuvius_train
from vesuvius.runlog.records import read_records
from vesuvius.stream.reading.reading_log import read_logs
from vesuvius.training.checkpoint.format import list_checkpoints, step_of

# The run could not end by itself within these seconds: failed requests are repeated for longer.
NEVER_S = 300.0
# Far below that, and far above the 2 s that a stop may take on an idle machine.
SOON_S = 20.0
HANGS = [{"path": r"volume\.zarr/\d", "kind": "stall"}]
"""Answers to requests for chunks break off in the middle and never go on; metadata are served."""


@pytest.fixture
def remote_config(tiny_config: WriteConfig, volume: Path, server: ChunkServer) -> WriteConfig:
    """A config whose volume is served over HTTP and read by the trainer."""

    def write(name: str = "tiny", **sections: dict[str, Any]) -> Path:
        data = {"volumes": [{"path": server.url_of(volume)}], "store": {"requests": 4}}
        return tiny_config(name, **(sections | {"data": data | sections.get("data", {})}))

    return write


def seconds_to_end(session: Session, number: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
    """Send a signal; returns exit code and seconds until the end."""
    started = time.monotonic()
    session.process.send_signal(number)
    return session.process.wait(timeout=SOON_S), time.monotonic() - started


@pytest.mark.parametrize("hangs", [r"volume\.zarr/\.z", r"volume\.zarr/\d"], ids=["metadata", "intensities"])
def test_a_stop_is_obeyed_before_the_run_begins(
    remote_config: WriteConfig, tmp_path: Path, server: ChunkServer, hangs: str
) -> None:
    server.set_faults([{"path": hangs, "kind": "stall"}])
    with Session(remote_config(), tmp_path) as session:
        session.wait_until(lambda: server.stats()["faults"].get("stall", 0) > 0, "a request hangs", every_s=0.05)
        code, seconds = seconds_to_end(session)
        assert code == 75, session.text()
        assert "stopped before the run began" in session.text()
    print(f"exit after {seconds:.2f} s")
    assert not (tmp_path / "runs/tiny").exists()


def test_the_memory_guard_stops_a_run_that_waits_for_a_batch(
    remote_config: WriteConfig, tmp_path: Path, server: ChunkServer
) -> None:
    """The limit is far below a trainer's memory: the guard orders an exit at its first sample."""
    config = remote_config(data={"normalize": {"low": 0, "high": 200}}, monitor={"ram_limit_gib": 0.05})
    with Session(config, tmp_path) as session:
        session.wait_for("INFO noise ")
        server.set_faults(HANGS)
        assert session.process.wait(timeout=NEVER_S / 5) == 4, session.text()
        assert "memory guard" in session.text()
        assert "Train step" not in session.text()


@pytest.mark.long
def test_a_stop_is_obeyed_while_readers_are_suspended(tiny_config: WriteConfig, tmp_path: Path) -> None:
    """SIGSTOP, as from a debugger or a frozen cgroup: the readers are alive but unresponsive."""
    config = tiny_config(training={"epochs": 1000, "save_every": 10_000, "workers": 2})
    with Session(config, tmp_path) as session:
        session.wait_for("Train step 40/")  # beyond the regions that the trainer reads itself
        children = psutil.Process(session.process.pid).children(recursive=True)
        readers = {psutil.Process(note.pid) for note in read_logs(tmp_path / "runs/tiny/reading")} & {*children}
        assert readers
        for reader in readers:
            reader.suspend()
        steps = -1
        while steps != session.text().count("Train step"):
            steps = session.text().count("Train step")
            time.sleep(1.0)
        code, seconds = seconds_to_end(session)
        print(f"exit after {seconds:.2f} s")
        assert code == 75, session.text()
        assert "Traceback" not in session.text()
    assert wait_until_gone(children, SOON_S) == []
    (checkpoint,) = list_checkpoints(tmp_path / "runs/tiny/checkpoints")
    assert step_of(checkpoint) == session.text().count("Train step")


def memcheck(run: Path) -> tuple[int, dict[str, Any]]:
    found = run_vesuvius("memcheck", run, "--once", "--json", cwd=run.parent)
    return found.returncode, json.loads(found.stdout)


@pytest.mark.long
def test_a_hanging_run_is_reported_by_its_log_and_memcheck_until_it_continues(
    remote_config: WriteConfig, tmp_path: Path, server: ChunkServer
) -> None:
    """Requests time out and are retried after 7 s, when the run has been hanging for more than three."""
    store = {"store": {"outage_minutes": 7 / 30, "requests": 4}}
    config = remote_config(data=store, training={"epochs": 1000}, monitor={"stall_minutes": 0.05})
    run = tmp_path / "runs/tiny"
    with Session(config, tmp_path) as session:
        session.wait_for("Train step 2/")
        server.set_faults(HANGS)
        session.wait_for("hung: no batch for 0.1 min: waiting for regions to be read, for sample ")
        server.set_faults([])
        session.wait_until(lambda: '"event"' in (run / "metrics.jsonl").read_text(), "the event is recorded")
        code, found = memcheck(run)
        assert (code, found["state"], found["stalled"]) == (10, "hung", True)
        assert "no batch for 0.1 min" in found["state_text"]
        (stacks,) = (run / "stacks").iterdir()
        assert "next_batch" in stacks.read_text()
        steps = session.text().count("Train step")
        session.wait_for("no longer hung")
        session.wait_for("Train step", steps + 1)
        code, found = memcheck(run)
        assert (code, found["state"], found["stalled"]) == (0, "running", False)
        assert seconds_to_end(session)[0] == 75
        assert (session.text().count("ERROR"), session.text().count("no longer hung")) == (1, 1)
        assert "defect" not in session.text()
    verdict = next(record for record in read_records(run / "metrics.jsonl") if record["kind"] == "verdict")
    assert verdict["bound"] == "hung"


@pytest.mark.parametrize("hangs", [False, True])
def test_a_long_validation_is_not_a_hang_but_one_without_progress_is(
    tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    config = tiny_config(
        training={"validate_every": 1, "validate_patches": 2, "max_steps": 1}, monitor={"stall_minutes": 0.03}
    )

    def slow(*arguments: Any) -> None:
        stop: Callable[[], bool] = arguments[-2]
        deadline = time.monotonic() + 2.8
        assert not stop()
        while time.monotonic() < deadline:
            assert hangs or not stop()
            time.sleep(0.1)

    monkeypatch.setattr("vesuvius.training.between_steps.validate", slow)
    assert vesuvius_train(config) == 0
    hung = [record["what"] for record in records_of("event") if record["event"] == "hung"]
    assert hung == (["batch of a validation"] if hangs else [])
