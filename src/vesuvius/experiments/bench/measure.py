"""Measures a cell once: a process of `vesuvius train`, ended once its steady state is known."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from pydantic import ValidationError

from vesuvius.config import Config
from vesuvius.errors import VesuviusError, one_line
from vesuvius.experiments.bench.results import Measurement
from vesuvius.experiments.machine import planned_bytes, ram_left, vram_left
from vesuvius.experiments.steady import SteadyState, Warmup
from vesuvius.experiments.trainer import Trainer, TrialInterrupted, next_number, trainer_config
from vesuvius.runlog.records import Record
from vesuvius.runlog.units import size_text
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.start.prepare import PreparedData, prepare_data
from vesuvius.training.stop import StoppedError, unless_stopped

_prepared = cache(prepare_data)


def measure_training(
    directory: Path,
    config: Config,
    ranks: int,
    blank: Measurement,
    *,
    seconds: float,
    limit_s: float,
    lock_fd: int | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> Measurement:
    """Fill in a measurement.

    Args:
        directory: of the run directories of all measurements.
        seconds: of the steady state.
        limit_s: the longest that it may take.
        lock_fd: descriptor that the trainer keeps open; None = none.
        stopping: whether the bench was asked to stop.

    Raises:
        TrialInterrupted: the bench was asked to stop; the process and its children are gone.
        StorageError, OSError: the disk cannot be written.
    """
    began, launched_s = time.monotonic(), time.time()
    try:
        data = unless_stopped(partial(_prepared, config.seed, config.data), stopping)
        if obstacle := _obstacle(config, data, ranks):
            return replace(blank, ended="failed", cause=f"not started: {obstacle}")
        run = trainer_config(config, next_number(directory))
        # Also without a bench that ends it, as after SIGKILL, a trainer ends at the limit.
        run = run.with_training(max_hours=limit_s / 3600)
    except StoppedError:
        raise TrialInterrupted("interrupted while it opened the volumes; continue with --resume") from None
    except (VesuviusError, ValidationError) as error:
        return replace(blank, ended="failed", cause=one_line(error, 400))
    state = _steady_state(config, data, ranks, seconds)
    trainer = Trainer(run, directory, lock_fd, takes_commands=False)

    def take(record: Record) -> bool:
        return record["kind"] == "step" and state.add(record)

    ended, cause = trainer.watch(take, limit_s, stopping)
    trainer.close()
    found = replace(blank, run=run.name, ended=ended, cause=cause, seconds=time.monotonic() - began)
    if ended != "ok":
        return found
    return replace(found, samples_s=state.samples_s, start_s=state.start_s(launched_s), figures=state.figures())


def _steady_state(config: Config, data: PreparedData, ranks: int, seconds: float) -> SteadyState:
    training, plan = config.training, data.plan
    batch = training.train_batch_size * training.accumulate_steps * ranks
    options = StreamOptions.from_config(training, config.cluster)
    warmup = Warmup.of(data.job, options, training.accumulate_steps, batch)
    workers, task = training.workers * ranks, plan.samples_per_task
    return SteadyState(warmup, seconds, batch, workers, task, plan.patches_per_region)


def _obstacle(config: Config, data: PreparedData, ranks: int) -> str:
    """Why a config does not fit into memory, as planned; '' = it does."""
    ram_bytes, vram_bytes = planned_bytes(config, data)
    ram_bytes, left_bytes = ram_bytes * (1 if config.cluster.address else ranks), ram_left(config)
    if ram_bytes > left_bytes:
        return f"it needs about {size_text(ram_bytes)} of RAM, and {size_text(left_bytes)} are left"
    if vram_bytes is not None and vram_bytes > (vram_left_bytes := vram_left()):
        return f"it needs about {size_text(vram_bytes)} of VRAM, and {size_text(vram_left_bytes)} are left"
    return ""
