"""A bench from its cells to its report: rounds ask, a lab measures, the ledger stores."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from vesuvius.benchmark.cells.command import measure_command
from vesuvius.benchmark.cells.training import Bounds, Lab, measure_training
from vesuvius.benchmark.grid import Cell
from vesuvius.benchmark.ledger import BenchLedger, Measurement
from vesuvius.benchmark.page import Memory, build_page
from vesuvius.benchmark.pictures import draw_comparison, draw_table
from vesuvius.benchmark.results import Result, results_of
from vesuvius.config import Config
from vesuvius.config.load import dump_config, read_config
from vesuvius.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_OK, EXIT_STOPPED, ConfigError
from vesuvius.monitor.recent import read_recent
from vesuvius.report.model import commit_text
from vesuvius.report.page import made_by, new_folder, write_pages
from vesuvius.report.records import figure, read_run
from vesuvius.runlog.environment import describe_environment
from vesuvius.runlog.files.whole_file import write_whole
from vesuvius.runlog.redact import redacted
from vesuvius.runlog.run_dir import BENCHES, run_dir
from vesuvius.runlog.units import format_duration, number
from vesuvius.training.step.step import choose_device
from vesuvius.trials.alone import locked, run_storage_errors, signals_to
from vesuvius.trials.ended import TrialInterrupted
from vesuvius.trials.machine import describe_machine

log = logging.getLogger(__name__)

PAGE = "bench"


@dataclass(frozen=True)
class BenchRequest:
    """What is asked for."""

    source: Path  # the YAML file; with `environment` and `overrides` applied it is what cells change
    overrides: tuple[str, ...]
    cells: tuple[Cell, ...]
    rounds: int  # how often each cell is measured
    bounds: Bounds
    resume: bool = False  # continue the newest bench of this run
    retry_failed: bool = False  # and measure again what failed in it
    left_out: tuple[str, ...] = ()  # loaders that are not installed
    command: str = "vesuvius bench"  # as typed
    # variables that set keys, which a cell's trainer must not find in its own environment
    environment: Mapping[str, str] = field(default_factory=dict)


def bench(request: BenchRequest) -> tuple[int, Path]:
    """Measure what is missing and write the report.

    Returns:
        The exit code and the folder: EXIT_OK; EXIT_ERROR if nothing could be measured; EXIT_INTERRUPTED or EXIT_STOPPED
        after a signal, without a report.

    Raises:
        ConfigError: a cell's config is wrong, another bench of this run is active, or there is none to continue.
        StorageError: the folder cannot be written.
    """

    def config_with(overrides: Sequence[str]) -> Config:
        return read_config(request.source, [*request.overrides, *overrides], request.environment)

    config, configs = config_with(()), [config_with(cell.overrides) for cell in request.cells]
    parent = run_dir(config).path / BENCHES
    with locked(parent, "bench") as lock_fd, run_storage_errors(parent):
        folder = _newest(parent) if request.resume else new_folder(parent)
        ledger = BenchLedger(folder / "ledger.json", _asked(request, config), request.retry_failed)
        with signals_to(lambda: None) as came:
            code = _measure(request, configs, folder, ledger, lock_fd, came)
        if code == EXIT_OK:
            code = _write(request, config, folder, ledger)
    return code, folder


def _measure(
    request: BenchRequest,
    configs: Sequence[Config],
    folder: Path,
    ledger: BenchLedger,
    lock_fd: int,
    came: Sequence[signal.Signals],
) -> int:
    cells, most = request.cells, max(map(_ranks_of, configs))
    if most > 1 and choose_device().type == "cpu":  # as many threads for each rank, however many there are
        os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // most, 1)))
    lab = Lab(folder / "cells", request.bounds, lock_fd, lambda: bool(came))

    def measure(cell: int, round: int) -> Measurement:
        blank, config = Measurement(cell, round, "ok"), configs[cell]
        if command := cells[cell].command:
            return measure_command(lab, command, config, blank)
        return measure_training(lab, config, _ranks_of(config), blank)

    def on_done(done: Measurement) -> None:
        where = f"round {done.round + 1} of {request.rounds}: {cells[done.cell].label}"
        if done.ended == "ok":
            log.info("%s: %s samples/s, %s", where, number(done.samples_s), format_duration(done.seconds))
        else:
            log.warning("%s: %s: %s", where, done.ended, done.cause)

    log.info("%d cells, %d rounds; %s", len(cells), request.rounds, folder)
    if request.left_out:
        log.info("not installed, so left out: %s", ", ".join(request.left_out))
    try:
        ledger.measure_rounds(len(cells), request.rounds, measure, on_done)
    except TrialInterrupted as interrupted:
        log.error("%s", interrupted)
        return EXIT_INTERRUPTED if came[0] == signal.SIGINT else EXIT_STOPPED
    return EXIT_OK


def _ranks_of(config: Config) -> int:
    ranks = config.training.ranks
    return max(torch.cuda.device_count(), 1) if ranks == "auto" else ranks


def _asked(request: BenchRequest, config: Config) -> dict[str, Any]:
    """What a resumed bench must have in common with this one; there may be more rounds."""
    machine = {key: value for key, value in asdict(describe_machine()).items() if key != "host"}
    bounds = {"seconds": request.bounds.seconds}
    asked = {"config": config.model_dump(mode="json"), "cells": [asdict(cell) for cell in request.cells]}
    plain: dict[str, Any] = json.loads(json.dumps(asked | {"machine": machine} | bounds))
    return plain


def _newest(parent: Path) -> Path:
    ledgers = sorted(parent.glob("*/ledger.json*"))
    if not ledgers:
        raise ConfigError(f"--resume needs the ledger of an earlier bench; got none in {parent}; drop --resume")
    if ledgers[-1].suffix != ".json":
        raise ConfigError(
            f"--resume needs a ledger of this version of vesuvius; got {ledgers[-1]}; drop --resume to start over"
        )
    return ledgers[-1].parent


def _write(request: BenchRequest, config: Config, folder: Path, ledger: BenchLedger) -> int:
    """Write JSON, pictures and pages."""
    results, environment = results_of(request.cells, ledger.measurements), describe_environment()
    memory = _memory(results, folder / "cells")
    title = f"{config.name}: bench of {len(results)} cells"
    packages = {name: version for name, version in environment["packages"].items() if version}
    facts = {
        "baseline": ", ".join(request.cells[0].overrides) or "the config",
        "machine": describe_machine().words(),
        "rounds": f"{request.rounds}, each {request.bounds.seconds:g} s of the steady pace",
        "measuring took": format_duration(sum(m.seconds for m in ledger.measurements)),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "not set"),
        "versions": ", ".join(f"{name} {packages[name]}" for name in ("torch", "ray", "zarr") if name in packages),
        "commit": commit_text(environment),
    }
    if unknown := [rank for rank, (seconds, _) in memory.items() if not seconds]:
        facts["memory not known"] = f"{', '.join(unknown)}: measured for less time than the first sample takes"
    if request.left_out:
        facts["loaders left out"] = f"not installed: {', '.join(request.left_out)}"
    made = made_by(request.command)
    figures: Mapping[str, Any] = {
        "made": made,
        "facts": facts,
        "environment": environment,
        "results": [asdict(each) for each in results],
        "measurements": [asdict(each) for each in ledger.measurements],
        "config": config.model_dump(mode="json"),
    }
    write_whole(folder / "benchmark_results.json", (json.dumps(redacted(figures), indent=1) + "\n").encode())
    write_whole(folder / "gpu_benchmark_comparison.png", draw_comparison(title, results, memory))
    write_whole(folder / "performance_summary_table.png", draw_table(title, results))
    write_pages(folder, PAGE, [build_page(title, str(folder), facts, results, memory, dump_config(config))], made)
    return EXIT_OK if any(each.samples_s for each in results) else EXIT_ERROR


def _memory(results: Sequence[Result], runs: Path) -> Memory:
    """Memory over time of each rank in the last round of each number of ranks; empty where it is not known."""
    found = {}
    for result in results:
        if result.ranks and result.run:
            main = runs / result.run
            for rank, path in enumerate([main, *(main / "ranks" / str(n) for n in range(1, result.ranks))]):
                found[f"rank {rank} of {result.ranks}"] = memory_over_time(path)
    return found


def memory_over_time(run: Path) -> tuple[list[float], list[float]]:
    """Seconds, and bytes of the GPU, or of the trainer without one: from the records, or else the samples before."""
    points = [
        (figure(record.get("time")), ((record.get("vram") or {}).get("reserved_bytes") or record["trainer_bytes"])[-1])
        for record in read_run(run).system
    ] or [(moment.time, moment.vram_used_bytes or moment.trainer_bytes) for moment in read_recent(run / "recent.jsonl")]
    return [time - points[0][0] for time, _ in points], [figure(size) for _, size in points]
