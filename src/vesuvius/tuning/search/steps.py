"""The third stage: faster steps by larger micro-batches and by switches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vesuvius.tuning.measurement import Knob, Setting, in_words, trainer_knobs
from vesuvius.tuning.search.search import AT_ONCE, SMALLEST_GAIN, Search, Stage, percent

_ON_GPU: tuple[tuple[Knob, Any, str], ...] = (
    ("amp", "auto", "half the bytes per value, and tensor cores; values are rounded to 16 bits"),
    ("channels_last", True, "the memory order preferred by cuDNN"),
    ("compile", True, "fewer and larger kernels"),
    ("cudnn_benchmark", True, "cuDNN selects its fastest kernels"),
    ("checkpoint_levels", (), "no recomputation"),
)
_ON_CPU = tuple(switch for switch in _ON_GPU if switch[0] in ("compile", "channels_last"))
_LOST_AT_ONCE = 0.05  # steps alone that are slower than this need no second pair
_COMPILE_SHARE = 0.15  # of the budget that the first compilation may take
_MOST_LEVELS = 2  # the highest resolutions take nearly all of the memory


def raise_steps(search: Search) -> bool:
    """Try larger micro-batches and switches where a faster step can gain; returns whether one did."""
    readers, trainer = search.rates.measured_readers(search.best) or 0.0, search.trainer_rate()
    cores_bound = search.rates.cores_limit(search.best) < 0.9 * min(readers, trainer)
    supply = readers / trainer if search.best.workers == 0 else search.supply(search.best) or 0.0
    if supply < 1 and not cores_bound:
        words = f"not entered: readers deliver {readers:.3g} samples/s at most, a faster step would only wait longer"
        search.ended["batch"] = search.ended["switches"] = words
        return False
    before = search.best
    _larger_batches(search)
    _switches(search)
    if trainer_knobs(search.best) != trainer_knobs(before) and search.ended["batch"].startswith("cap"):
        _larger_batches(search)
    if search.space.on_gpu and search.ended["batch"].startswith("cap"):
        _recompute_for_batch(search)
    return trainer_knobs(search.best) != trainer_knobs(before)


def _larger_batches(search: Search) -> None:
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
        gain = _step_gain(search, setting, "batch", f"{in_words(setting, search.best)}: fewer and larger micro-batches")
        if gain is None or gain < SMALLEST_GAIN:
            what = search.why_failed if gain is None else f"{percent(gain)} by {in_words(setting, search.best)}"
            search.ended["batch"] = f"{'cap' if gain is None else 'knee'}: {what}"
            return
        search.note(search.best, setting, f"{percent(gain)} samples/s of the steps alone")
        search.best = setting


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
            seen.append(_one_switch(search, setting, knob, f"{words}: {why}"))
        search.ended["switches"] = "; ".join(seen)
    search.ended.setdefault("switches", "every switch is set already")


def _one_switch(search: Search, setting: Setting, knob: Knob, why: str) -> str:
    words, before = in_words(setting, search.best), search.best
    gain = _step_gain(search, setting, "switches", why)
    if gain is None:
        return f"{words} not taken: {search.why_failed}"
    if gain < SMALLEST_GAIN:
        return f"{words} not taken ({percent(gain)})"
    search.note(before, setting, f"{percent(gain)} samples/s of the steps alone")
    search.best = setting
    return f"{words} taken ({percent(gain)})"


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
            gain = _step_gain(search, setting, "batch", "recomputed levels make room for a larger micro-batch")
            if gain is not None and gain >= SMALLEST_GAIN:
                search.note(search.best, setting, f"together {percent(gain)} samples/s of the steps alone")
                search.best = setting
            return


def _step_gain(search: Search, setting: Setting, stage: Stage, why: str) -> float | None:
    """Gain of the steps alone over the best; in turn with it where one block cannot tell.  None where it failed.

    A setting that costs more has to show its gain; one that shows none after three pairs is given up.
    """
    last = search.blocks[-1]
    beside = (last.kind, last.ended) == ("step", "ok") and trainer_knobs(last.setting) == trainer_knobs(search.best)
    first = search.rate(setting, "step", stage, why)
    if first is None:
        return None
    again = f"in turn: {in_words(setting, search.best)}"
    base = last.rate if beside else search.rate(search.best, "step", stage, again)
    if base is None:
        return None
    if first < (1 - _LOST_AT_ONCE) * base:
        return first / base - 1
    words = in_words(setting, search.best)
    found = search.in_turn((setting, "step"), (search.best, "step"), stage, words, pairs=[(first, base)])
    if found is None:
        return None
    if not (found.is_above(0.0) or found.gain < SMALLEST_GAIN or found.gain > AT_ONCE):
        search.undecided.append(
            f"{in_words(setting, search.best)} was not decided: {percent(found.gain)} in {found.pairs} pairs"
        )
        return 0.0
    return found.gain
