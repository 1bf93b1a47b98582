"""Predicts the memory of a setting from the planner and from measured settings.  Pure.

The planner knows which parts grow with a knob, but may be off by half in the amount.  Trials that differ in one knob
only lie on a straight line over the planned bytes; its slope holds for that knob only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vesuvius.tuning.setting import Knob, Setting

STEEPEST = 1.5
"""Assumed growth per planned byte before the knob's own line is known."""

_SHALLOWEST = 0.5  # assumed saving per byte that the planner saves
_SAME_SIZE = 0.01  # sizes closer than this, relative to the larger, do not determine a slope
_SPREAD = 0.01  # relative spread of the peaks of one setting
_STEEPER = 1.1  # safety factor on a slope from two or three sizes


@dataclass(frozen=True)
class Point:
    """A setting with its planned and its measured peak."""

    setting: Setting
    planned_bytes: int
    measured_bytes: int


@dataclass(frozen=True)
class Size:
    """The predicted memory of a setting.

    Attributes:
        expected_bytes: the best estimate.
        most_bytes: a safe upper bound; no trial starts if it exceeds a limit.
        sizes: distinct measured sizes on the line; 0 = planner only.
    """

    expected_bytes: int
    most_bytes: int
    sizes: int


def predict_size(setting: Setting, planned_bytes: int, points: Sequence[Point]) -> Size:
    """Predict the memory of a setting.

    - Measured before: its measured peak.
    - Three or more sizes on a line: least squares plus the largest residual, and at least the peak of a smaller plan.
      With exactly three, growth beyond them counts a tenth more.
    - Two sizes: their slope, at least 1.
    - One size: the planned growth, scaled by the planner's error there.
    - None: the plan.
    """
    same = [point.measured_bytes for point in points if point.setting == setting]
    if same:
        return Size(max(same), max(same), len(_distinct(points)))
    if not points:
        return Size(planned_bytes, planned_bytes, 0)
    size = _predicted(setting, planned_bytes, points)
    return Size(size.expected_bytes, int((1 + _SPREAD) * size.most_bytes), size.sizes)


def _predicted(setting: Setting, planned_bytes: int, points: Sequence[Point]) -> Size:
    line = max((_distinct(line) for line in _lines(setting, points)), key=len, default=[])
    if len(line) >= 3:
        expected = _fitted(planned_bytes, line)
        growth = max(expected - _fitted(line[-1].planned_bytes, line), 0)  # beyond the largest
        more = int((_STEEPER - 1) * growth) if len(line) == 3 else 0
        return Size(expected, expected + more, len(line))
    if len(line) == 2:
        return _along(planned_bytes, line)
    return _from_one(planned_bytes, _nearest(setting, planned_bytes, points))


def groups_apart(one: Setting, other: Setting) -> frozenset[str]:
    """Return the knobs in which two settings differ; micro-batch and accumulation count as one."""
    changes: set[Knob] = set(one.changes(other))
    return frozenset("batch" if knob in ("train_batch_size", "accumulate_steps") else knob for knob in changes)


def _lines(setting: Setting, points: Sequence[Point]) -> list[list[Point]]:
    by_group: dict[str, list[Point]] = {}
    for point in points:
        apart = groups_apart(setting, point.setting)
        if len(apart) == 1:
            by_group.setdefault(next(iter(apart)), []).append(point)
    return list(by_group.values())


def _distinct(points: Sequence[Point]) -> list[Point]:
    """Sort by planned bytes; of equal sizes keep the one with the largest measured peak."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.planned_bytes, p.measured_bytes)):
        if kept and point.planned_bytes - kept[-1].planned_bytes <= _SAME_SIZE * point.planned_bytes:
            if point.measured_bytes > kept[-1].measured_bytes:
                kept[-1] = point
        else:
            kept.append(point)
    return kept


def _fitted(planned_bytes: int, line: Sequence[Point]) -> int:
    xs, ys = [p.planned_bytes for p in line], [p.measured_bytes for p in line]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    above = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    slope = max(above / sum((x - mean_x) ** 2 for x in xs), 0.0)
    residual = max(y - mean_y - slope * (x - mean_x) for x, y in zip(xs, ys, strict=True))
    smaller = max((y for x, y in zip(xs, ys, strict=True) if x <= planned_bytes), default=0)
    return int(max(mean_y + slope * (planned_bytes - mean_x) + residual, smaller))


def _along(planned_bytes: int, line: Sequence[Point]) -> Size:
    low, high = line
    seen = (high.measured_bytes - low.measured_bytes) / (high.planned_bytes - low.planned_bytes)
    if planned_bytes < low.planned_bytes:
        return _from_one(planned_bytes, low)
    if planned_bytes <= high.planned_bytes:
        between = low.measured_bytes + max(seen, 0.0) * (planned_bytes - low.planned_bytes)
        return Size(int(between), max(low.measured_bytes, high.measured_bytes), 2)
    growth, slope = planned_bytes - high.planned_bytes, max(seen, 1.0)
    top = max(low.measured_bytes, high.measured_bytes)
    return Size(int(top + slope * growth), int(top + _STEEPER * slope * growth), 2)


def _nearest(setting: Setting, planned_bytes: int, points: Sequence[Point]) -> Point:
    """Return the point that differs in the fewest knobs, then the nearest by planned bytes."""
    return min(
        points,
        key=lambda p: (len(groups_apart(setting, p.setting)), abs(p.planned_bytes - planned_bytes), p.planned_bytes),
    )


def _from_one(planned_bytes: int, point: Point) -> Size:
    growth, off = planned_bytes - point.planned_bytes, point.measured_bytes / point.planned_bytes
    if growth < 0:
        expected = int(point.measured_bytes + min(off, STEEPEST) * growth)
        return Size(expected, max(expected, int(point.measured_bytes + _SHALLOWEST * growth)), 1)
    expected = int(point.measured_bytes + min(max(off, 1.0), STEEPEST) * growth)
    return Size(expected, int(point.measured_bytes + STEEPEST * growth), 1)
