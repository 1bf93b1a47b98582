"""`vesuvius profile`: trains some steps in a folder of its own below the run, and writes where their time went."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

from vesuvius.config import Config
from vesuvius.config.experiment import NEVER, trial_config
from vesuvius.errors import VesuviusError
from vesuvius.experiments.profile.observer import MOST_STEPS_BESIDE, Observed, Observer
from vesuvius.experiments.profile.page import build_profile
from vesuvius.report.content import RunReport
from vesuvius.report.page import made_by, new_folder, write_page
from vesuvius.report.records import read_run
from vesuvius.runlog.run_dir import run_dir
from vesuvius.training.loop import TrainingLoop, Tuner
from vesuvius.training.ranks.part import one_rank
from vesuvius.training.reporting.report import StepReporter
from vesuvius.training.request import Request
from vesuvius.training.run import train

FOLDER = "profiles"
TRACE = "trace.json.gz"


def profile(config: Config, source: Path, steps: int, trace: bool, command: str) -> RunReport:
    """Train `steps` steps after the warm-up and write profile.html; returns the report.

    Args:
        source: the YAML file of the config.
        trace: also trace some further steps, and look at each layer.
        command: as typed, for the page.

    Raises:
        VesuviusError: as `train`, or the run ended before it had made the steps.
    """
    ranks, config = config.training.ranks, one_rank(config)
    folder, observed = new_folder(run_dir(config).path / FOLDER), Observed()

    def make_tuner(loop: TrainingLoop, reporter: StepReporter) -> Tuner:
        return Observer(loop, reporter, observed, steps, folder / TRACE if trace else None)

    before = os.environ.get("VESUVIUS_RUNS")
    os.environ["VESUVIUS_RUNS"] = str(folder.parent.absolute())
    try:
        code = train(Request(profiled(config, folder.name, steps), source, False, make_tuner=make_tuner))
    finally:
        os.environ.pop("VESUVIUS_RUNS")
        if before is not None:
            os.environ["VESUVIUS_RUNS"] = before
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # of weights that are worth nothing
    if observed.verdict is None:
        error = VesuviusError(f"the run ended before the profile had its steps: exit code {code}; see {folder}/logs")
        error.exit_code = code or error.exit_code
        raise error
    tune = shlex.join(["vesuvius", "tune", "--config", str(source)])
    report = build_profile(config, read_run(folder), observed, steps, ranks, tune)
    write_page(folder, "profile", [report], made_by(command))
    return report


def profiled(config: Config, name: str, steps: int) -> Config:
    """The config of the run that is profiled: that of the training, but for what is not a step.  Pure."""
    training: dict[str, Any] = {"validate_every": 0}
    least = 2 * (steps + MOST_STEPS_BESIDE)  # readers go on beyond the steps that count, as in a long run
    if config.stop_step < least:
        training |= {"steps_per_epoch": least, "epochs": 1, "max_steps": None}
    return trial_config(config, name, training, {"verdict_every": NEVER})
