"""`vesuvius profile`: trains some steps in a folder of its own below the run, and writes where their time went.

`vesuvius train --profile` writes the same page of the run's own steps, while it trains.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from vesuvius.config import Config
from vesuvius.config.trial import NEVER, trial_config
from vesuvius.errors import EXIT_OK, VesuviusError, one_line
from vesuvius.experiments.profile.observer import MOST_STEPS_BESIDE, Observed, Observer
from vesuvius.experiments.profile.page import build_profile
from vesuvius.report.page import made_by, new_folder, write_pages
from vesuvius.report.records import read_run
from vesuvius.runlog.records import current_records, iter_records, run_starts
from vesuvius.runlog.run_dir import run_dir
from vesuvius.training.loop import MakeTuner, TrainingLoop, Tuner, make_autotuner
from vesuvius.training.ranks.part import one_rank
from vesuvius.training.reporting.report import StepReporter
from vesuvius.training.request import Request
from vesuvius.training.run import train

log = logging.getLogger(__name__)

FOLDER = "profiles"
TRACE = "trace.json.gz"


def profile(config: Config, source: Path, steps: int, trace: bool, command: str) -> Path:
    """Train `steps` steps after the warm-up and write profile.html and profile.md; returns their folder.

    Args:
        source: the YAML file of the config.
        trace: also trace some further steps, and look at each layer.
        command: as typed, for the page.

    Raises:
        VesuviusError: as `train`, or the run ended before it had made the steps.
    """
    ranks, config = config.training.ranks, one_rank(config)
    folder = new_folder(run_dir(config).path / FOLDER)
    observed = Observed(ranks=1 if ranks == "auto" else ranks)

    def make_tuner(loop: TrainingLoop, reporter: StepReporter) -> Tuner:
        stop = partial(loop.run.stop.ask, EXIT_OK, "the profile has its steps")
        return Observer(loop, reporter, observed, steps, 0, folder / TRACE if trace else None, stop)

    before = os.environ.get("VESUVIUS_RUNS")
    os.environ["VESUVIUS_RUNS"] = str(folder.parent.absolute())
    try:
        code = train(Request(profiled(config, folder.name, steps), source, False, make_tuner=make_tuner))
    finally:
        os.environ.pop("VESUVIUS_RUNS")
        if before is not None:
            os.environ["VESUVIUS_RUNS"] = before
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # of weights that are worth nothing
    if not observed.complete:
        error = VesuviusError(f"the run ended before the profile had its steps: exit code {code}; see {folder}/logs")
        error.exit_code = code or error.exit_code
        raise error
    tune = shlex.join(["vesuvius", "tune", "--config", str(source)])
    return _write(config, steps, command, folder, folder, observed, tune)


def profile_in_place(steps: int, after: int, command: str, source: Path) -> MakeTuner:
    """For `train`: rank 0's own steps after `after`; their page is written once they are made, or the run ends.

    What goes wrong with the page is logged and does not end the run.
    """

    def make(loop: TrainingLoop, reporter: StepReporter) -> Tuner:
        observed = Observed(in_place=True, ranks=loop.run.part.world)

        def write() -> None:
            config, run = loop.run.config, loop.run.directory.path
            try:
                tune = f"{shlex.join(['vesuvius', 'tune', '--config', str(source)])}, once the run has ended"
                folder = _write(config, steps, command, run, new_folder(run / FOLDER), observed, tune)
                log.info("profile of steps after step %d: %s", observed.after, folder / "profile.html")
            except Exception as error:
                log.warning("the profile was not written: %s", one_line(error))

        return Observer(loop, reporter, observed, steps, after, None, write, make_autotuner(loop, reporter))

    return make


def profiled(config: Config, name: str, steps: int) -> Config:
    """The config of the run that is profiled: that of the training, but for what is not a step.  Pure."""
    training: dict[str, Any] = {"validate_every": 0}
    least = 2 * (steps + MOST_STEPS_BESIDE)  # readers go on beyond the steps that count, as in a long run
    if config.stop_step < least:
        training |= {"steps_per_epoch": least, "epochs": 1, "max_steps": None}
    return trial_config(config, name, training, {"verdict_every": NEVER})


def _write(
    config: Config, asked: int, command: str, run: Path, folder: Path, observed: Observed, next_command: str
) -> Path:
    """Write the pages from what a run has recorded; returns their folder.

    Raises:
        VesuviusError: there is no verdict.
    """
    verdict, first, last = observed.verdict, observed.after + 1, observed.after + asked
    if verdict is None:
        raise VesuviusError(f"steps {first} to {last} must be made without new readers; the run made too few of them")
    numbers = range(first - 1, last + 1)
    metrics = run / "metrics.jsonl"
    recorded = current_records(iter_records(metrics, numbers), run_starts(metrics))
    steps = [record for record in recorded if record["kind"] == "step" and record["step"] in numbers]
    report = build_profile(
        config,
        read_run(run, range(first - 1 if observed.in_place else observed.begin, last + 1)),
        steps,
        observed,
        asked,
        next_command,
    )
    write_pages(folder, "profile", [report], made_by(command))
    return folder
