"""What stands for a stream and for the monitor where a test has neither."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from vesuvius.config import Config
from vesuvius.monitor.alerts.watchdog import Watchdog
from vesuvius.monitor.memory.limits import Limits
from vesuvius.monitor.probes.system_sample import Rates
from vesuvius.monitor.session import SessionRecord
from vesuvius.runlog.records import JsonLines
from vesuvius.runlog.run_dir import RunDir
from vesuvius.stream.feeder import FeederFigures
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.reading.reader_figures import ReaderFigures, ReaderTotals
from vesuvius.training.checkpoint.progress import Progress
from vesuvius.training.context import RunContext
from vesuvius.training.ranks.part import part_of
from vesuvius.training.stop import StopRequest


def run_context(
    config: Config, directory: Path, progress: Progress | None = None, stop: StopRequest | None = None, on: str = "cpu"
) -> RunContext:
    """A session in a directory, whose memory has no limit but the machine's; `on` is the device."""
    progress, metrics = progress or Progress(), JsonLines(directory / "metrics.jsonl")
    return RunContext(
        config,
        RunDir(directory),
        torch.device(on),
        SessionRecord(config.name, "", "", os.getpid(), 0.0, 0.0, config.training.workers, Limits()),
        metrics,
        progress,
        stop or StopRequest(None),
        Watchdog(0.0, directory / "stacks", metrics.write, lambda: (0, config.stop_step)),
        part_of(config, 0, 1),
    )


@dataclass
class StillStream:
    """A stream that has done nothing."""

    options: StreamOptions
    readers: dict[int, ReaderFigures] = field(default_factory=dict)
    reader_deaths: int = 0
    readers_with_work: int = 8
    readers_alive: int = 8
    blocks_ahead: int = 0
    reader_totals: ReaderTotals = field(default_factory=ReaderTotals)
    feeder_figures: FeederFigures = field(default_factory=FeederFigures)


@dataclass
class FixedMachine:
    """A machine that is always as busy."""

    busy: Rates | None = None
    short: bool = False

    def ram(self) -> tuple[int, int]:
        return 1, 2

    def rates(self) -> Rates | None:
        return self.busy

    def gpu_busy(self) -> None:
        return None

    def stopped_readers(self) -> int:
        return 0

    def memory_is_short(self) -> bool:
        return self.short
