"""The memory guard decides what to do before the run is killed for its memory.  A pure state machine."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from vesuvius.monitor.memory.limits import MemoryLimit, MemoryPolicy, shrinking_helps, used_share
from vesuvius.monitor.memory.risk import Level, Risk

Action = Literal["drop", "restart", "shrink", "exit"]

_SHOWS_S = 10.0  # before a restart of the readers shows in memory
_TREND_S = 45.0  # before growth is known again after it: readers fill their buffers, then six windows of 5 s
_SAVE_S = 15.0  # to write a checkpoint and exit
_EXIT_HOLD_S = 3.0  # a shorter peak above exit_at is ignored


@dataclass(frozen=True)
class LoopStatus:
    step: int = 0  # optimizer steps done
    step_s: float = 0.0  # longest recent step
    # private memory of each reader by pid, as last reported; includes readers on other machines
    readers: Mapping[int, int] = field(default_factory=dict)
    # pids of the readers on this machine, which may be children of a Ray that another process started
    local_readers: frozenset[int] = frozenset()
    workers: int | None = None  # current number of readers
    can_shrink: bool = False  # whether readers or prefetched batches can be reduced
    can_drop: bool = False  # whether volumes are kept in memory


@dataclass(frozen=True)
class Order:
    """Something the loop must do after the current step."""

    # drop the volumes kept in memory; restart the readers unchanged; continue with half the prefetch and one reader
    # fewer; save and exit
    action: Action
    reason: str  # the figures behind it, for people


class Guard:
    """Orders fewer readers once, then the exit; leaking readers are restarted instead, as often as needed.

    At `shrink_at`, volumes kept in memory are dropped first.  Otherwise the readers are reduced, if an exit is still
    possible should that not help; leaking readers are also restarted if growth leaves just enough time.  Exit is
    ordered at `exit_at`, or when growth leaves only two steps and the time to save.

    Only memory that the run can influence counts (`Risk.ours`).  If other programs fill the memory, the run continues:
    stopping it would not help, and the next start would find as little memory.

    Not thread-safe.
    """

    def __init__(self, policy: MemoryPolicy) -> None:
        self._policy = policy
        self._order: Order | None = None
        self._carried_out_s = -math.inf
        self._has_shrunk = False
        self._beyond_exit_since_s: float | None = None

    def next_action(self, time_s: float, risk: Risk, loop: LoopStatus) -> Order | None:
        """Return the pending order; it is repeated until carried out, replaced by an exit, or the risk is LOW."""
        helped = [limit for limit in risk.ours if shrinking_helps(limit, self._policy)]
        if risk.level is Level.LOW or not helped:
            self._order = self._beyond_exit_since_s = None
            return None
        grows = risk.exhaustion is not None and risk.own_grows and risk.ours[0] in helped
        left_s = risk.exhaustion.within_s if grows and risk.exhaustion else math.inf
        action = self._action(time_s, helped, left_s, loop, _leaks(risk, loop.readers))
        if action and (self._order is None or action == "exit" != self._order.action):
            self._order = Order(action, risk.reason)
        return self._order

    def carried_out(self, time_s: float) -> None:
        """Note that the readers were changed as ordered, which takes time to show."""
        self._has_shrunk |= self._order is not None and self._order.action == "shrink"
        self._order, self._carried_out_s = None, time_s

    def _action(
        self, time_s: float, helped: Sequence[MemoryLimit], left_s: float, loop: LoopStatus, leaks: bool
    ) -> Action | None:
        share = max(used_share(limit, self._policy) for limit in helped)
        exit_s = 2 * loop.step_s + _SAVE_S  # an order waits for the current step, and the next one may be as long
        shows = time_s - self._carried_out_s >= _SHOWS_S
        if self._stays_beyond_exit(time_s, share, helped[0]) or (shows and left_s <= exit_s):
            return "exit"
        if not shows:
            return None
        is_full = share >= self._policy.shrink_at
        if is_full and loop.can_drop:
            return "drop"
        if leaks and left_s > exit_s + loop.step_s and (is_full or left_s <= exit_s + 2 * loop.step_s + 2 * _SHOWS_S):
            return "restart"
        # While the trend restarts, continuing growth is not visible.
        if is_full and loop.can_shrink and not self._has_shrunk and left_s > exit_s + loop.step_s + _TREND_S:
            return "shrink"
        return None

    def _stays_beyond_exit(self, time_s: float, share: float, nearest: MemoryLimit) -> bool:
        """Whether memory stayed above `exit_at` for long enough, or is halfway from there to the limit."""
        if share < self._policy.exit_at:
            self._beyond_exit_since_s = None
            return False
        since_s = self._beyond_exit_since_s = time_s if self._beyond_exit_since_s is None else self._beyond_exit_since_s
        kill = used_share(replace(nearest, used_bytes=nearest.limit_bytes), self._policy)
        halfway = (self._policy.exit_at + kill) / 2
        return used_share(nearest, self._policy) >= halfway > self._policy.exit_at or time_s - since_s >= _EXIT_HOLD_S


def _leaks(risk: Risk, readers: Collection[int]) -> bool:
    rates = {pid: max(trend.bytes_per_s, 0.0) for pid, trend in risk.growing.items()}
    return 2 * sum(rate for pid, rate in rates.items() if pid in readers) > sum(rates.values())
