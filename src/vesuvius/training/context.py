"""What every part of a training session works with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vesuvius.config import Config
from vesuvius.monitor.alerts.watchdog import Watchdog
from vesuvius.monitor.session import SessionRecord
from vesuvius.runlog.records import JsonLines
from vesuvius.runlog.run_dir import RunDir
from vesuvius.training.checkpoint.progress import Progress
from vesuvius.training.ranks.part import Part
from vesuvius.training.ranks.ranks import SINGLE, Ranks
from vesuvius.training.stop import StopRequest


@dataclass(frozen=True)
class RunContext:
    """One session of a run."""

    config: Config  # the experiment
    directory: RunDir  # where everything is written
    device: torch.device  # where the network is
    session: SessionRecord  # what `session.json` says of it, with the memory limits
    metrics: JsonLines  # writes `metrics.jsonl`
    progress: Progress  # how far the run is; changed by the loop and by validations
    stop: StopRequest  # the request to stop
    watchdog: Watchdog  # is told what the loop waits for
    part: Part  # what this rank computes of each step
    ranks: Ranks = SINGLE  # the trainer processes of the run
    on_step: Callable[[int], None] = lambda step: None  # called with the number of each step once it is logged
