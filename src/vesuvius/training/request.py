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
    """What `vesuvius train` was asked for."""

    config: Config  # the experiment
    source: Path  # the YAML file it came from, kept with the run
    resume: bool  # continue from the newest whole checkpoint of `runs/<name>`, if there is one
    allow_drift: bool = False  # continue although the data or what the weights mean have changed
    make_tuner: MakeTuner | None = None  # makes what acts between two steps; None = `training.autotune`
    facts: Path | None = None  # a file in which runs on the same data share what they measure of these beforehand
