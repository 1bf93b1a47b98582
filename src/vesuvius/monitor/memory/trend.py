"""Robust slope of a noisy series with its interval.  Pure.

A leak must be told from what healthy runs do as well: steps (validation takes 1 GB and keeps it), the sawtooth of
buffers, allocators that grow ever more slowly.  So what counts are the peaks of short windows, and a trend must hold
in every third of the time that it claims.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

MIN_POINTS = 6  # fewer have no 95 % interval that is worth the name: of 15 slopes it leaves out one at either end
_Z_95 = 1.959964  # quantile of the normal distribution that leaves 2.5 % on either side
_WINDOW_S = 5.0
_SPANS = (6, 8, 10, 12, 24, 60)  # windows in each span, shortest first
_CLOCK_JUMP_S = 60.0  # longer without a sample: the machine slept, or its clock was set


@dataclass(frozen=True)
class Trend:
    """Bytes a second: the Theil-Sen slope and its 95 % interval."""

    bytes_per_s: float  # the slope
    # low, high: the interval
    low: float
    high: float
    seen_s: float = 0.0  # for how long it was seen, from the first to the last point


def theil_sen(points: Sequence[tuple[float, float]]) -> Trend | None:
    """Median of the slopes of all pairs of points, and its interval.  Pure.

    P. K. Sen (1968), "Estimates of the Regression Coefficient Based on Kendall's Tau", Journal of the American
    Statistical Association 63, 1379-1389: the interval's ends are slopes whose ranks follow from the variance of
    Kendall's statistic by the normal approximation; equal values make that variance smaller, and a rank between two
    slopes is taken outwards.

    Args:
        points: (seconds, bytes), in rising order of time.  n points cost n (n - 1) / 2 slopes and a sort of them.

    Returns:
        None for fewer than `MIN_POINTS` points.
    """
    if len(points) < MIN_POINTS:
        return None
    slopes = sorted(
        [(y2 - y1) / (t2 - t1) for i, (t2, y2) in enumerate(points) for t1, y1 in points[:i]]
    )  # a list, not a generator: half the time
    count, equal = len(slopes), Counter(y for _, y in points).values()
    variance = (_variance_term(len(points)) - sum(map(_variance_term, equal))) / 18
    rank = max(int((count - _Z_95 * sqrt(variance)) / 2) - 1, 0)
    median = (slopes[(count - 1) // 2] + slopes[count // 2]) / 2
    return Trend(median, slopes[rank], slopes[count - 1 - rank], points[-1][0] - points[0][0])


def _variance_term(n: int) -> int:
    """Of n values, or of n equal ones, to the variance of Kendall's statistic without a trend; 0 for a single one."""
    return n * (n - 1) * (2 * n + 5)


class PeakSeries:
    """The peaks of windows of 5 s of a series, and its trend.

    The trend is worked out whenever a window closes, over several spans that end now.  A long span alone would see a
    leak late, because the flat time before it thins the slope out; a short one alone would say little of a slow leak.
    The longest span with a trend speaks, unless a shorter one is surely steeper, or falls.  A rise to a height that was
    there before the span is none.

    Args:
        warmup_s: so long after the first sample nothing is kept: processes start, and the first step allocates.

    Attributes:
        trend: growth beyond doubt (the interval is above 0), or shrinking beyond doubt; None = no trend, or too early.
        peaks: (seconds since the warm-up, bytes) of each closed window, oldest first.
    """

    def __init__(self, warmup_s: float = 30.0) -> None:
        self.trend: Trend | None = None
        self.peaks: deque[tuple[float, float]] = deque(maxlen=_SPANS[-1])
        self._warmup_s = warmup_s
        self._begin_s: float | None = None
        self._last_s = 0.0
        self._window = 0
        self._peak: float | None = None

    def add(self, time_s: float, value: float) -> None:
        """Take a sample in.

        Args:
            time_s: of the sample; where the clock ran backwards, or stood still for long, the past is forgotten.
            value: bytes.
        """
        if self._begin_s is None:
            self._begin_s = time_s + self._warmup_s
        elif not 0 <= time_s - self._last_s <= _CLOCK_JUMP_S:
            self.peaks.clear()
            self._begin_s, self._window, self._peak, self.trend = time_s, 0, None, None
        self._last_s = time_s
        if time_s < self._begin_s:
            return
        window = int((time_s - self._begin_s) / _WINDOW_S)
        if window != self._window:
            if self._peak is not None:
                self.peaks.append((self._window * _WINDOW_S, self._peak))
                self.trend = _find_trend(list(self.peaks))
            self._window, self._peak = window, None
        self._peak = value if self._peak is None else max(self._peak, value)


def _find_trend(points: Sequence[tuple[float, float]]) -> Trend | None:
    found: Trend | None = None
    for span in reversed(_SPANS):
        # The cheap question first, so that a calm run costs no slopes.
        if len(points) < span or not _is_steady([value for _, value in points[-span:]]):
            continue
        recent = theil_sen(points[-span:])
        if recent is None or recent.low <= 0 <= recent.high or (recent.low > 0 and _was_there_before(points, span)):
            continue
        if found is None or recent.low > found.bytes_per_s or recent.high < 0:
            found = recent
    return found


def _was_there_before(points: Sequence[tuple[float, float]], span: int) -> bool:
    """Whether three quarters of the rise, at least, led to a height that was survived before the span began."""
    values = [value for _, value in points]
    lowest, last, before = min(values[-span:]), values[-1], max(values[:-span], default=float("-inf"))
    return before >= lowest + 0.75 * (last - lowest)


def _is_steady(values: Sequence[float]) -> bool:
    """Whether the way from the median of the first third to that of the last is gone in both halves.

    Theil-Sen alone takes a single step for a trend: half of all pairs span it.  But a step is all in one half, and so
    is, nearly, growth that began just now; and growth that is about to end has done two thirds in the first.
    """
    third = len(values) // 3
    # The lower of two medians, never between them: half of a step would look like a rise.
    first, middle, last = (
        sorted(part)[(len(part) - 1) // 2] for part in (values[:third], values[third:-third], values[-third:])
    )
    whole = last - first
    return whole != 0 and 0.2 <= (middle - first) / whole <= 2 / 3
