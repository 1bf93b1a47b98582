"""Measures a cell once: a process of `vesuvius train`, ended once its steady state is known."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from pydantic import ValidationError

from vesuvius.config import Config
from vesuvius.errors import VesuviusError, one_line
from vesuvius.experiments.machine import planned_bytes, ram_left, vram_left
from vesuvius.experiments.process import Ended, TrialInterrupted
from vesuvius.experiments.steady import SteadyState, Warmup
from vesuvius.experiments.trainer import Trainer, next_number, trainer_config
from vesuvius.runlog.units import size_text
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.start.prepare import PreparedData, prepare_data

_POLL_S = 0.05


@dataclass(frozen=True)
class Measurement:
    """A cell in one round, and how that ended."""

    cell: int
    round: int
    ended: Ended
    cause: str = ""  # one line; '' where it ended ok
    run: str = ""  # name of its run directory below `cells/`; '' = none
    session: int = 1  # of the bench: rates of different sessions are not compared within a round
    seconds: float = 0.0
    samples_s: float = 0.0  # in the steady state; 0 unless ok
    # seconds from the start of the process to the steady state, less what the steps until then take in it
    start_s: float | None = None
    figures: Mapping[str, float | None] = field(default_factory=dict)  # others, by name; None = not known


@dataclass(frozen=True)
class Lab:
    """What all measurements of a bench share; one process at a time."""

    directory: Path  # of the run directories
    seconds: float  # of the steady state
    limit_s: float  # the longest that a measurement may take
    lock_fd: int | None = None
    stopping: Callable[[], bool] = lambda: False  # whether the bench was asked to stop

    def check_stop(self) -> None:
        """Raises TrialInterrupted if the bench was asked to stop."""
        if self.stopping():
            raise TrialInterrupted("the bench was interrupted while it measured; continue with --resume")


_prepared = cache(prepare_data)


def measure_training(lab: Lab, config: Config, ranks: int, blank: Measurement) -> Measurement:
    """Fill in a measurement.

    Raises:
        TrialInterrupted: the bench was asked to stop; the process and its children are gone.
        StorageError, OSError: the disk cannot be written.
    """
    began, launched_s = time.monotonic(), time.time()
    try:
        data = _prepared(config.seed, config.data)
        if obstacle := _obstacle(config, data, ranks):
            return replace(blank, ended="failed", cause=f"not started: {obstacle}")
        run = trainer_config(config, next_number(lab.directory))
        # Also without a bench that ends it, as after SIGKILL, a trainer ends at the limit.
        run = run.with_training(max_hours=lab.limit_s / 3600)
    except (VesuviusError, ValidationError) as error:
        return replace(blank, ended="failed", cause=one_line(error, 400))
    state = _steady_state(config, data, ranks, lab.seconds)
    trainer = Trainer.start(run, lab.directory, lab.lock_fd, takes_commands=False)
    found = replace(blank, run=run.name)
    try:
        while True:
            lab.check_stop()
            has_ended = trainer.process.wait(_POLL_S)  # first: what it wrote before its end is read then
            steps = (record for record in trainer.new_records() if record["kind"] == "step")
            elapsed_s = time.monotonic() - began
            if any(state.add(step) for step in steps):
                figures, start_s = state.figures(), state.start_s(launched_s)
                return replace(found, seconds=elapsed_s, samples_s=state.samples_s, start_s=start_s, figures=figures)
            if has_ended or trainer.guard_text or elapsed_s >= lab.limit_s:
                ended, cause = trainer.fail(elapsed_s)
                return replace(found, ended=ended, cause=cause, seconds=elapsed_s)
    finally:
        trainer.close()


def _steady_state(config: Config, data: PreparedData, ranks: int, seconds: float) -> SteadyState:
    training, plan = config.training, data.plan
    batch = training.train_batch_size * training.accumulate_steps * ranks
    options = StreamOptions.from_config(training, config.cluster)
    warmup = Warmup.of(data.job, options, training.accumulate_steps, batch)
    workers, task = training.workers * ranks, plan.samples_per_task
    return SteadyState(warmup, seconds, batch, workers, task, plan.patches_per_region, training.compile)


def _obstacle(config: Config, data: PreparedData, ranks: int) -> str:
    """Why a config does not fit into memory, as planned; '' = it does."""
    ram_bytes, vram_bytes = planned_bytes(config, data)
    ram_bytes, left_bytes = ram_bytes * (1 if config.cluster.address else ranks), ram_left(config)
    if ram_bytes > left_bytes:
        return f"it needs about {size_text(ram_bytes)} of RAM, and {size_text(left_bytes)} are left"
    if vram_bytes is not None and vram_bytes > (vram_left_bytes := vram_left()):
        return f"it needs about {size_text(vram_bytes)} of VRAM, and {size_text(vram_left_bytes)} are left"
    return ""
