"""The disk of a run: its free bytes, the size of the run, and whether the next checkpoint fits."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vesuvius.monitor.alerts.notices import Notice
from vesuvius.runlog.files import directory_bytes
from vesuvius.runlog.units import size_text

_LOOK_EVERY_S = 60.0


@dataclass(frozen=True)
class DiskUse:
    """What was seen at one moment."""

    free_bytes: int  # that a process of this user may still write; quotas count as far as the file system tells
    run_bytes: int  # of the run directory, checkpoints included


class DiskWatch:
    """Looks at the disk of a run once a minute, and says once that the next checkpoint will not fit.

    Args:
        run: the run directory.
        checkpoints: the directory in it.
        now: a monotonic clock, seconds.

    Attributes:
        use: what was last seen; None before the first look, and where the disk does not tell.
    """

    def __init__(self, run: Path, checkpoints: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._run, self._checkpoints, self._now = run, checkpoints, now
        self._looked_s = float("-inf")
        self._said_no_room = False
        self.use: DiskUse | None = None

    def look(self) -> list[Notice]:
        """Look if it is time to; returns what is to be said.  Walks the run directory."""
        if self._now() - self._looked_s < _LOOK_EVERY_S:
            return []
        self._looked_s = self._now()
        try:
            newest = max(self._checkpoints.glob("step_*[0-9]"), default=None)
            needed = directory_bytes(newest) if newest else 0
            self.use = DiskUse(shutil.disk_usage(self._run).free, directory_bytes(self._run))
        except OSError:  # it is gone, or may not be asked: whoever writes there says so
            self.use = None
            return []
        before, self._said_no_room = self._said_no_room, self.use.free_bytes < needed
        if before or not self._said_no_room:
            return []
        # It is written before an older one is deleted.
        text = (
            f"the next checkpoint will not fit on the disk: it takes {size_text(needed)}, and "
            f"{size_text(self.use.free_bytes)} are free for {self._run}; free some space before the next save"
        )
        fields = {"needed": needed, "free_bytes": self.use.free_bytes}
        return [Notice(logging.WARNING, text, "disk_no_room", fields)]
