"""The state of a search: the next trial, the results so far, the best setting, the remaining budget.  Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal, TypeVar

from vesuvius.experiments.paired import LOOKS, MIN_PAIRS_TO_WRITE, MOST_PAIRS, Comparison, compare
from vesuvius.experiments.tune.measurement import (
    Knob,
    Planner,
    PredictedMemory,
    PredictedRates,
    Result,
    SearchSpace,
    Setting,
    TrialKind,
    in_words,
)
from vesuvius.runlog.units import format_duration

Stage = Literal["baseline", "reading", "steps", "delivery", "confirm"]
T = TypeVar("T")
Variant = tuple[Setting, TrialKind]
Pairs = list[tuple[float, float]]  # samples/s of two variants
Asks = Generator["Trial", Result, T]

SMALLEST_GAIN = 0.03
"""Smallest relative gain that is worth a change."""

KINDS: dict[TrialKind, str] = {"run": "full run", "reading": "reading alone", "step": "steps alone"}

_LARGE_GAIN = 0.10  # a change is dropped once it significantly gains less
# Two pairs that both differ by more suffice: for steps alone, for anything else.
STEP_SHORTCUT_GAIN, RUN_SHORTCUT_GAIN = 0.15, 0.5
# Assumed seconds of a trial in addition to measuring, by `_need`.
_ASSUMED_S = {(True, True): 40.0, (True, False): 20.0, (False, True): 10.0, (False, False): 10.0}
_COMPILE_S = 90.0  # assumed additional time of the first start that compiles
_LEAST_STEPS = 3


@dataclass(frozen=True)
class Trial:
    """The next measurement, its stage, and the reason."""

    setting: Setting
    kind: TrialKind
    stage: Stage
    why: str
    expected_s: float
    limit_s: float  # timeout


class Search:
    """A search: call `tell` with the result of its `trial` until `trial` is None.

    The policy is a generator that yields a `Trial` and is sent its `Result`.
    """

    def __init__(self, space: SearchSpace, planner: Planner, policy: Callable[[Search], Asks[None]]) -> None:
        self.space = space
        self.asked: list[Trial] = []  # all trials so far
        self.results: list[Result] = []  # their results
        self.memory = PredictedMemory(space, planner, self.results)
        self.rates = PredictedRates(self.results)
        self.base = self.best = space.source
        self.because: dict[Knob, str] = {}  # reason for each changed knob
        self.notes: list[tuple[Stage, str]] = []  # for each stage, the rejected settings and why it ended
        self.with_base: Pairs = []  # of full runs of the best and the base
        self.cut_short = ""  # why the search ended early; '' = it did not
        self.why_failed = ""  # why the last trial could not be measured
        self._overhead_s: dict[tuple[bool, bool], float] = {}  # longest time of a trial in addition to measuring
        self._script = policy(self)
        self.trial: Trial | None = next(self._script, None)  # to measure next; None = the search is over

    @property
    def left_s(self) -> float:
        return self.space.budget_s - math.fsum(result.seconds for result in self.results)

    def tell(self, result: Result) -> None:
        """Add the result of `trial`, and choose the next trial."""
        try:
            self.trial = self._script.send(result)
        except StopIteration:
            self.trial = None

    def measure(self, setting: Setting, kind: TrialKind, stage: Stage, why: str) -> Asks[Result | None]:
        """Measure one trial; None if it failed, may not be tried, or does not fit the budget: see `why_failed`."""
        if (obstacle := self.memory.obstacle(setting)) is not None:
            self.why_failed = f"{in_words(setting, self.base)}: {obstacle}"
            return None
        left_s, seconds, kept_s = self.left_s, self.expected_s(setting, kind), 0.0
        if stage not in ("baseline", "confirm") and self.best != self.base:
            # For the first look at pairs of full runs of the best and the baseline.
            kept_s = MIN_PAIRS_TO_WRITE * (self.expected_s(self.best, "run") + self.expected_s(self.base, "run"))
        if seconds + kept_s > left_s:
            kept = f", {format_duration(kept_s)} is reserved to confirm the result" if kept_s else ""
            self.cut_short = self.why_failed = (
                f"the budget was spent: {format_duration(max(left_s, 0))} of {format_duration(self.space.budget_s)} "
                f"is left after {len(self.results)} trials{kept}; the next one takes {format_duration(seconds)} ({why})"
            )
            return None
        share = 2 if not self.results else 3 if self.space.compiles(setting) else 6
        limit_s = min(left_s, max(self.space.budget_s / share, 2 * self.space.trial_s + 40.0))
        trial = Trial(setting, kind, stage, why, seconds, limit_s)
        result = yield trial
        need = self._need(setting, kind)
        self.results.append(result)
        self.asked.append(trial)
        if result.ended == "ok":
            self._overhead_s[need] = max(self._overhead_s.get(need, 0.0), result.seconds - result.measured_s)
            return result
        self.why_failed = result.failure
        if result.ended == "timeout" and limit_s == left_s:
            self.cut_short = f"the budget was spent: {self.why_failed}"
        return None

    def expected_s(self, setting: Setting, kind: TrialKind) -> float:
        """Expected seconds of a trial: starting a process or readers as long as it took so far, and measuring."""
        need = self._need(setting, kind)
        other_s = self._overhead_s.get(need, _ASSUMED_S[need])
        compiles = self.space.compiles
        if need[0] and compiles(setting) and not any(compiles(r.setting) for r in self.results):
            other_s += _COMPILE_S
        rate = self.rates.expected(kind, setting)
        return other_s + max(self.space.trial_s, _LEAST_STEPS * setting.global_batch / rate if rate else 0.0)

    def _need(self, setting: Setting, kind: TrialKind) -> tuple[bool, bool]:
        """Whether a trial needs a new process; and whether it is a full run, which first validates and saves."""
        last = self.results[-1] if self.results else None
        is_alive = last is not None and last.ended == "ok" and last.setting.of_trainer == setting.of_trainer
        return not is_alive, kind == "run"

    def in_turn(
        self, one: Variant, other: Variant, stage: Stage, most: int = MOST_PAIRS, pairs: Pairs | None = None
    ) -> Asks[Comparison | None]:
        """Measure two settings alternately until it is settled whether `one` is faster; None without a pair.

        Pairs are appended to `pairs`.  To confirm a result, all are new: the trial that chose a setting flatters it.
        """
        pairs, words = [] if pairs is None else pairs, in_words(one[0], other[0])
        shortcut = STEP_SHORTCUT_GAIN if one[1] == "step" else RUN_SHORTCUT_GAIN
        while True:
            gain = compare(pairs) if pairs else None
            if gain is not None:
                is_large = stage != "confirm" and len(pairs) == 2 and all(a > (1 + shortcut) * b for a, b in pairs)
                is_settled = len(pairs) in LOOKS and _is_gain_settled(gain)
                if is_large or is_settled or len(pairs) >= most:
                    return gain
            last = self.results[-1] if self.results else None
            at = (last.setting, last.kind) if last and last.ended == "ok" else None
            is_half = last and not pairs and at in (one, other) and stage != "confirm"  # of the first pair
            rates = {at: last.rate} if last and is_half else {}
            for each in (other, one) if at == other else (one, other):
                if each not in rates:
                    result = yield from self.measure(*each, stage, f"pair {len(pairs) + 1}: {words}")
                    if result is None:
                        return gain
                    rates[each] = result.rate
            pairs.append((rates[one], rates[other]))

    def gain(
        self, one: Variant, stage: Stage, why: str, have: float, near: tuple[float, float], most: int
    ) -> Asks[Comparison | None]:
        """The gain over the best, which has a rate of `have`; None = the measurement failed.

        One trial is enough unless its gain is in the range `near`; then up to `most` pairs are measured.
        """
        first = yield from self.measure(*one, stage, why)
        if first is None:
            return None
        gain = first.rate / have - 1
        if not near[0] <= gain <= near[1]:
            return Comparison(gain, None, None, 1)
        return (yield from self.in_turn(one, (self.best, one[1]), stage, most))

    def supply(self) -> float:
        """Rate of the best setting's readers over that of its steps, measured or predicted."""
        readers, trainer = self.rates.expected("reading", self.best), self.trainer_rate()
        assert readers is not None  # the baseline was measured
        # Without readers, reading and computing alternate.
        return readers / trainer if self.best.workers else 1 / (1 + trainer / readers)

    def trainer_rate(self) -> float:
        """Samples/s of the best setting's steps alone."""
        rate = self.rates.measured("step", self.best)
        assert rate is not None  # only measured settings become the best
        return rate

    def note(self, stage: Stage, words: str) -> None:
        self.notes.append((stage, words))

    def take(self, setting: Setting, why: str) -> None:
        """Make a setting the best; the reason applies to each changed knob."""
        self.because |= dict.fromkeys(setting.changes(self.best), why)
        self.best = setting

    def adopt(self, setting: Setting, gain: Comparison | None, stage: Stage, measured: str, shortcut: float) -> bool:
        """Take a setting that is significantly faster, or faster by more than `shortcut`; else note why not."""
        if gain is None:
            self.note(stage, f"{in_words(setting, self.best)} rejected: {self.why_failed}")
            return False
        is_faster = gain.is_above(0.0) or (gain.low is None and gain.gain > shortcut)
        if gain.gain >= SMALLEST_GAIN and is_faster:
            self.take(setting, f"{measured}: {gain.text}")
            return True
        may_gain = gain.gain >= SMALLEST_GAIN or (gain.pairs > 1 and not gain.is_below(_LARGE_GAIN))
        more = "; a larger --budget may decide it" if may_gain else ""
        self.note(stage, f"{in_words(setting, self.best)} rejected: {gain.text}{more}")
        return False

    def words(self) -> str:
        """`reading alone delivers 12 samples/s, the trainer alone takes 20`."""
        have = self.rates.measured("reading", self.best) or 0.0
        return f"reading alone delivers {have:.3g} samples/s, the trainer alone takes {self.trainer_rate():.3g}"


def _is_gain_settled(gain: Comparison) -> bool:
    """Whether a costlier setting is significantly faster, or its gain is too small and a large gain is excluded."""
    if gain.is_above(0.0) or gain.is_below(SMALLEST_GAIN):
        return True
    return (gain.gain < 0 or (gain.pairs >= 6 and gain.gain < SMALLEST_GAIN)) and gain.is_below(_LARGE_GAIN)
