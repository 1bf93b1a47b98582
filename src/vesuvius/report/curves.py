"""Curves of a report: many figures as a few hundred points, each with the least and the most that it stands for.

A spike of one step stays visible in a run of 100,000.  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vesuvius.report.records import Column

POINTS = 240


@dataclass(frozen=True)
class Series:
    """A curve with its band; arrays of equal length, finite, in order of `x`."""

    label: str
    x: Column
    low: Column
    mid: Column
    high: Column


@dataclass(frozen=True)
class Chart:
    """A picture."""

    key: str  # by which the same picture of other runs is found
    title: str
    unit: str
    series: tuple[Series, ...]
    x_label: str = "step"
    stacked: bool = False  # the areas of the series lie on one another, and have no bands
    limits: tuple[tuple[str, float], ...] = ()  # horizontal lines, each with its name
    log: bool = False  # a logarithmic axis, where all values are above 0
    note: str = ""


def banded(
    label: str,
    x: ArrayLike,
    mid: ArrayLike,
    low: ArrayLike | None = None,
    high: ArrayLike | None = None,
    points: int = POINTS,
) -> Series | None:
    """A series of at most so many points; None where no value is finite.

    Args:
        mid: values; of several, the mean is drawn.
        low, high: what each value ranges over, if it is itself a mean.
    """
    xs, mids = np.asarray(x, dtype=float), np.asarray(mid, dtype=float)
    lows = mids if low is None else np.asarray(low, dtype=float)
    highs = mids if high is None else np.asarray(high, dtype=float)
    known = np.isfinite(xs) & np.isfinite(mids) & np.isfinite(lows) & np.isfinite(highs)
    if not known.any():
        return None
    xs, mids, lows, highs = (each[known] for each in (xs, mids, lows, highs))
    starts = _starts(len(xs), points)
    return Series(
        label,
        _means(xs, starts),
        np.minimum.reduceat(lows, starts),
        _means(mids, starts),
        np.maximum.reduceat(highs, starts),
    )


def layers(labels: Sequence[str], x: Column, parts: Sequence[Column]) -> tuple[Series, ...]:
    """Parts of a whole in the same points, for a stack; where one is not known, none is.  Empty without points."""
    known = np.isfinite(x) & np.isfinite(np.sum(parts, axis=0))
    if not known.any():
        return ()
    made = (banded(label, x[known], part[known]) for label, part in zip(labels, parts, strict=True))
    return tuple(series for series in made if series is not None)


def thinned(chart: Chart, points: int) -> Chart:
    """The chart with at most so many points in each curve; spikes stay."""
    if all(len(each.x) <= points for each in chart.series):
        return chart
    fewer = (banded(each.label, each.x, each.mid, each.low, each.high, points) for each in chart.series)
    return replace(chart, series=tuple(each for each in fewer if each is not None))


def chart(key: str, title: str, unit: str, series: Sequence[Series | None], **more: object) -> list[Chart]:
    """A chart of those series that there are, or none."""
    there = tuple(each for each in series if each is not None)
    return [Chart(key, title, unit, there, **more)] if there else []  # type: ignore[arg-type]


def wants_log(series: Sequence[Series | None]) -> bool:
    """Whether the values span more than a factor of 20, and none is 0 or below."""
    there = [each for each in series if each is not None]
    if not there or min(each.low.min() for each in there) <= 0:
        return False
    return bool(max(each.mid.max() for each in there) > 20 * min(each.mid.min() for each in there))


def _starts(count: int, points: int) -> NDArray[np.intp]:
    """Where each of at most `points` runs of neighbours begins."""
    return np.unique(np.linspace(0, count, min(count, points), endpoint=False).astype(np.intp))


def _means(values: Column, starts: NDArray[np.intp]) -> Column:
    sizes = np.diff(np.append(starts, len(values)))
    means: Column = np.add.reduceat(values, starts) / sizes
    return means
