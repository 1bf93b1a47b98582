"""A search under way: its blocks, the best setting so far, the budget that is left; and how it measures a block."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from vesuvius.runlog.units import format_duration
from vesuvius.tuning.block import DEADLY, Block, Kind
from vesuvius.tuning.lab import Lab
from vesuvius.tuning.search.memory import Memory, death_text
from vesuvius.tuning.search.pairs import LOOKS, MOST_PAIRS, Comparison, compare
from vesuvius.tuning.search.rates import Rates, trainer_knobs
from vesuvius.tuning.search.recommendation import SMALLEST_GAIN, Entry, Stage, Step
from vesuvius.tuning.setting import Knob, Setting, in_words
from vesuvius.tuning.space import Goal, Planner, Space

AT_ONCE = 0.15
"""Two pairs of steps alone that both differ by more need no third."""

ENOUGH: dict[Goal, float] = {"samples_s": 1.25, "cost": 1.05}
"""Readers must be able to deliver this multiple of the trainer's rate, because volumes and load vary."""

_LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # numbers of readers that are tried
_ASSUMED_S = {"restart": 20.0, "readers": 10.0, "validation": 10.0}  # what a block needs takes, until it is measured
_COMPILE_S = 90.0  # assumed additional time of the first restart that compiles
_LEAST_STEPS = 3


class SearchEndedError(Exception):
    """The search cannot go on: the budget is spent, or the baseline cannot be measured; the message says why."""


class Search:
    """A search under way.

    Args:
        lab: measures.
        on_step, on_block: told of each block before and after it is measured.

    Attributes:
        entries, blocks: all blocks so far.
        base: the setting of the baseline.
        best: the best setting so far.
        because: for each knob that was changed, why.
        ended: for each stage, why it ended.
        rivals: what was compared in turn with what, and what came of it.
        with_base: samples/s of the best and of the baseline, in turn.
        undecided: what was not decided, in words.
        why_failed: why the last block that failed did.
    """

    def __init__(
        self,
        lab: Lab,
        space: Space,
        planner: Planner,
        on_step: Callable[[Step], None] = lambda step: None,
        on_block: Callable[[Entry], None] = lambda entry: None,
    ) -> None:
        self.space = space
        self.planner = planner
        self.entries: list[Entry] = []
        self.blocks: list[Block] = []
        self.memory = Memory(space, planner, self.blocks)
        self.rates = Rates(self.blocks, space.cores)
        self.base = self.best = space.source
        self.because: dict[Knob, str] = {}
        self.ended: dict[Stage, str] = {}
        self.rivals: list[tuple[Setting, Setting, Comparison]] = []
        self.with_base: list[tuple[float, float]] = []
        self.undecided: list[str] = []
        self.why_failed = ""
        self._lab = lab
        self._on_step = on_step
        self._on_block = on_block

    @property
    def spent_s(self) -> float:
        """Seconds of all blocks."""
        return math.fsum(block.seconds for block in self.blocks)

    def measure(self, setting: Setting, kind: Kind, stage: Stage, why: str) -> Block:
        """Measure one block.

        A setting that may not be tried is not: its block says why, and does not count.

        Raises:
            SearchEndedError: it takes longer than is left.
        """
        if (obstacle := self.memory.obstacle(setting)) is not None:
            self.why_failed = f"{in_words(setting, self.space.source)}: {obstacle}"
            return Block(setting, kind, "failed", obstacle, 0.0)
        left_s, seconds = self.space.budget_s - self.spent_s, self.expected_s(setting, kind)
        if seconds > left_s:
            raise SearchEndedError(
                f"the budget was spent: {format_duration(max(left_s, 0))} of {format_duration(self.space.budget_s)} "
                f"are left after {len(self.blocks)} blocks, the next one takes {format_duration(seconds)} ({why})"
            )
        vram, rate = self.memory.vram(setting), self._expected_rate(setting, kind)
        step = Step(
            len(self.entries),
            stage,
            setting,
            kind,
            why,
            rate,
            self.memory.ram(setting).expected_bytes,
            None if vram is None else vram.expected_bytes,
            seconds,
        )
        self._on_step(step)
        share = 2 if not self.blocks else 3 if setting.compile else 6
        least_s = 2 * self.space.block_s + sum(_ASSUMED_S.values())
        limit_s = min(left_s, max(self.space.budget_s / share, least_s))
        block = self._lab.measure(setting, kind, self.space.block_s, limit_s)
        self.blocks.append(block)
        self.entries.append(Entry(step, block))
        self._on_block(self.entries[-1])
        if block.ended != "ok":
            self.why_failed = death_text(block)
            if block.ended == "timeout" and limit_s == left_s:
                raise SearchEndedError(f"the budget was spent: {self.why_failed}")
        return block

    def rate(self, setting: Setting, kind: Kind, stage: Stage, why: str) -> float | None:
        """Samples/s of a new block; None where it ended badly."""
        block = self.measure(setting, kind, stage, why)
        return block.rate if block.ended == "ok" and block.rate else None

    def _expected_rate(self, setting: Setting, kind: Kind) -> float | None:
        return {"run": self.rates.run, "readers": self.rates.readers, "step": self.rates.trainer}[kind](setting)

    def expected_s(self, setting: Setting, kind: Kind) -> float:
        """Seconds that a block takes: what has to be restarted or changed for it, and its measuring."""
        needs = _needs(self.blocks, setting, kind)
        known = [
            block.seconds - block.measured_s
            for number, block in enumerate(self.blocks)
            if block.ended == "ok" and _needs(self.blocks[:number], block.setting, block.kind) == needs
        ]
        other_s = max(known, default=math.fsum(_ASSUMED_S[need] for need in needs))
        if "restart" in needs and setting.compile and not any(b.setting.compile for b in self.blocks):
            other_s += _COMPILE_S
        rate = self._expected_rate(setting, kind)
        steps_s = _LEAST_STEPS * setting.global_batch / rate if rate else 0.0
        return other_s + max(self.space.block_s, steps_s)

    def readers_of(self, setting: Setting) -> float | None:
        return self.rates.measured_readers(setting) or self.rate(setting, "readers", "readers", "the readers alone")

    def trainer_rate(self) -> float:
        rate = self.rates.trainer(self.best)
        assert rate is not None  # only measured settings become the best
        return rate

    def target_rate(self) -> float:
        return ENOUGH[self.space.goal] * self.trainer_rate()

    def note(self, before: Setting, after: Setting, why: str) -> None:
        for knob in after.changes(before):
            self.because[knob] = why

    def pairs(
        self, one: Setting, other: Setting, kind: Kind, stage: Stage, pairs: list[tuple[float, float]] | None = None
    ) -> Comparison | None:
        """Measure two settings in turn until one is surely faster or a gain of `one` is not to be expected.

        Args:
            pairs: of earlier blocks; grows.

        Returns:
            None where one of them ended badly before there was a pair.
        """
        pairs = [] if pairs is None else pairs
        while True:
            found = compare(pairs) if pairs else None
            if kind == "step" and len(pairs) == 2 and all(a > (1 + AT_ONCE) * b for a, b in pairs):
                return found
            if found is not None and len(pairs) in LOOKS:
                decided = found.is_above(0.0) or found.is_below(SMALLEST_GAIN)
                if decided or found.gain < 0 or (len(pairs) >= 6 and found.gain < SMALLEST_GAIN):
                    return found
            if found is not None and (len(pairs) >= MOST_PAIRS or not self.affords_pair(one, other, kind)):
                return found
            order = (one, other) if self.blocks[-1].setting != other else (other, one)
            rates = {
                s: self.rate(s, kind, stage, f"in turn: {in_words(one, other)}, pair {len(pairs) + 1}") for s in order
            }
            a, b = rates[one], rates[other]
            if a is None or b is None:
                return found
            pairs.append((a, b))

    def affords_pair(self, one: Setting, other: Setting, kind: Kind) -> bool:
        """Whether the budget has room for another pair."""
        return self.expected_s(one, kind) + self.expected_s(other, kind) <= self.space.budget_s - self.spent_s

    def deaths(self) -> int:
        return sum(block.ended in DEADLY for block in self.blocks)


def _needs(before: Sequence[Block], setting: Setting, kind: Kind) -> frozenset[str]:
    """What a block needs besides measuring: a restart, other readers, or the first validation of a process."""
    process: list[Block] = []  # the blocks of the present process
    for block in before:
        if process and trainer_knobs(process[-1].setting) != trainer_knobs(block.setting):
            process.clear()
        process.append(block)
        if block.ended != "ok":
            process.clear()
    if process and trainer_knobs(process[-1].setting) != trainer_knobs(setting):
        process.clear()
    needs = set() if process else {"restart"}
    in_force = next((block.setting for block in reversed(process) if block.kind != "step"), None)
    if kind != "step" and in_force != setting:
        needs.add("readers")
    if kind == "run" and not any(block.kind == "run" for block in process):
        needs.add("validation")
    return frozenset(needs)


def ladder(least: float) -> int:
    """The smallest number of readers to try that is at least this."""
    return next((workers for workers in _LADDER if workers >= least - 1e-9), math.ceil(least))


def percent(gain: float) -> str:
    """`+4.2 %`."""
    return f"{100 * gain:+.1f} %"
