"""Post-mortems of readers and of the run: made, logged and kept."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Literal

from vesuvius.monitor.monitor import Monitor
from vesuvius.monitor.postmortem.death import Death, append_death, death_lines
from vesuvius.monitor.postmortem.post_mortem import ReaderEnd, ended_run, examine_reader, record_run_death
from vesuvius.runlog.plain import from_plain
from vesuvius.runlog.run_dir import RunDir
from vesuvius.stream.events import StreamEvent
from vesuvius.training.context import RunContext
from vesuvius.training.guard_actions import GuardActions

log = logging.getLogger(__name__)


class Deaths:
    """Examines the deaths of one session."""

    def __init__(self, run: RunContext, monitor: Monitor, guard_actions: GuardActions) -> None:
        self._run = run
        self._monitor = monitor
        self._guard_actions = guard_actions

    def of_reader(self, event: StreamEvent) -> None:
        """Of a reader that was replaced."""
        end = from_plain(ReaderEnd, event.fields)
        session = replace(self._run.session, workers=self._guard_actions.workers)  # the guard may have dropped some
        self._keep(examine_reader(end, self._run.progress.step, session, self._monitor.moments()))

    def of_run(self, killer: Literal["gpu", "guard"], reason: str, remedy: str) -> None:
        """Of this run, which ran out of GPU memory, or which the memory guard ended."""
        self._keep(ended_run(killer, self._run.progress.step, reason, self._monitor.moments(), remedy))

    def _keep(self, death: Death) -> None:
        try:
            append_death(self._run.directory.post_mortem, death)
        except OSError as error:
            log.warning("a post-mortem must be writable; got %s; it is in the log only", error)
        _say(death)


def log_killed_session(directory: RunDir) -> None:
    """Log and record how the previous session ended if it was killed.  Needs the run's lock."""
    try:
        death = record_run_death(directory.path)
    except OSError as error:
        log.warning("a post-mortem must be writable; got %s; how the last session ended is not kept", error)
        return
    if death is not None:
        _say(death)


def _say(death: Death) -> None:
    for line in death_lines(death):
        log.error("%s", line)
