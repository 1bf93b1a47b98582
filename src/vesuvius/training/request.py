"""The request to `vesuvius train`, and the shared state of a session.

Imports no torch: Ray starts while torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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


MakeTuner = Callable[..., Callable[[], None]]
"""Makes from the loop and its reporter a function to call between two steps."""


@dataclass(frozen=True)
class Request:
    """Arguments of `vesuvius train`."""

    config: Config  # the experiment
    source: Path  # YAML file, copied into the run directory
    resume: bool  # continue from the newest intact checkpoint, if any
    allow_drift: bool = False  # resume although data or model changed
    make_tuner: MakeTuner | None = None
    facts: Path | None = None  # file in which runs on the same data share measured facts
    directory: Path | None = None  # run directory; None = that of the config's name


@dataclass(frozen=True)
class RunContext:
    """One session of a run."""

    config: Config
    checked: Preflight  # data and run directory
    device: torch.device  # of the network
    session: SessionRecord  # contents of `session.json`, with the memory limits
    metrics: JsonLines  # `metrics.jsonl`
    progress: Progress  # updated by the loop and by validations
    stop: StopRequest
    watchdog: Watchdog  # knows what the loop waits for
    share: RankShare  # this rank's share of each step
    ranks: Ranks  # trainer processes of the run

    @property
    def directory(self) -> RunDir:
        return self.checked.directory
