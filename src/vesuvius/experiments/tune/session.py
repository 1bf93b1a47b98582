"""Runs a tune from the first trial to the report: the policy chooses trials, a trainer measures them.

The trainer is a process of `vesuvius train` that takes commands (`worker.py`) and writes results to its run directory.
If it dies, the tune continues: the rest of it is killed, and the cause is stored in the `Result`.
"""

import json
import logging
import math
import os
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import psutil
from pydantic import ValidationError

from vesuvius.accelerator import choose_device
from vesuvius.config import Config
from vesuvius.config.load import dump_config
from vesuvius.errors import EXIT_NO_RESULT, EXIT_OK, EXIT_STOPPED, ConfigError, one_line, storage_errors
from vesuvius.experiments import machine
from vesuvius.experiments.trainer import Trainer, next_number, trainer_config
from vesuvius.experiments.tune import report
from vesuvius.experiments.tune.measurement import (
    READER_KNOBS,
    Knob,
    Planned,
    Planner,
    Result,
    SearchSpace,
    Setting,
    TrialKind,
    key_of,
)
from vesuvius.experiments.tune.policy import Recommendation, conclude, policy
from vesuvius.experiments.tune.search import KINDS, Search
from vesuvius.monitor.probes.cores import bound_cores, others_text, usable_cores
from vesuvius.monitor.session import is_alive, read_session
from vesuvius.report.page import RunReport, made_by, render_html, write_page
from vesuvius.runlog.files import write_atomically
from vesuvius.runlog.logfile import open_log
from vesuvius.runlog.records import Record
from vesuvius.runlog.run_dir import TUNE, run_dir
from vesuvius.runlog.units import format_duration
from vesuvius.stream.options import StreamOptions, check_store
from vesuvius.stream.start.prepare import PreparedData, prepare_data
from vesuvius.training.forecast.memory_plan import max_indexable_batch
from vesuvius.training.forecast.plan import num_local_ranks, plan_run
from vesuvius.training.forecast.preflight import READERS_PER_CORE
from vesuvius.training.ranks.share import single_rank_config
from vesuvius.training.stop import StoppedError, StopRequest

log = logging.getLogger(__name__)

_MOST_PREFETCH = 16
_MOST_REQUESTS = 256
_TRIALS = 180  # trials that fit the budget; a third of it goes to starts and changes
_SHORTEST_TRIAL_S, _LONGEST_TRIAL_S = 2.0, 30.0
_OTHERS_OVER_S = 1.0


class TrialRunner:
    """Measures settings in one trainer, restarted only if training settings other than the readers change."""

    def __init__(
        self, config: Config, folder: Path, lock_fd: int | None = None, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        self._config, self._folder, self._lock_fd, self._stopping = config, folder, lock_fd, stopping
        self._trainer: Trainer | None = None
        self._in_force = Setting.of(config)
        self._commands = 0

    def measure(self, setting: Setting, kind: TrialKind, seconds: float, limit_s: float) -> Result:
        """Measure a setting for about `seconds`; after `limit_s` its trainer is killed.  Raises StoppedError."""
        began, force, trainer = time.monotonic(), setting, self._trainer
        starts = trainer is None or trainer.wait(0) or setting.of_trainer != self._in_force.of_trainer
        if kind == "step":  # steps alone need no readers: keep or do not start them
            readers = {"workers": 0} if starts else {k: getattr(self._in_force, k) for k in READER_KNOBS}
            force = replace(setting, **readers)
        if starts or trainer is None:
            try:
                config = trainer_config(force.applied_to(self._config), next_number(self._folder))
            except ValidationError as error:
                return Result(setting, kind, "failed", one_line(error, 400), 0.0)
            self.close()
            trainer = self._trainer = Trainer(config, self._folder, self._lock_fd, takes_commands=True)
            self._in_force = force
        self._commands += 1
        command = {"number": self._commands, "kind": kind, "seconds": seconds}
        command |= {knob: getattr(force, knob) for knob in READER_KNOBS}
        measured: Record = {}

        def take(record: Record) -> bool:
            if record["kind"] == "trial" and record["number"] == command["number"]:
                measured.update(record["figures"])
            return bool(measured)

        trainer.tell(json.dumps(command))
        ended, cause = trainer.watch(take, limit_s, self._stopping)
        result = Result(setting, kind, ended, cause, time.monotonic() - began, **measured)
        if ended != "ok":
            self._trainer = None
            return result
        self._in_force = force
        return result if force == setting else replace(result, ram_bytes=None)

    def close(self) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.close()


@dataclass(frozen=True)
class TuneRequest:
    # `source` with environment and overrides applied; one of several ranks is measured, with its share of the machine
    config: Config
    written: Config  # `source` alone
    source: Path  # the YAML file
    overrides: tuple[str, ...]  # from the command line
    command: str  # as typed
    keep: tuple[Knob, ...]  # knobs to leave unchanged
    budget_s: float  # for all measurements together


def tune(request: TuneRequest) -> tuple[int, RunReport]:
    """Measure until the policy stops or a signal arrives, then write the report and the tuned config.

    Returns the exit code, EXIT_NO_RESULT if nothing could be measured, and the report.  Raises ConfigError if another
    tune of this run is active or the tuned config could not be written, DataError and StorageError.
    """
    space, planner = _open(request)
    run = run_dir(request.config)
    directory = run.path / TUNE
    with machine.locked(directory) as lock_fd:
        open_log(directory / "tune.log")
        stop, trials = StopRequest(None, "ending the trainer"), directory / "trials"
        runner = TrialRunner(single_rank_config(request.config), trials, lock_fd, stop.is_requested)
        with closing(runner), stop:
            log.info("tuning %s on %s", request.source, machine.machine_words())
            if (session := read_session(run.session)) is not None and is_alive(session):
                log.warning("the run %s is active on this machine: stop it for reliable figures", run.path)
            if space.others:
                log.warning("%s: measurements vary more, so tuning takes longer", space.others)
            search, why = Search(space, planner, policy), ""
            try:
                _measure(search, runner, stop)
            except StoppedError as interrupted:
                why = str(interrupted)
                log.error("%s", why)
            recommendation = conclude(search, why)
        page = _finish(request, search, recommendation, directory)
        code = EXIT_NO_RESULT if recommendation.certainty == "none" else EXIT_OK
        return (stop.exit_code or EXIT_STOPPED) if why else code, page


def _measure(search: Search, runner: TrialRunner, stop: StopRequest) -> None:
    while (trial := search.trial) is not None:
        if stop.is_requested():
            raise StoppedError("interrupted between two trials")
        number, seconds = len(search.results), format_duration(trial.expected_s)
        log.info("Trial %d %s, %s: %s; about %s", number, trial.stage, KINDS[trial.kind], trial.why, seconds)
        result = runner.measure(trial.setting, trial.kind, search.space.trial_s, trial.limit_s)
        log.log(logging.INFO if result.ended == "ok" else logging.WARNING, "%s", report.trial_line(number, result))
        search.tell(result)


def plan(request: TuneRequest) -> list[str]:
    """The lines of `--dry-run`.  Writes nothing.  Raises as `tune`, and if the config does not fit."""
    return report.plan_lines(*_open(request), machine.machine_words())


def _open(request: TuneRequest) -> tuple[SearchSpace, Planner]:
    report.check_tunable(request.source)
    config = request.config
    data = prepare_data(config.seed, config.data)
    space = survey(machine.with_micro_batch(config), data, budget_s=request.budget_s, keep=request.keep)
    return space, planner_of(single_rank_config(config), data)


def _finish(request: TuneRequest, search: Search, recommendation: Recommendation, directory: Path) -> RunReport:
    config, space, tuned = request.config, search.space, report.tuned_path(request.source)
    is_none = recommendation.certainty == "none"
    options = [] if is_none else report.build_options(recommendation, search, config.horizon_steps)
    spent = f"{len(search.results)} trials in {format_duration(space.budget_s - search.left_s)}"
    facts = {
        "samples/s are of": "one rank" if config.training.ranks != 1 else "the run",
        "trials": f"{spent} of {format_duration(space.budget_s)}",
        "memory limits": report.memory_words(space.ram_limit_bytes, space.vram_limit_bytes),
        "other programs": space.others or "less than a tenth of the cores when tuning began",
        **machine.facts_of_this_place(),
    }
    made = made_by(request.command)
    commands = _next_commands(request, space, recommendation, tuned)
    text = dump_config(request.written)
    page = report.build_page(config.name, str(directory), recommendation, search, options, facts, commands, text)
    write_page(directory, "report", render_html([page], made))
    figures = {
        "made": made,
        "facts": page.facts,
        "recommendation": asdict(recommendation),
        "options": [asdict(option) for option in options],
        "trials": [
            {"trial": asdict(trial), "result": asdict(result)}
            for trial, result in zip(search.asked, search.results, strict=True)
        ],
    }
    machine.write_figures(directory / "report.json", figures)
    # The tuned config includes overrides by the environment and the command line.
    header = [f"{made[5:]}.", f"{page.headline}.  {spent}.", f"Measured on: {facts['machine']}"]
    why = {key_of(knob): reason for knob, reason in recommendation.reasons.items()}
    wanted = recommendation.written.applied_to(config)
    text = report.tuned_yaml(request.source.name, request.written, wanted, why, header)
    with storage_errors(f"the tuned config {tuned}", "free some space or correct the permissions"):
        write_atomically(tuned, text.encode())
    log.log(logging.ERROR if is_none else logging.INFO, "%s", page.headline)
    return page


def _next_commands(request: TuneRequest, space: SearchSpace, recommendation: Recommendation, tuned: Path) -> list[str]:
    """The commands to type next: train with the tuned config and, if the result is not sure, a longer tune."""
    resume = ["--resume"] if run_dir(request.config).exists() else []
    run = shlex.join(["vesuvius", "train", "--config", str(tuned), *resume])
    certainty = recommendation.certainty
    if certainty == "sure" or (certainty == "unchanged" and recommendation.complete):
        return [run]
    budget = f"{math.ceil(2 * space.budget_s / 60)}m"
    again = ["vesuvius", "tune", "--config", str(request.source), *request.overrides, "--budget", budget]
    again += ["--keep", ",".join(request.keep)] if request.keep else []
    return [shlex.join(again)] if certainty == "none" else [f"{shlex.join(again)}  # more certain", run]


def survey(config: Config, data: PreparedData, *, budget_s: float, keep: Sequence[Knob] = ()) -> SearchSpace:
    """The search space of one rank, with its share of this machine.  Does I/O; uses no GPU."""
    source, on_gpu, ranks = Setting.of(config), choose_device().type != "cpu", num_local_ranks(config)
    cores = usable_cores(os.getpid()) / ranks
    busy = psutil.cpu_percent(_OTHERS_OVER_S, percpu=True)  # before the tune starts anything
    used = math.fsum(busy[core] for core in bound_cores() if core < len(busy)) / 100
    remote = any(volume.source.remote for volume in (*data.volumes, *data.conditions))
    return SearchSpace(
        source=source,
        budget_s=budget_s,
        trial_s=min(max(budget_s / _TRIALS, _SHORTEST_TRIAL_S), _LONGEST_TRIAL_S),
        most_workers=_most_workers(config, data, cores, remote, ranks),
        most_prefetch=max(_MOST_PREFETCH, source.prefetch_factor),
        most_requests=max(_MOST_REQUESTS, source.requests) if remote else source.requests,
        most_batch=min(source.global_batch, max(max_indexable_batch(config), source.train_batch_size)),
        ram_limit_bytes=machine.ram_left(config) // ranks,
        vram_limit_bytes=machine.vram_left() if on_gpu else None,
        kept=tuple(keep),
        others=others_text(min(used, cores * ranks), cores * ranks),
    )


def _most_workers(config: Config, data: PreparedData, cores: float, remote: bool, ranks: int) -> int:
    """The maximum number of readers: one per core (several on a remote store), limited by /dev/shm."""
    source = config.training.workers
    most = max(source, int(cores * (READERS_PER_CORE if remote else 1)), 1)
    while most > source:
        options = replace(StreamOptions.from_config(config.training, config.cluster), num_workers=most, processes=True)
        try:
            check_store(data.job, options, ranks)
            return most
        except ConfigError:
            most -= 1
    return most


def planner_of(config: Config, data: PreparedData) -> Planner:
    """A cached predictor of memory, without resident volumes, which give way to readers; takes up to seconds."""
    config = config.model_copy(update={"data": config.data.model_copy(update={"resident": 0})})

    @cache
    def planned(setting: Setting) -> Planned:
        wanted = setting.applied_to(config)
        ram_bytes, vram_bytes = machine.planned_bytes(wanted, data)
        return Planned(ram_bytes, max(plan_run(wanted, data).ram_bytes - ram_bytes, 0), vram_bytes)

    return planned
