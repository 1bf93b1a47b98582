"""Runs a bench: each trial is measured once a round, by a process of `vesuvius train`."""

import logging
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
from pydantic import ValidationError

from vesuvius.accelerator import choose_device
from vesuvius.config import Config
from vesuvius.config.load import dump_config, read_config
from vesuvius.errors import EXIT_NO_RESULT, EXIT_OK, VesuviusError, one_line
from vesuvius.experiments import machine
from vesuvius.experiments.bench.results import Measurement, Trial, build_page, results_of
from vesuvius.experiments.steady import SteadyState, Warmup
from vesuvius.experiments.trainer import Trainer, next_number, trainer_config
from vesuvius.report.page import RunReport, made_by, new_folder, render_html, write_page
from vesuvius.runlog.records import Record
from vesuvius.runlog.run_dir import BENCHES, describe_environment, run_dir
from vesuvius.runlog.units import format_duration, format_number, format_size
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.start.prepare import PreparedData, prepare_data
from vesuvius.training.stop import StoppedError, StopRequest, run_unless_stopped

log = logging.getLogger(__name__)

PAGE = "bench"
_prepared = cache(prepare_data)


@dataclass(frozen=True)
class BenchRequest:
    source: Path  # the YAML file; with `environment` and `overrides` applied it is what trials change
    overrides: tuple[str, ...]
    trials: tuple[Trial, ...]
    rounds: int
    seconds: float  # of the steady state, per measurement
    limit_s: float  # the longest that a measurement may take
    command: str  # as typed
    # variables that set keys, which a trial's trainer must not find in its own environment
    environment: Mapping[str, str]


def bench(request: BenchRequest) -> tuple[int, RunReport]:
    """Measure all trials and write the report; after a signal, with the measurements until then.

    Returns the exit code, EXIT_NO_RESULT if nothing could be measured, and the report.  Raises ConfigError if a trial's
    config is wrong or another bench of this run is active, and StorageError.
    """

    def config_with(overrides: Sequence[str]) -> Config:
        return read_config(request.source, [*request.overrides, *overrides], request.environment)

    config = config_with(())
    configs = [machine.with_micro_batch(config_with(trial.overrides)) for trial in request.trials]
    parent = run_dir(config).path / BENCHES
    with machine.locked(parent) as lock_fd:
        folder, done = new_folder(parent, create=True), list[Measurement]()
        log.info("%d trials, %d rounds; %s", len(configs), request.rounds, folder)
        if max(map(_ranks_of, configs)) > 1 and choose_device().type == "cpu":  # as many threads for each rank
            os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // max(map(_ranks_of, configs)), 1)))
        with StopRequest(None, "ending the trainer") as stop:

            def measure(trial: int, round: int) -> Measurement:
                asked = configs[trial], request.seconds, request.limit_s
                measurement = measure_trial(folder / "trials", *asked, lock_fd, stop.is_requested)
                if done:  # what is measured so far outlives this process
                    _write(request, config, folder, done)
                where = f"round {round + 1} of {request.rounds}: {request.trials[trial].label}"
                if measurement.ended == "ok":
                    rate, took = format_number(measurement.samples_s), format_duration(measurement.seconds)
                    log.info("%s: %s samples/s, %s", where, rate, took)
                else:
                    log.warning("%s: %s: %s", where, measurement.ended, measurement.cause)
                return replace(measurement, trial=trial, round=round)

            try:
                measure_rounds(done, len(configs), request.rounds, measure)
            except StoppedError as interrupted:
                log.error("%s", interrupted)
        code, report = _write(request, config, folder, done)
        return stop.exit_code or code, report


def measure_rounds(
    done: list[Measurement], trials: int, rounds: int, measure: Callable[[int, int], Measurement]
) -> None:
    """Append the trials of each round to `done`, every other round in reverse order, without those that failed."""
    for round in range(rounds):
        for trial in list(range(trials))[:: -1 if round % 2 else 1]:
            if not any(m.trial == trial and m.ended != "ok" for m in done):
                done.append(measure(trial, round))


def measure_trial(
    directory: Path, config: Config, seconds: float, limit_s: float, lock_fd: int | None, stopping: Callable[[], bool]
) -> Measurement:
    """Measure `seconds` of the steady state of a trial by a process.  Raises StoppedError, and OSError of the disk."""
    began, launched_s, ranks = time.monotonic(), time.time(), _ranks_of(config)
    try:
        data = run_unless_stopped(partial(_prepared, config.seed, config.data), stopping)
        if obstacle := _obstacle(config, data, ranks):
            return Measurement(ended="failed", cause=f"not started: {obstacle}")
        run = trainer_config(config, next_number(directory))
        # Also without a bench that ends it, as after SIGKILL, a trainer ends at the limit.
        run = run.with_training(max_hours=limit_s / 3600)
    except StoppedError:
        raise StoppedError("interrupted while the volumes were opened") from None
    except (VesuviusError, ValidationError) as error:
        return Measurement(ended="failed", cause=one_line(error, 400))
    training = config.training
    batch = training.micro_batch * training.accumulate_steps * ranks
    options = StreamOptions.from_config(training, config.cluster)
    warmup = Warmup.of(data.plan, options, training.accumulate_steps, batch)
    state = SteadyState(warmup, data.plan, training.workers * ranks, batch, seconds)
    trainer = Trainer(run, directory, lock_fd, takes_commands=False)

    def take(record: Record) -> bool:
        return record["kind"] == "step" and state.add(record)

    ended, cause = trainer.watch(take, limit_s, stopping)
    trainer.close()
    measurement = Measurement(run=run.name, ended=ended, cause=cause, seconds=time.monotonic() - began)
    if ended != "ok":
        return measurement
    return replace(measurement, samples_s=state.samples_s, start_s=state.start_s(launched_s), figures=state.figures())


def _obstacle(config: Config, data: PreparedData, ranks: int) -> str:
    """Return why a config is predicted not to fit into memory; '' = it fits."""
    ram_bytes, vram_bytes = machine.planned_bytes(config, data)
    ram_bytes, left_bytes = ram_bytes * (1 if config.cluster.address else ranks), machine.ram_left(config)
    if ram_bytes > left_bytes:
        return f"it needs about {format_size(ram_bytes)} of RAM, but {format_size(left_bytes)} is free"
    if vram_bytes is not None and vram_bytes > (vram_left_bytes := machine.vram_left()):
        return f"it needs about {format_size(vram_bytes)} of VRAM, but {format_size(vram_left_bytes)} is free"
    return ""


def _ranks_of(config: Config) -> int:
    ranks = config.training.ranks
    return max(torch.accelerator.device_count(), 1) if ranks == "auto" else ranks


def _write(
    request: BenchRequest, config: Config, folder: Path, measurements: Sequence[Measurement]
) -> tuple[int, RunReport]:
    results, made = results_of(request.trials, measurements), made_by(request.command)
    facts = {
        "baseline": ", ".join(request.trials[0].overrides) or "the config",
        "rounds": f"{request.rounds}, each {request.seconds:g} s of the steady state",
        "measuring took": format_duration(sum(m.seconds for m in measurements)),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
        **machine.facts_of_this_place(),
    }
    figures = {
        "made": made,
        "facts": facts,
        "environment": describe_environment(),
        "results": [asdict(each) for each in results],
        "measurements": [asdict(each) for each in measurements],
        "config": config.model_dump(mode="json"),
    }
    machine.write_figures(folder / "benchmark_results.json", figures)
    title = f"{config.name}: bench of {len(results)} trials"
    train = shlex.join(["vesuvius", "train", "--config", str(request.source), *request.overrides])
    page = build_page(title, str(folder), facts, results, dump_config(config), train)
    write_page(folder, PAGE, render_html([page], made))
    return (EXIT_OK if any(each.samples_s for each in results) else EXIT_NO_RESULT), page
