"""Whether the disk of a run will be full, from its free bytes, the checkpoints on it and those to come.

True or silent: a forecast is given only for growth that has lasted an hour and goes on.  Quotas count as far as the
file system includes them in the free bytes that it reports (`statvfs`).
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vesuvius.monitor.alerts.notices import Notice
from vesuvius.monitor.memory.trend import MIN_POINTS, theil_sen
from vesuvius.runlog.files.disk_use import directory_bytes
from vesuvius.runlog.units import format_duration, size_text

WARN_BELOW_S = 24 * 3600.0
_CALM_ABOVE_S = 1.5 * WARN_BELOW_S
_LOOK_EVERY_S = 60.0
_POINT_EVERY_S = 300.0
_POINTS_MOST = 72  # six hours


@dataclass(frozen=True)
class Retention:
    """Checkpoints come every `save_every` steps; `keep_last` stay, and those at multiples of `keep_every` for good."""

    save_every: int
    keep_last: int
    keep_every: int | None = None
    stop_step: int | None = None  # where the run ends; None = not known

    @property
    def kept_every(self) -> int | None:
        """Steps between two that stay for good: only what is saved can be kept."""
        return None if self.keep_every is None else math.lcm(self.keep_every, self.save_every)

    def to_come(self, steps: Sequence[int]) -> int:
        """How many more there will be than there are now, at these ascending steps, besides those for good: as long as
        fewer than `keep_last` are there, and one more while it is written."""
        every, newest = self.kept_every, steps[-1]
        if every is None:
            return max(self.keep_last + 1 - len(steps), 0)
        rolling = sum(step % every > 0 for step in steps)
        for_good = newest // every - max(newest - self.keep_last * self.save_every, 0) // every  # of the newest
        return max(self.keep_last + 1 - rolling - for_good, 0)


@dataclass(frozen=True)
class DiskUse:
    """What was seen at one moment."""

    time_s: float  # of a monotonic clock
    step: int  # optimizer steps done
    free_bytes: int  # that a process of this user may still write
    run_bytes: int  # of the run directory, checkpoints included
    checkpoints: Mapping[int, int]  # bytes of each whole checkpoint by its step, oldest first
    checkpoints_bytes: int  # of all that lies beside them too, such as one that is being written


@dataclass(frozen=True)
class Forecast:
    """When the disk will be full."""

    seconds: float  # until then
    latest_s: float  # by the lower end of the interval of what it loses
    bytes_per_s: float  # what it loses, beside checkpoints that are deleted again


def forecast(seen: Sequence[DiskUse], retention: Retention) -> Forecast | None:
    """Extrapolate; None where nothing is known to grow, or the run ends first.  Pure.

    The free bytes and those of the checkpoints together do not follow the sawtooth of saving and deleting.  What they
    lose is due to logs, previews and others on the disk, and must hold in both halves of what was seen.  Checkpoints
    that are kept for good come at a known pace.
    """
    if len(seen) < 2 * MIN_POINTS or not seen[-1].checkpoints:  # whose size is not known yet
        return None
    points = [(use.time_s, -float(use.free_bytes + use.checkpoints_bytes)) for use in seen]
    half = len(points) // 2
    trends = [theil_sen(part) for part in (points, points[:half], points[half:])]
    others = trends[0] if all(trend is not None and trend.low > 0 for trend in trends) else None
    last = seen[-1]
    steps = list(last.checkpoints)
    newest = last.checkpoints[steps[-1]]
    steps_s = (last.step - seen[0].step) / (last.time_s - seen[0].time_s)
    kept = newest * steps_s / retention.kept_every if retention.kept_every else 0.0
    rate, least = kept + (others.bytes_per_s if others else 0.0), kept + (others.low if others else 0.0)
    if least <= 0:
        return None
    pace_s = retention.save_every / steps_s if steps_s > 0 else math.inf
    to_come = retention.to_come(steps)

    def full_after_s(bytes_per_s: float) -> float:
        for saves in range(to_come):
            after_s = max((last.free_bytes - saves * newest) / bytes_per_s, saves * pace_s)
            if after_s < (saves + 1) * pace_s:
                return after_s
        return max((last.free_bytes - to_come * newest) / bytes_per_s, to_come * pace_s if to_come else 0.0)

    seconds = full_after_s(rate)
    if retention.stop_step is not None and seconds * steps_s > retention.stop_step - last.step:
        return None
    return Forecast(seconds, full_after_s(least), rate)


class DiskWatch:
    """Looks at the disk of a run once a minute, and says once when it will be full.

    Args:
        run: the run directory.
        checkpoints: the directory in it.
        retention: of checkpoints.
        free_bytes: of the disk that holds a path.
        now: a monotonic clock, seconds.

    Attributes:
        use: what was last seen; None before the first look, and where the disk does not tell.
    """

    def __init__(
        self,
        run: Path,
        checkpoints: Path,
        retention: Retention,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._checkpoints, self._retention = run, checkpoints, retention
        self._free_bytes, self._now = free_bytes, now
        self._points: deque[DiskUse] = deque(maxlen=_POINTS_MOST)
        self._said_full = self._said_no_room = False
        self.use: DiskUse | None = None

    def look(self, step: int) -> list[Notice]:
        """Look if it is time to; returns what is to be said.  Walks the run directory."""
        now = self._now()
        if self.use is not None and now - self.use.time_s < _LOOK_EVERY_S:
            return []
        try:
            self.use = self._look(now, step)
        except OSError:  # it is gone, or may not be asked: whoever writes there says so
            self.use = None
            return []
        notices = self._no_room(self.use)
        if not self._points or now - self._points[-1].time_s >= _POINT_EVERY_S:
            self._points.append(self.use)
            notices += self._full_soon(self.use)
        return notices

    def _look(self, now: float, step: int) -> DiskUse:
        paths = [path for path in sorted(self._checkpoints.glob("step_*")) if path.name[len("step_") :].isdigit()]
        checkpoints = {int(path.name[len("step_") :]): directory_bytes(path) for path in paths}
        # In this order: a save in between counts as growth or as nothing, and the next point corrects it.
        beside, run = directory_bytes(self._checkpoints), directory_bytes(self._run)
        return DiskUse(now, step, self._free_bytes(self._run), run, checkpoints, beside)

    def _no_room(self, use: DiskUse) -> list[Notice]:
        """Once, where the next checkpoint will not fit: it is written before an older one is deleted."""
        needed = use.checkpoints[max(use.checkpoints)] if use.checkpoints else 0
        before, self._said_no_room = self._said_no_room, use.free_bytes < needed
        if before or not self._said_no_room:
            return []
        text = (
            f"the next checkpoint will not fit on the disk: it takes {size_text(needed)}, and "
            f"{size_text(use.free_bytes)} are free for {self._run}; free some space before the next save"
        )
        return [Notice(logging.WARNING, text, "disk_no_room", {"needed": needed, "free_bytes": use.free_bytes})]

    def _full_soon(self, use: DiskUse) -> list[Notice]:
        found = forecast(self._points, self._retention)
        if found is None or found.seconds > _CALM_ABOVE_S:
            self._said_full = False
            return []
        if self._said_full or found.latest_s > WARN_BELOW_S:
            return []
        self._said_full = True
        text = (
            f"the disk of {self._run} will be full in {format_duration(found.seconds)}: it has "
            f"{size_text(use.free_bytes)} free and loses {size_text(3600 * found.bytes_per_s)} an hour; the run takes "
            f"{size_text(use.run_bytes)}; free some space, raise training.keep_every or lower training.keep_last"
        )
        fields = {"hours": found.seconds / 3600, "bytes_per_s": found.bytes_per_s, "free_bytes": use.free_bytes}
        return [Notice(logging.WARNING, text, "disk_full_soon", fields)]
