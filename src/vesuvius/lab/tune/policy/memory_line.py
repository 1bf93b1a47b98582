"""How much memory a setting takes, from what the planner says and what was measured near it.  Pure.

The planner knows what grows with a knob, not how much of it: parts of it may be off by half.  Trials that differ from
the setting in one knob alone lie on a straight line over the planner's bytes, whose slope holds for that knob only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vesuvius.lab.tune.terms.setting import Knob, Setting

STEEPEST = 1.5
"""What a part may grow by for each byte that the planner has for it, before the knob's own line is known."""

_SHALLOWEST = 0.5  # what at least is saved for each byte that the planner saves
_SAME_SIZE = 0.01  # sizes that lie closer, relative to the larger, say nothing about a slope
_SPREAD = 0.01  # peaks of the same setting differ by that much
_STEEPER = 1.1  # two sizes give a slope without a proof, three a weak one


@dataclass(frozen=True)
class Point:
    """A setting with what was planned and what was measured at its peak."""

    setting: Setting
    planned_bytes: int
    measured_bytes: int


@dataclass(frozen=True)
class Size:
    """What a setting takes.

    Attributes:
        expected_bytes: the best guess.
        most_bytes: on the safe side; no trial starts where this is beyond a limit.
        sizes: distinct measured sizes on the line; 0 = the plan alone.
    """

    expected_bytes: int
    most_bytes: int
    sizes: int


def predict_size(setting: Setting, planned_bytes: int, points: Sequence[Point]) -> Size:
    """The memory of a setting.

    A setting that was measured takes what it took.  With three sizes on a line: least squares, plus the largest
    residual, and no less than a smaller plan has taken; of just three, what lies beyond them counts a tenth more.  With
    two: their slope, or 1 if that is more.  With one: the planner's growth, scaled as the planner was off there.
    Without: the plan.
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
    """The knobs in which two settings differ; micro-batch and accumulation count as one."""
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
    """In the order of the plan, of sizes that are the same the one that took most."""
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
    """Differing in the fewest knobs, then by the plan."""
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
