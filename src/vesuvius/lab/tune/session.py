"""A tune from its first trial to its report: the policy proposes, the runner runs, the ledger keeps."""

from __future__ import annotations

import fcntl
import logging
import os
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from vesuvius.config import Config
from vesuvius.data.prepare import prepare_data
from vesuvius.engine.run_dir import TUNE, describe_environment, run_dir
from vesuvius.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED, ConfigError, StorageError
from vesuvius.lab.tune.known import Known
from vesuvius.lab.tune.ledger import Ledger, check_same
from vesuvius.lab.tune.options import Horizon, options
from vesuvius.lab.tune.policy import expected_trials, propose
from vesuvius.lab.tune.prediction import Forecast
from vesuvius.lab.tune.report import Report, build_report
from vesuvius.lab.tune.report_files import write_report
from vesuvius.lab.tune.report_text import headline, option_line, yaml_header
from vesuvius.lab.tune.runner import RunnerOptions, SubprocessRunner, TuneInterrupted
from vesuvius.lab.tune.setting import Setting
from vesuvius.lab.tune.space import Goal
from vesuvius.lab.tune.survey import ConfigPlanner, describe_machine, survey
from vesuvius.lab.tune.trial import Stop, Trial
from vesuvius.lab.tune.tuned_config import (
    TunedValue,
    check_replaceable,
    tuned_path,
    tuned_values,
    tuned_yaml,
    write_tuned,
)
from vesuvius.lab.tune.words import outcome_line, plan_lines, trial_line
from vesuvius.observe.logfile import open_log

log = logging.getLogger(__name__)

DEFAULT_BUDGET_S = 1800.0


@dataclass(frozen=True)
class Request:
    """What was asked for.

    Attributes:
        config: of `source` with the overrides.
        source: the YAML file.
        overrides: of the command line.
        command: as it was typed.
        goal, scale_batch: as in `Space`.
        budget_s: seconds for all trials; None = as the ledger has it, or half an hour.
        resume: go on with the ledger that is there.
        steps: measured in a trial at most; half as many where they agree well.
    """

    config: Config
    source: Path
    overrides: tuple[str, ...] = ()
    command: str = "vesuvius tune"
    goal: Goal = "samples_s"
    scale_batch: bool = False
    budget_s: float | None = None
    resume: bool = False
    steps: int = 100


def tune(request: Request) -> int:
    """Try settings until the policy stops; write report and tuned config.

    Returns:
        EXIT_OK; EXIT_ERROR where no trial ended well; EXIT_INTERRUPTED or EXIT_STOPPED for a signal.

    Raises:
        ConfigError: another tune of this run is at work, the ledger is of another tune, or the tuned config could not
            be written in the end.
        DataError: a volume cannot be used.
        StorageError: the run directory cannot be written.
    """
    _check_writable(request)
    directory = tune_dir(request.config)
    with _locked(directory) as lock_fd, _storage_errors(directory):
        open_log(directory / "tune.log")
        ledger, planner = _open(request)
        seconds = _trial_seconds(ledger.space.budget_s)
        trials = RunnerOptions(seconds, least_steps=request.steps // 2, most_steps=request.steps, lock_fd=lock_fd)
        runner = SubprocessRunner(request.config, directory / "trials", trials)
        with ledger, _signals_to(runner) as signals:
            log.info("tuning %s on %s", request.source, ledger.machine.words())
            try:
                stop = _run_trials(ledger, planner, runner)
            except TuneInterrupted as interrupted:
                ledger.interrupted()
                log.error("%s", interrupted)
                return EXIT_STOPPED if signal.SIGTERM in signals else EXIT_INTERRUPTED
            return _finish(request, ledger, planner, stop, directory)


def plan(request: Request) -> list[str]:
    """`--dry-run`: the trials that would be run, a line each, with what is predicted of them.  Writes nothing.

    Raises:
        ConfigError, DataError: as `tune`.
    """
    _check_writable(request)
    ledger, planner = _open(request, write=False)
    return plan_lines(ledger, expected_trials(ledger.entries, ledger.space, planner))


def _trial_seconds(budget_s: float) -> float:
    """That one trial may take at most: a run of slow steps says enough before it has eaten the budget."""
    return min(max(budget_s / 6, 60.0), 600.0)


def tune_dir(config: Config) -> Path:
    """Where the tune of a config keeps everything."""
    return run_dir(config).path / TUNE


def _open(request: Request, write: bool = True) -> tuple[Ledger, ConfigPlanner]:
    config, path = request.config, tune_dir(request.config) / "ledger.jsonl"
    machine, data = describe_machine(), prepare_data(config.seed, config.data)
    if request.resume:
        ledger = Ledger.read(path)
        space = ledger.space
        asked = [
            ("--goal", space.goal, request.goal),
            ("--scale-batch", space.scale_batch, request.scale_batch),
            # What was tried has followed from it.
            ("--budget in seconds", space.budget_s, request.budget_s or space.budget_s),
        ]
        check_same(ledger, config, machine, asked)
    else:
        budget_s = DEFAULT_BUDGET_S if request.budget_s is None else request.budget_s
        space = survey(config, data, request.goal, request.scale_batch, budget_s)
        make = Ledger.new if write else Ledger.sketch
        ledger = make(path, config, space, machine)
    return ledger, ConfigPlanner(config, data, ledger.space.on_gpu)


def _run_trials(ledger: Ledger, planner: ConfigPlanner, runner: SubprocessRunner) -> Stop:
    """Until the policy says that it is enough."""
    while isinstance(step := propose(ledger.entries, ledger.space, planner), Trial):
        log.info("%s", trial_line(step))
        outcome = ledger.begin(step) or runner.run(step)
        ledger.end(outcome)
        log.log(logging.INFO if outcome.ended == "ok" else logging.WARNING, "%s", outcome_line(step, outcome))
    return step


def _finish(request: Request, ledger: Ledger, planner: ConfigPlanner, stop: Stop, directory: Path) -> int:
    """Write what was found and say it."""
    log.info("tune ended: %s", stop.reason)
    if not any(entry.outcome.measured for entry in ledger.entries):
        log.error("no trial ended well, so nothing can be recommended; see %s", directory / "trials")
        return EXIT_ERROR
    tuned = tuned_path(request.source) if stop.best != ledger.space.source or request.overrides else None
    report = _report(request, ledger, planner, stop, tuned)
    if tuned is not None:
        write_tuned(tuned, _tuned_text(request, stop.best, stop.reasons, yaml_header(report)))
    write_report(directory, report, ledger.entries, ledger.space)
    for line in _closing_lines(report, directory):
        log.info("%s", line)
    return EXIT_OK


def _report(request: Request, ledger: Ledger, planner: ConfigPlanner, stop: Stop, tuned: Path | None) -> Report:
    config, space = request.config, ledger.space
    horizon = Horizon(config.training.steps_per_epoch, config.training.epochs, config.global_batch)
    forecast = Forecast(space, planner, Known(ledger.entries))
    environment = describe_environment()
    versions = {name: version for name, version in environment["packages"].items() if version}
    return build_report(
        name=config.name,
        source=str(request.source),
        tuned=None if tuned is None else str(tuned),
        command=request.command,
        date=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        versions={"python": environment["python"], **versions},
        machine=(ledger.machine.words(), environment["platform"]),
        space=space,
        ledger=ledger.entries,
        stop=stop,
        options=options(ledger.entries, stop, space, forecast.predict, horizon),
        horizon=horizon,
    )


def _closing_lines(report: Report, directory: Path) -> list[str]:
    """What to do now, and where to read why."""
    return [
        headline(report),
        *(option_line(option) for option in report.options),
        *(f"{change.knob} {change.before} -> {change.after}: {change.reason}" for change in report.changes),
        f"report: {directory / 'report.html'}",
        f"run it: {report.train_command}",
    ]


def _tuned_text(request: Request, setting: Setting, reasons: dict[str, str], header: Sequence[str]) -> str:
    values = _given(request) | tuned_values(setting, Setting.of(request.config), reasons)
    return tuned_yaml(request.source.read_bytes().decode("utf-8"), str(request.source), values, header)


def _given(request: Request) -> dict[str, TunedValue]:
    """What the command line has set: the tuned config says it too."""
    values: dict[str, TunedValue] = {}
    for override in request.overrides:
        key = override.partition("=")[0]
        value: Any = request.config.model_dump(mode="json")
        for part in key.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        values[key] = TunedValue(value, "given on the command line of the tune")
    return values


def _check_writable(request: Request) -> None:
    """Raises ConfigError now, not after half an hour, where the tuned config could not be written."""
    source = Setting.of(request.config)
    changed = replace(source, workers=source.workers + 1, requests=source.requests + 1, compile=not source.compile)
    _tuned_text(request, changed, {}, ["a trial of it"])
    check_replaceable(tuned_path(request.source))


@contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """Keep other tunes of this run out, and trials of one that was killed; yields the lock's descriptor."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise StorageError(f"the run directory must be writable; got {error}; choose another place") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    except BlockingIOError:
        raise ConfigError(
            f"one tune may work on a run, with one trial; got {directory}, where another, or a trial that outlived its "
            "tune, is at work; wait for it or stop it"
        ) from None
    finally:
        os.close(descriptor)


@contextmanager
def _storage_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the run directory must be writable; got {error} in {directory}; free some space and go on with --resume"
        ) from error


@contextmanager
def _signals_to(runner: SubprocessRunner) -> Iterator[list[signal.Signals]]:
    """Ctrl-C and SIGTERM end the trial in hand, and with it the tune; yields those that came."""
    came: list[signal.Signals] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        came.append(signal.Signals(number))
        runner.stop()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def typed(arguments: Sequence[str]) -> str:
    """The command line, to be typed again."""
    return shlex.join(["vesuvius", "tune", *arguments])
