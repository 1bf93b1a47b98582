"""When a reader or the run dies: the post-mortem is made, logged and kept."""

from __future__ import annotations

import logging
from dataclasses import replace

from vesuvius.engine.memory_acts import MemoryActs
from vesuvius.engine.progress import Progress
from vesuvius.engine.run_dir import RunDir
from vesuvius.errors import GpuMemoryError
from vesuvius.observe.death.death import Death, append_death, death_lines
from vesuvius.observe.death.post_mortem import ReaderEnd, ended_run, examine_reader, record_run_death
from vesuvius.observe.monitor import Monitor
from vesuvius.observe.session import SessionRecord
from vesuvius.stream.events import StreamEvent

log = logging.getLogger(__name__)


class Deaths:
    """Looks into the deaths of one session.

    Args:
        session: that is at work.
        progress, monitor, acts: of it.
    """

    def __init__(
        self, directory: RunDir, session: SessionRecord, progress: Progress, monitor: Monitor, acts: MemoryActs
    ) -> None:
        self._directory = directory
        self._session = session
        self._progress = progress
        self._monitor = monitor
        self._acts = acts

    def of_reader(self, event: StreamEvent) -> None:
        """Of a reader that another has taken the place of."""
        end = ReaderEnd.of(event.fields)
        session = replace(self._session, workers=self._acts.workers)  # the guard may have dropped some
        self._keep(examine_reader(end, self._progress.step, session, self._monitor.moments()))

    def of_gpu(self, error: GpuMemoryError) -> None:
        """Of this run, which the GPU had no memory for."""
        reason = str(error).splitlines()[0]
        self._keep(ended_run("gpu", self._progress.step, reason, self._monitor.moments(), error.remedy))

    def of_guard(self) -> None:
        """Of this run, which the memory guard has ended; its checkpoint is saved."""
        reason = self._acts.reason or ""
        self._keep(
            ended_run(
                "guard",
                self._progress.step,
                reason,
                self._monitor.moments(),
                self._acts.remedy(self._monitor.risk.killers[0].name),
            )
        )

    def _keep(self, death: Death) -> None:
        try:
            append_death(self._directory.post_mortem, death)
        except OSError as error:
            log.warning("a post-mortem must be writable; got %s; it stands in the log only", error)
        _say(death)


def log_killed_session(directory: RunDir) -> None:
    """Say, and keep, how the session before this one ended, where it was killed.  Needs the run's lock."""
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
