"""A tune from the first block to the report: the policy asks, the living trainer measures, the ledger stores."""

from __future__ import annotations

import logging
import shlex
import signal
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from vesuvius.config import Config
from vesuvius.config.environment import key_of_variable
from vesuvius.config.load import read_config
from vesuvius.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED, ConfigError
from vesuvius.monitor.session import is_alive, read_session
from vesuvius.runlog.logfile import open_log
from vesuvius.runlog.run_dir import TUNE, describe_environment, run_dir
from vesuvius.stream.start.prepare import PreparedData, prepare_data
from vesuvius.training.ranks.part import one_rank
from vesuvius.tuning.alone import locked, signals_to, storage_errors
from vesuvius.tuning.lab import TuneInterrupted
from vesuvius.tuning.ledger import Ledger, RecordingLab, check_same
from vesuvius.tuning.optimist import OptimisticLab
from vesuvius.tuning.report.files import write_report
from vesuvius.tuning.report.options import Horizon
from vesuvius.tuning.report.report import Report, build_report
from vesuvius.tuning.report.text import block_line, closing_lines, plan_lines, step_line, yaml_header
from vesuvius.tuning.report.tuned_config import check_tunable, setting_reasons, tuned_path, tuned_yaml, write_tuned
from vesuvius.tuning.search.policy import recommend
from vesuvius.tuning.search.recommendation import Entry, Recommendation, Step
from vesuvius.tuning.search.search import Search
from vesuvius.tuning.setting import Knob, Setting
from vesuvius.tuning.space import Goal
from vesuvius.tuning.survey import ConfigPlanner, describe_machine, survey
from vesuvius.tuning.trainer_lab import TrainerLab

log = logging.getLogger(__name__)

_BUDGET_S = 1800.0
_GOAL: Goal = "samples_s"


@dataclass(frozen=True)
class Request:
    """The arguments of a tune.

    Attributes:
        config: `source` with environment and overrides applied.  Of several ranks, one is measured alone: each does
            what one does, and has its share of the machine.
        written: `source` alone.
        source: the YAML file.
        overrides: from the command line.
        environment: variables that set keys.
        command: as typed.
        goal, scale_batch, budget_s: as in `Space`; None = from the ledger, or the default.
        keep: knobs that nothing changes; empty = from the ledger, or none.
        resume: continue with the existing ledger.
    """

    config: Config
    written: Config
    source: Path
    overrides: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    command: str = "vesuvius tune"
    goal: Goal | None = None
    scale_batch: bool = False
    keep: tuple[Knob, ...] = ()
    budget_s: float | None = None
    resume: bool = False


def tune(request: Request) -> int:
    """Measure until the policy stops, then write the report and the tuned config.

    Returns:
        EXIT_OK; EXIT_ERROR if nothing could be measured; EXIT_INTERRUPTED or EXIT_STOPPED after a signal.

    Raises:
        ConfigError: another tune of this run is active, the ledger belongs to another tune, or the tuned config could
            not be written.
        DataError: a volume cannot be used.
        StorageError: the run directory cannot be written.
    """
    check_tunable(request.source)
    directory, data = tune_dir(request.config), prepare_data(request.config.seed, request.config.data)
    with locked(directory, "tune") as lock_fd, storage_errors(directory):
        open_log(directory / "tune.log")
        ledger, planner = _open(request, data)
        trainers = TrainerLab(one_rank(request.config), directory / "trials", lock_fd=lock_fd)
        with ledger, trainers as trainer, signals_to(trainer.stop) as came:
            log.info("tuning %s on %s", request.source, ledger.machine.words())
            _warn_of_neighbours(request.config)
            lab = RecordingLab(ledger, trainer)

            def on_step(step: Step) -> None:
                if came:
                    raise TuneInterrupted(f"the tune was interrupted before block {step.number}; go on with --resume")
                if not lab.replaying:
                    log.info("%s", step_line(step))

            def on_block(entry: Entry) -> None:
                level = logging.INFO if entry.block.ended == "ok" else logging.WARNING
                log.log(level, "%s", block_line(entry))

            search = Search(lab, ledger.space, planner, on_step, on_block)
            try:
                found = recommend(search)
            except TuneInterrupted as interrupted:
                log.error("%s", interrupted)
                return EXIT_INTERRUPTED if came and came[0] == signal.SIGINT else EXIT_STOPPED
        return _finish(request, ledger, search, found, directory)


def plan(request: Request) -> list[str]:
    """Return the lines of `--dry-run`: the blocks to expect with their predictions.  Writes nothing.

    Raises:
        ConfigError, DataError: as `tune`.
    """
    check_tunable(request.source)
    data = prepare_data(request.config.seed, request.config.data)
    ledger, planner = _open(request, data, write=False)
    search = Search(OptimisticLab(ledger.space, planner), ledger.space, planner)
    found = recommend(search)
    if found.verdict == "none":
        raise ConfigError(f"a tune needs a setting that fits this machine; got none: {found.reason}")
    return plan_lines([entry.step for entry in search.entries], ledger.space, ledger.machine.words())


def tune_dir(config: Config) -> Path:
    """Return the directory of a tune."""
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
        ]
        check_same(ledger, config, machine, asked)  # the blocks so far depend on them
    else:
        space = survey(
            config,
            data,
            goal=request.goal or _GOAL,
            scale_batch=request.scale_batch,
            budget_s=request.budget_s or _BUDGET_S,
            keep=request.keep,
        )
        make = Ledger.new if write else Ledger.sketch
        ledger = make(path, config, space, machine)
    return ledger, ConfigPlanner(one_rank(config), data, ledger.space.on_gpu)


def _finish(request: Request, ledger: Ledger, search: Search, found: Recommendation, directory: Path) -> int:
    """Write the report and the tuned config, and log the result."""
    if found.verdict == "none":
        log.error("nothing could be measured, so there is no recommendation: %s; see %s", found.reason, directory)
        return EXIT_ERROR
    tuned = tuned_path(request.source)
    report = _report(request, ledger, search, found, tuned)
    write_report(directory, report)
    _write_tuned(request, found, report, tuned)
    for line in closing_lines(report, directory):
        log.info("%s", line)
    return EXIT_OK


def _report(request: Request, ledger: Ledger, search: Search, found: Recommendation, tuned: Path) -> Report:
    config, environment = request.config, describe_environment()
    training = config.training
    return build_report(
        name=config.name,
        source=str(request.source),
        tuned=str(tuned),
        command=request.command,
        train_command=_train_command(config, tuned),
        date=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        versions={"python": environment["python"], **{n: v for n, v in environment["packages"].items() if v}},
        machine=f"{ledger.machine.words()}; {environment['platform']}",
        space=ledger.space,
        search=search,
        found=found,
        horizon=Horizon(training.steps_per_epoch, config.horizon_steps, Setting.of(config).global_batch),
    )


def _train_command(config: Config, path: Path) -> str:
    resume = ["--resume"] if run_dir(config).exists() else []
    return shlex.join(["vesuvius", "train", "--config", str(path), *resume])


def _write_tuned(request: Request, found: Recommendation, report: Report, path: Path) -> None:
    """Write the tuned config, with what the environment and the command line of the tune have set."""
    wanted = found.best.applied_to(request.config)
    reasons = {str(knob): reason for knob, reason in found.reasons.items()}
    why = setting_reasons(found.best, Setting.of(request.config), reasons)  # of these, the first that fits a key counts
    for key in (override.partition("=")[0].strip() for override in request.overrides):
        why.setdefault(key, "given on the command line of the tune")
    for name in request.environment:
        why.setdefault(key_of_variable(name), f"{name} was set for the tune")
    write_tuned(path, tuned_yaml(request.source.name, request.written, wanted, why, yaml_header(report)))
    try:
        as_wanted = read_config(path) == wanted
    except ConfigError as error:
        as_wanted = False
        log.warning("%s", error)
    if not as_wanted:
        log.warning("%s was changed during the tune, so %s is not what was measured; tune again", request.source, path)


def _warn_of_neighbours(config: Config) -> None:
    """Warn if the run itself is active: it takes part of the machine and distorts the figures."""
    session = read_session(run_dir(config).session)
    if session is not None and is_alive(session):
        log.warning(
            "the run %s is active on this machine: it slows the tune down and the tune slows it down; stop it for "
            "reliable figures",
            run_dir(config).path,
        )
