"""A search under way: its blocks, the best setting so far, the budget that is left; and how it measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vesuvius.experiments.paired import LOOKS, MOST_PAIRS, Comparison, compare
from vesuvius.experiments.tune.measurement import (
    Block,
    BlockKind,
    Knob,
    Planner,
    Runner,
    SearchSpace,
    Setting,
    in_words,
    trainer_knobs,
)
from vesuvius.experiments.tune.memory import PredictedMemory, death_text
from vesuvius.experiments.tune.rates import PredictedRates
from vesuvius.runlog.units import format_duration

Stage = Literal["baseline", "readers", "batch", "switches", "delivery", "confirm"]
Certainty = Literal["sure", "likely", "unchanged", "none"]

SMALLEST_GAIN = 0.03
"""Smallest relative gain that is worth a change."""

LARGE_GAIN = 0.10
"""A change is given up for good once it surely gains less."""

AT_ONCE = 0.15
"""Two pairs of steps alone that both differ by more need no third."""

SURE = 0.5
"""Two pairs of anything else that both differ by more need no third."""

KINDS: dict[BlockKind, str] = {"run": "whole run", "readers": "readers alone", "step": "steps alone"}

ENOUGH = 1.25
"""Readers must be able to deliver this multiple of the trainer's rate, because volumes and load vary."""

SHOWN = 2  # pairs without which nothing enters the tuned config
_READER_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # that are tried
# What a block takes besides measuring, until that is known: the first run of a process validates and saves.
_ASSUMED_S = {"start": 20.0, "readers": 10.0, "same": 0.0}
_COMPILE_S = 90.0  # assumed additional time of the first start that compiles
_LEAST_STEPS = 3


@dataclass(frozen=True)
class Entry:
    """A block, in which stage it was measured, and why."""

    number: int
    stage: Stage
    why: str
    block: Block


@dataclass(frozen=True)
class Recommendation:
    """The result of a tune."""

    # "sure": the interval of its gain has `best` faster than the baseline, or as fast and cheaper.  "likely": what was
    # measured says so, and may be wrong.  "unchanged": no change that was tried is worth it.  "none": nothing could be
    # measured.
    certainty: Certainty
    best: Setting  # the recommended setting, which never ran out of memory
    written: Setting  # of the tuned config: the part of `best` that was measured in at least two pairs
    reason: str  # why the tune ended
    reasons: dict[Knob, str] = field(default_factory=dict)  # for each knob that differs from the source, why
    ended: dict[Stage, str] = field(default_factory=dict)  # for each stage, why it ended
    unsettled: tuple[str, ...] = ()  # changes of which more time might say more
    # of `best` over `base`: from whole runs in turn; None where these were not measured in turn
    gain: Comparison | None = None
    predicted: float | None = None  # the same, from readers alone and steps alone
    complete: bool = True  # whether all that was to be tried was: neither the budget nor a signal ended it


class SearchEndedError(Exception):
    """The search cannot go on: the budget is spent, or the baseline cannot be measured; the message says why."""


class TimeToConfirmError(Exception):
    """What is left of the budget is needed to compare what was found with the baseline."""


def is_gain_settled(found: Comparison) -> bool:
    """Whether a costlier setting is surely faster, or shows no gain that is worth a change and surely no large one."""
    if found.is_above(0.0) or found.is_below(SMALLEST_GAIN):
        return True
    return (found.gain < 0 or (found.pairs >= 6 and found.gain < SMALLEST_GAIN)) and found.is_below(LARGE_GAIN)


class Search:
    """A search under way.

    Args:
        runner: measures.
        on_planned: called with a line for the log before each new block.
        on_block: called with each new block.
        earlier: blocks of earlier sessions, each of which is used where the policy asks for its like.

    Attributes:
        entries, blocks: all blocks so far.
        base: the setting of the config, with which the best is compared.
        best: the best setting so far.
        shown: the last one on the way to it of which each step was measured in pairs.
        because: for each knob that was changed, why.
        ended: for each stage, why it ended.
        with_base: samples/s of the best and of the baseline, in turn.
        unsettled: changes that were not settled, in words.
        why_failed: why the last block that failed did.
    """

    def __init__(
        self,
        runner: Runner,
        space: SearchSpace,
        planner: Planner,
        on_planned: Callable[[str], None] = lambda line: None,
        on_block: Callable[[Entry], None] = lambda entry: None,
        earlier: Sequence[Block] = (),
    ) -> None:
        self.space = space
        self.planner = planner
        self.entries: list[Entry] = []
        self.blocks: list[Block] = []
        self.memory = PredictedMemory(space, planner, self.blocks)
        self.rates = PredictedRates(self.blocks)
        self.base = self.best = self.shown = space.source
        self.because: dict[Knob, str] = {}
        self.ended: dict[Stage, str] = {}
        self.with_base: list[tuple[float, float]] = []
        self.unsettled: list[str] = []
        self.why_failed = ""
        self._earlier = list(earlier)
        self._runner, self._on_planned, self._on_block = runner, on_planned, on_block
        self._besides_s: dict[tuple[str, bool], float] = {}  # the longest that a block has taken besides measuring

    @property
    def left_s(self) -> float:
        """Seconds of the budget that no block has taken."""
        return self.space.budget_s - math.fsum(block.seconds for block in self.blocks)

    def measure(self, setting: Setting, kind: BlockKind, stage: Stage, why: str) -> Block:
        """Measure one block.

        A setting that may not be tried is not: its block says why, and does not count.

        Raises:
            SearchEndedError: it takes longer than is left.
            TimeToConfirmError: with it, what is left would not hold two pairs of the best and the baseline.
        """
        if (obstacle := self.memory.obstacle(setting)) is not None:
            self.why_failed = f"{in_words(setting, self.space.source)}: {obstacle}"
            return Block(setting, kind, "failed", obstacle, 0.0)
        left_s, seconds = self.left_s, self.expected_s(setting, kind)
        if seconds > left_s:
            raise SearchEndedError(
                f"the budget was spent: {format_duration(max(left_s, 0))} of {format_duration(self.space.budget_s)} "
                f"are left after {len(self.blocks)} blocks, the next one takes {format_duration(seconds)} ({why})"
            )
        if stage not in ("baseline", "confirm") and self.best != self.base and left_s - seconds < self._confirm_s():
            self.ended[stage] = f"{format_duration(left_s)} were left to confirm what was found; not tried: {why}"
            raise TimeToConfirmError
        number = len(self.entries)
        share = 2 if not self.blocks else 3 if setting.compile else 6
        limit_s = min(left_s, max(self.space.budget_s / share, 2 * self.space.block_s + 40.0))
        earlier = next((b for b in self._earlier if (b.setting, b.kind) == (setting, kind)), None)
        if earlier is None:
            self._on_planned(f"Block {number} {stage}, {KINDS[kind]}: {why}; about {format_duration(seconds)}")
        else:
            self._earlier.remove(earlier)
        block = earlier or self._runner.measure(setting, kind, self.space.block_s, limit_s)
        if block.ended == "ok":
            need = self._need(setting, kind)
            self._besides_s[need] = max(self._besides_s.get(need, 0.0), block.seconds - block.measured_s)
        self.blocks.append(block)
        self.entries.append(Entry(number, stage, why, block))
        if earlier is None:
            self._on_block(self.entries[-1])
        if block.ended != "ok":
            self.why_failed = death_text(block)
            if block.ended == "timeout" and limit_s == left_s:
                raise SearchEndedError(f"the budget was spent: {self.why_failed}")
        return block

    def rate(self, setting: Setting, kind: BlockKind, stage: Stage, why: str) -> float | None:
        """Samples/s of a new block; None where it ended badly."""
        block = self.measure(setting, kind, stage, why)
        return block.rate if block.ended == "ok" and block.rate else None

    def expected_s(self, setting: Setting, kind: BlockKind) -> float:
        """Seconds that a block takes: what has to be started or changed for it, and its measuring."""
        need = self._need(setting, kind)
        other_s = self._besides_s.get(need, _ASSUMED_S[need[0]] + (20.0 if need == ("start", True) else 0.0))
        if need[0] == "start" and setting.compile and not any(b.setting.compile for b in self.blocks):
            other_s += _COMPILE_S
        rate = self.rates.expected(kind, setting)
        return other_s + max(self.space.block_s, _LEAST_STEPS * setting.global_batch / rate if rate else 0.0)

    def _confirm_s(self) -> float:
        """Seconds of two pairs of whole runs of the best and the baseline, and as much again for one of them."""
        return 3 * (self.expected_s(self.best, "run") + self.expected_s(self.base, "run"))

    def _need(self, setting: Setting, kind: BlockKind) -> tuple[str, bool]:
        """What a block needs besides measuring: a process, other readers or neither; and whether it is a whole run."""
        last = self.blocks[-1] if self.blocks else None
        if last is None or last.ended != "ok" or trainer_knobs(last.setting) != trainer_knobs(setting):
            return "start", kind == "run"
        in_force = next((b.setting for b in reversed(self.blocks) if b.kind != "step"), None)
        return "readers" if kind != "step" and in_force != setting else "same", kind == "run"

    def trainer_rate(self) -> float:
        rate = self.rates.measured("step", self.best)
        assert rate is not None  # only measured settings become the best
        return rate

    def supply(self, setting: Setting) -> float | None:
        """What the readers can deliver over what the steps take; None where the readers could not be measured."""
        why, trainer = "what readers deliver and what steps take", self.rates.measured("step", setting)
        readers = self.rates.measured("readers", setting) or self.rate(setting, "readers", "readers", why)
        trainer = trainer or self.rate(setting, "step", "readers", why)
        if readers is None or trainer is None:
            return None
        # Without readers, reading and computing take turns.
        return readers / trainer if setting.workers else 1 / (1 + trainer / readers)

    def take(self, setting: Setting, why: str, pairs: int) -> None:
        """Make a setting the best, for a reason that holds for each knob that it changes, measured in so many pairs."""
        self.because |= dict.fromkeys(setting.changes(self.best), why)
        self.shown = setting if self.shown == self.best and pairs >= SHOWN else self.shown
        self.best = setting

    def give_up(self, words: str, found: Comparison) -> None:
        """Drop a change; it stays unsettled if it may gain what counts."""
        if found.gain >= SMALLEST_GAIN or (found.pairs > 1 and not found.is_below(LARGE_GAIN)):
            self.unsettled.append(f"{words}: {found.text}")

    def gain(
        self,
        setting: Setting,
        kind: BlockKind,
        why: tuple[Stage, str],
        have: float,
        is_clear: Callable[[float], bool],
        most_pairs: int = MOST_PAIRS,
    ) -> Comparison | None:
        """Gain over the best, which has a rate of `have`: of one block if that is clear, else in turn.

        None where it failed.
        """
        if (first := self.rate(setting, kind, *why)) is None:
            return None
        if is_clear(first / have - 1):
            return Comparison(first / have - 1, None, None, 1)
        return self.in_turn(
            (setting, kind), (self.best, kind), why[0], in_words(setting, self.best), most_pairs=most_pairs
        )

    def in_turn(
        self,
        one: tuple[Setting, BlockKind],
        other: tuple[Setting, BlockKind],
        stage: Stage,
        why: str,
        is_settled: Callable[[Comparison], bool] = is_gain_settled,
        most_pairs: int = MOST_PAIRS,
        pairs: list[tuple[float, float]] | None = None,
    ) -> Comparison | None:
        """Measure two settings in turn until what is asked is settled.

        Args:
            is_settled: asked at each look; default: one is surely faster, or a gain of `one` is not to be expected.
            pairs: of earlier blocks; grows.

        Returns:
            None where one of them ended badly before there was a pair.
        """
        pairs = [] if pairs is None else pairs
        at_once = AT_ONCE if one[1] == "step" else SURE
        while True:
            found = compare(pairs) if pairs else None
            if found is not None:
                if len(pairs) == SHOWN and all(a > (1 + at_once) * b for a, b in pairs):
                    return found
                affordable = self.expected_s(*one) + self.expected_s(*other) <= self.left_s
                if len(pairs) >= most_pairs or not affordable or (len(pairs) in LOOKS and is_settled(found)):
                    return found
            last = self.blocks[-1] if self.blocks else None
            at = (last.setting, last.kind) if last and last.ended == "ok" else None
            rates = {at: last.rate} if last and not pairs and at in (one, other) else {}  # half of the first pair
            for each in (other, one) if at == other else (one, other):
                if each not in rates:
                    rate = self.rate(*each, stage, f"in turn: {why}, pair {len(pairs) + 1}")
                    if rate is None:
                        return found
                    rates[each] = rate
            pairs.append((rates[one], rates[other]))


def at_least(readers: float) -> int:
    """The smallest number of readers to try that is at least this."""
    return next((count for count in _READER_COUNTS if count >= readers - 1e-9), math.ceil(readers))


def fewer_than(readers: int) -> list[int]:
    """The numbers of readers to try below this one, ascending."""
    return [count for count in _READER_COUNTS if count < readers]
