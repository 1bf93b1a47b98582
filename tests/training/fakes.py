"""Fakes of a stream and the monitor, and a minimal training session."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vesuvius.config import Config
from vesuvius.diffusion.randomness import stratified_timesteps
from vesuvius.diffusion.schedule import Schedule
from vesuvius.loader.device import DeviceFeed
from vesuvius.monitor.clock import StepClock
from vesuvius.monitor.memory.limits import MemoryLimit, MemoryPolicy
from vesuvius.monitor.probes.system_sample import Rates
from vesuvius.monitor.samples import MemorySample
from vesuvius.monitor.session import SessionRecord
from vesuvius.monitor.watchdog import Watchdog
from vesuvius.runlog.records import JsonLines, read_records
from vesuvius.runlog.run_dir import RunDir
from vesuvius.stream.feeder import FeederStats
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.reading.reader_stats import ReaderStats, ReaderTotals
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.training.checkpoint.progress import Progress
from vesuvius.training.ranks.ranks import SINGLE
from vesuvius.training.ranks.share import rank_share
from vesuvius.training.reporting.report import Diagnosis, LaunchedStep, StepReporter, diagnose
from vesuvius.training.request import RunContext
from vesuvius.training.step.feed import Conditioner, TrainingFeed
from vesuvius.training.step.setup import build_network
from vesuvius.training.step.step import TrainStep
from vesuvius.training.stop import StopRequest
from vesuvius.training.validation.validation import measure_spectrum

CPU = torch.device("cpu")


def run_context(
    config: Config, directory: Path, progress: Progress | None = None, stop: StopRequest | None = None, on: str = "cpu"
) -> RunContext:
    """A session in a directory, without memory limits of its own; `on` is the device."""
    progress, metrics = progress or Progress(), JsonLines(directory / "metrics.jsonl")
    checked: Any = SimpleNamespace(directory=RunDir(directory))
    return RunContext(
        config,
        checked,
        torch.device(on),
        SessionRecord(config.name, "", "", os.getpid(), 0.0, 0.0, config.training.workers, MemoryPolicy()),
        metrics,
        progress,
        stop or StopRequest(None),
        Watchdog(0.0, directory / "stacks", metrics.write, lambda: (0, config.stop_step)),
        rank_share(config, 0, 1),
        SINGLE,
    )


@dataclass
class StillStream:
    """A stream without activity."""

    options: StreamOptions
    readers: dict[int, ReaderStats] = field(default_factory=dict)
    reader_deaths: int = 0
    num_readers_with_work: int = 8
    num_readers_alive: int = 8
    max_blocks_ahead: int = 0
    reader_totals: ReaderTotals = field(default_factory=ReaderTotals)
    feeder_stats: FeederStats = field(default_factory=FeederStats)


@dataclass
class FixedMachine:
    """A machine with constant load."""

    busy: Rates | None = None
    short: bool = False

    def recent_samples(self) -> list[MemorySample]:
        limit = MemoryLimit("the machine", 1, 2, 2)
        return [MemorySample(0.0, 0, used_bytes=1, shared_bytes=0, trainer_bytes=1, limits=(limit,))]

    def rates(self) -> Rates | None:
        return self.busy

    def gpu_busy(self) -> None:
        return None

    def stopped_readers(self) -> int:
        return 0

    def memory_is_short(self) -> bool:
        return self.short


@dataclass
class Session:
    """The steps of a run on a CPU, without checkpoints and validation.

    `again` replaces the diagnosis of a step; `kept` are its batches.
    """

    config: Config
    directory: Path
    clock: StepClock = field(default_factory=StepClock)
    again: Callable[[Any], Diagnosis] | None = None
    kept: list[weakref.ref[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = self.config
        self.data = prepare_data(config.seed, config.data)
        intensities = self.data.intensity_ranges(config.data)
        schedule = Schedule.from_config(config.diffusion, measure_spectrum(self.data, config.data, intensities))
        self.step = TrainStep(config, build_network(config, CPU), schedule, CPU)
        self.step.timed = self.clock.computing
        conditioner = Conditioner(config.data.class_values, intensities.conditions, CPU)
        options = StreamOptions.from_config(config.training, config.cluster)
        self._feed = TrainingFeed(DeviceFeed(CPU, options, self.data.job, intensities.volumes), conditioner)

    def run(self, steps: int) -> list[dict[str, Any]]:
        """Returns the records.  Raises NonFiniteError like a run."""
        config, run = self.config, run_context(self.config, self.directory)
        again = self.again or partial(diagnose, self.step, self._feed)
        with self._feed.open() as stream:
            reporter = StepReporter(run, self.clock, stream, FixedMachine(), again)  # type: ignore[arg-type]
            for number in range(steps):
                batches = []
                timesteps = stratified_timesteps(config.seed, number, config.global_batch, config.diffusion.timesteps)
                for t in np.split(timesteps, config.training.accumulate_steps):
                    batch = self._feed.next(self.clock)
                    self.step.accumulate(batch.x_0, batch.indices, t, batch.condition)
                    batches.append((batch.stored, t))
                    self.kept.append(weakref.ref(batch.stored))
                result = self.step.apply(1e-3)
                self.clock.step_done()
                reporter.launched.append(LaunchedStep(number + 1, number * config.global_batch, 1e-3, result, batches))
                del batches, batch
                reporter.report()
            reporter.finish()
        return self.records()

    def records(self, kind: str | None = None) -> list[dict[str, Any]]:
        return [record for record in read_records(self.directory / "metrics.jsonl") if kind in (None, record["kind"])]
