"""How near a kill is: which killer comes first, and in how many seconds at the present growth.  Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from vesuvius.monitor.memory.limits import Limits, MemoryLimit, killers_of, largest_share, shrinking_helps, used_share
from vesuvius.monitor.memory.trend import PeakSeries, Trend
from vesuvius.monitor.probes.system_sample import SystemSample
from vesuvius.runlog.units import format_duration, gib

_EASED_BY, _EASED_FOR_S = 0.02, 10.0  # the level falls only this share below its threshold, and after so long
_WARN_WITHIN_S = 300.0
_CRITICAL_WITHIN_S = 60.0
_FIRST_WITHIN_S = 600.0
_CARRIED_ON = 1.25  # growth that was seen for t seconds is believed to go on for so many times t,
_CARRIED_ON_S = 65.0  # at least for so long: a leak that lasts 100 s must be told 60 s before its end
_RESTART_WARMUP_S = 15.0  # readers start in 3 to 5 s and fill their buffers in about ten more
_WORTH_SAYING_BYTES = 16e6  # what has surely grown by less is not said to grow: noise passes the test now and then


class Level(IntEnum):
    """How great the risk is."""

    LOW = 0
    WARN = 1
    CRITICAL = 2


@dataclass(frozen=True)
class Exhaustion:
    """Seconds until the first killer strikes if memory goes on growing as it does; a 95 % interval.

    Attributes:
        earliest_s, likely_s, latest_s: at the fastest growth that fits what was seen, its median, and the slowest.
        firm: the growth was seen for long enough to be believed to go on that far, and the interval is not wide.
            Growth of 30 s says something of the next minute, nothing of the next hour: allocators fill up and stop.
    """

    earliest_s: float
    likely_s: float
    latest_s: float
    firm: bool = True

    @property
    def within_s(self) -> float:
        """The time that is left, where it is firm; infinite otherwise."""
        return self.likely_s if self.firm else math.inf


@dataclass(frozen=True)
class Risk:
    """What a sample came to."""

    # level, reason: for people; the reason names the figure
    level: Level
    reason: str
    # nearest first: those that strike within ten minutes if growth goes on, by time; then the others, by the bytes that
    # are left
    killers: tuple[MemoryLimit, ...]
    trend: Trend | None  # of the memory that the first killer counts; None = too little was seen, or no trend
    exhaustion: Exhaustion | None  # None without growth
    growing: Mapping[int, Trend]  # by pid, the processes whose private memory grows beyond doubt
    own_grows: bool = True  # whether the growth of the first killer's memory is the run's, at least half of it

    @property
    def ours(self) -> tuple[MemoryLimit, ...]:
        """What the run has a hand in: the killers as they are if it grows, else as if the others had not grown."""
        if self.own_grows:
            return self.killers
        return tuple(replace(each, used_bytes=each.own_bytes + each.least_others_bytes) for each in self.killers)

    def is_of_others(self, limits: Limits) -> bool:
        """Whether there is a risk that a smaller run would not lessen: others fill the memory, or only they grow."""
        tight = (killer for killer in self.ours if used_share(killer, limits) >= limits.warn_at)
        grows = self.own_grows and self.exhaustion is not None and self.exhaustion.firm
        return self.level > Level.LOW and not grows and not any(shrinking_helps(killer, limits) for killer in tight)


class RiskWatch:
    """Judges sample after sample.

    A level is that of the largest share of a limit (`used_share`) or of the time that firm growth leaves, whichever is
    higher.  It rises at once, and falls after memory stood a little below it for ten seconds: a sawtooth would flap.

    Args:
        limits: what memory is held against.
        warmup_s: so long after the first sample growth is not judged; 0 where the run has been at work for long.
    """

    def __init__(self, limits: Limits, warmup_s: float = 30.0) -> None:
        self._limits = limits
        self._least_others: dict[str, int] = {}  # by killer, in the whole session
        self._level = Level.LOW
        self._held_at_s = 0.0
        self._restarted = False
        self._begin(warmup_s)

    def _begin(self, warmup_s: float) -> None:
        self._warmup_s = warmup_s
        self._of_killer: dict[str, PeakSeries] = {}
        self._own = PeakSeries(warmup_s)
        self._of_process: dict[tuple[int, float], PeakSeries] = {}

    def restart(self) -> None:
        """Forget the past from the next sample on: readers were restarted.  Any thread may call."""
        self._restarted = True

    def add(self, sample: SystemSample) -> Risk:
        """Take a sample in and say how it stands."""
        if self._restarted:
            self._restarted = False
            self._begin(_RESTART_WARMUP_S)
        killers = [self._beside_others(killer) for killer in killers_of(sample, self._limits)]
        self._own.add(sample.time, max(killer.own_bytes for killer in killers))
        for killer in killers:
            series = self._of_killer.setdefault(killer.name, PeakSeries(self._warmup_s))
            series.add(sample.time, killer.used_bytes)
        growing = self._growing(sample)
        trends = {name: series.trend for name, series in self._of_killer.items()}
        left = {killer.name: _exhaustion(killer, trends[killer.name]) for killer in killers}

        def nearness(killer: MemoryLimit) -> tuple[bool, float]:
            first = left[killer.name]
            soon = first is not None and first.within_s <= _FIRST_WITHIN_S
            return (False, first.likely_s) if first is not None and soon else (True, killer.left_bytes)

        killers.sort(key=nearness)
        trend, exhaustion = trends[killers[0].name], left[killers[0].name]
        level = self._next_level(sample.time, largest_share(killers, self._limits), exhaustion)
        reason = _reason(level, killers, self._limits, trend, exhaustion, growing)
        own = self._own.trend
        own_grows = own is not None and _grows(own) and (trend is None or 2 * own.bytes_per_s >= trend.bytes_per_s)
        return Risk(level, reason, tuple(killers), trend, exhaustion, growing, own_grows)

    def _beside_others(self, killer: MemoryLimit) -> MemoryLimit:
        others = killer.used_bytes - killer.own_bytes
        least = self._least_others[killer.name] = min(others, self._least_others.get(killer.name, others))
        return replace(killer, least_others_bytes=least)

    def _growing(self, sample: SystemSample) -> dict[int, Trend]:
        """Of each process, in memory and swap; those that are gone are forgotten."""
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
        if eased >= self._level or time_s < self._held_at_s:  # the latter: the clock was set back
            self._held_at_s = time_s
        elif time_s - self._held_at_s >= _EASED_FOR_S:
            self._level = eased
        return self._level

    def _level_at(self, share: float, exhaustion: Exhaustion | None) -> Level:
        left_s = exhaustion.within_s if exhaustion else math.inf
        if share >= self._limits.exit_at or left_s <= _CRITICAL_WITHIN_S:
            return Level.CRITICAL
        return Level.WARN if share >= self._limits.warn_at or left_s <= _WARN_WITHIN_S else Level.LOW


def _grows(trend: Trend) -> bool:
    return trend.low * trend.seen_s >= _WORTH_SAYING_BYTES


def _exhaustion(killer: MemoryLimit, trend: Trend | None) -> Exhaustion | None:
    if trend is None or not _grows(trend):
        return None
    left = max(killer.left_bytes, 0)
    earliest, likely, latest = (left / rate for rate in (trend.high, trend.bytes_per_s, trend.low))
    firm = likely <= max(_CARRIED_ON * trend.seen_s, _CARRIED_ON_S) and latest <= 2 * likely
    return Exhaustion(earliest, likely, latest, firm)


def _reason(
    level: Level,
    killers: Sequence[MemoryLimit],
    limits: Limits,
    trend: Trend | None,
    exhaustion: Exhaustion | None,
    growing: Mapping[int, Trend],
) -> str:
    """One line.  Log hygiene: at LOW no name of a cgroup or process, which may be anything; else the words to grep."""
    first, growth = killers[0], "no significant growth"
    if trend is not None and exhaustion is not None:
        seconds = (exhaustion.earliest_s, exhaustion.likely_s, exhaustion.latest_s)
        earliest, likely, latest = map(format_duration, seconds)
        growth = f"growing {trend.bytes_per_s / 1e6:.1f} MB/s: full in {likely} ({earliest} to {latest})"
        if growing:
            pid = max(growing, key=lambda each: growing[each].bytes_per_s)
            growth += f", fastest process {pid} ({growing[pid].bytes_per_s / 1e6:.1f} MB/s)"
    if level is Level.LOW:
        return f"{_in_use(first)}, {growth}"
    fullest = max(killers, key=lambda each: used_share(each, limits))
    text = f"near out of memory: {first.name}: {_in_use(first)}; kills at {gib(first.kills_at_bytes)} GiB, {growth}"
    if fullest.name != first.name and used_share(fullest, limits) >= limits.warn_at:
        text += f"; {fullest.name}: {_in_use(fullest)}; kills at {gib(fullest.kills_at_bytes)} GiB"
    return text


def _in_use(killer: MemoryLimit) -> str:
    return f"{gib(killer.used_bytes)} of {gib(killer.limit_bytes)} GiB in use ({killer.share:.0%})"
