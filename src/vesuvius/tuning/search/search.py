"""A search under way: its blocks, the best setting so far, the budget that is left; and how it measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vesuvius.errors import ConfigError
from vesuvius.runlog.units import format_duration
from vesuvius.tuning.measurement import (
    Block,
    BlockKind,
    Goal,
    Knob,
    Planner,
    Runner,
    SearchSpace,
    Setting,
    in_words,
    trainer_knobs,
)
from vesuvius.tuning.search.memory import PredictedMemory, death_text
from vesuvius.tuning.search.pairs import LOOKS, MOST_PAIRS, Comparison, compare
from vesuvius.tuning.search.rates import PredictedRates, reader_knobs

Stage = Literal["baseline", "readers", "batch", "switches", "confirm"]
Outcome = Literal["better", "unchanged", "undecided", "none"]

SMALLEST_GAIN = 0.03
"""Smallest relative gain that is worth a change."""

LARGE_GAIN = 0.10
"""What is given up surely gains less, or the tune is undecided."""

AT_ONCE = 0.15
"""Two pairs of steps alone that both differ by more need no third."""

SURE = 0.5
"""A larger gain needs no interval where that would cost much."""

ENOUGH: dict[Goal, float] = {"samples_s": 1.25, "cost": 1.05}
"""Readers must be able to deliver this multiple of the trainer's rate, because volumes and load vary."""

_CLEAR = 1.5  # factor beyond ENOUGH, up or down, from which on two blocks that were not in turn decide
SOME_PAIRS = 8
_READER_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # that are tried
# What a block takes besides measuring, until that is known: the first run of a process validates and saves.
_ASSUMED_S = {"start": 20.0, "readers": 10.0, "same": 0.0}
_COMPILE_S = 90.0  # assumed additional time of the first start that compiles
_LEAST_STEPS = 3


@dataclass(frozen=True)
class PlannedBlock:
    """What is measured next, why, and what is expected of it: samples/s (None = unknown), memory, seconds."""

    number: int
    stage: Stage
    setting: Setting
    kind: BlockKind
    why: str
    rate: float | None
    ram_bytes: int
    vram_bytes: int | None
    seconds: float


@dataclass(frozen=True)
class Entry:
    """A block as it was planned, and as it was measured."""

    planned: PlannedBlock
    block: Block


@dataclass(frozen=True)
class Recommendation:
    """The result of a tune."""

    # "better": the interval of its gain has `best` faster than the baseline, or as fast and cheaper.  "unchanged": no
    # change that was tried was worth it.  "undecided": the intervals or the budget do not say.  "none": nothing could
    # be measured.
    verdict: Outcome
    best: Setting  # the recommended setting, which never ran out of memory
    base: Setting  # the setting of the baseline: the source, or the nearest smaller one that fits
    reason: str  # why the tune ended
    reasons: dict[Knob, str] = field(default_factory=dict)  # for each knob that differs from the source, why
    ended: dict[Stage, str] = field(default_factory=dict)  # for each stage, why it ended
    # of `best` over `base`, from blocks in turn; None where they were not measured in turn
    gain: Comparison | None = None


class SearchEndedError(Exception):
    """The search cannot go on: the budget is spent, or the baseline cannot be measured; the message says why."""


def is_gain_settled(found: Comparison) -> bool:
    """Whether a costlier setting is surely faster, or shows no gain that is worth a change and surely no large one."""
    if found.is_above(0.0) or found.is_below(SMALLEST_GAIN):
        return True
    return (found.gain < 0 or (found.pairs >= 6 and found.gain < SMALLEST_GAIN)) and found.is_below(LARGE_GAIN)


class Search:
    """A search under way.

    Args:
        runner: measures.
        on_planned, on_block: told of each block before and after it is measured.
        earlier: blocks of an earlier session, in order; the policy is a function of the blocks alone, so it asks for
            the same ones again.

    Attributes:
        entries, blocks: all blocks so far.
        base: the setting of the baseline.
        best: the best setting so far.
        because: for each knob that was changed, why.
        ended: for each stage, why it ended.
        with_base: samples/s of the best and of the baseline, in turn.
        undecided: what was not decided, in words.
        why_failed: why the last block that failed did.
    """

    def __init__(
        self,
        runner: Runner,
        space: SearchSpace,
        planner: Planner,
        on_planned: Callable[[PlannedBlock], None] = lambda planned: None,
        on_block: Callable[[Entry], None] = lambda entry: None,
        earlier: Sequence[Block] = (),
    ) -> None:
        self.space = space
        self.planner = planner
        self.entries: list[Entry] = []
        self.blocks: list[Block] = []
        self.memory = PredictedMemory(space, planner, self.blocks)
        self.rates = PredictedRates(self.blocks, space.cores)
        self.base = self.best = space.source
        self.because: dict[Knob, str] = {}
        self.ended: dict[Stage, str] = {}
        self.with_base: list[tuple[float, float]] = []
        self.undecided: list[str] = []
        self.why_failed = ""
        self._earlier = tuple(earlier)
        self._runner, self._on_planned, self._on_block = runner, on_planned, on_block
        self._besides_s: dict[tuple[str, bool], float] = {}  # the longest that a block has taken besides measuring
        self._supplies: dict[object, list[tuple[float, float]]] = {}

    @property
    def left_s(self) -> float:
        """Seconds of the budget that no block has taken."""
        return self.space.budget_s - math.fsum(block.seconds for block in self.blocks)

    def measure(self, setting: Setting, kind: BlockKind, stage: Stage, why: str) -> Block:
        """Measure one block.

        A setting that may not be tried is not: its block says why, and does not count.

        Raises:
            SearchEndedError: it takes longer than is left.
            ConfigError: the earlier session measured something else.
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
        ram_bytes, vram_bytes = self.memory.ram(setting).expected_bytes, self.memory.vram_bytes(setting)
        rate = self.rates.expected(kind, setting)
        planned = PlannedBlock(len(self.entries), stage, setting, kind, why, rate, ram_bytes, vram_bytes, seconds)
        self._on_planned(planned)
        share = 2 if not self.blocks else 3 if setting.compile else 6
        limit_s = min(left_s, max(self.space.budget_s / share, 2 * self.space.block_s + 40.0))
        if len(self.blocks) < len(self._earlier):
            block = self._earlier[len(self.blocks)]
            if (block.setting, block.kind) != (setting, kind):
                words = f"a {block.kind} block of {in_words(block.setting, setting)} where this tune has a {kind} block"
                raise ConfigError(
                    "a ledger must have the same config, limits and options; got one with "
                    f"{words}; drop --resume to start over"
                )
        else:
            block = self._runner.measure(setting, kind, self.space.block_s, limit_s)
        if block.ended == "ok":
            need = self._need(setting, kind)
            self._besides_s[need] = max(self._besides_s.get(need, 0.0), block.seconds - block.measured_s)
        self.blocks.append(block)
        self.entries.append(Entry(planned, block))
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
        """What the readers can deliver over what the steps take; in turn where it is near the threshold.

        None where the readers could not be measured.
        """
        why, trainer = "what readers deliver and what steps take", self.rates.measured("step", setting)
        readers = self.rates.measured("readers", setting) or self.rate(setting, "readers", "readers", why)
        trainer = trainer or self.rate(setting, "step", "readers", why)
        if readers is None or trainer is None:
            return None
        if setting.workers == 0:  # reading and computing take turns
            return 1 / (1 + trainer / readers)
        enough = ENOUGH[self.space.goal]
        pairs = self._supplies.setdefault((reader_knobs(setting), trainer_knobs(setting)), [])
        if not pairs and not enough / _CLEAR < readers / trainer < enough * _CLEAR:
            return readers / trainer

        def is_settled(found: Comparison) -> bool:
            # Far within the interval, which is wider than is needed here: a wrong choice costs little.
            return found.high is not None and abs(1 + found.gain - enough) > 0.3 * (found.high - found.gain)

        found = self.in_turn((setting, "readers"), (setting, "step"), "readers", why, is_settled, SOME_PAIRS, pairs)
        return readers / trainer if found is None else 1 + found.gain

    def take(self, setting: Setting, why: str) -> None:
        """Make a setting the best, for a reason that holds for each knob that it changes."""
        self.because |= dict.fromkeys(setting.changes(self.best), why)
        self.best = setting

    def give_up(self, words: str, found: Comparison) -> None:
        """Drop a change; it stays undecided where it may gain what counts."""
        if found.gain >= SMALLEST_GAIN or (found.pairs > 1 and not found.is_below(LARGE_GAIN)):
            self.undecided.append(f"{words} was not decided: {found.text}")

    def gain(
        self,
        setting: Setting,
        kind: BlockKind,
        why: tuple[Stage, str],
        have: float,
        is_clear: Callable[[float], bool],
        most_pairs: int = MOST_PAIRS,
    ) -> Comparison | None:
        """Gain over the best and its rate of `have`: of one block where that is clear, else in turn.

        None where it failed.
        """
        best, (stage, words), last = (self.best, kind), why, self.blocks[-1]
        beside = last.rate if last in self.rates.of(kind, self.best) else None
        first = self.rate(setting, kind, stage, words)
        if first is None:
            return None
        if is_clear(first / have - 1):
            return Comparison(first / have - 1, None, None, 1)
        changes = in_words(setting, self.best)
        base = beside or self.rate(*best, stage, f"in turn: {changes}, pair 1")
        if base is None:
            return None
        return self.in_turn((setting, kind), best, stage, changes, most_pairs=most_pairs, pairs=[(first, base)])

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
        while True:
            found = compare(pairs) if pairs else None
            if found is not None:
                if one[1] == "step" and len(pairs) == 2 and all(a > (1 + AT_ONCE) * b for a, b in pairs):
                    return found
                affordable = self.expected_s(*one) + self.expected_s(*other) <= self.left_s
                if len(pairs) >= most_pairs or not affordable or (len(pairs) in LOOKS and is_settled(found)):
                    return found
            last = (self.blocks[-1].setting, self.blocks[-1].kind) if self.blocks else None
            rates = {
                each: self.rate(*each, stage, f"in turn: {why}, pair {len(pairs) + 1}")
                for each in ((other, one) if last == other else (one, other))
            }
            a, b = rates[one], rates[other]
            if a is None or b is None:
                return found
            pairs.append((a, b))


def at_least(readers: float) -> int:
    """The smallest number of readers to try that is at least this."""
    return next((count for count in _READER_COUNTS if count >= readers - 1e-9), math.ceil(readers))


def fewer_than(readers: int) -> list[int]:
    """The numbers of readers to try below this one, ascending."""
    return [count for count in _READER_COUNTS if count < readers]
