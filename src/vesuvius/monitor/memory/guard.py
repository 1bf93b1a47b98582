"""The memory guard: what to do, and when, before something kills.  A pure state machine: it acts on nothing itself."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from vesuvius.monitor.memory.limits import Limits, MemoryLimit, largest_share, shrinking_helps, used_share
from vesuvius.monitor.memory.risk import Level, Risk

Rung = Literal["save", "restart", "prefetch", "worker", "exit"]

_SETTLE_S = 20.0  # until an order that was carried out shows: readers close and start in 5 s, buffers fill again
_SHOWS_S = 10.0  # until it shows at the earliest
_SAVE_S = 15.0  # to write a checkpoint and let go
_EXIT_HOLD_S = 3.0  # a peak above exit_at that passes sooner is answered by a lower rung,
_TRIED_S = 60.0  # unless one was carried out so short a time ago
_PACE_S = 5.0  # to see at what pace memory rises once an order has shown
_GROWN_BY = 0.01  # share: a rung is repeated only where memory has grown since, for it may have been enough
_SAVED_S = 300.0  # where the others go on growing, checkpoints are so far apart
_HEIGHTS: dict[Rung, int] = {"save": 0, "restart": 1, "prefetch": 1, "worker": 2, "exit": 3}


@dataclass(frozen=True)
class Order:
    """What the loop is to do after the current step."""

    # save and go on; start the readers anew, as they are; shrink the prefetch; drop a worker; or save and exit
    rung: Rung
    reason: str  # the figures that make it necessary, for people


class Guard:
    """Climbs the ladder: prefetch, worker, exit; where readers leak, they are started anew instead of the first two.

    A rung is needed where memory stands at its share of the limit, or where growth leaves just time enough for it and
    for the rungs above it.  A rung below exit is passed over where no time would be left to exit after it.  The ladder
    is never climbed down: making things larger is not the guard's business.  It counts what the run has a hand in
    (`Risk.ours`).  Where others bring a kill near, a checkpoint is saved and the run goes on: its end would leave them
    as they are, and the next start would find the same.

    `judge` and `carried_out` may be called in different threads.

    Args:
        limits: with the share of each rung.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._order: Order | None = None
        self._carried_out_s = float("-inf")
        self._beyond_exit_since_s: float | None = None
        self._lowest_since: dict[Rung, float] = {}  # the smallest share since a rung was last ordered
        self._saved: tuple[float, float] | None = None  # when a checkpoint was last ordered for others, at what share
        self._growth: _Growth | None = None

    def judge(
        self,
        time_s: float,
        risk: Risk,
        step_s: float,
        prefetch_left: bool,
        workers_left: bool,
        readers: Collection[int] = (),
    ) -> Order | None:
        """What is to be done now; None = nothing.

        The same order comes again and again until it was carried out, a higher one is needed, or the risk is LOW.

        Args:
            time_s: of the look, seconds of any clock.
            step_s: how long the longest recent step took: so late may an order be carried out.
            prefetch_left, workers_left: whether the prefetch can be made smaller, a worker dropped.
            readers: pids of the readers.
        """
        with self._lock:
            left_s = self._seconds_left(time_s, risk)
            helped = [killer for killer in risk.ours if shrinking_helps(killer, self._limits)]
            if risk.level is Level.LOW:
                self._order, self._saved = None, None
            if risk.level is Level.LOW or not helped:
                self._beyond_exit_since_s = None
                self._lowest_since.clear()
                return self._save(time_s, risk, helped)
            if risk.ours[0] not in helped:
                left_s = float("inf")
            share = largest_share(helped, self._limits)
            self._lowest_since = {rung: min(lowest, share) for rung, lowest in self._lowest_since.items()}
            rung: Rung | None = "exit"
            if not self._must_exit(time_s, share, left_s, step_s, self._is_nearly_over(helped[0])):
                leaks = _leaks(risk, readers)
                rung = self._lower_rung(time_s, share, left_s, step_s, prefetch_left or leaks, workers_left)
                rung = "restart" if rung and leaks else rung
            if rung and (self._order is None or _HEIGHTS[rung] > _HEIGHTS[self._order.rung]):
                self._order = Order(rung, risk.reason + _remembered_text(left_s, risk))
                self._lowest_since[rung] = share
            return self._order or self._save(time_s, risk, helped)

    def saved(self) -> None:
        """The order to save was carried out."""
        with self._lock:
            self._order = None

    def carried_out(self, time_s: float) -> None:
        """The last order was carried out: give it time to show, unless there is none."""
        with self._lock:
            self._order = None
            self._carried_out_s = time_s

    def _save(self, time_s: float, risk: Risk, helped: Sequence[MemoryLimit]) -> Order | None:
        """An order to save and go on, where others bring a kill near; again once they have grown since."""
        self._order = self._order if self._order and self._order.rung == "save" else None
        ours = bool(helped) and (risk.own_grows or largest_share(helped, self._limits) >= self._limits.exit_at)
        share = largest_share(risk.killers, self._limits)
        # The level alone falls late: it may be that of what the last order has answered.
        near = share >= self._limits.exit_at or (risk.exhaustion is not None and risk.exhaustion.firm)
        if self._order is None and risk.level is Level.CRITICAL and near and not ours:
            before_s, before = self._saved or (float("-inf"), float("-inf"))
            if time_s - before_s >= _SAVED_S and share >= before + _GROWN_BY:
                self._saved = time_s, share
                self._order = Order("save", risk.reason)
        return self._order

    def _is_nearly_over(self, killer: MemoryLimit) -> bool:
        """Whether half of what exit_at leaves is used up too: then no peak is waited for to pass."""
        end = replace(killer, used_bytes=killer.kills_at_bytes)
        halfway = (self._limits.exit_at + used_share(end, self._limits)) / 2
        return used_share(killer, self._limits) >= halfway > self._limits.exit_at

    def _must_exit(self, time_s: float, share: float, left_s: float, step_s: float, nearly_over: bool) -> bool:
        if share < self._limits.exit_at:
            self._beyond_exit_since_s = None
        elif self._beyond_exit_since_s is None:
            self._beyond_exit_since_s = time_s
        beyond_since_s = self._beyond_exit_since_s
        if beyond_since_s is not None and (nearly_over or time_s - beyond_since_s >= _EXIT_HOLD_S):
            return True
        return left_s <= _exit_s(step_s) and time_s - self._carried_out_s >= _SHOWS_S

    def _lower_rung(
        self, time_s: float, share: float, left_s: float, step_s: float, prefetch_left: bool, workers_left: bool
    ) -> Rung | None:
        settle_s = _SETTLE_S if share < self._limits.exit_at else _TRIED_S
        if time_s - self._carried_out_s < settle_s or left_s <= step_s + _SHOWS_S + _exit_s(step_s):
            return None
        worker_s = step_s + _SETTLE_S + _exit_s(step_s)
        prefetch_s = step_s + _SETTLE_S + worker_s
        if workers_left and (left_s <= worker_s or self._is_above("worker", share, self._limits.worker_at)):
            return "worker"
        if prefetch_left and (left_s <= prefetch_s or self._is_above("prefetch", share, self._limits.prefetch_at)):
            return "prefetch"
        return None

    def _is_above(self, rung: Rung, share: float, threshold: float) -> bool:
        return share >= max(threshold, self._lowest_since.get(rung, 0.0) + _GROWN_BY)

    def _seconds_left(self, time_s: float, risk: Risk) -> float:
        """Until a killer strikes; infinity where no growth is known.

        After the readers were reopened the trend starts over and says nothing for most of a minute.  Until then what
        grew before is taken to go on at its pace, unless memory is seen to rise at less than half of that.
        """
        first = risk.killers[0]
        if risk.exhaustion and risk.exhaustion.firm and not risk.own_grows:
            self._growth = None  # it is the others'
            return float("inf")
        if risk.exhaustion and risk.exhaustion.firm and risk.trend:
            self._growth = _Growth(first.name, risk.trend.bytes_per_s, time_s, first.used_bytes)
            return risk.exhaustion.likely_s
        growth = self._growth
        killer = next((each for each in risk.killers if growth and each.name == growth.killer), None)
        if growth is None or killer is None:
            return float("inf")
        if growth.since_s < self._carried_out_s + _SHOWS_S <= time_s:
            # what was freed must not pass for an end of the growth
            growth = self._growth = replace(growth, since_s=time_s, used_bytes=killer.used_bytes)
        if time_s - self._carried_out_s > _SHOWS_S and not growth.goes_on(time_s, killer.used_bytes):
            self._growth = None
            return float("inf")
        return max(killer.left_bytes, 0) / growth.bytes_per_s


@dataclass(frozen=True)
class _Growth:
    """Growth as it was last known."""

    # killer, bytes_per_s: whose memory grows, and how fast
    killer: str
    bytes_per_s: float
    # since_s, used_bytes: the time and the memory from which on it is judged whether growth goes on
    since_s: float
    used_bytes: int

    def goes_on(self, time_s: float, used_bytes: int) -> bool:
        seconds = time_s - self.since_s
        return seconds < _PACE_S or used_bytes - self.used_bytes >= 0.5 * self.bytes_per_s * seconds


def _leaks(risk: Risk, readers: Collection[int]) -> bool:
    """Whether most of what grows is readers."""
    rates = {pid: trend.bytes_per_s for pid, trend in risk.growing.items() if trend.bytes_per_s > 0}
    return 2 * sum(rate for pid, rate in rates.items() if pid in readers) > sum(rates.values())


def _remembered_text(left_s: float, risk: Risk) -> str:
    """What the reason of the risk does not say: that growth from before the readers were reopened goes on."""
    known = left_s == float("inf") or (risk.exhaustion is not None and risk.exhaustion.firm)
    return "" if known else f"; at the pace from before the last order {left_s:.0f} s are left"


def _exit_s(step_s: float) -> float:
    """An order is seen after the current step, and the step after it may be as long."""
    return 2 * step_s + _SAVE_S
