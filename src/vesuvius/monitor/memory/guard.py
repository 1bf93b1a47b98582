"""The memory guard: what to do, and when, before something kills.  A pure state machine: it acts on nothing itself."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from vesuvius.monitor.memory.limits import MemoryLimit, MemoryPolicy, largest_share, shrinking_helps, used_share
from vesuvius.monitor.memory.risk import Level, Risk

Rung = Literal["save", "drop", "restart", "shrink", "exit"]

_SHOWS_S = 10.0  # until readers that were started anew show in the memory, at the earliest
_TREND_S = 45.0  # until growth is known again after that: readers start and fill buffers, then six windows of 5 s
_SAVE_S = 15.0  # to write a checkpoint and let go
_EXIT_HOLD_S = 3.0  # a peak above exit_at that passes sooner ends no run
_GROWN_BY = 0.01  # share by which others must have grown before a checkpoint is saved for them again,
_SAVED_S = 300.0  # and the least time between two of these


@dataclass(frozen=True)
class Order:
    """What the loop is to do after the current step."""

    # save a checkpoint and go on; let go of the volumes in memory, and read them again; start the readers anew, as they
    # are; go on with half the prefetch and a reader fewer; or save and exit
    rung: Rung
    reason: str  # the figures that make it necessary, for people


class Guard:
    """Orders one smaller set of readers, then the exit; readers that leak are started anew instead, whenever they do.

    Where memory stands at `shrink_at`, first of all the volumes go that are kept in memory, if there are any.  The
    readers are changed there if there is time to exit should that not help; those that leak also where growth leaves
    just time for it.  Exit is ordered where memory stands at `exit_at`, or growth leaves two steps and the time to
    save.  The guard counts what the run has a hand in (`Risk.ours`).  Where others bring a kill near, a checkpoint is
    saved and the run goes on: its end would leave them as they are, and the next start would find the same.

    One thread at a time may call it.
    """

    def __init__(self, policy: MemoryPolicy) -> None:
        self._policy = policy
        self._order: Order | None = None
        self._carried_out_s = -math.inf
        self._has_shrunk = False
        self._beyond_exit_since_s: float | None = None
        self._saved_s, self._saved_at = -math.inf, -math.inf  # a checkpoint was last ordered for others, at what share

    def judge(
        self,
        time_s: float,
        risk: Risk,
        step_s: float,
        can_shrink: bool,
        readers: Collection[int] = (),
        can_drop: bool = False,
    ) -> Order | None:
        """What is to be done now, again and again until it was carried out, an exit is needed, or the risk is LOW.

        Args:
            time_s: of the sample, seconds of any clock.
            step_s: how long the longest recent step took: so late may an order be carried out.
            can_shrink: whether there are readers or batches ahead to do without.
            readers: pids of the readers.
            can_drop: whether volumes are kept in memory.
        """
        helped = [limit for limit in risk.ours if shrinking_helps(limit, self._policy)]
        if risk.level is Level.LOW:
            self._order, self._saved_s, self._saved_at = None, -math.inf, -math.inf
        if risk.level is Level.LOW or not helped:
            self._beyond_exit_since_s = None
            return self._save(time_s, risk, helped)
        grows = risk.exhaustion is not None and risk.own_grows and risk.ours[0] in helped
        left_s = risk.exhaustion.within_s if grows and risk.exhaustion else math.inf
        rung = self._rung(time_s, helped, left_s, step_s, can_shrink, _leaks(risk, readers), can_drop)
        if rung and (self._order is None or self._order.rung == "save" or rung == "exit" != self._order.rung):
            self._order = Order(rung, risk.reason)
        return self._order or self._save(time_s, risk, helped)

    def saved(self) -> None:
        """The order to save was carried out."""
        self._order = None

    def carried_out(self, time_s: float) -> None:
        """The readers were changed as ordered: give it time to show."""
        self._has_shrunk |= self._order is not None and self._order.rung == "shrink"
        self._order, self._carried_out_s = None, time_s

    def _rung(
        self,
        time_s: float,
        helped: Sequence[MemoryLimit],
        left_s: float,
        step_s: float,
        can_shrink: bool,
        leaks: bool,
        can_drop: bool,
    ) -> Rung | None:
        share = largest_share(helped, self._policy)
        exit_s = 2 * step_s + _SAVE_S  # an order is seen after the current step, and the step after it may be as long
        shows = time_s - self._carried_out_s >= _SHOWS_S
        if self._stays_beyond_exit(time_s, share, helped[0]) or (shows and left_s <= exit_s):
            return "exit"
        if not shows:
            return None
        is_full = share >= self._policy.shrink_at
        if is_full and can_drop:
            return "drop"
        if leaks and left_s > exit_s + step_s and (is_full or left_s <= exit_s + 2 * step_s + 2 * _SHOWS_S):
            return "restart"
        # While the trend starts over nothing is known of growth that goes on.
        if is_full and can_shrink and not self._has_shrunk and left_s > exit_s + step_s + _TREND_S:
            return "shrink"
        return None

    def _stays_beyond_exit(self, time_s: float, share: float, nearest: MemoryLimit) -> bool:
        """Beyond `exit_at` for long enough; where half of what that leaves is used up too, no peak is waited for."""
        if share < self._policy.exit_at:
            self._beyond_exit_since_s = None
            return False
        since_s = self._beyond_exit_since_s = time_s if self._beyond_exit_since_s is None else self._beyond_exit_since_s
        kill = used_share(replace(nearest, used_bytes=nearest.kills_at_bytes), self._policy)
        halfway = (self._policy.exit_at + kill) / 2
        return used_share(nearest, self._policy) >= halfway > self._policy.exit_at or time_s - since_s >= _EXIT_HOLD_S

    def _save(self, time_s: float, risk: Risk, helped: Sequence[MemoryLimit]) -> Order | None:
        """An order to save and go on, where others bring a kill near; again once they have grown since."""
        self._order = self._order if self._order and self._order.rung == "save" else None
        ours = bool(helped) and (risk.own_grows or largest_share(helped, self._policy) >= self._policy.exit_at)
        share = largest_share(risk.limits, self._policy)
        # The level alone falls late: it may be that of what the last order has answered.
        near = share >= self._policy.exit_at or (risk.exhaustion is not None and risk.exhaustion.firm)
        due = time_s - self._saved_s >= _SAVED_S and share >= self._saved_at + _GROWN_BY
        if self._order is None and risk.level is Level.CRITICAL and near and not ours and due:
            self._saved_s, self._saved_at = time_s, share
            self._order = Order("save", risk.reason)
        return self._order


def _leaks(risk: Risk, readers: Collection[int]) -> bool:
    """Whether most of what grows is readers."""
    rates = {pid: max(trend.bytes_per_s, 0.0) for pid, trend in risk.growing.items()}
    return 2 * sum(rate for pid, rate in rates.items() if pid in readers) > sum(rates.values())
