"""Runs a tune from the first trial to the report: the policy chooses trials, a trainer measures them.

The trainer is a process of `vesuvius train` that takes commands (`worker.py`) and writes results to its run directory.
If it dies, the tune continues: the rest of it is killed, and the cause is stored in the `Result`.
"""

from __future__ import annotations

import json
import logging
import math
import shlex
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from vesuvius.config import Config
from vesuvius.config.load import dump_config
from vesuvius.errors import EXIT_NO_RESULT, EXIT_OK, EXIT_STOPPED, one_line, storage_errors
from vesuvius.experiments.folder import locked, write_figures
from vesuvius.experiments.machine import facts_of_this_place, machine_words, with_micro_batch
from vesuvius.experiments.trainer import Trainer, next_number, trainer_config
from vesuvius.experiments.tune.measurement import (
    READER_KNOBS,
    Knob,
    Planner,
    Result,
    SearchSpace,
    Setting,
    TrialKind,
    key_of,
    trainer_knobs,
)
from vesuvius.experiments.tune.policy import Recommendation, conclude, policy
from vesuvius.experiments.tune.report import (
    build_options,
    build_page,
    check_tunable,
    headline,
    memory_words,
    plan_lines,
    summary,
    trial_line,
    tuned_path,
    tuned_yaml,
)
from vesuvius.experiments.tune.search import KINDS, Search
from vesuvius.experiments.tune.survey import planner_of, survey
from vesuvius.monitor.session import is_alive, read_session
from vesuvius.report.page import made_by, render_html, write_page
from vesuvius.runlog.files import write_atomically
from vesuvius.runlog.logfile import open_log
from vesuvius.runlog.records import Record
from vesuvius.runlog.run_dir import TUNE, run_dir
from vesuvius.runlog.units import format_duration
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.training.ranks.share import single_rank_config
from vesuvius.training.stop import StoppedError, StopRequest

log = logging.getLogger(__name__)


class TrialRunner:
    """Measures settings in one trainer, which is restarted only if training settings other than the readers change.

    Args:
        directory: folder for the trainers: run directory `NNN`, its config `NNN.yaml` and its output `NNN.log`.
        lock_fd: descriptor that a trainer keeps open.
        stopping: once it returns true, `measure` kills the trainer and raises StoppedError.
    """

    def __init__(
        self,
        config: Config,
        directory: Path,
        *,
        lock_fd: int | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._config, self._directory, self._lock_fd, self._stopping = config, directory, lock_fd, stopping
        self._trainer: Trainer | None = None
        self._in_force = Setting.of(config)
        self._commands = 0

    def measure(self, setting: Setting, kind: TrialKind, seconds: float, limit_s: float) -> Result:
        """Apply a setting and measure it for about `seconds`, longer if these hold too few steps.

        After `limit_s` the trainer is killed.  Raises StoppedError, and OSError if the disk cannot be written.
        """
        began, force, trainer = time.monotonic(), setting, self._trainer
        starts = trainer is None or trainer.wait(0) or trainer_knobs(setting) != trainer_knobs(self._in_force)
        if kind == "step":  # steps alone need no readers: keep or do not start them
            readers = {"workers": 0} if starts else {k: getattr(self._in_force, k) for k in READER_KNOBS}
            force = replace(setting, **readers)
        if starts or trainer is None:
            try:
                config = trainer_config(force.applied_to(self._config), next_number(self._directory))
            except ValidationError as error:
                return Result(setting, kind, "failed", one_line(error, 400), 0.0)
            self.close()
            trainer = self._trainer = Trainer(config, self._directory, self._lock_fd, takes_commands=True)
            self._in_force = force
        self._commands += 1
        command = {"number": self._commands, "kind": kind, "seconds": seconds}
        command |= {knob: getattr(force, knob) for knob in READER_KNOBS}
        records: list[Record] = []

        def take(record: Record) -> bool:
            if record["kind"] == "trial" and record["number"] == command["number"]:
                records.append(record)
            return bool(records)

        trainer.tell(json.dumps(command))
        ended, cause = trainer.watch(take, limit_s, self._stopping)
        result = Result(setting, kind, ended, cause, time.monotonic() - began)
        if ended != "ok":
            self._trainer = None
            return result
        (record,) = records
        self._in_force = force
        result = replace(result, **record["figures"])
        return result if force == setting else replace(result, ram_bytes=None)

    def close(self) -> None:
        """End the trainer."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.close()


@dataclass(frozen=True)
class TuneRequest:
    """The arguments of a tune."""

    # `source` with environment and overrides applied; one of several ranks is measured, with its share of the machine
    config: Config
    written: Config  # `source` alone
    source: Path  # the YAML file
    overrides: tuple[str, ...]  # from the command line
    command: str  # as typed
    keep: tuple[Knob, ...]  # knobs to leave unchanged
    budget_s: float  # for all measurements together


def tune(request: TuneRequest) -> int:
    """Measure until the policy stops or a signal arrives, then write the report and the tuned config.

    Returns the exit code, EXIT_NO_RESULT if nothing could be measured.  Raises ConfigError if another tune of this run
    is active or the tuned config could not be written, DataError and StorageError.
    """
    space, planner = _open(request)
    directory = run_dir(request.config).path / TUNE
    with locked(directory, "tune") as lock_fd:
        open_log(directory / "tune.log")
        stop, trials = StopRequest(None, "ending the trainer"), directory / "trials"
        runner = TrialRunner(single_rank_config(request.config), trials, lock_fd=lock_fd, stopping=stop.is_requested)
        with closing(runner), stop:
            log.info("tuning %s on %s", request.source, machine_words())
            _warn_of_neighbours(request.config, space)
            search, why = Search(space, planner, policy), ""
            try:
                _measure(search, runner, stop)
            except StoppedError as interrupted:
                why = str(interrupted)
                log.error("%s", why)
            found = conclude(search, why)
        _finish(request, search, found, directory)
        if why:
            return stop.exit_code or EXIT_STOPPED
        return EXIT_NO_RESULT if found.certainty == "none" else EXIT_OK


def _measure(search: Search, runner: TrialRunner, stop: StopRequest) -> None:
    """Measure all trials.  Raises StoppedError after a signal."""
    while (trial := search.trial) is not None:
        if stop.is_requested():
            raise StoppedError("interrupted between two trials")
        number, seconds = len(search.results), format_duration(trial.expected_s)
        log.info("Trial %d %s, %s: %s; about %s", number, trial.stage, KINDS[trial.kind], trial.why, seconds)
        result = runner.measure(trial.setting, trial.kind, search.space.trial_s, trial.limit_s)
        log.log(logging.INFO if result.ended == "ok" else logging.WARNING, "%s", trial_line(number, result))
        search.tell(result)


def plan(request: TuneRequest) -> list[str]:
    """Return the lines of `--dry-run`.  Writes nothing.  Raises as `tune`, and if the config does not fit."""
    return plan_lines(*_open(request), machine_words())


def _open(request: TuneRequest) -> tuple[SearchSpace, Planner]:
    """The search space, and the planner of its memory.  Writes nothing."""
    check_tunable(request.source)
    config = request.config
    data = prepare_data(config.seed, config.data)
    space = survey(with_micro_batch(config), data, budget_s=request.budget_s, keep=request.keep)
    return space, planner_of(single_rank_config(config), data)


def _finish(request: TuneRequest, search: Search, found: Recommendation, directory: Path) -> None:
    """Write the report and the tuned config, and log the result."""
    config, space, tuned = request.config, search.space, tuned_path(request.source)
    options = build_options(found, search, config.horizon_steps) if found.certainty != "none" else []
    commands = _next_commands(request, space, found, tuned)
    spent = f"{len(search.results)} trials in {format_duration(space.budget_s - search.left_s)}"
    facts = {
        "samples/s are of": "one rank" if config.training.ranks != 1 else "the run",
        "trials": f"{spent} of {format_duration(space.budget_s)}",
        "memory limits": memory_words(space.ram_limit_bytes, space.vram_limit_bytes),
        "other programs": space.others or "less than a tenth of the cores when tuning began",
        **facts_of_this_place(),
    }
    made, head = made_by(request.command), headline(found, search.base)
    page = build_page(
        config.name, str(directory), found, search, options, facts, commands, dump_config(request.written)
    )
    write_page(directory, "report", render_html([page], made))
    figures = {
        "made": made,
        "facts": page.facts,
        "recommendation": asdict(found),
        "options": [asdict(option) for option in options],
        "trials": [
            {"trial": asdict(trial), "result": asdict(result)}
            for trial, result in zip(search.asked, search.results, strict=True)
        ],
    }
    write_figures(directory / "report.json", figures)
    # The tuned config includes overrides by the environment and the command line.
    header = [f"{made[5:]}.", f"{head}.  {spent}.", f"Measured on: {facts['machine']}"]
    why = {key_of(knob): reason for knob, reason in found.reasons.items()}
    wanted = found.written.applied_to(config)
    text = tuned_yaml(request.source.name, request.written, wanted, why, header)
    with storage_errors(f"the tuned config {tuned}", "free some space or correct the permissions"):
        write_atomically(tuned, text.encode())
    log.log(logging.ERROR if found.certainty == "none" else logging.INFO, "%s", head)
    for label, words in (*summary(found, search).items(), *found.reasons.items()):
        log.info("%s: %s", label, words)
    log.info("report: %s", directory / "report.html")
    for command in commands:
        log.info("Next: %s", command)


def _next_commands(request: TuneRequest, space: SearchSpace, found: Recommendation, tuned: Path) -> list[str]:
    """The commands to type next: train with the tuned config and, if the result is not sure, a longer tune."""
    resume = ["--resume"] if run_dir(request.config).exists() else []
    run = shlex.join(["vesuvius", "train", "--config", str(tuned), *resume])
    if found.certainty == "sure" or (found.certainty == "unchanged" and found.complete):
        return [run]
    budget = f"{math.ceil(2 * space.budget_s / 60)}m"
    again = ["vesuvius", "tune", "--config", str(request.source), *request.overrides, "--budget", budget]
    again += ["--keep", ",".join(request.keep)] if request.keep else []
    if found.certainty == "none":
        return [shlex.join(again)]
    return [f"{shlex.join(again)}  # more certain", run]


def _warn_of_neighbours(config: Config, space: SearchSpace) -> None:
    """Warn if the run itself or other programs distort the measurements."""
    run = run_dir(config)
    session = read_session(run.session)
    if session is not None and is_alive(session):
        log.warning("the run %s is active on this machine: stop it for reliable figures", run.path)
    if space.others:
        log.warning("%s: measurements vary more, so tuning takes longer", space.others)
