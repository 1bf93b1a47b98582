"""A bench from its cells to its report: rounds ask, a lab measures, the ledger stores."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from vesuvius.config import Config
from vesuvius.config.load import dump_config, read_config
from vesuvius.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED
from vesuvius.experiments.bench.measure import measure_training
from vesuvius.experiments.bench.page import build_page
from vesuvius.experiments.bench.results import Cell, Measurement, results_of
from vesuvius.experiments.ledger import Ledger, locked, signals_to, write_figures
from vesuvius.experiments.machine import describe_machine, facts_of_this_place
from vesuvius.experiments.trainer import TrialInterrupted
from vesuvius.report.content import RunReport
from vesuvius.report.page import made_by, new_folder, write_page
from vesuvius.runlog.environment import describe_environment
from vesuvius.runlog.run_dir import BENCHES, run_dir
from vesuvius.runlog.units import format_duration, number
from vesuvius.training.step.step import choose_device

log = logging.getLogger(__name__)

PAGE = "bench"
_LEDGER = "ledger.jsonl"


@dataclass(frozen=True)
class BenchRequest:
    """What is asked for."""

    source: Path  # the YAML file; with `environment` and `overrides` applied it is what cells change
    overrides: tuple[str, ...]
    cells: tuple[Cell, ...]
    rounds: int  # how often each cell is measured
    seconds: float  # of the steady state, in each measurement
    limit_s: float  # the longest that a measurement may take
    resume: bool = False  # continue the newest bench of this run, and measure again what failed in it
    command: str = "vesuvius bench"  # as typed
    # variables that set keys, which a cell's trainer must not find in its own environment
    environment: Mapping[str, str] = field(default_factory=dict)


def bench(request: BenchRequest) -> tuple[int, RunReport | None]:
    """Measure what is missing and write the report.

    Returns:
        The exit code and the report: EXIT_OK; EXIT_ERROR if nothing could be measured; EXIT_INTERRUPTED or EXIT_STOPPED
        after a signal, without a report.

    Raises:
        ConfigError: a cell's config is wrong, another bench of this run is active, or there is none to continue.
        StorageError: the folder cannot be written.
    """

    def config_with(overrides: Sequence[str]) -> Config:
        return read_config(request.source, [*request.overrides, *overrides], request.environment)

    config, configs = config_with(()), [config_with(cell.overrides) for cell in request.cells]
    parent = run_dir(config).path / BENCHES
    with locked(parent, "bench") as lock_fd:
        asked = _asked(request, config)
        ledger: Ledger[Measurement]
        if request.resume:
            newest = max(parent.glob(f"*/{_LEDGER}"), default=parent / _LEDGER)
            ledger = Ledger.read(newest, "bench", Measurement)
            ledger.check_same(asked)
            folder = newest.parent
        else:
            folder = new_folder(parent)
            ledger = Ledger(folder / _LEDGER, "bench", asked)
            ledger.begin()
        log.info("%d cells, %d rounds; %s", len(configs), request.rounds, folder)
        with ledger, signals_to(lambda: None) as came:
            try:
                _measure(request, configs, folder, ledger, lock_fd, came)
            except TrialInterrupted as interrupted:
                log.error("%s", interrupted)
                return (EXIT_INTERRUPTED if came[0] == signal.SIGINT else EXIT_STOPPED), None
        return _write(request, config, folder, ledger.results)


def _measure(
    request: BenchRequest,
    configs: Sequence[Config],
    folder: Path,
    ledger: Ledger[Measurement],
    lock_fd: int,
    came: Sequence[signal.Signals],
) -> None:
    """Raises TrialInterrupted after a signal."""
    most = max(map(_ranks_of, configs))
    if most > 1 and choose_device().type == "cpu":  # as many threads for each rank, however many there are
        os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // most, 1)))

    def measure(cell: int, round: int) -> Measurement:
        done = measure_training(
            folder / "cells",
            configs[cell],
            _ranks_of(configs[cell]),
            Measurement(cell, round, "ok"),
            seconds=request.seconds,
            limit_s=request.limit_s,
            lock_fd=lock_fd,
            stopping=lambda: bool(came),
        )
        where = f"round {round + 1} of {request.rounds}: {request.cells[cell].label}"
        if done.ended == "ok":
            log.info("%s: %s samples/s, %s", where, number(done.samples_s), format_duration(done.seconds))
        else:
            log.warning("%s: %s: %s", where, done.ended, done.cause)
        return done

    measure_rounds(ledger, len(configs), request.rounds, measure)


def measure_rounds(
    ledger: Ledger[Measurement],
    cells: int,
    rounds: int,
    measure: Callable[[int, int], Measurement],
) -> None:
    """Measure what is missing: every cell once a round, each round in the reverse order of the one before.

    A cell that failed is left out of the later rounds of a session; failures of earlier sessions do not count.

    Args:
        measure: takes a cell and a round.

    Raises:
        TrialInterrupted, StorageError, OSError: as `measure`; the ledger can be continued.
    """
    for round in range(rounds):
        for cell in list(range(cells))[:: -1 if round % 2 else 1]:
            there = [m for m in ledger.results if m.cell == cell and (m.ended == "ok" or m.session == ledger.session)]
            if not any(m.round == round or m.ended != "ok" for m in there):
                ledger.add(replace(measure(cell, round), session=ledger.session))


def _ranks_of(config: Config) -> int:
    ranks = config.training.ranks
    return max(torch.cuda.device_count(), 1) if ranks == "auto" else ranks


def _asked(request: BenchRequest, config: Config) -> dict[str, Any]:
    """What a resumed bench must have in common with this one; there may be more rounds."""
    cells = [asdict(cell) for cell in request.cells]
    machine = describe_machine().compared
    asked = {"config": config.model_dump(mode="json"), "cells": cells, "machine": machine, "seconds": request.seconds}
    plain: dict[str, Any] = json.loads(json.dumps(asked))
    return plain


def _write(
    request: BenchRequest, config: Config, folder: Path, measurements: Sequence[Measurement]
) -> tuple[int, RunReport]:
    """Write the figures as JSON, and the page."""
    results, made = results_of(request.cells, measurements), made_by(request.command)
    facts = {
        "baseline": ", ".join(request.cells[0].overrides) or "the config",
        "rounds": f"{request.rounds}, each {request.seconds:g} s of the steady state",
        "measuring took": format_duration(sum(m.seconds for m in measurements)),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
        **facts_of_this_place(),
    }
    figures = {
        "made": made,
        "facts": facts,
        "environment": describe_environment(),
        "results": [asdict(each) for each in results],
        "measurements": [asdict(each) for each in measurements],
        "config": config.model_dump(mode="json"),
    }
    write_figures(folder / "benchmark_results.json", figures)
    title = f"{config.name}: bench of {len(results)} cells"
    page = build_page(title, str(folder), facts, results, dump_config(config))
    write_page(folder, PAGE, [page], made)
    return (EXIT_OK if any(each.samples_s for each in results) else EXIT_ERROR), page
