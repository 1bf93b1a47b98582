"""What `vesuvius train` was asked for, and what every part of a session works with.

Imports no torch: Ray starts while torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vesuvius.config import Config

if TYPE_CHECKING:
    import torch

    from vesuvius.monitor.session import SessionRecord
    from vesuvius.monitor.watchdog import Watchdog
    from vesuvius.runlog.records import JsonLines
    from vesuvius.runlog.run_dir import RunDir
    from vesuvius.training.checkpoint.progress import Progress
    from vesuvius.training.forecast.preflight import Preflight
    from vesuvius.training.ranks.ranks import Ranks
    from vesuvius.training.ranks.share import RankShare
    from vesuvius.training.stop import StopRequest


@dataclass(frozen=True)
class Request:
    """What `vesuvius train` was asked for."""

    config: Config  # the experiment
    source: Path  # the YAML file it came from, kept with the run
    resume: bool  # continue from the newest whole checkpoint of `runs/<name>`, if there is one
    allow_drift: bool = False  # continue although the data or what the weights mean have changed
    # makes a `loop.Tuner` of the loop and its reporter; None = `training.autotune`
    make_tuner: Callable[..., Any] | None = None
    facts: Path | None = None  # a file in which runs on the same data share what they measure of these beforehand


@dataclass(frozen=True)
class RunContext:
    """One session of a run."""

    request: Request
    checked: Preflight  # the data, and where everything is written
    device: torch.device  # where the network is
    session: SessionRecord  # what `session.json` says of it, with the memory limits
    metrics: JsonLines  # writes `metrics.jsonl`
    progress: Progress  # how far the run is; changed by the loop and by validations
    stop: StopRequest  # the request to stop
    watchdog: Watchdog  # is told what the loop waits for
    share: RankShare  # what this rank computes of each step
    ranks: Ranks  # the trainer processes of the run

    @property
    def config(self) -> Config:
        """The experiment."""
        return self.request.config

    @property
    def directory(self) -> RunDir:
        """Where everything is written."""
        return self.checked.directory
