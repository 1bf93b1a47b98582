"""How near a kill is: which killer comes first, and in how many seconds at the present growth.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from vesuvius.monitor.memory.limits import (
    Limits,
    MemoryLimit,
    killers_of,
    largest_share,
    shrinking_helps,
    used_share,
    without_growth_of_others,
)
from vesuvius.monitor.memory.trend import PeakSeries, Trend
from vesuvius.monitor.probes.system_sample import SystemSample
from vesuvius.runlog.units import format_duration, gib

_EASED_BY = 0.02  # the level falls only this share below its threshold,
_EASED_FOR_S = 10.0  # and after so long, or a sawtooth would flap
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
        earliest_s, likely_s: at the fastest growth that fits what was seen, and at its median.
        latest_s: None: the slowest growth that fits what was seen never gets there.
        firm: the growth was seen for long enough to be believed to go on that far, and the interval is not wide.
            Growth of 30 s says something of the next minute, nothing of the next hour: allocators fill up and stop.
    """

    earliest_s: float
    likely_s: float
    latest_s: float | None
    firm: bool = True


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
        return self.killers if self.own_grows else tuple(without_growth_of_others(killer) for killer in self.killers)

    def is_of_others(self, limits: Limits) -> bool:
        """Whether there is a risk that a smaller run would not lessen: others fill the memory, or only they grow."""
        tight = (killer for killer in self.ours if used_share(killer, limits) >= limits.warn_at)
        if self.level is Level.LOW or any(shrinking_helps(killer, limits) for killer in tight):
            return False
        return not self.own_grows or self.exhaustion is None or not self.exhaustion.firm


class RiskWatch:
    """Judges sample after sample.

    Args:
        limits: what memory is held against.
        warmup_s: so long after the first sample growth is not judged; 0 where the run has been at work for long.
    """

    def __init__(self, limits: Limits, warmup_s: float = 30.0) -> None:
        self._limits = limits
        self._warmup_s = warmup_s
        self._of_killer: dict[str, PeakSeries] = {}
        self._own = PeakSeries(warmup_s=warmup_s)
        self._least_others: dict[str, int] = {}  # by killer, in the whole session
        self._of_process: dict[tuple[int, float], PeakSeries] = {}
        self._steps = _LevelSteps(limits)
        self._forget = False

    def add(self, sample: SystemSample) -> Risk:
        """Take a sample in and say how it stands."""
        private = {(p.pid, p.started_s): p.anon_bytes + p.swap_bytes for p in sample.processes}
        return self.judge(sample.time, killers_of(sample, self._limits), private)

    def judge(self, time_s: float, killers: Iterable[MemoryLimit], private: Mapping[tuple[int, float], int]) -> Risk:
        """As `add`.

        Args:
            time_s: seconds since 1970.
            killers: all, in any order.
            private: bytes of each process, by its pid and start, in memory and swap.
        """
        if self._forget:
            self._forget = False
            self._warmup_s = _RESTART_WARMUP_S
            self._of_killer.clear()
            self._own = PeakSeries(warmup_s=self._warmup_s)
            self._of_process.clear()
        killers = tuple(self._beside_others(killer) for killer in killers)
        self._own.add(time_s, max((killer.own_bytes or 0 for killer in killers), default=0))
        for killer in killers:
            series = self._of_killer.setdefault(killer.name, PeakSeries(warmup_s=self._warmup_s))
            series.add(time_s, killer.used_bytes)
        killers = tuple(sorted(killers, key=self._nearness))
        trend = self._of_killer[killers[0].name].trend
        exhaustion = _exhaustion(killers[0], trend)
        growing = self._growing(time_s, private)
        level = self._steps.next(time_s, largest_share(killers, self._limits), exhaustion)
        reason = _reason(level, killers, self._limits, trend, exhaustion, growing)
        return Risk(level, reason, killers, trend, exhaustion, growing, self._own_grows(trend))

    def restart(self) -> None:
        """Forget the past: readers were restarted, so what grew before says nothing.

        From the next sample on; so it may be called in another thread than `add`.
        """
        self._forget = True

    def _beside_others(self, killer: MemoryLimit) -> MemoryLimit:
        if killer.own_bytes is None:
            return killer
        others = killer.used_bytes - killer.own_bytes
        least = self._least_others[killer.name] = min(others, self._least_others.get(killer.name, others))
        return replace(killer, least_others_bytes=least)

    def _own_grows(self, trend: Trend | None) -> bool:
        own = self._own.trend
        return own is not None and _grows(own) and (trend is None or 2 * own.bytes_per_s >= trend.bytes_per_s)

    def _nearness(self, killer: MemoryLimit) -> tuple[bool, float]:
        exhaustion = _exhaustion(killer, self._of_killer[killer.name].trend)
        if exhaustion and exhaustion.firm and exhaustion.likely_s <= _FIRST_WITHIN_S:
            return False, exhaustion.likely_s
        return True, killer.left_bytes

    def _growing(self, time_s: float, private: Mapping[tuple[int, float], int]) -> dict[int, Trend]:
        """Of each process; those that are gone are forgotten."""
        before, self._of_process = self._of_process, {}
        for identity, size in private.items():
            series = self._of_process[identity] = before.get(identity) or PeakSeries(warmup_s=self._warmup_s)
            series.add(time_s, size)
        trends = {pid: series.trend for (pid, _), series in self._of_process.items()}
        return {pid: trend for pid, trend in trends.items() if trend and _grows(trend)}


class _LevelSteps:
    """Rises at once, falls late."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._level = Level.LOW
        self._held_at_s = 0.0

    def next(self, time_s: float, share: float, exhaustion: Exhaustion | None) -> Level:
        self._level = max(self._level, self._level_at(share, exhaustion))
        eased = self._level_at(share + _EASED_BY, exhaustion)
        if eased >= self._level or time_s < self._held_at_s:  # the latter: the clock was set back
            self._held_at_s = time_s
        elif time_s - self._held_at_s >= _EASED_FOR_S:
            self._level = eased
        return self._level

    def _level_at(self, share: float, exhaustion: Exhaustion | None) -> Level:
        left_s = exhaustion.likely_s if exhaustion and exhaustion.firm else float("inf")
        if share >= self._limits.exit_at or left_s <= _CRITICAL_WITHIN_S:
            return Level.CRITICAL
        if share >= self._limits.warn_at or left_s <= _WARN_WITHIN_S:
            return Level.WARN
        return Level.LOW


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
    killers: tuple[MemoryLimit, ...],
    limits: Limits,
    trend: Trend | None,
    exhaustion: Exhaustion | None,
    growing: Mapping[int, Trend],
) -> str:
    """One line.  Log hygiene: at LOW no name of a cgroup or process, which may be anything; else the words to grep."""
    first, fullest = killers[0], max(killers, key=lambda killer: used_share(killer, limits))
    growth = _growth_text(trend, exhaustion, growing)
    if level is Level.LOW:
        return f"{gib(first.used_bytes)} of {gib(first.limit_bytes)} GiB in use ({first.share:.0%}), {growth}"
    figures = [_figures_text(first) + f", {growth}"]
    if fullest.name != first.name and used_share(fullest, limits) >= limits.warn_at:
        figures.append(_figures_text(fullest))
    return "near out of memory: " + "; ".join(figures)


def _figures_text(killer: MemoryLimit) -> str:
    return (
        f"{killer.name}: {gib(killer.used_bytes)} of {gib(killer.limit_bytes)} GiB in use ({killer.share:.0%}); kills "
        f"at {gib(killer.kills_at_bytes)} GiB"
    )


def _growth_text(trend: Trend | None, exhaustion: Exhaustion | None, growing: Mapping[int, Trend]) -> str:
    if trend is None or exhaustion is None:
        return "no significant growth"
    latest = "never" if exhaustion.latest_s is None else format_duration(exhaustion.latest_s)
    text = (
        f"growing {trend.bytes_per_s / 1e6:.1f} MB/s: full in {format_duration(exhaustion.likely_s)} "
        f"({format_duration(exhaustion.earliest_s)} to {latest})"
    )
    if growing:
        pid = max(growing, key=lambda each: growing[each].bytes_per_s)
        text += f", fastest process {pid} ({growing[pid].bytes_per_s / 1e6:.1f} MB/s)"
    return text
