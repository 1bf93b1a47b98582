"""`vesuvius tune` as a user types it: real trials of a config of seconds."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kill_harness import Session, processes_with
from tests.runs import WriteConfig, vesuvius_train
from vesuvius import tune
from vesuvius.config_file import read_config
from vesuvius.errors import EXIT_CONFIG, EXIT_DATA, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK
from vesuvius.lab.tune.ledger import Ledger
from vesuvius.observe.records import read_records

TUNE = Path("runs/tiny/tune")
LONG = {"steps_per_epoch": 100_000, "epochs": 1}


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def vesuvius_tune(config: Path, *arguments: str) -> int:
    return tune.main(["--config", str(config), *arguments])


def report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((TUNE / "report.json").read_text())
    return found


def test_a_tune_leaves_a_report_and_a_config_that_trains(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of micro-batches of 1: larger ones of the same effective batch are much faster, on a CPU too."""
    config = tiny_config(training=LONG | {"train_batch_size": 1, "accumulate_steps": 8})
    assert vesuvius_tune(config, "--budget", "90s", "--steps", "20", "training.lr=2e-3") == EXIT_OK
    found, entries = report(), Ledger.read(TUNE / "ledger.jsonl").entries
    assert found["options"][1]["measured"]
    assert found["gain"] > 1.2
    assert [trial["number"] for trial in found["trials"]] == list(range(len(entries)))
    assert sum(entry.outcome.seconds for entry in entries) < 90 + entries[-1].outcome.seconds
    assert all((TUNE / name).stat().st_size > 1000 for name in ("report.md", "report.html", "curves.png", "tune.log"))
    assert not list(TUNE.glob("trials/*/checkpoints"))
    tuned = read_config(Path("tiny.tuned.yaml"))
    assert tuned.global_batch == 8
    assert tuned.training.train_batch_size > 1
    assert tuned.training.lr == 2e-3, "given on the command line of the tune"
    text = capsys.readouterr().out
    assert "run it: vesuvius train --config" in text
    assert vesuvius_train(Path("tiny.tuned.yaml"), "training.max_steps=2") == 0, "in the run directory of the tune"
    assert vesuvius_tune(config, "--budget", "90s", "--resume", "training.lr=2e-3", "--dry-run") == EXIT_OK


def test_the_dry_run_names_trials_with_memory_risk_and_time_and_writes_nothing(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vesuvius_tune(tiny_config(training=LONG | {"workers": 1}), "--dry-run") == EXIT_OK
    text = capsys.readouterr().out
    assert re.search(r"^trial 0 +baseline .* RAM [\d.]+ GiB, risk low, 1m30s$", text, re.MULTILINE)
    assert re.search(r"^trial \d+ +batch .*train_batch_size 2 -> 4", text, re.MULTILINE)
    assert "nothing was written" in text
    assert not Path("runs").exists()


def test_an_interrupted_tune_goes_on_where_it_was(tiny_config: WriteConfig, tmp_path: Path) -> None:
    config = tiny_config(training=LONG | {"train_batch_size": 1, "accumulate_steps": 2})
    arguments = ("--budget", "60s", "--steps", "20")
    with Session(config, tmp_path, *arguments, module="vesuvius.tune") as session:
        session.wait_for("Trial 1", at_most_s=120)
        session.process.send_signal(signal.SIGINT)
        assert session.process.wait(120) == EXIT_INTERRUPTED
        assert "go on with --resume" in session.text()
    assert processes_with(str(tmp_path / "runs")) == []
    before = Ledger.read(TUNE / "ledger.jsonl").entries
    assert len(before) == 1
    assert vesuvius_tune(config, *arguments, "--resume") == EXIT_OK
    after = Ledger.read(TUNE / "ledger.jsonl").entries
    assert after[:1] == before
    assert len(after) > 1
    assert vesuvius_tune(config, "--resume", "--goal", "cost") == EXIT_CONFIG, "another tune"
    assert vesuvius_tune(config, "--resume", "--keep", "workers") == EXIT_CONFIG, "another tune"


def test_a_second_tune_is_kept_out_also_by_a_trial_that_outlived_its_tune(
    tiny_config: WriteConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(training=LONG)
    trial = TUNE / "trials" / "000" / "metrics.jsonl"
    with Session(config, tmp_path, module="vesuvius.tune") as session:
        session.wait_for("Trial 0", at_most_s=120)
        while not (trial.exists() and any(r["kind"] == "step" for r in read_records(trial))):
            assert session.process.poll() is None, session.text()
        assert vesuvius_tune(config) == EXIT_CONFIG
        orphans = psutil.Process(session.process.pid).children(recursive=True)
        session.process.kill()
        session.process.wait()
        assert vesuvius_tune(config, "--resume") == EXIT_CONFIG
    assert capsys.readouterr().err.count("one tune may work on a run") == 2
    for orphan in orphans:
        orphan.kill()


def test_a_config_whose_data_are_missing_is_refused_at_once(tiny_config: WriteConfig) -> None:
    config = tiny_config()
    assert vesuvius_tune(config, "data.volumes=[{path: nowhere.zarr}]") == EXIT_DATA
    assert not TUNE.exists()


def test_a_tuned_config_that_could_not_be_written_is_said_before_the_first_trial(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config()
    Path("tiny.tuned.yaml").write_text("name: mine\n")
    assert vesuvius_tune(config) == EXIT_CONFIG
    assert "rename it" in capsys.readouterr().err
    assert not TUNE.exists()


def test_where_no_trial_ends_well_nothing_is_recommended(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """The guard's limit is below what torch alone takes."""
    config = tiny_config(monitor={"ram_limit_gib": 0.05})
    assert vesuvius_tune(config, "--budget", "2m") == EXIT_ERROR
    assert "nothing can be recommended" in capsys.readouterr().err
    assert not Path("tiny.tuned.yaml").exists()


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("1h30m", 5400), ("1.5h", 5400)])
def test_a_budget_is_a_time(text: str, seconds: float) -> None:
    assert tune.duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("compile", ("compile",)),
        ("training.workers, data.store.requests", ("workers", "requests")),
        ("channels_last,compile,compile", ("compile", "channels_last")),
        ("training.compile", ("compile",)),
    ],
)
def test_knobs_to_keep_are_named_as_in_the_config(text: str, kept: tuple[str, ...]) -> None:
    assert tune.knobs(text) == kept


@pytest.mark.parametrize(
    "arguments",
    [
        ["--budget", "30"],
        ["--budget", "59s"],
        ["--steps", "3"],
        ["--goal", "speed"],
        ["--keep", "workers,speed"],
        ["--keep", "data.workers"],
        ["--keep", "train_batch_size", "--scale-batch"],
    ],
)
def test_what_cannot_be_meant_is_refused(tiny_config: WriteConfig, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        vesuvius_tune(tiny_config(), *arguments)
    assert ended.value.code == EXIT_CONFIG
