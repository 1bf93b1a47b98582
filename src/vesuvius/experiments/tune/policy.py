"""The policy of a tune: what to measure next, and what to recommend.  Pure.

Readers (capacity R) and steps (rate T) are measured separately, so that neither hides the other.  The bottleneck comes
first: readers and requests are raised until R exceeds T, then steps are made faster by larger micro-batches and
switches.  The result is confirmed by full runs that alternate with the baseline.  Each stage is a generator that yields
a `Trial` and is sent its `Result`: the same trials give the same decisions.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from vesuvius.experiments.paired import MOST_PAIRS, Comparison, compare
from vesuvius.experiments.tune.measurement import OOM_OUTCOMES, Knob, Setting, TrialKind, in_words
from vesuvius.experiments.tune.search import RUN_SHORTCUT_GAIN, SMALLEST_GAIN, STEP_SHORTCUT_GAIN, Asks, Search
from vesuvius.runlog.units import format_count

Certainty = Literal["sure", "likely", "unchanged", "none"]

_ENOUGH = 1.25  # readers have to deliver this multiple of the trainer's rate, since volumes and load vary
_KNEE = 0.08  # minimum gain in R of more readers, if their number rises by at least twice this
_NEAR = 0.25  # a gain this close to the minimum is measured in pairs
_MOST_DEATHS = 3  # after which readers are not raised further
_COMPILE_SHARE = 0.15  # of the budget that the first compilation may take
_WAITS = 0.05  # share of the time that a trainer with sufficient readers may wait
_FEW_READERS = 2
_MOST_RIVALS = 6


@dataclass(frozen=True)
class Recommendation:
    # "sure": `best` is significantly faster than the baseline.  "likely": the measurements say so, but not
    # significantly.  "unchanged": no change is worth it.  "none": nothing could be measured.
    certainty: Certainty
    best: Setting  # the recommended setting, which never ran out of memory
    written: Setting  # to the tuned config: `best` if it is sure, else the source
    reason: str  # why the tune ended
    reasons: dict[Knob, str]  # reason for each knob that differs from the source
    # of `best` over `base`, from pairs of full runs; None without pairs
    gain: Comparison | None
    predicted: float | None  # the same, predicted from readers and steps alone
    complete: bool  # whether neither the budget nor a signal ended it early


def conclude(search: Search, cut_short: str = "") -> Recommendation:
    """Return the recommendation from the trials so far; `cut_short` = why the tune ended early, '' = it did not."""
    base, best, cut_short = search.base, search.best, cut_short or search.cut_short
    gain = compare(search.with_base) if search.with_base else None
    rates = search.rates.expected("run", best), search.rates.expected("run", base)
    predicted = rates[0] / rates[1] - 1 if rates[0] and rates[1] else None
    obstacle = search.memory.obstacle(best)  # a later trial may have exceeded the memory
    certainty: Certainty = "likely"
    if best == base or obstacle or ((predicted or 0.0) if gain is None else gain.gain) < SMALLEST_GAIN:
        certainty = "unchanged"
    elif gain and gain.is_above(0.0):
        certainty = "sure"
    if certainty == "unchanged" and best != base and gain and not obstacle:
        reason = f"{in_words(best, base)} is not worth it: {gain.text}"
    elif cut_short:
        reason = cut_short
    elif obstacle:
        reason = f"{in_words(best, base)} cannot be recommended: {obstacle}"
    elif certainty == "unchanged":
        is_tried = any(result.setting != base for result in search.results)
        reason = "no change that was tried is worth it" if is_tried else "there was nothing to try"
    else:
        reason = "nothing more to try"
    best = base if certainty == "unchanged" else best
    if not any(result.ended == "ok" for result in search.results) or search.memory.obstacle(best) is not None:
        return Recommendation("none", base, base, reason, {}, None, None, complete=False)
    written = best if certainty == "sure" else base
    reasons = {knob: search.because.get(knob, "changed together with other keys") for knob in best.changes(base)}
    return Recommendation(certainty, best, written, reason, reasons, gain, predicted, complete=not cut_short)


def policy(search: Search) -> Asks[None]:
    if obstacle := search.memory.obstacle(search.base):
        search.cut_short = does_not_fit(obstacle)
        return
    kinds: tuple[tuple[TrialKind, str], ...] = (("reading", "reading alone"), ("step", "steps alone"))
    for kind, words in kinds:
        if (yield from search.measure(search.base, kind, "baseline", f"the unchanged config, {words}")) is None:
            search.cut_short = f"the unchanged config cannot be measured: {search.why_failed}"
            return
    search.note("baseline", search.words())
    yield from _feed(search)
    if (yield from _raise_steps(search)):
        yield from _feed(search)
    result = yield from search.measure(search.best, "run", "confirm", "a full run with the best setting")
    if result is None:
        return search.note("confirm", search.why_failed)
    yield from _smooth(search)
    yield from _without_readers(search)
    if search.best != search.base:
        gain = yield from search.in_turn((search.best, "run"), (search.base, "run"), "confirm", pairs=search.with_base)
        if gain is None:
            search.note("confirm", f"not compared with the baseline: {search.why_failed}")


def _feed(search: Search) -> Asks[None]:
    """Raise readers and requests until they suffice, no longer gain, or reach a limit."""
    more_requests = True
    # Without readers, reading and computing alternate: the supply cannot exceed 1.
    while (supply := search.supply()) < (_ENOUGH if search.best.workers else 1 - SMALLEST_GAIN):
        setting, words = _more(search, supply, more_requests)
        if setting is None:
            return search.note("reading", words)
        best, is_requests = search.best, setting.requests != search.best.requests
        least = max(SMALLEST_GAIN, min(_KNEE, (max(setting.workers, 1) / max(best.workers, 1) - 1) / 2))
        have = search.rates.measured("reading", best) if best.workers else search.rates.limit(best)
        assert have is not None  # both were measured for the best setting
        # More requests gain much or nothing, as does the first reader: one trial is enough.
        at_once = is_requests or best.workers == 0
        near = (math.inf, -math.inf) if at_once else (least - _NEAR, least + _NEAR)
        changes = in_words(setting, best)
        gain = yield from search.gain((setting, "reading"), "reading", f"{changes}: {words}", have, near, 3)
        if gain is not None and gain.gain >= least:
            why = f"reading alone delivers {have * (1 + gain.gain):.3g} samples/s instead of {have:.3g}"
            search.take(setting, f"{why}; the trainer takes {search.trainer_rate():.3g}")
        elif is_requests:
            more_requests = False
        else:
            deaths = sum(result.ended in OOM_OUTCOMES for result in search.results)
            if (
                gain is None
                and not search.cut_short
                and search.results[-1].ended in OOM_OUTCOMES
                and deaths <= _MOST_DEATHS
            ):
                continue  # the next setting is smaller than those that died
            return search.note("reading", f"no gain from {changes}: {gain.text if gain else search.why_failed}")
    search.note("reading", f"reading suffices: {search.words()}")


def _more(search: Search, supply: float, more_requests: bool) -> tuple[Setting | None, str]:
    """More requests if readers mostly wait for the store, else more readers; with the reason, or why there is none."""
    best, space = search.best, search.space
    if more_requests and search.rates.waiting_share(best) > 0.5 and best.requests < space.most_requests:
        setting = replace(best, requests=min(4 * best.requests, space.most_requests))
        if search.memory.obstacle(setting) is None:
            return setting, search.words()
    count = max(best.workers, 1)
    wanted = min(math.ceil(_ENOUGH / supply * count), 4 * count, space.most_workers)
    obstacle: str | None = f"at most {space.most_workers} are tried"
    for workers in range(wanted, best.workers, -1):
        if (obstacle := search.memory.obstacle(replace(best, workers=workers))) is None:
            return replace(best, workers=workers), search.words()
    return None, f"no more than {format_count(best.workers, 'worker')}: {obstacle}"


def _raise_steps(search: Search) -> Asks[bool]:
    """Try larger micro-batches and switches; returns whether steps became faster, so readers may be too slow."""
    before, readers, space = search.best, search.rates.measured("reading", search.best) or 0.0, search.space
    is_fed = readers >= search.trainer_rate()
    if not is_fed:
        search.note("steps", f"reading delivers {readers:.3g} samples/s at most: a faster step would only wait longer")
    elif space.on_gpu and space.source.amp == "off":  # an explicit format stays
        why = "half the bytes per value, and tensor cores; values are rounded to 16 bits"
        yield from _try(search, replace(search.best, amp="auto"), why)
    # On a CPU, a cheaper step leaves more of the cores to the readers.
    while (is_fed or not space.on_gpu) and (setting := _larger_batch(search)) is not None:
        if not (yield from _try(search, setting, "fewer and larger micro-batches")):
            break
    if not is_fed:
        return False
    switches: list[tuple[Knob, bool | str, str]] = [
        ("compile", "auto" if space.on_gpu else True, "fewer and larger kernels")
    ]
    if space.on_gpu:
        switches.insert(0, ("channels_last", "auto", "the memory order preferred by cuDNN"))
    for knob, value, why in switches:
        if space.on_gpu and getattr(search.best, knob):  # `auto` is on there
            continue
        on: dict[str, Any] = {knob: value}
        setting = replace(search.best, **on)
        if knob == "compile" and search.expected_s(setting, "step") > _COMPILE_SHARE * space.budget_s:
            search.note("steps", f"compile not tried: it would take {100 * _COMPILE_SHARE:.0f} % of the budget or more")
        elif setting != search.best and knob not in space.kept:
            yield from _try(search, setting, why)
    return search.best.of_trainer != before.of_trainer


def _larger_batch(search: Search) -> Setting | None:
    """Return the next micro-batch of at least twice the size that divides the effective batch."""
    best, total = search.best, search.best.global_batch
    for size in range(2 * best.train_batch_size, min(total, search.space.most_batch) + 1):
        if total % size == 0:
            return replace(best, train_batch_size=size, accumulate_steps=total // size)
    return None


def _try(search: Search, setting: Setting, why: str) -> Asks[bool]:
    """Take a setting whose steps alone are faster; returns whether it was taken."""
    words, rate, near = in_words(setting, search.best), search.trainer_rate(), (-STEP_SHORTCUT_GAIN, math.inf)
    gain = yield from search.gain((setting, "step"), "steps", f"{words}: {why}", rate, near, MOST_PAIRS)
    return search.adopt(setting, gain, "steps", "steps alone", STEP_SHORTCUT_GAIN)


def _smooth(search: Search) -> Asks[None]:
    """If the full run waits although readers suffice (bursts), try more prefetch, readers and requests."""
    tried = {search.best}
    for _ in range(_MOST_RIVALS):
        best, space = search.best, search.space
        waits = search.rates.of("run", best)[-1].data_share or 0.0
        starved = max(1 - search.supply(), 0.0)  # waits that smoother delivery cannot avoid
        rivals = (
            replace(best, prefetch_factor=min(2 * best.prefetch_factor, space.most_prefetch)),
            replace(best, workers=min(2 * best.workers, space.most_workers)),
            replace(best, requests=min(2 * best.requests, space.most_requests)),
        )
        rival = next((each for each in rivals if each not in tried and not search.memory.obstacle(each)), None)
        if waits <= max(_WAITS, starved + SMALLEST_GAIN) or rival is None:
            return
        tried.add(rival)
        gain = yield from search.in_turn((rival, "run"), (best, "run"), "delivery")
        search.adopt(rival, gain, "delivery", "full run", RUN_SHORTCUT_GAIN)
        if gain is None:
            return


def _without_readers(search: Search) -> Asks[None]:
    """If few readers are enough, try none: on a small machine Ray may cost more than readers gain."""
    best = search.best
    none = replace(best, workers=0)
    if 0 < best.workers <= _FEW_READERS and "workers" not in search.space.kept and not search.memory.obstacle(none):
        gain = yield from search.in_turn((none, "run"), (best, "run"), "delivery")
        search.adopt(none, gain, "delivery", "full run", RUN_SHORTCUT_GAIN)


def does_not_fit(obstacle: str) -> str:
    remedy = "lower training.workers, training.prefetch_factor or training.train_batch_size"
    return f"the config does not fit this machine: {obstacle}; {remedy}"
