"""Risk of running out of memory: which limit is reached first, and when at the present growth.  Pure.

A leak must be distinguished from healthy behaviour: steps (validation takes 1 GB and keeps it), the sawtooth of
buffers, allocators that grow ever more slowly.  Therefore the peaks of 5 s windows count, and a trend must hold in
each third of its span.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from statistics import median, median_low, pstdev

from vesuvius.monitor.memory.limits import MemoryLimit, MemoryPolicy, limits_of, shrinking_helps, used_share
from vesuvius.monitor.probes.system_sample import SystemSample
from vesuvius.runlog.units import format_duration, format_gib, format_rate, format_size

_WINDOW_S = 5.0
_WARMUP_S = 30.0
_SPANS = (60, 24, 12, 10, 8, 6)  # windows; fewer than 6 give no useful interval
# Least rise of growth, in multiples of fluctuations (`_stands_out`).  Chosen by simulation: with these, memory that
# fluctuates about a constant mean leads to an alarm in less than 1 % of hours.
_SHORT, _KNOWN = 12, 12  # windows of a short span; windows before it from which the usual fluctuation is known
_SHORT_RISE, _FIRST_RISE, _LONG_RISE, _CHANGES = 15.0, 40.0, 360.0, 10.0
_CLOCK_JUMP_S = 60.0  # a longer gap between samples: the machine slept, or its clock was set


@dataclass(frozen=True)
class Trend:
    """Theil-Sen slope in bytes per second, with Sen's interval (1968), over `seen_s` seconds.

    For independent noise the interval covers 95 %; noise of memory is not, so it covers less.
    """

    bytes_per_s: float
    low: float
    high: float
    seen_s: float = 0.0


class PeakSeries:
    """Windowed peaks of a series, in bytes, and its trend over the longest of several spans that end now.

    A shorter span replaces it if it is significantly steeper, or falls: the flat time before a leak dilutes the slope.
    Samples in the first `warmup_s` are ignored: processes start, and the first step allocates.

    Attributes:
        trend: growth (the interval is above 0, and it stands out) or shrinking; None = no trend, or too early.
    """

    def __init__(self, warmup_s: float = _WARMUP_S) -> None:
        self.trend: Trend | None = None
        self._peaks: deque[tuple[float, float]] = deque(maxlen=_SPANS[0])  # begin, bytes; the last window is open
        self._begin_s: float | None = None
        self._last_s, self._warmup_s = 0.0, warmup_s

    def add(self, time_s: float, value: float) -> None:
        """Add a sample; if the clock ran backwards or jumped, forget the past."""
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
        # The lower median, not their mean: half of a step would look like a rise.
        thirds = values[: span // 3], values[span // 3 : -(span // 3)], values[-(span // 3) :]
        first, middle, last = map(median_low, thirds)
        # Theil-Sen alone mistakes a single step for a trend.  A step rises within one half, as does growth that has
        # just begun; growth that is about to end has two thirds of its rise in the first half.
        if first == last or not 0.2 <= (middle - first) / (last - first) <= 2 / 3:
            continue
        recent = slope_of(points[-span:])
        was_there = before and max(before) >= min(values) + 0.75 * (values[-1] - min(values))  # it only fills again
        if recent.low <= 0 <= recent.high:
            continue
        if recent.low > 0 and (was_there or not _stands_out(recent, points[-span:], before)):
            continue
        if found is None or recent.low > found.bytes_per_s or recent.high < 0:
            found = recent
    return found


def _stands_out(trend: Trend, points: list[tuple[float, float]], before: list[float]) -> bool:
    """Whether growth is more than the usual fluctuation.

    Memory that wanders about a constant mean, with a correlation time of 10 to 20 s, rises for a minute now and then,
    and as steadily as a leak.  What sets a leak apart is its size: compared with the scatter about its line, and with
    the changes within 30 s before it began.
    """
    rise = trend.bytes_per_s * trend.seen_s
    scatter = pstdev([value - trend.bytes_per_s * time_s for time_s, value in points])
    known = len(before) >= _KNOWN
    if len(points) > _SHORT:
        return rise * len(points) >= _LONG_RISE * scatter
    if rise < (_SHORT_RISE if known else _FIRST_RISE) * scatter:
        return False
    changes = [later - value for value, later in zip(before, before[6:], strict=False)]
    usual = median(changes) if known else 0.0
    return not known or rise >= _CHANGES * median([abs(change - usual) for change in changes])


def slope_of(points: list[tuple[float, float]]) -> Trend:
    """Return the trend of (seconds, bytes) points in order of time; sorts n (n - 1) / 2 slopes."""
    n = len(points)
    slopes = sorted([(y2 - y1) / (t2 - t1) for i, (t2, y2) in enumerate(points) for t1, y1 in points[:i]])
    # Sen (1968): the variance of Kendall's statistic gives the ranks of the interval's ends.
    rank = max(int((len(slopes) - 1.96 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)) / 2) - 1, 0)
    return Trend(median(slopes), slopes[rank], slopes[-1 - rank], points[-1][0] - points[0][0])


_EASED_BY, _EASED_FOR_S = 0.02, 10.0  # the level falls this far below its threshold, after so many seconds
_WARN_WITHIN_S = 300.0
_CRITICAL_WITHIN_S = 60.0
_FIRST_WITHIN_S = 600.0
_CARRIED_ON = 1.25  # growth seen for t seconds is extrapolated for so many times t,
_CARRIED_ON_S = 65.0  # but at least for this long: a leak of 100 s must be reported 60 s before its end
_RESTART_WARMUP_S = 15.0  # readers start in 3 to 5 s and fill their buffers in about ten more
_LEAST_GROWTH_BYTES = 16e6  # smaller growth is not reported: noise passes the test now and then


class Level(IntEnum):
    LOW = 0
    WARN = 1
    CRITICAL = 2


@dataclass(frozen=True)
class Exhaustion:
    """Seconds until a limit is reached: at the fastest, median and slowest growth of Sen's interval."""

    earliest_s: float
    likely_s: float
    latest_s: float
    # Whether growth was seen for long enough to be extrapolated that far, and the interval is not wide.  Growth of 30 s
    # says something about the next minute, nothing about the next hour: allocators fill up and stop.
    firm: bool = True

    @property
    def within_s(self) -> float:
        """Likely time left if it is firm, else infinity."""
        return self.likely_s if self.firm else math.inf


@dataclass(frozen=True)
class Risk:
    level: Level
    reason: str  # for people
    # first those reached within ten minutes at the present growth, by time; then the others, by bytes left
    limits: tuple[MemoryLimit, ...]
    trend: Trend | None  # of the use of the first limit; None = no trend, or too early
    exhaustion: Exhaustion | None  # None without growth
    growing: Mapping[int, Trend]  # by pid, processes whose private memory grows significantly
    own_grows: bool = True  # whether the run accounts for at least half of the growth

    @property
    def ours(self) -> tuple[MemoryLimit, ...]:
        """The limits as far as the run can influence them: unless it grows, as if other programs had not grown."""
        if self.own_grows:
            return self.limits
        return tuple(replace(each, used_bytes=each.own_bytes + each.least_others_bytes) for each in self.limits)

    def is_of_others(self, policy: MemoryPolicy) -> bool:
        """Whether other programs cause the risk, so that a smaller run would not reduce it."""
        tight = (limit for limit in self.ours if used_share(limit, policy) >= policy.warn_at)
        grows = self.own_grows and self.exhaustion is not None and self.exhaustion.firm
        return self.level > Level.LOW and not grows and not any(shrinking_helps(limit, policy) for limit in tight)


class RiskWatch:
    """Judges the risk of successive samples.

    The level follows from the largest share of a limit (`used_share`) or from the time that firm growth leaves,
    whichever is worse.  It falls only after memory stayed slightly below the threshold for ten seconds, so that a
    sawtooth does not make it flap.
    """

    def __init__(self, policy: MemoryPolicy) -> None:
        self._policy = policy
        self._least_others: dict[str, int] = {}  # by limit, since the beginning
        self._level = Level.LOW
        self._held_at_s = 0.0
        self._restarted = False
        self._begin(_WARMUP_S)

    def _begin(self, warmup_s: float) -> None:
        self._warmup_s = warmup_s
        self._of_limit: dict[str, PeakSeries] = {}
        self._own = PeakSeries(warmup_s)
        self._of_process: dict[tuple[int, float], PeakSeries] = {}

    def restart(self) -> None:
        """Forget the past from the next sample on, as readers were restarted.  Thread-safe."""
        self._restarted = True

    def add(self, sample: SystemSample) -> Risk:
        if self._restarted:
            self._restarted = False
            self._begin(_RESTART_WARMUP_S)
        limits = [self._with_least_others(limit) for limit in limits_of(sample, self._policy)]
        # Volumes kept in memory grow to a planned size: not a trend.
        self._own.add(sample.time, max(limit.own_bytes for limit in limits) - sample.kept_bytes)
        for limit in limits:
            series = self._of_limit.setdefault(limit.name, PeakSeries(self._warmup_s))
            series.add(sample.time, limit.used_bytes - sample.kept_bytes)
        growing = self._growing(sample)
        trends = {name: series.trend for name, series in self._of_limit.items()}
        left = {limit.name: _exhaustion(limit, trends[limit.name]) for limit in limits}
        soon = {name: each.likely_s for name, each in left.items() if each and each.within_s <= _FIRST_WITHIN_S}
        limits.sort(key=lambda limit: soon.get(limit.name, math.inf))  # stable: the others stay sorted by bytes left
        trend, exhaustion = trends[limits[0].name], left[limits[0].name]
        share = max(used_share(limit, self._policy) for limit in limits)
        level = self._next_level(sample.time, share, exhaustion)
        own = self._own.trend
        own_grows = own is not None and _grows(own) and (trend is None or 2 * own.bytes_per_s >= trend.bytes_per_s)
        risk = Risk(level, "", tuple(limits), trend, exhaustion, growing, own_grows)
        return replace(risk, reason=_reason(risk, self._policy))

    def _with_least_others(self, limit: MemoryLimit) -> MemoryLimit:
        others = limit.used_bytes - limit.own_bytes
        least = self._least_others[limit.name] = min(others, self._least_others.get(limit.name, others))
        return replace(limit, least_others_bytes=least)

    def _growing(self, sample: SystemSample) -> dict[int, Trend]:
        """Return the trends of growing processes (memory and swap), and forget those that have ended."""
        before, self._of_process = self._of_process, {}
        for process in sample.processes:
            identity = process.pid, process.started_s
            series = self._of_process[identity] = before.get(identity) or PeakSeries(self._warmup_s)
            series.add(sample.time, process.anon_bytes + process.swap_bytes)
        trends = {pid: series.trend for (pid, _), series in self._of_process.items()}
        return {pid: trend for pid, trend in trends.items() if trend and _grows(trend)}

    def _next_level(self, time_s: float, share: float, exhaustion: Exhaustion | None) -> Level:
        self._level = max(self._level, self._level_at(share, exhaustion))
        eased = self._level_at(share + _EASED_BY, exhaustion)
        if eased >= self._level or time_s < self._held_at_s:  # or the clock was set back
            self._held_at_s = time_s
        elif time_s - self._held_at_s >= _EASED_FOR_S:
            self._level = eased
        return self._level

    def _level_at(self, share: float, exhaustion: Exhaustion | None) -> Level:
        left_s = exhaustion.within_s if exhaustion else math.inf
        if share >= self._policy.exit_at or left_s <= _CRITICAL_WITHIN_S:
            return Level.CRITICAL
        return Level.WARN if share >= self._policy.warn_at or left_s <= _WARN_WITHIN_S else Level.LOW


def _grows(trend: Trend) -> bool:
    return trend.low * trend.seen_s >= _LEAST_GROWTH_BYTES


def _exhaustion(limit: MemoryLimit, trend: Trend | None) -> Exhaustion | None:
    if trend is None or not _grows(trend):
        return None
    left = max(limit.left_bytes, 0)
    earliest, likely, latest = (left / rate for rate in (trend.high, trend.bytes_per_s, trend.low))
    firm = likely <= max(_CARRIED_ON * trend.seen_s, _CARRIED_ON_S) and latest <= 2 * likely
    return Exhaustion(earliest, likely, latest, firm)


def _reason(risk: Risk, policy: MemoryPolicy) -> str:
    """Return one line.  At LOW it names no cgroup or process, whose name might match a grep for kills."""
    first, growth, left = risk.limits[0], "no significant growth", risk.exhaustion
    if risk.trend is not None and left is not None:
        earliest, likely, latest = map(format_duration, (left.earliest_s, left.likely_s, left.latest_s))
        growth = f"growing {format_rate(risk.trend.bytes_per_s)}: full in {likely} ({earliest} to {latest})"
        if risk.growing:
            pid, fastest = max(risk.growing.items(), key=lambda each: each[1].bytes_per_s)
            growth += f", fastest process {pid} ({format_rate(fastest.bytes_per_s)})"
    if risk.level is Level.LOW:
        return f"{_in_use(first)}, {growth}"
    fullest = max(risk.limits, key=lambda each: used_share(each, policy))
    text = f"close to running out of memory: {first.name}: {_in_use(first)}; "
    text += f"kills at {format_size(first.limit_bytes)}, {growth}"
    if fullest.name != first.name and used_share(fullest, policy) >= policy.warn_at:
        text += f"; {fullest.name}: {_in_use(fullest)}; kills at {format_size(fullest.limit_bytes)}"
    return text


def _in_use(limit: MemoryLimit) -> str:
    return f"{format_gib(limit.used_bytes)} of {format_gib(limit.total_bytes)} GiB in use ({100 * limit.share:.0f} %)"
