"""A sequential test of two settings that are measured in turn.  Pure.

Blocks of A and B alternate (A B, B A, A B, ...), and a pair of neighbours gives one difference of log rates: what
drifts more slowly than a pair takes cancels.  The test may stop after each of several looks, so each has the level of
Pocock's boundary (S. J. Pocock, Biometrika 64, 191, 1977): all looks together are wrong in at most 5 % of the tests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LOOKS = {3: 8.68, 4: 5.32, 5: 4.27, 6: 3.77, 8: 3.31, 10: 3.09, 12: 2.96}
"""Pairs at a look, and Student's t there for a two-sided level of 0.013, Pocock's for seven looks."""

MOST_PAIRS = max(LOOKS)


@dataclass(frozen=True)
class Comparison:
    """How much faster A is than B: 0.1 = 10 %."""

    gain: float
    # low, high: 95 % confidence interval, also if the test stopped early; None with fewer than three pairs
    low: float | None
    high: float | None
    pairs: int  # of blocks, behind it

    @property
    def text(self) -> str:
        """`+4.2 % (95 %: -1.0 to +9.7 %, 4 pairs)`."""
        if self.low is None or self.high is None:
            blocks = "one block each" if self.pairs == 1 else f"{self.pairs} pairs"
            return f"{100 * self.gain:+.1f} % ({blocks}, no interval)"
        return f"{100 * self.gain:+.1f} % (95 %: {100 * self.low:+.1f} to {100 * self.high:+.1f} %, {self.pairs} pairs)"

    def is_above(self, gain: float) -> bool:
        """Whether A is surely faster by more than this."""
        return self.low is not None and self.low > gain

    def is_below(self, gain: float) -> bool:
        """Whether A is surely not faster by this."""
        return self.high is not None and self.high < gain


def compare(pairs: Sequence[tuple[float, float]]) -> Comparison:
    """Compare two settings by the rates of their pairs of blocks; between two looks, those up to the earlier one count.

    Args:
        pairs: samples/s of A and of B, at least one pair.
    """
    count = max((look for look in LOOKS if look <= len(pairs)), default=0)
    differences = [math.log(a / b) for a, b in pairs[: count or len(pairs)]]
    mean = math.fsum(differences) / len(differences)
    if not count:
        return Comparison(math.expm1(mean), None, None, len(pairs))
    variance = math.fsum((difference - mean) ** 2 for difference in differences) / (count - 1)
    half = LOOKS[count] * math.sqrt(variance / count)
    return Comparison(math.expm1(mean), math.expm1(mean - half), math.expm1(mean + half), count)
