"""Robust slope of a noisy series with its interval.  Pure.

A leak must be told from what healthy runs do as well: steps (validation takes 1 GB and keeps it), the sawtooth of
buffers, allocators that grow ever more slowly.  So what counts are the peaks of windows of 5 s, and a trend must hold
in every third of the time that it claims.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import sqrt

_WINDOW_S = 5.0
_SPANS = (60, 24, 12, 10, 8, 6)  # windows; fewer than 6 have no 95 % interval that is worth the name
_CLOCK_JUMP_S = 60.0  # longer without a sample: the machine slept, or its clock was set


@dataclass(frozen=True)
class Trend:
    """Bytes a second: the Theil-Sen slope and its 95 % interval (Sen 1968), seen for so many seconds."""

    bytes_per_s: float
    low: float
    high: float
    seen_s: float = 0.0


class PeakSeries:
    """The peaks of windows of a series, in bytes, and its trend over the longest of several spans that end now.

    A shorter span speaks where it is surely steeper, or falls: the flat time before a leak thins its slope out.  For
    `warmup_s` after the first sample nothing is kept: processes start, and the first step allocates.

    Attributes:
        trend: growth beyond doubt (the interval is above 0), or shrinking beyond doubt; None = no trend, or too early.
    """

    def __init__(self, warmup_s: float = 30.0) -> None:
        self.trend: Trend | None = None
        self._peaks: deque[tuple[float, float]] = deque(maxlen=_SPANS[0])  # begin, bytes; the last window is open
        self._begin_s: float | None = None
        self._last_s, self._warmup_s = 0.0, warmup_s

    def add(self, time_s: float, value: float) -> None:
        """Take a sample in; where the clock ran backwards, or stood still for long, the past is forgotten."""
        if self._begin_s is None:
            self._begin_s = time_s + self._warmup_s
        elif not 0 <= time_s - self._last_s <= _CLOCK_JUMP_S:
            self._begin_s, self.trend = time_s, None
            self._peaks.clear()
        self._last_s = time_s
        window_s = (time_s - self._begin_s) // _WINDOW_S * _WINDOW_S
        if self._peaks and self._peaks[-1][0] == window_s:
            self._peaks[-1] = window_s, max(value, self._peaks[-1][1])
        elif window_s >= 0:
            self.trend = _find_trend(list(self._peaks))
            self._peaks.append((window_s, value))


def _find_trend(points: list[tuple[float, float]]) -> Trend | None:
    found: Trend | None = None
    for span in (span for span in _SPANS if span <= len(points)):
        values, before = [value for _, value in points[-span:]], [value for _, value in points[:-span]]
        # The lower of two medians, never between them: half of a step would look like a rise.
        thirds = values[: span // 3], values[span // 3 : -(span // 3)], values[-(span // 3) :]
        first, middle, last = (sorted(part)[(len(part) - 1) // 2] for part in thirds)
        # Theil-Sen alone takes a single step for a trend.  But that is all in one half, as, nearly, is growth that
        # began just now; and growth that is about to end has done two thirds in the first.
        if first == last or not 0.2 <= (middle - first) / (last - first) <= 2 / 3:
            continue
        recent = slope_of(points[-span:])
        was_there = before and max(before) >= min(values) + 0.75 * (values[-1] - min(values))  # it only fills again
        if recent.low <= 0 <= recent.high or (recent.low > 0 and was_there):
            continue
        if found is None or recent.low > found.bytes_per_s or recent.high < 0:
            found = recent
    return found


def slope_of(points: list[tuple[float, float]]) -> Trend:
    """Of (seconds, bytes), in rising order of time: n points cost n (n - 1) / 2 slopes and a sort of them."""
    n = len(points)
    slopes = sorted([(y2 - y1) / (t2 - t1) for i, (t2, y2) in enumerate(points) for t1, y1 in points[:i]])
    # Sen (1968): the ranks of the interval's ends follow from the variance of Kendall's statistic.
    rank = max(int((len(slopes) - 1.96 * sqrt(n * (n - 1) * (2 * n + 5) / 18)) / 2) - 1, 0)
    median = (slopes[(len(slopes) - 1) // 2] + slopes[len(slopes) // 2]) / 2
    return Trend(median, slopes[rank], slopes[-1 - rank], points[-1][0] - points[0][0])
