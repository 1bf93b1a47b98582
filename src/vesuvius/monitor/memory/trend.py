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
    count = len(slopes)
    spread = _Z_95 * sqrt(_kendall_variance([y for _, y in points]))
    rank = max(int((count - spread) / 2) - 1, 0)
    median = (slopes[(count - 1) // 2] + slopes[count // 2]) / 2
    return Trend(median, slopes[rank], slopes[count - 1 - rank], points[-1][0] - points[0][0])


class PeakSeries:
    """The peaks of short windows of a series, and its trend.

    The trend is worked out whenever a window closes, over several spans that end now.  A long span alone would see a
    leak late, because the flat time before it thins the slope out; a short one alone would say little of a slow leak.
    The longest span with a trend speaks, unless a shorter one is surely steeper, or falls.  A rise to a height that was
    there before the span is none.

    Args:
        window_s: length of a window.
        warmup_s: so long after the first sample nothing is kept: processes start, and the first step allocates.
        spans: windows in each span, shortest first.
    """

    def __init__(
        self, window_s: float = 5.0, warmup_s: float = 30.0, spans: tuple[int, ...] = (6, 8, 10, 12, 24, 60)
    ) -> None:
        self._window_s = window_s
        self._warmup_s = warmup_s
        self._spans = spans
        self._peaks: deque[tuple[float, float]] = deque(maxlen=spans[-1])
        self._begin_s: float | None = None
        self._last_s = 0.0
        self._window = 0
        self._peak: float | None = None
        self._trend: Trend | None = None

    @property
    def trend(self) -> Trend | None:
        """Growth beyond doubt (the interval is above 0), or shrinking beyond doubt; None = no trend, or too early."""
        return self._trend

    @property
    def peaks(self) -> tuple[tuple[float, float], ...]:
        """(Seconds since the warm-up, bytes) of each closed window, oldest first."""
        return tuple(self._peaks)

    def add(self, time_s: float, value: float) -> None:
        """Take a sample in.

        Args:
            time_s: of the sample; where the clock ran backwards, or stood still for long, the past is forgotten.
            value: bytes.
        """
        if self._begin_s is None:
            self._begin_s = time_s + self._warmup_s
        elif not 0 <= time_s - self._last_s <= _CLOCK_JUMP_S:
            self._forget(time_s)
        self._last_s = time_s
        if time_s < self._begin_s:
            return
        window = int((time_s - self._begin_s) / self._window_s)
        if window != self._window:
            self._close(window)
        self._peak = value if self._peak is None else max(self._peak, value)

    def _forget(self, time_s: float) -> None:
        self._peaks.clear()
        self._begin_s, self._window, self._peak, self._trend = time_s, 0, None, None

    def _close(self, next_window: int) -> None:
        if self._peak is not None:
            self._peaks.append((self._window * self._window_s, self._peak))
            self._trend = self._find_trend()
        self._window, self._peak = next_window, None

    def _find_trend(self) -> Trend | None:
        points = list(self._peaks)
        found: Trend | None = None
        for span in reversed(self._spans):
            if len(points) < span:
                continue
            recent = _steady_trend(points[-span:])
            if recent is None or (recent.low > 0 and _was_there_before(points, span)):
                continue
            if found is None or recent.low > found.bytes_per_s or recent.high < 0:
                found = recent
        return found


def _steady_trend(points: Sequence[tuple[float, float]]) -> Trend | None:
    """The trend where it is one of the whole time; the cheap question first, so that a calm run costs no slopes."""
    if not _is_steady([value for _, value in points]):
        return None
    trend = theil_sen(points)
    return trend if trend and (trend.low > 0 or trend.high < 0) else None


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
    first, middle, last = (_low_median(part) for part in (values[:third], values[third:-third], values[-third:]))
    whole = last - first
    return whole != 0 and 0.2 <= (middle - first) / whole <= 2 / 3


def _low_median(values: Sequence[float]) -> float:
    """The lower of two medians, never between them: half of a step would look like a rise."""
    return sorted(values)[(len(values) - 1) // 2]


def _kendall_variance(values: Sequence[float]) -> float:
    """Variance of Kendall's statistic without a trend, reduced for equal values."""
    equal = [count for count in Counter(values).values() if count > 1]
    return (_variance_term(len(values)) - sum(_variance_term(count) for count in equal)) / 18


def _variance_term(n: int) -> int:
    return n * (n - 1) * (2 * n + 5)
