"""The command: real trainers, a trial that fails, Ctrl-C; ranks with `make test-long`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from vesuvius.commands import bench as command
from vesuvius.config.load import read_config
from vesuvius.errors import EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_NO_RESULT, EXIT_OK
from vesuvius.experiments.bench import session
from vesuvius.experiments.bench.results import Measurement
from vesuvius.experiments.bench.session import measure_trial
from vesuvius.monitor.session import read_session
from vesuvius.runlog.records import read_records
from vesuvius.runlog.run_dir import run_dir
from vesuvius.training.stop import StoppedError

WriteConfig = Callable[..., Path]
_HANG_S = 120.0


@pytest.fixture
def config(tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tiny_config(training={"accumulate_steps": 1})
    monkeypatch.chdir(path.parent)
    monkeypatch.delenv("VESUVIUS_RUNS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return path


def folder_of(run: Path = Path("runs/tiny")) -> Path:
    (folder,) = [path for path in (run / "benches").iterdir() if path.is_dir()]
    return folder


def results_in(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "benchmark_results.json").read_text())["results"]
    return found


def interrupt_when_it_trains(over: threading.Event) -> None:
    while not over.is_set():  # once it is, Ctrl-C would end the tests
        files = Path("runs/tiny/benches").glob("*/trials/*/metrics.jsonl")
        if any(record["kind"] == "step" for metrics in files for record in read_records(metrics)):
            return os.kill(os.getpid(), signal.SIGINT)
        over.wait(0.02)
    return None


def test_a_real_bench_with_a_trial_that_fails_interrupted_and_again(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = ["--compare", "training.accumulate_steps=1,2", "--compare", "data.patch_size=[8,16,16],[160,16,16]"]
    asked = ["--config", str(config), *axes, "--rounds", "1", "--seconds", "0.2"]

    def bench(*more: str) -> int:
        monkeypatch.setenv("VESUVIUS_TRAINING__ACCUMULATE_STEPS", "3")  # of the config, not of a trial
        return command.main([*asked, *more])

    over = threading.Event()
    thread = threading.Thread(target=interrupt_when_it_trains, args=(over,))
    thread.start()
    try:
        assert bench("--seconds", "1000") == EXIT_INTERRUPTED
    finally:
        over.set()
        thread.join()
    folder = folder_of()
    session = read_session(next(folder.glob("trials/*/session.json")))
    assert session is not None
    assert not psutil.pid_exists(session.pid), "no orphan"
    assert "the baseline could not be measured" in capsys.readouterr().out
    shutil.rmtree(folder)
    assert bench() == EXIT_OK

    folder = folder_of()
    base, longer, failed = results_in(folder)
    assert [len(each["rates"]) for each in (base, longer)] == [1, 1]
    assert base["figures"]["batch"] * 2 == longer["figures"]["batch"] == 4
    assert longer["speed"]["pairs"] == 1
    assert failed["samples_s"] is None
    assert "failed: " in failed["cause"]
    assert "160" in failed["cause"]
    assert "\nFailed\n" in capsys.readouterr().out
    assert (folder / "bench.html").stat().st_size < 200_000
    assert not list(folder.glob("trials/*/checkpoints"))
    trainer = read_config(next(folder.glob("trials/*.yaml")))
    assert trainer.training.max_hours == pytest.approx(1 / 3), "--limit also applies if the bench is killed"
    assert not run_dir(read_config(config)).exists(), "the run itself can still begin"


def measured(config: Path, tmp_path: Path, limit_s: float = _HANG_S, *overrides: str) -> Measurement:
    return measure_trial(tmp_path / "trials", read_config(config, overrides), 0.2, limit_s, None, lambda: False)


@pytest.mark.long
def test_a_trial_that_does_not_fit_into_memory_is_not_started(config: Path, tmp_path: Path) -> None:
    found = measured(config, tmp_path, _HANG_S, "monitor.ram_limit_gib=0.1")
    assert found.ended == "failed"
    assert "not started: it needs about" in found.cause
    assert not (tmp_path / "trials").exists()


def test_a_stop_ends_a_bench_whose_volumes_do_not_open(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = threading.Event()
    monkeypatch.setattr(session, "_prepared", lambda *_: outage.wait(_HANG_S))
    try:
        with pytest.raises(StoppedError, match="while the volumes were opened"):
            measure_trial(tmp_path, read_config(config), 0.2, _HANG_S, None, lambda: True)
    finally:
        outage.set()


def test_a_trial_that_takes_too_long_is_killed(config: Path, tmp_path: Path) -> None:
    found = measured(config, tmp_path, 0.0)
    assert found.ended == "timeout"
    assert "no result within" in found.cause
    session = read_session(tmp_path / "trials" / found.run / "session.json")
    assert session is None or not psutil.pid_exists(session.pid)


@pytest.mark.parametrize("wrong", [["--compare", "training.amp=off,b16"], ["--sweep", "training.workers"]])
def test_a_mistake_is_reported_before_anything_runs(config: Path, wrong: list[str]) -> None:
    assert command.main(["--config", str(config), *wrong]) == EXIT_CONFIG
    assert not list(Path("runs").glob("tiny/benches/*/bench.html"))


@pytest.mark.long
def test_ranks_are_measured_with_their_exchange(config: Path) -> None:
    asked = ["--config", str(config), "--ranks", "1,2,64", "--rounds", "1", "--seconds", "0.3"]
    assert command.main(asked) == EXIT_OK
    one, two, many = results_in(folder_of())
    assert one["efficiency"] == 1
    assert two["figures"]["batch"] == 2 * one["figures"]["batch"]
    assert two["figures"]["comm_s"] > 0
    assert two["efficiency"] == pytest.approx((1 + two["speed"]["gain"]) / 2)
    assert many["cause"]


def test_nothing_measured_is_an_error(config: Path) -> None:
    asked = ["--config", str(config), "data.volumes[0].path=nowhere", "--rounds", "1"]
    assert command.main(asked) == EXIT_NO_RESULT
