"""The stages of a tune between baseline and confirmation: enough readers, faster steps, no more readers than that."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from vesuvius.experiments.paired import Comparison
from vesuvius.experiments.tune.measurement import DEADLY, Knob, Setting, in_words, trainer_knobs
from vesuvius.experiments.tune.search import (
    AT_ONCE,
    ENOUGH,
    SMALLEST_GAIN,
    Search,
    Stage,
    at_least,
    fewer_than,
)

_KNEE = 0.08  # more readers or requests that raise R by less are not worth it
_MOSTLY = 0.8  # share of a reader's time that waits for the store from which on requests are raised fourfold
_NEAR = 0.25  # a gain this near to the knee is measured in turn
_MOST_DEATHS = 3  # after which readers are raised no more
_COMPILE_SHARE = 0.15  # of the budget that the first compilation may take
_ON_GPU: tuple[tuple[Knob, Any, str], ...] = (
    ("amp", "auto", "half the bytes per value, and tensor cores; values are rounded to 16 bits"),
    ("channels_last", True, "the memory order preferred by cuDNN"),
    ("compile", True, "fewer and larger kernels"),
    ("cudnn_benchmark", True, "cuDNN selects its fastest kernels"),
)
_ON_CPU = tuple(switch for switch in _ON_GPU if switch[0] == "compile")


# As many readers and requests as the trainer needs, and no more.


def feed(search: Search) -> None:
    """Raise readers and requests until they can deliver more than the trainer takes, or to a knee or a cap."""
    more_requests, hint = search.space.remote, _hint(search)
    while True:
        supply = search.supply(search.best)
        # Without readers, reading and computing take turns: there is no more to gain than the rest to 1.
        enough = ENOUGH if search.best.workers else 1 - SMALLEST_GAIN
        if supply is None or supply >= enough:
            search.ended["readers"] = search.why_failed if supply is None else f"readers suffice: {words_of(search)}"
            return
        setting, words = (
            (hint, "as the run's own verdict says") if hint else _more_readers(search, supply, more_requests)
        )
        hint = None
        if setting is None:
            search.ended["readers"] = words
            return
        is_requests = setting.requests != search.best.requests
        linear = max(setting.workers, 1) / max(search.best.workers, 1) - 1
        least = _KNEE if is_requests else max(SMALLEST_GAIN, min(_KNEE, linear / 2))
        rates = search.rates
        have = (rates.measured("readers", search.best) if search.best.workers else rates.limit(search.best)) or math.inf
        changes = in_words(setting, search.best)

        def is_clear(gain: float, least: float = least) -> bool:
            return search.best.workers == 0 or abs(gain - least) > _NEAR

        found = search.gain(setting, "readers", ("readers", f"{changes}: {words}"), have, is_clear, most_pairs=3)
        if found is None or found.gain < least:
            if is_requests:
                more_requests = False
                continue
            deaths = sum(block.ended in DEADLY for block in search.blocks)
            if found is None and search.blocks[-1].ended in DEADLY and deaths <= _MOST_DEATHS:
                continue  # what died bars all that is no smaller
            failed = f"cap: {search.why_failed}"
            search.ended["readers"] = failed if found is None else f"no gain from {changes}: {found.text}"
            return
        shorter = setting.prefetch_factor < search.best.prefetch_factor
        room = "; less prefetch makes room for them in memory" if shorter else ""
        search.take(
            setting,
            f"readers alone deliver {have * (1 + found.gain):.3g} samples/s instead of {have:.3g}; "
            f"the trainer takes {search.trainer_rate():.3g}{room}",
            found.pairs,
        )


def _hint(search: Search) -> Setting | None:
    """The readers that the run's own verdict asks for; None where it names none, or they may not be tried."""
    evidence, best = search.space.evidence, search.best
    if evidence is None or best != search.space.source:
        return None
    workers, requests = evidence.workers or best.workers, evidence.requests or best.requests
    wanted = replace(best, workers=min(workers, search.space.most_workers), requests=requests)
    is_more = wanted.workers >= best.workers and requests >= best.requests and wanted != best
    return wanted if is_more and search.memory.obstacle(wanted) is None else None


def _more_readers(search: Search, supply: float, more_requests: bool) -> tuple[Setting | None, str]:
    """More requests where readers mostly wait for the store, else more readers; and why, or why there are none."""
    best, space, why = search.best, search.space, words_of(search)
    waits = search.rates.waiting_share(best)
    if more_requests and waits > 0.5 and best.requests < space.most_requests:
        factor = 4 if waits > _MOSTLY else 2
        setting = replace(best, requests=min(factor * best.requests, space.most_requests))
        if search.memory.obstacle(setting) is None:
            return setting, why
    count = max(best.workers, 1)
    wanted = min(at_least(ENOUGH / supply * count), 4 * count, space.most_workers)
    obstacle = f"cap: workers {best.workers} of at most {space.most_workers}"
    half = max(best.prefetch_factor // 2, 1)
    died = any(block.ended in DEADLY for block in search.blocks)
    for prefetch in (best.prefetch_factor,) if half == best.prefetch_factor or died else (best.prefetch_factor, half):
        for workers in range(wanted, best.workers, -1):
            setting = replace(best, workers=workers, prefetch_factor=prefetch)
            found = search.memory.obstacle(setting)
            if found is None:
                return setting, why
            obstacle = f"cap: workers {best.workers}: {found}"
    return None, obstacle


def fewer_readers(search: Search) -> None:
    """Take the fewest readers that are enough for the trainer."""
    best, supply = search.best, search.supply(search.best)
    if supply is None or supply < ENOUGH or best.workers <= 1:
        return
    each = max(supply / best.workers, search.rates.per_reader(best) / search.trainer_rate())
    tries = [count for count in fewer_than(best.workers) if count >= 0.8 * ENOUGH / each]
    for setting in (replace(best, workers=count) for count in tries[:2]):
        if search.memory.obstacle(setting) is None and (search.supply(setting) or 0.0) >= ENOUGH:
            search.take(setting, f"fewer readers are enough: {words_of(search, setting)}", 1)
            return


def words_of(search: Search, setting: Setting | None = None) -> str:
    """`readers alone deliver 12 samples/s, the trainer alone takes 20`."""
    have = search.rates.measured("readers", setting or search.best) or 0.0
    return f"readers alone deliver {have:.3g} samples/s, the trainer alone takes {search.trainer_rate():.3g}"


# Faster steps: larger micro-batches, and switches.


def raise_steps(search: Search) -> bool:
    """Try larger micro-batches and switches where a faster step can gain; returns whether readers may be slow again."""
    readers, trainer = search.rates.measured("readers", search.best) or 0.0, search.trainer_rate()
    supply = readers / trainer if search.best.workers == 0 else search.supply(search.best) or 0.0
    before = search.best
    if supply < 1:
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
            search.ended["batch"] = f"{'cap' if found is None else 'no gain'}: {words}"
            return


def _try(search: Search, setting: Setting, stage: Stage, why: str, besides: str = "") -> tuple[Comparison | None, str]:
    """Take a setting whose steps alone are faster; returns the gain, None where it failed, and what came of it."""
    words, rate = in_words(setting, search.best), search.trainer_rate()
    found = search.gain(setting, "step", (stage, f"{words}: {why}"), rate, lambda gain: gain < -AT_ONCE)
    if found is None:
        return None, f"{words} not taken: {search.why_failed}"
    is_faster = found.is_above(0.0) or (found.low is None and found.gain > AT_ONCE)
    if found.gain < SMALLEST_GAIN or not is_faster:
        search.give_up(words, found)
        return found, f"{words} not taken: {found.text}"
    search.take(setting, f"steps alone: {found.text}{besides}", found.pairs)
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
