"""Samples a second of a trial, from the records of its steps, with an interval.  Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median, stdev
from typing import Any

import numpy as np

from vesuvius.lab.tune.trials.config import LEAST_SAID, Course

Record = Mapping[str, Any]

_CONFIDENCE = 0.95
# Steps of the shortest block, and how many times as long the others are.
_BLOCK_STEPS = 4
_BLOCK_TIMES = (1, 2, 4, 8)
_BLOCKS_LEAST = 5
_PERIODS_LEAST = 3
_SHORTEST = 0.1
# So much of a block may be missing in floating point.
_ROUNDED = 1e-9
# Computing is warm once it takes no longer than this many times its median; what is slow later is no warm-up.
_WARM_WITHIN = 1.5
_COLD_STEPS_MOST = 10


@dataclass(frozen=True)
class Rate:
    """Samples a second.

    Attributes:
        steps: that it is the mean of.
        samples_s: samples by the time at work: pauses are no part of it.
        low, high: 95 % confidence interval.
    """

    steps: int
    samples_s: float
    low: float
    high: float

    def is_narrow(self, half_width: float) -> bool:
        """Whether the interval is no wider than `half_width`, relative to the mean, to both sides.

        Never with fewer steps than blocks can be made of.
        """
        enough = self.steps >= _BLOCKS_LEAST * _BLOCK_STEPS
        return enough and (self.high - self.low) / 2 <= half_width * self.samples_s


def stretches_of(steps: Sequence[Record], course: Course) -> list[list[Record]]:
    """The measured steps of a run, in stretches of consecutive ones.

    Where computing is still slow behind the warm-up (a network that is compiled again for another shape), up to ten
    further steps are left out.  Waiting for data is not looked at: it comes in bursts, and a window that began right
    behind one would be too fast.

    Args:
        steps: the run's records of kind `step`, in order.
    """
    found: list[list[Record]] = [[]]
    for record in steps:
        if course.is_measured(record["step"]):
            found[-1].append(record)
        elif found[-1]:
            found.append([])
    found[0] = _warm(found[0])
    return [stretch for stretch in found if stretch]


def rate_of(stretches: Sequence[Sequence[Record]], samples: int, period: float | None = None) -> Rate | None:
    """The rate over measured steps; None where there are too few to say anything.

    Args:
        samples: of a step.
        period: as in `half_width_s`.
    """
    seconds = [[work_s(record) for record in stretch] for stretch in stretches]
    flat = [each for stretch in seconds for each in stretch]
    if len(flat) < LEAST_SAID:
        return None
    mean, half = fmean(flat), half_width_s(seconds, period)
    # The interval of a few steps may be wider than their mean.  They are no faster than the fastest one, and where
    # that one had no wait at all, ten times the mean is called the most.
    shortest = max(mean - half, _SHORTEST * mean, min(flat))
    return Rate(len(flat), samples / mean, samples / (mean + half), samples / shortest)


def half_width_s(stretches: Sequence[Sequence[float]], period: float | None = None) -> float:
    """Half of the 95 % confidence interval of a mean, by the means of blocks of consecutive values.

    Steps are not independent: data come in bursts, a task of many samples at a time, so that fast steps follow fast
    ones.  Each reader has a task in its turn, so what bursts there are repeat once all readers have delivered one: a
    block of whole periods holds as many fast steps as slow ones, while one that cuts a period varies by where it lies.
    Blocks longer than a period count what else is slow to change.  So the widest interval is taken over the lengths of
    which there are at least five blocks, or else that of the three or four shortest.  Where not even three periods
    fit, or nothing is known of them, the same is done with lengths of 4, 8, 16 and 32 steps; with too few values for
    that, each is a block.  For values that are independent the interval is a little too wide.

    Args:
        stretches: of consecutive values, at least 2 values in all; a block lies within one stretch.
        period: steps after which bursts repeat, a fraction of a step included; None = not known.
    """
    if period is not None:
        shortest = period * math.ceil(_BLOCK_STEPS / period)
        periodic = [_block_means(stretches, shortest * times) for times in _BLOCK_TIMES]
        enough = [means for means in periodic if len(means) >= _BLOCKS_LEAST]
        if enough or len(periodic[0]) >= _PERIODS_LEAST:
            return max(map(_half_width, enough or periodic[:1]))
    blocks = [_block_means(stretches, _BLOCK_STEPS * times) for times in _BLOCK_TIMES]
    halves = [_half_width(means) for means in blocks if len(means) >= _BLOCKS_LEAST]
    return max(halves) if halves else _half_width([each for stretch in stretches for each in stretch])


def student_t(freedom: int) -> float:
    """The quantile of Student's t that leaves 2.5 % above it, by its expansion around the normal distribution's.

    Within 0.3 % from 4 degrees of freedom on, 4 % too small with 2.  Abramowitz and Stegun, 26.7.5.
    """
    z = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def work_s(record: Record) -> float:
    """Seconds of a step without its pauses."""
    return float(record["step_s"] - record["pause_s"])


def _warm(stretch: Sequence[Record]) -> list[Record]:
    if len(stretch) <= LEAST_SAID:
        return list(stretch)
    own_s = [work_s(record) - record["data_s"] for record in stretch]
    slow = _WARM_WITHIN * median(own_s)
    most = min(_COLD_STEPS_MOST, len(stretch) // 2, len(stretch) - LEAST_SAID)
    cold = next((number for number in range(most) if own_s[number] <= slow), most)
    return list(stretch[cold:])


def _block_means(stretches: Iterable[Sequence[float]], steps: float) -> list[float]:
    """Of blocks of so many steps; of a step that two of them share each has its part."""
    means = []
    for stretch in stretches:
        ends = steps * np.arange(int(len(stretch) / steps + _ROUNDED) + 1)
        sums = np.interp(ends, np.arange(len(stretch) + 1), np.cumsum([0.0, *stretch]))
        means += [float(each) for each in np.diff(sums) / steps]
    return means


def _half_width(means: Sequence[float]) -> float:
    return student_t(len(means) - 1) * stdev(means) / math.sqrt(len(means))
