"""Medians with intervals, speeds of one cell over another, and bands of scaling.  Pure.

Cells are measured in rounds, each round in the reverse order of the one before.  The ratio of two cells is taken within
a round: what the machine does more slowly than a round cancels, and a steady drift has the other sign in the next one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vesuvius.monitor.quantile import quantile

_WANTED_LEVEL = 0.95
BANDS = ((0.90, "near-linear"), (0.75, "good"), (0.50, "acceptable"), (-math.inf, "poor"))
"""Least efficiency of each band, the best first: every efficiency is in one of them."""


@dataclass(frozen=True)
class Interval:
    """A median and two of the values as its confidence interval, which assumes nothing of their distribution."""

    mid: float
    low: float
    high: float
    level: float  # how often such an interval holds the true median; 0 of a single value
    count: int


def median_interval(values: Sequence[float]) -> Interval | None:
    """The narrowest interval of order statistics of at least 95 %, or all of the values where they are fewer than six.

    A value is below the true median with probability 1/2, so the number of them is binomial: the k-th lowest and the
    k-th highest hold the median between them with probability 1 - 2 P(fewer than k below).
    """
    if not values:
        return None
    ordered, count = sorted(values), len(values)
    outside, place, level = 0.0, 0, 0.0
    for k in range((count + 1) // 2):
        outside += math.comb(count, k) / 2**count
        if k and 1 - 2 * outside < _WANTED_LEVEL:
            break
        place, level = k, max(1 - 2 * outside, 0.0)
    return Interval(quantile(ordered, 0.5), ordered[place], ordered[-1 - place], level, count)


def band(efficiency: float) -> str:
    """The name of an efficiency of scaling, 1 = as fast per rank as one alone.

    Raises:
        ValueError: it is not a number.
    """
    if math.isnan(efficiency):
        raise ValueError("an efficiency must be a number; got NaN")
    return next(name for least, name in BANDS if efficiency >= least)


def bands(low: float, high: float) -> str:
    """The bands that an interval of efficiencies reaches: `good`, `poor to good`."""
    names = dict.fromkeys((band(low), band(high)))
    return " to ".join(names)


def break_even_step(start_s: float, samples_s: float, base_start_s: float, base_samples_s: float, batch: int) -> float:
    """Steps after which a cell is ahead of the baseline for good; 0 = at once, infinity = never.

    Args:
        start_s: seconds before the steady pace: start, compilation, warm-up beyond the steps' usual time.
        batch: samples of a step.
    """
    later_s, gained_s = start_s - base_start_s, 1 / base_samples_s - 1 / samples_s
    if later_s <= 0:
        return 0.0 if gained_s >= 0 else math.inf
    return later_s / gained_s / batch if gained_s > 0 else math.inf
