"""Samples a second of a setting that was not tried: a roofline through the nearest one that was.  Pure.

Readers, trainer and processors each allow a rate, and the smallest holds.  What the roofline misses (bursts, cores that
are shared) is taken over from the nearest trial as a factor, so that predictions pass through what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace

from vesuvius.lab.tune.terms.known import Known
from vesuvius.lab.tune.terms.setting import Setting
from vesuvius.lab.tune.terms.trial import Measured

_OTHER_SWITCH = 8.0  # doublings of a number that count as much as one switch: its effect is not known beforehand


def predict_rate(setting: Setting, known: Known, cores: float) -> float | None:
    """Samples a second; None where no trial ended well.

    Args:
        cores: processors that the run may use.
    """
    base = nearest(setting, known.settings)
    if base is None:
        return None
    between = _between(setting, known)
    if between is not None:
        return between
    measured = known.measured(base)
    faster = _speed_up(setting.train_batch_size, base, known)
    return measured.samples_s * (
        _roofline(setting, base, measured, faster, cores) / _roofline(base, base, measured, 1.0, cores)
    )


def readers_rate(setting: Setting, base: Setting, measured: Measured) -> float:
    """Samples a second that the readers of a setting can give, by what a trial of `base` measured."""
    if not measured.reader_s:
        return math.inf
    decode_s = min(measured.decode_s or 0.0, measured.reader_s)
    waiting_s = (measured.reader_s - decode_s) * base.requests / setting.requests
    return max(setting.workers, 1) / (decode_s + waiting_s)


def nearest(setting: Setting, settings: Sequence[Setting]) -> Setting | None:
    """The one that differs least: in switches first, then in doublings of numbers; of equals the latest."""
    return min(reversed(settings), key=lambda other: _distance(setting, other), default=None)


def _distance(one: Setting, other: Setting) -> float:
    total = 0.0
    for field in fields(Setting):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name == "accumulate_steps" or a == b:
            continue  # goes with the micro-batch
        numbers = isinstance(a, int) and not isinstance(a, bool)
        total += abs(math.log2(max(a, 1) / max(b, 1))) if numbers else _OTHER_SWITCH
    return total


def _between(setting: Setting, known: Known) -> float | None:
    """Between fewer and more readers that were tried with all else the same: on the line between the nearest two."""
    line = {
        s.workers: known.rate(s).samples_s for s in known.settings if replace(s, workers=setting.workers) == setting
    }
    fewer, more = [w for w in line if w <= setting.workers], [w for w in line if w >= setting.workers]
    if not fewer or not more:
        return None
    low, high = max(fewer), min(more)
    share = (setting.workers - low) / (high - low) if high > low else 0.0
    return line[low] + share * (line[high] - line[low])


def _roofline(setting: Setting, base: Setting, measured: Measured, faster: float, cores: float) -> float:
    used = measured.cores_used
    processors = math.inf if not used else measured.samples_s * max(cores / used, 1.0)
    trainer = faster / measured.trainer_s if measured.trainer_s else math.inf
    rate = min(readers_rate(setting, base, measured), trainer, processors)
    return rate if math.isfinite(rate) else measured.samples_s


def _speed_up(batch: int, base: Setting, known: Known) -> float:
    """How many times faster the trainer gets with another micro-batch; 1 where no two were tried with equal switches.

    A sample takes a share for itself and one of what each micro-batch costs, by the two largest.
    """
    curves: dict[tuple[object, ...], dict[int, float]] = {}
    for other in known.settings:
        curves.setdefault(_switches(other), {})[other.train_batch_size] = known.measured(other).trainer_s
    own = curves[_switches(base)]
    curve = own if len(own) > 1 else max(curves.values(), key=len)
    if len(curve) < 2:
        return 1.0
    (x1, y1), (x2, y2) = sorted((1 / size, s) for size, s in curve.items())[:2]
    each = max((y2 - y1) / (x2 - x1), 0.0)

    def seconds(size: int) -> float:
        return curve.get(size, max(y1 + each * (1 / size - x1), y1 / 2))

    now_s, then_s = seconds(base.train_batch_size), seconds(batch)
    return now_s / then_s if now_s and then_s else 1.0


def _switches(setting: Setting) -> tuple[object, ...]:
    """Those that change how long a step takes; the allocator hardly does."""
    return setting.amp, setting.compile, setting.channels_last, setting.checkpoint_levels, setting.cudnn_benchmark
