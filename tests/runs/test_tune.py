"""`vesuvius tune` on the command line, with a real trainer of a small config."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.experiments.tune.simulated import Machine, SimulatedRunner
from tests.support.kill_harness import Session
from tests.support.runs import WriteConfig, fork_trials, vesuvius_train
from vesuvius.commands import tune
from vesuvius.config import Config
from vesuvius.config.load import read_config
from vesuvius.errors import EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_NO_RESULT, EXIT_OK
from vesuvius.experiments.trainer import trainer_config
from vesuvius.experiments.tune import session
from vesuvius.experiments.tune.measurement import Result, Setting
from vesuvius.experiments.tune.report import MARK
from vesuvius.runlog.records import read_records
from vesuvius.training.stop import StoppedError

TUNE = Path("runs/tiny/tune")
LONG = {"steps_per_epoch": 100_000, "epochs": 1}


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_trials(monkeypatch)


def vesuvius_tune(config: Path, *arguments: str) -> int:
    return tune.main(["--config", str(config), *arguments])


def report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((TUNE / "report.json").read_text())
    return found


class SimulatedTrainers(SimulatedRunner):
    """Replaces `TrialRunner`: a micro-batch costs as much as ten samples."""

    def __init__(self, config: Config, *_: object) -> None:
        machine = Machine("launches", Setting.of(config), on_gpu=False, sample_s=0.01, launch_s=0.1)
        super().__init__(replace(machine, ram=(0.3, 0.1, 0.01, 0.02)), seed=0)

    def close(self) -> None:
        """Nothing runs."""


def test_a_tune_leaves_a_report_and_a_config_that_trains(
    tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "TrialRunner", SimulatedTrainers)
    config = tiny_config(training=LONG | {"train_batch_size": 1, "accumulate_steps": 2})
    arguments = ("--budget", "30m", "--keep", "compile,channels_last,workers,prefetch_factor", "training.lr=2e-3")
    assert vesuvius_tune(config, *arguments) == EXIT_OK
    assert "Next: vesuvius train --config" in capsys.readouterr().out
    found, text = report(), Path("tiny.tuned.yaml").read_text()
    assert found["recommendation"]["certainty"] == "sure"
    assert found["recommendation"]["best"]["train_batch_size"] > 1
    assert found["trials"]
    assert all((TUNE / name).stat().st_size > 1000 for name in ("report.html", "report.json", "tune.log"))
    assert not list(TUNE.glob("trials/*/checkpoints"))
    assert "extends: tiny.yaml" in text
    assert "as set for the tune" in text
    tuned = read_config(Path("tiny.tuned.yaml"))
    assert (tuned.training.train_batch_size, tuned.global_batch, tuned.training.lr) == (2, 2, 2e-3)
    assert vesuvius_train(Path("tiny.tuned.yaml"), "training.max_steps=2") == 0, "in the run directory of the tune"


@pytest.mark.long
def test_a_config_of_several_ranks_keeps_them_and_its_global_batch(
    tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank is measured alone; the written config is for all of them, also if ranks may be lost."""

    class OneRank(SimulatedTrainers):
        def __init__(self, config: Config, *others: object) -> None:
            assert trainer_config(config, 0).training.ranks == 1
            super().__init__(config, *others)

    monkeypatch.setattr(session, "TrialRunner", OneRank)
    training = LONG | {"train_batch_size": 1, "accumulate_steps": 4, "ranks": 4}
    config = tiny_config(training=training, cluster={"min_ranks": 2})
    assert vesuvius_tune(config, "--keep", "compile,channels_last,workers,prefetch_factor") == EXIT_OK
    source, tuned = read_config(config), read_config(Path("tiny.tuned.yaml"))
    assert (tuned.training.ranks, tuned.cluster.min_ranks) == (4, 2)
    assert tuned.global_batch == source.global_batch == 16
    assert tuned.training.train_batch_size == 4
    assert "ranks:" not in Path("tiny.tuned.yaml").read_text()


@pytest.mark.long
@pytest.mark.usefixtures("of_two_micro_batches")
def test_the_dry_run_names_trials_with_memory_and_time_and_writes_nothing(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vesuvius_tune(tiny_config(training=LONG | {"workers": 1}), "--dry-run") == EXIT_OK
    text = capsys.readouterr().out
    assert re.search(r"^the unchanged config: [\d.]+ GiB of RAM$", text, re.MULTILINE)
    assert re.search(
        r"^training.train_batch_size=4 training.accumulate_steps=1: [\d.]+ GiB of RAM$", text, re.MULTILINE
    )
    assert "nothing was written" in text
    assert not Path("runs").exists()


@pytest.mark.long
def test_a_second_tune_is_refused_while_one_is_measuring(
    tiny_config: WriteConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(training=LONG)
    trial = TUNE / "trials" / "000" / "metrics.jsonl"
    with Session(config, tmp_path, module="vesuvius.tune") as session:
        session.wait_for("Trial 0", at_most_s=120)
        while not (trial.exists() and any(r["kind"] == "step" for r in read_records(trial))):
            assert session.process.poll() is None, session.text()
            time.sleep(0.05)
        assert vesuvius_tune(config) == EXIT_CONFIG
        orphans = psutil.Process(session.process.pid).children(recursive=True)
        session.process.kill()
        session.process.wait()
    assert capsys.readouterr().err.count("is in use by process") == 1
    assert psutil.wait_procs(orphans, timeout=60)[1] == [], "a trainer ends with its tune"


@pytest.mark.long
def test_without_measurements_nothing_is_recommended(
    tiny_config: WriteConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """The guard's limit is below the memory of torch alone."""
    Path("tiny.tuned.yaml").write_text(f"# {MARK} from tiny.yaml\nextends: tiny.yaml\ntraining:\n  workers: 7\n")
    config = tiny_config(monitor={"ram_limit_gib": 0.05})
    assert vesuvius_tune(config, "--budget", "2m") == EXIT_NO_RESULT
    assert "No recommendation: the config does not fit this machine" in capsys.readouterr().err
    check_nothing_stale(config, "No recommendation: ", "none")


def check_nothing_stale(config: Path, said: str, verdict: str) -> None:
    """No file of an earlier tune looks current: the tuned config only extends its source, with the reason."""
    text = Path("tiny.tuned.yaml").read_text()
    assert said in text
    assert read_config(Path("tiny.tuned.yaml")) == read_config(config)
    assert said in (TUNE / "report.html").read_text()
    assert report()["recommendation"]["certainty"] == verdict


@pytest.mark.long
def test_an_interrupted_tune_reports_its_results_and_leaves_nothing_of_an_earlier_one(
    tiny_config: WriteConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "TrialRunner", SimulatedTrainers)
    config = tiny_config(training=LONG | {"train_batch_size": 1, "accumulate_steps": 8})
    keep = ("--keep", "compile,channels_last,workers,prefetch_factor")
    assert vesuvius_tune(config, *keep) == EXIT_OK
    assert read_config(Path("tiny.tuned.yaml")).training.train_batch_size == 8

    class Interrupted(SimulatedTrainers):
        def measure(self, *arguments: Any) -> Result:
            if self.now_s > 50:  # before a change is found
                os.kill(os.getpid(), signal.SIGINT)
                raise StoppedError("the tune was interrupted while it measured")
            return super().measure(*arguments)

    monkeypatch.setattr(session, "TrialRunner", Interrupted)
    assert vesuvius_tune(config, *keep) == EXIT_INTERRUPTED
    check_nothing_stale(config, "No gain found yet: the tune was interrupted while it measured", "unchanged")
    assert report()["trials"], "what was measured is told"


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
        ["--keep", "workers,speed"],
        ["--keep", "data.workers"],
    ],
)
def test_contradictory_arguments_are_refused(tiny_config: WriteConfig, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        vesuvius_tune(tiny_config(), *arguments)
    assert ended.value.code == EXIT_CONFIG
