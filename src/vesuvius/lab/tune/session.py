"""A tune from its first trial to its report: the policy proposes, the runner runs, the ledger keeps."""

from __future__ import annotations

import logging
import os
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType

from vesuvius.config import Config
from vesuvius.engine.run_dir import TUNE, describe_environment, run_dir
from vesuvius.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED, ConfigError, StorageError
from vesuvius.file_lock import take_lock
from vesuvius.lab.tune.ledger import Ledger, check_same
from vesuvius.lab.tune.policy.policy import expected_trials, propose
from vesuvius.lab.tune.policy.prediction import Forecast
from vesuvius.lab.tune.report.files import write_report
from vesuvius.lab.tune.report.options import Horizon, options
from vesuvius.lab.tune.report.report import Report, build_report
from vesuvius.lab.tune.report.text import headline, option_line, summary, yaml_header
from vesuvius.lab.tune.report.tuned_config import (
    TunedValue,
    check_replaceable,
    remove_tuned,
    tuned_path,
    tuned_values,
    tuned_yaml,
    value_at,
    write_tuned,
)
from vesuvius.lab.tune.survey import ConfigPlanner, describe_machine, survey
from vesuvius.lab.tune.terms.known import Known
from vesuvius.lab.tune.terms.setting import Knob, Setting
from vesuvius.lab.tune.terms.space import Goal
from vesuvius.lab.tune.terms.trial import Stop, Trial
from vesuvius.lab.tune.trials.runner import RunnerOptions, SubprocessRunner, TuneInterrupted
from vesuvius.lab.tune.words import outcome_line, plan_lines, trial_line
from vesuvius.observe.logfile import open_log
from vesuvius.observe.session import is_alive, read_session
from vesuvius.stream.prepare import PreparedData, prepare_data

log = logging.getLogger(__name__)

_BUDGET_S = 1800.0
_STEPS = 100
_GOAL: Goal = "samples_s"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Request:
    """What was asked for.

    Attributes:
        config: of `source` with the overrides.
        source: the YAML file; `text` is what it said when the tune began.
        overrides: of the command line.
        command: as it was typed.
        goal, scale_batch, budget_s, steps: as in `Space`; None = as the ledger has it, or the default.
        keep: knobs that no trial turns; empty = as the ledger has it, or none.
        resume: go on with the ledger that is there.
    """

    config: Config
    source: Path
    text: str
    overrides: tuple[str, ...] = ()
    command: str = "vesuvius tune"
    goal: Goal | None = None
    scale_batch: bool = False
    keep: tuple[Knob, ...] = ()
    budget_s: float | None = None
    steps: int | None = None
    resume: bool = False


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
    directory, data = tune_dir(request.config), prepare_data(request.config.seed, request.config.data)
    with _locked(directory) as lock_fd, _storage_errors(directory):
        open_log(directory / "tune.log")
        ledger, planner = _open(request, data)
        least, most = ledger.space.trial_steps
        trials = RunnerOptions(
            seconds=ledger.space.trial_limit_s,
            least_steps=least,
            most_steps=most,
            lock_fd=lock_fd,
            task_samples=planner.task_samples,
        )
        runner = SubprocessRunner(request.config, directory / "trials", trials)
        with ledger, _signals_to(runner) as signals:
            log.info("tuning %s on %s", request.source, ledger.machine.words())
            _warn_of_neighbours(request.config)
            try:
                stop = _run_trials(ledger, planner, runner, signals)
            except TuneInterrupted as interrupted:
                log.error("%s", interrupted)
                return EXIT_INTERRUPTED if signals[0] == signal.SIGINT else EXIT_STOPPED
            return _finish(request, ledger, planner, stop, directory)


def plan(request: Request) -> list[str]:
    """`--dry-run`: the trials that would be run, a line each, with what is predicted of them.  Writes nothing.

    Raises:
        ConfigError, DataError: as `tune`.
    """
    _check_writable(request)
    data = prepare_data(request.config.seed, request.config.data)
    ledger, planner = _open(request, data, write=False)
    return plan_lines(ledger, expected_trials(ledger.entries, ledger.space, planner))


def tune_dir(config: Config) -> Path:
    """Where the tune of a config keeps everything."""
    return run_dir(config).path / TUNE


def _open(request: Request, data: PreparedData, write: bool = True) -> tuple[Ledger, ConfigPlanner]:
    config, path, machine = request.config, tune_dir(request.config) / "ledger.jsonl", describe_machine()
    if request.resume:
        ledger = Ledger.read(path)
        space = ledger.space
        asked = [
            ("--goal", space.goal, request.goal or space.goal),
            ("--scale-batch", space.scale_batch, request.scale_batch or space.scale_batch),
            ("--keep", ",".join(space.kept), ",".join(request.keep or space.kept)),
            ("--budget in seconds", space.budget_s, request.budget_s or space.budget_s),
            ("--steps", space.trial_steps[1], request.steps or space.trial_steps[1]),
        ]
        check_same(ledger, config, machine, asked)  # what was tried has followed from them
    else:
        space = survey(
            config,
            data,
            goal=request.goal or _GOAL,
            scale_batch=request.scale_batch,
            budget_s=request.budget_s or _BUDGET_S,
            steps=request.steps or _STEPS,
            keep=request.keep,
        )
        make = Ledger.new if write else Ledger.sketch
        ledger = make(path, config, space, machine)
    return ledger, ConfigPlanner(config, data, ledger.space.on_gpu)


def _run_trials(
    ledger: Ledger, planner: ConfigPlanner, runner: SubprocessRunner, signals: Sequence[signal.Signals]
) -> Stop:
    """Until the policy says that it is enough.

    Raises:
        TuneInterrupted: a signal came; the trial in hand does not count.
        StorageError, OSError: the disk is full; the same.
    """
    while isinstance(step := propose(ledger.entries, ledger.space, planner), Trial):
        if signals:
            raise TuneInterrupted(f"the tune was interrupted before trial {step.number}; go on with --resume")
        log.info("%s", trial_line(step))
        outcome = ledger.begin(step)
        try:
            outcome = outcome or runner.run(step)
        except (TuneInterrupted, StorageError, OSError):
            ledger.interrupted()
            raise
        ledger.end(outcome)
        log.log(logging.INFO if outcome.ended == "ok" else logging.WARNING, "%s", outcome_line(step, outcome))
    return step


def _finish(request: Request, ledger: Ledger, planner: ConfigPlanner, stop: Stop, directory: Path) -> int:
    """Write what was found and say it."""
    log.info("tune ended: %s", stop.reason)
    known = Known(ledger.entries)
    if not known.good(stop.best) or known.died(stop.best):
        log.error("no setting was tried that ended well, so nothing can be recommended; see %s", directory / "trials")
        return EXIT_ERROR
    tuned = tuned_path(request.source) if stop.best != ledger.space.source or request.overrides else None
    report = _report(request, ledger, planner, stop, tuned)
    write_report(directory, report, ledger.entries, ledger.space)
    if tuned is None:
        remove_tuned(tuned_path(request.source))  # of an earlier tune, which found something else
    else:
        write_tuned(tuned, _tuned_text(request, stop.best, stop.reasons, yaml_header(report)))
    for line in _closing_lines(report, directory):
        log.info("%s", line)
    return EXIT_OK


def _report(request: Request, ledger: Ledger, planner: ConfigPlanner, stop: Stop, tuned: Path | None) -> Report:
    config, space = request.config, ledger.space
    training, known = config.training, Known(ledger.entries)
    horizon = Horizon(training.steps_per_epoch, training.epochs, config.global_batch, training.max_steps)
    forecast = Forecast(space, planner, known)
    environment = describe_environment()
    versions = {name: version for name, version in environment["packages"].items() if version}
    return build_report(
        name=config.name,
        source=str(request.source),
        tuned=None if tuned is None else str(tuned),
        command=request.command,
        train_command=_train_command(config, tuned or request.source),
        date=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        versions={"python": environment["python"], **versions},
        machine=(ledger.machine.words(), environment["platform"]),
        space=space,
        known=known,
        stop=stop,
        options=options(known, stop, space, forecast.predict, forecast.obstacle, horizon),
        horizon=horizon,
    )


def _train_command(config: Config, path: Path) -> str:
    resume = ["--resume"] if run_dir(config).exists() else []
    return shlex.join(["vesuvius", "train", "--config", str(path), *resume])


def _closing_lines(report: Report, directory: Path) -> list[str]:
    """What to do now, and where to read why."""
    return [
        headline(report),
        *(f"{label}: {sentence}" for label, sentence in summary(report)),
        *(option_line(option) for option in report.options),
        *(f"{change.knob} {change.before} -> {change.after}: {change.reason}" for change in report.changes),
        f"report: {directory / 'report.html'}",
        f"run it: {report.train_command}",
    ]


def _tuned_text(request: Request, setting: Setting, reasons: dict[str, str], header: Sequence[str]) -> str:
    values = _given(request) | tuned_values(setting, Setting.of(request.config), reasons)
    return tuned_yaml(request.text, str(request.source), values, header)


def _given(request: Request) -> dict[str, TunedValue]:
    """What the command line has set: the tuned config says it too."""
    config = request.config.model_dump(mode="json")
    keys = [override.partition("=")[0] for override in request.overrides]
    return {key: TunedValue(value_at(config, key), "given on the command line of the tune") for key in keys}


def _check_writable(request: Request) -> None:
    """Raises ConfigError now, not after half an hour, where the tuned config could not be written."""
    check_replaceable(tuned_path(request.source))
    source = Setting.of(request.config)
    changed = Setting(
        workers=source.workers + 1,
        requests=source.requests + 1,
        prefetch_factor=source.prefetch_factor + 1,
        train_batch_size=source.train_batch_size + 1,
        accumulate_steps=source.accumulate_steps + 1,
        amp="off" if source.amp != "off" else "auto",
        compile=not source.compile,
        channels_last=not source.channels_last,
        checkpoint_levels=() if source.checkpoint_levels else (1,),
        cudnn_benchmark=not source.cudnn_benchmark,
        cuda_allocator="default" if source.cuda_allocator != "default" else "expandable",
    )
    _tuned_text(request, changed, {}, ["to see whether it can be"])


def _warn_of_neighbours(config: Config) -> None:
    """A run at work takes part of the machine, and the figures are of what it leaves."""
    session = read_session(run_dir(config).session)
    if session is not None and is_alive(session):
        log.warning(
            "the run %s is at work on this machine: trials slow it down, and their figures are of what it leaves; "
            "stop it before a tune that is to count",
            run_dir(config).path,
        )


@contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """Keep other tunes of this run out, and trials of one that was killed; yields the lock's descriptor."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise StorageError(f"the run directory must be writable; got {error}; choose another place") from error
    try:
        if not take_lock(descriptor, directory / ".lock"):
            raise ConfigError(
                f"one tune may work on a run, with one trial; got {directory}, where another, or a trial that outlived "
                "its tune, is at work; wait for it or stop it"
            )
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _storage_errors(directory: Path) -> Iterator[None]:
    """What the system says of a file of the tune that cannot be written, as an error with a remedy."""
    try:
        yield
    except (ConnectionError, TimeoutError, BlockingIOError):  # of the network, or of a process that cannot begin
        raise
    except OSError as error:
        raise StorageError(
            f"the run directory must be writable; got {error} in {directory}; free some space and go on with --resume"
        ) from error


@contextmanager
def _signals_to(runner: SubprocessRunner) -> Iterator[list[signal.Signals]]:
    """Ctrl-C, SIGTERM and a lost terminal end the trial in hand, and with it the tune; yields those that came."""
    came: list[signal.Signals] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        came.append(signal.Signals(number))
        runner.stop()
        log.info("%s: ending the trial in hand; once more ends it at once", came[-1].name)

    heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # as nohup asks for
    before = {number: signal.signal(number, on_signal) for number in heard}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
