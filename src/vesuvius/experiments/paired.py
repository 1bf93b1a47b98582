"""Comparison of settings measured alternately: the mean difference of their log rates.  Pure.

Settings alternate (A B, B A, A B, ..., or all trials once a round, every other round in reverse), so drift that is slow
compared with a pair cancels in the difference of two neighbors.  The interval is Student's around the mean difference,
corrected for multiple tests: a tune may stop at each of several tests, so each test has the level of Pocock's boundary
(S. J. Pocock, Biometrika 64, 191, 1977); a bench divides its 5 % among the trials that it compares (Bonferroni).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.special import stdtrit

LOOKS = (3, 4, 5, 6, 8, 10, 12)
"""Pairs at which a sequential test may stop."""

MIN_PAIRS_TO_WRITE, MOST_PAIRS = min(LOOKS), max(LOOKS)
ALPHA = 0.05
"""Probability of a wrong result over all looks of a tune or all trials of a bench."""

_POCOCK = 0.0117  # level of each of the seven looks whose overall error is 5 %, by simulation


@dataclass(frozen=True)
class Comparison:
    """How much faster A is than B: 0.1 = 10 %."""

    gain: float
    # low, high: 95 % confidence interval, over all looks or all trials together; None with too few pairs
    low: float | None
    high: float | None
    pairs: int  # of measurements

    @property
    def ends(self) -> tuple[float, ...]:
        return () if self.low is None or self.high is None else (self.low, self.high)

    @property
    def text(self) -> str:
        """`+4.2 % (95 %: -1.0 to +9.7 %, 4 pairs)`."""
        pairs = "one trial each" if self.pairs == 1 else f"{self.pairs} pairs"
        ends = " to ".join(f"{100 * end:+.1f}" for end in self.ends)
        return f"{100 * self.gain:+.1f} % ({f'95 %: {ends} %, {pairs}' if ends else f'{pairs}, no interval'})"

    def is_above(self, gain: float) -> bool:
        """Whether A is significantly faster by more than `gain`."""
        return self.low is not None and self.low > gain

    def is_below(self, gain: float) -> bool:
        """Whether A is significantly less than `gain` faster."""
        return self.high is not None and self.high < gain


def compare(pairs: Sequence[tuple[float, float]]) -> Comparison:
    """Compare the samples/s of A and B in pairs, at least one, up to the last test (after 3, 4, 5, ... pairs)."""
    count = max((look for look in LOOKS if look <= len(pairs)), default=0)
    return _compare(pairs[: count or len(pairs)], _POCOCK)


def compare_one_of(pairs: Sequence[tuple[float, float]], trials: int) -> Comparison:
    """Compare two trials; `trials` = number of trials compared with the baseline (Bonferroni's correction)."""
    return _compare(pairs, ALPHA / max(trials, 1))


def _compare(pairs: Sequence[tuple[float, float]], level: float) -> Comparison:
    differences, count = [math.log(a / b) for a, b in pairs], len(pairs)
    mean = fmean(differences)
    if count < MIN_PAIRS_TO_WRITE:  # the interval of two pairs would span orders of magnitude
        return Comparison(math.expm1(mean), None, None, count)
    half = float(stdtrit(count - 1, 1 - level / 2)) * stdev(differences) / math.sqrt(count)
    return Comparison(math.expm1(mean), math.expm1(mean - half), math.expm1(min(mean + half, 700.0)), count)
