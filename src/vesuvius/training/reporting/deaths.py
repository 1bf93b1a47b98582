"""Post-mortems of readers and of the run: made, logged and kept."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Literal

from vesuvius.monitor.monitor import Monitor
from vesuvius.monitor.postmortem.death import Death, append_death, death_lines
from vesuvius.monitor.postmortem.post_mortem import ended_run, examine_reader, record_run_death
from vesuvius.runlog.run_dir import RunDir
from vesuvius.stream.events import StreamEvent
from vesuvius.training.request import RunContext

log = logging.getLogger(__name__)


def reader_died(run: RunContext, monitor: Monitor, workers: int, event: StreamEvent) -> None:
    """Examine a reader that was replaced, one of so many `workers`."""
    session = replace(run.session, workers=workers)  # the guard may have dropped some
    _keep(run, examine_reader(event.fields, run.progress.step, session, monitor.moments()))


def run_died(run: RunContext, monitor: Monitor, killer: Literal["gpu", "guard"], reason: str, remedy: str) -> None:
    """Keep how this run ended, which ran out of GPU memory, or which the memory guard ended."""
    _keep(run, ended_run(killer, run.progress.step, reason, monitor.moments(), remedy))


def log_killed_session(directory: RunDir) -> None:
    """Log and record how the previous session ended if it was killed.  Needs the run's lock."""
    try:
        death = record_run_death(directory.path)
    except OSError as error:
        log.warning("how the last session ended cannot be written: %s", error)
        return
    if death is not None:
        _say(death)


def _keep(run: RunContext, death: Death) -> None:
    try:
        append_death(run.directory.post_mortem, death)
    except OSError as error:
        log.warning("a post-mortem cannot be written and is in the log only: %s", error)
    _say(death)


def _say(death: Death) -> None:
    for line in death_lines(death):
        log.error("%s", line)
