"""What `vesuvius train` was asked for.  Imports no torch: Ray starts while torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vesuvius.config import Config

if TYPE_CHECKING:
    from vesuvius.training.loop import MakeTuner


@dataclass(frozen=True)
class Request:
    """What `vesuvius train` was asked for; the arguments are explained at `training.run.train`."""

    config: Config
    source: Path
    resume: bool
    allow_drift: bool = False
    restart_damaged: bool = False
    make_tuner: MakeTuner | None = None  # None = `make_autotuner`
