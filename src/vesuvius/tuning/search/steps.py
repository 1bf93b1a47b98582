"""The third stage: faster steps by larger micro-batches and by switches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vesuvius.tuning.measurement import Knob, Setting, in_words, trainer_knobs
from vesuvius.tuning.search.pairs import Comparison
from vesuvius.tuning.search.search import AT_ONCE, SMALLEST_GAIN, SURE, Search, Stage

_ON_GPU: tuple[tuple[Knob, Any, str], ...] = (
    ("amp", "auto", "half the bytes per value, and tensor cores; values are rounded to 16 bits"),
    ("channels_last", True, "the memory order preferred by cuDNN"),
    ("compile", True, "fewer and larger kernels"),
    ("cudnn_benchmark", True, "cuDNN selects its fastest kernels"),
    ("checkpoint_levels", (), "no recomputation"),
)
_ON_CPU = tuple(switch for switch in _ON_GPU if switch[0] in ("compile", "channels_last"))
_COMPILE_SHARE = 0.15  # of the budget that the first compilation may take
_MOST_LEVELS = 2  # the highest resolutions take nearly all of the memory


def raise_steps(search: Search) -> bool:
    """Try larger micro-batches and switches where a faster step can gain; returns whether readers may be slow again."""
    readers, trainer = search.rates.measured("readers", search.best) or 0.0, search.trainer_rate()
    cores_bound = search.rates.cores_limit(search.best) < 0.9 * min(readers, trainer)
    supply = readers / trainer if search.best.workers == 0 else search.supply(search.best) or 0.0
    before = search.best
    if supply < 1 and not cores_bound:
        words = f"not entered: readers deliver {readers:.3g} samples/s at most, a faster step would only wait longer"
        search.ended["batch"] = search.ended["switches"] = words
        larger = _larger_batch(search, before)
        if not search.space.on_gpu and larger and 4 * search.expected_s(larger, "step") < search.left_s / 2:
            _larger_batches(search, "; what the trainer does not use of the cores is left to the readers")
        return False
    _larger_batches(search)
    _switches(search)
    if trainer_knobs(search.best) != trainer_knobs(before) and search.ended["batch"].startswith("cap"):
        _larger_batches(search)
    if search.space.on_gpu and search.ended["batch"].startswith("cap"):
        _recompute_for_batch(search)
    return trainer_knobs(search.best) != trainer_knobs(before)


def _larger_batches(search: Search, besides: str = "") -> None:
    while True:
        setting = _larger_batch(search, search.best)
        if setting is None:
            search.ended["batch"] = _largest_words(search)
            return
        obstacle = search.memory.obstacle(setting)
        if obstacle is not None:
            search.ended["batch"] = f"cap: train_batch_size {search.best.train_batch_size}: {obstacle}"
            return
        if search.rates.of("step", setting):
            return
        found, words = _try(search, setting, "batch", "fewer and larger micro-batches", besides)
        if search.best != setting:
            search.ended["batch"] = f"{'cap' if found is None else 'knee'}: {words}"
            return


def _try(search: Search, setting: Setting, stage: Stage, why: str, besides: str = "") -> tuple[Comparison | None, str]:
    """Take a setting whose steps alone are faster; returns the gain, None where it failed, and what came of it."""
    words, rate = in_words(setting, search.best), search.trainer_rate()

    def is_clear(gain: float) -> bool:
        return gain < -AT_ONCE or gain > SURE

    found = search.gain(setting, "step", (stage, f"{words}: {why}"), rate, is_clear)
    if found is None:
        return None, f"{words} not taken: {search.why_failed}"
    if found.gain < SMALLEST_GAIN or not (found.is_above(0.0) or found.gain > AT_ONCE):
        search.give_up(words, found)
        return found, f"{words} not taken: {found.text}"
    search.take(setting, f"steps alone: {found.text}{besides}")
    return found, f"{words} taken: {found.text}"


def _largest_words(search: Search) -> str:
    if search.best.global_batch == 1 and not search.space.scale_batch:
        return (
            "cap: the effective batch is 1; larger micro-batches need `--scale-batch` or a larger "
            "training.accumulate_steps in the config"
        )
    return f"cap: train_batch_size {search.best.train_batch_size}: no larger one is allowed"


def _larger_batch(search: Search, setting: Setting) -> Setting | None:
    """The next micro-batch of at least twice the size that divides the effective batch, or lets it grow."""
    total = setting.global_batch
    for batch in range(2 * setting.train_batch_size, search.space.most_batch + 1):
        if batch <= total and total % batch == 0:
            return replace(setting, train_batch_size=batch, accumulate_steps=total // batch)
        if batch > total and search.space.scale_batch:
            return replace(setting, train_batch_size=batch, accumulate_steps=1)
    if setting.train_batch_size < total <= search.space.most_batch:
        return replace(setting, train_batch_size=total, accumulate_steps=1)
    return None


def _switches(search: Search) -> None:
    seen = []
    for knob, value, why in _ON_GPU if search.space.on_gpu else _ON_CPU:
        if getattr(search.best, knob) == value or not _is_free(search, knob):
            continue
        change: dict[str, Any] = {knob: value}
        setting = replace(search.best, **change)
        words, obstacle = in_words(setting, search.best), search.memory.obstacle(setting)
        if obstacle is not None:
            seen.append(f"{words} not tried: {obstacle}")
        elif knob == "compile" and search.expected_s(setting, "step") > _COMPILE_SHARE * search.space.budget_s:
            seen.append(f"{words} not tried: compiling would take {_COMPILE_SHARE:.0%} of the budget or more")
        else:
            seen.append(_try(search, setting, "switches", why)[1])
        search.ended["switches"] = "; ".join(seen)
    search.ended.setdefault("switches", "every switch is set already")


def _is_free(search: Search, knob: Knob) -> bool:
    """Whether a switch may be changed: an explicit amp format stays, and deterministic runs stay deterministic."""
    if knob == "amp":
        return search.space.source.amp == "off"
    return knob != "cudnn_benchmark" or not search.space.deterministic


def _recompute_for_batch(search: Search) -> None:
    """Checkpoint levels if only that lets larger micro-batches fit and the largest of these gains."""
    larger = _larger_batch(search, search.best)
    if search.best.checkpoint_levels or larger is None or search.memory.obstacle(larger) is None:
        return
    for count in range(1, min(_MOST_LEVELS, len(search.space.levels)) + 1):
        setting = replace(larger, checkpoint_levels=search.space.levels[:count])
        if search.memory.obstacle(setting) is None:
            while (more := _larger_batch(search, setting)) is not None and search.memory.obstacle(more) is None:
                setting = more
            _try(search, setting, "batch", "recomputed levels make room for a larger micro-batch")
            return
