"""Figures reach Weights & Biases and MLflow; a package that is missing, fails, hangs or dies ends no run.

A package of a few lines stands for each of the two, which are large (60 and 20 MB, and their dependencies); the tests
against the real ones run where these are installed.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vesuvius.errors import ConfigError
from vesuvius.runlog.listeners.trackers import Tracker, check_trackers

# Writes each call into the file `calls` beside it; does first what the file `fault` there says.
FAKE = """
import json, os, sys, time
from pathlib import Path
HERE = Path(__file__).parent
def note(*call):
    fault = HERE / "fault"
    exec(fault.read_text() if fault.exists() else "")
    with open(HERE / "calls", "a") as out:
        out.write(json.dumps(call) + "\\n")
"""
FAKE_WANDB = (
    FAKE
    + """
class Run:
    def log(self, figures): note("log", figures)
    def define_metric(self, *of, **by): note("define_metric", of, by)
    def finish(self, exit_code): note("finish", exit_code)
def init(**how): note("init", how); return Run()
"""
)
STEP = {"kind": "step", "time": 12.5, "step": 3, "loss": 0.5, "grad_norm": None, "lr": 1e-4}
END = {"kind": "run_end", "time": 13.0, "step": 3, "exit_code": 0}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "packages" / "wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_WANDB)
    (tmp_path / "run").mkdir()
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    return package


def tracked(tmp_path: Path, *records: dict[str, Any], name: str = "wandb", **options: Any) -> None:
    with Tracker(name, "exp", tmp_path / "run", {"training.lr": 1e-4}, **options) as tracker:
        for record in records:
            tracker.take(record)


def calls(fake: Path) -> list[Any]:
    return [json.loads(line) for line in (fake / "calls").read_text().splitlines()]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_figures_arrive_under_the_tags_of_tensorboard_and_the_next_session_goes_on_with_the_same_run(
    fake: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    busy = {"kind": "system", "time": 13.0, "step": 3, "cores_busy": 2.0}
    tracked(tmp_path, STEP, busy, busy | {"time": 14.0}, {"kind": "event", "time": 1.0, "event": "x"}, END)
    tracked(tmp_path, STEP | {"step": 1})
    first, second = calls(fake)[:5], calls(fake)[5:]
    assert [call[0] for call in first] == ["init", "define_metric", "log", "log", "finish"]
    how = first[0][1]
    assert (how["name"], how["resume"], how["config"]) == ("exp", "allow", {"training.lr": 1e-4})
    assert first[2][1] == {"step": 3, "train/loss": 0.5, "train/lr": 1e-4}, "what is not known is left out"
    assert first[3][1] == {"step": 3, "system/cores_busy": 2.0}, "one a minute"
    assert [first[-1], second[-1]] == [["finish", 0], ["finish", 1]], "the second was killed before its end"
    assert second[0][1]["id"] == how["id"]
    assert second[2][1]["step"] == 1
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("raise RuntimeError('no network')", "RuntimeError: no network"),
        ("call[0] == 'log' and 1 / 0", "ZeroDivisionError: division by zero"),
        ("time.sleep(20)", "no answer in time"),
    ],
)
def test_a_tracker_that_fails_is_one_warning(
    fake: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str, cause: str
) -> None:
    (fake / "fault").write_text(fault)
    close_s = 0.5 if "sleep" in fault else 30.0
    tracked(tmp_path, *(STEP | {"step": step} for step in range(40)), END, close_s=close_s)
    assert warnings(caplog) == [
        f"monitor.trackers wandb does not accept this run's figures: {cause}; the run continues, and metrics.jsonl has "
        "them all"
    ]


def test_a_tracker_that_hangs_holds_up_nobody_and_what_waits_is_bounded(
    fake: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (fake / "fault").write_text("time.sleep(20)")
    with Tracker("wandb", "exp", tmp_path / "run", {}, close_s=0.2) as tracker:
        for _ in range(1100):  # 1000 wait at a time
            tracker.take(STEP)
        assert len(warnings(caplog)) == 1, "while the run continues"
    assert len(warnings(caplog)) == 2
    assert re.search(r"at most 1000 writes may wait .*; \d+ more are lost", warnings(caplog)[-1])


def test_a_short_failure_of_a_server_loses_its_own_figures_alone(fake: Path, tmp_path: Path) -> None:
    (fake / "fault").write_text("if call[0] == 'log' and call[1]['step'] in (1, 2): raise OSError('away')")
    tracked(tmp_path, *(STEP | {"step": step} for step in range(5)), END)
    assert [call[1]["step"] for call in calls(fake) if call[0] == "log"] == [0, 3, 4]
    assert calls(fake)[-1] == ["finish", 0]


def test_a_missing_package_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"monitor.trackers mlflow needs a package.*`pip install mlflow-skinny`"):
        check_trackers(["mlflow"])
    check_trackers([])


def needs(name: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(missing, reason=f"the extra [{name}] is not installed, as it is large")


@needs("wandb")
def test_the_real_wandb_keeps_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "run").mkdir()
    tracked(tmp_path, *(STEP | {"step": step} for step in range(5)), END, close_s=60.0)
    (kept,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert b"train/loss" in kept.read_bytes()
    assert (tmp_path / "run" / "wandb_id").read_text().strip() in kept.name


@needs("mlflow")
def test_the_real_mlflow_keeps_a_run_in_a_folder_over_two_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "run").mkdir()
    for steps in (range(3), range(2, 5)):
        tracked(tmp_path, *(STEP | {"step": s} for s in steps), END, name="mlflow", close_s=60.0)
    assert warnings(caplog) == []
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracking = importlib.import_module("mlflow.tracking")
    client = tracking.MlflowClient((tmp_path / "run" / "mlruns").as_uri())
    run = client.get_run((tmp_path / "run" / "mlflow_id").read_text().strip())
    assert run.info.status == "FINISHED"
    assert run.data.params == {"training.lr": "0.0001"}
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(metric.step for metric in history) == [0, 1, 2, 2, 3, 4]
    assert time.time() > history[0].timestamp / 1000 == 12.5
