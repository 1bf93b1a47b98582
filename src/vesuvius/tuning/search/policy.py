"""The policy of a tune: what to measure next, and what to recommend.

Readers and trainer are measured apart (capacity R of the readers, rate T of the steps), so that neither hides the
other: readers are raised until R exceeds T, steps are made faster by larger micro-batches and switches, and what comes
of both is confirmed by blocks of the whole run in turn with its rivals.  Uses no clock, randomness or file: the same
blocks give the same questions and the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from vesuvius.tuning.measurement import DEADLY, WITHIN, Setting, in_words, trainer_knobs
from vesuvius.tuning.search.memory import GROWTH
from vesuvius.tuning.search.pairs import Comparison, compare
from vesuvius.tuning.search.search import (
    AT_ONCE,
    ENOUGH,
    LARGE_GAIN,
    SMALLEST_GAIN,
    SOME_PAIRS,
    SURE,
    Outcome,
    Recommendation,
    Search,
    SearchEndedError,
    at_least,
    fewer_than,
)
from vesuvius.tuning.search.steps import raise_steps

_BASELINE_TRIES, _SLOW_TRIES = 4, 2  # after a lack of memory, and after a timeout
_KNEE = 0.08  # more readers or requests that raise R by less are not worth it
_NEAR = 0.25  # a gain this near to the knee is measured in turn
_MOST_DEATHS = 3  # after which readers are raised no more
_WAITS = 0.05  # share of the time that a fed trainer may wait
_MOST_RIVALS = 6
_DEAR = 0.1  # share of the budget from which on three pairs cost much


def recommend(search: Search) -> Recommendation:
    """Measure until nothing more is to be gained or the budget is spent, and return what to use."""
    try:
        measure_baseline(search)
        feed(search)
        if raise_steps(search):
            feed(search)
        fewer_readers(search)
        confirm(search)
        compare_with_base(search)
    except SearchEndedError as ended:
        return conclude(search, str(ended))
    return conclude(search)


def conclude(search: Search, cut_short: str = "") -> Recommendation:
    """What the blocks so far say; `cut_short` = why there are no more."""
    source, reason = search.space.source, cut_short or "nothing more to try"
    if cut_short:
        search.undecided.append(cut_short)
        search.ended.setdefault("baseline", cut_short)
    if not search.rates.measured_settings():
        return Recommendation("none", source, source, reason, ended=search.ended)
    gain = compare(search.with_base) if search.with_base else None
    verdict = _verdict(search, gain)
    if verdict == "undecided" and gain is not None:
        search.undecided.append(f"{in_words(search.best, search.base)} was not decided: {gain.text}")
    kept = verdict == "unchanged" or (verdict == "undecided" and not _is_promising(search))
    best = search.base if kept else search.best
    if (obstacle := search.memory.obstacle(best)) is not None:  # a later block may have run out of memory
        verdict = "undecided"
        search.undecided.append(f"{in_words(best, source)} cannot be recommended: {obstacle}")
        safe = (setting for setting in search.rates.measured_settings() if search.memory.obstacle(setting) is None)
        if (found := next(safe, None)) is None:
            return Recommendation("none", source, search.base, search.undecided[-1], ended=search.ended)
        best = found
    if verdict == "undecided" and search.undecided:
        reason = "; ".join(dict.fromkeys(search.undecided))
    if verdict == "unchanged":
        is_tried = any(block.setting != search.base for block in search.blocks)
        reason = "no change that was tried is worth it" if is_tried else "there was nothing to try"
        if search.best != search.base and gain is not None:
            reason = f"{in_words(search.best, search.base)} is not worth it: {gain.text}"
    reasons = {knob: search.because.get(knob, "changed together with other keys") for knob in best.changes(source)}
    gain = gain if best == search.best else None
    return Recommendation(verdict, best, search.base, reason, reasons, search.ended, gain)


def _verdict(search: Search, gain: Comparison | None) -> Outcome:
    """What the interval of the gain supports; without one, a large gain of a single pair alone."""
    worth = WITHIN[search.space.goal]
    if search.best == search.base:
        return "undecided" if search.undecided or "confirm" not in search.ended else "unchanged"
    if gain is None:
        return "undecided"
    if gain.low is None:
        return "better" if gain.gain > SURE else "undecided"
    if _is_cheaper(search):
        return "better" if gain.is_above(-worth) or _waits_little(search) else "undecided"
    if gain.is_above(0.0) and gain.gain >= worth:
        return "better"
    return "unchanged" if gain.is_below(worth) else "undecided"


def _is_promising(search: Search) -> bool:
    """Whether what was measured so far predicts a clear gain."""
    expected, base = search.rates.run(search.best), search.rates.run(search.base)
    return expected is not None and base is not None and expected > (1 + AT_ONCE) * base


def _is_cheaper(search: Search) -> bool:
    costs = [(s.workers, s.requests, s.prefetch_factor * s.train_batch_size) for s in (search.best, search.base)]
    return costs[0] < costs[1] and trainer_knobs(search.best) == trainer_knobs(search.base)


def _waits_little(search: Search) -> bool:
    """Whether the best waits so little for data in each of its runs that more readers could not gain what counts."""
    shares = [block.data_share for block in search.rates.of("run", search.best)]
    return all(share is not None and share <= WITHIN[search.space.goal] for share in shares)


# The unchanged config, or the nearest smaller setting that fits into memory.


def measure_baseline(search: Search) -> None:
    why = _fit(search)
    deaths = slow = 0
    while (block := search.measure(search.best, "run", "baseline", why)).ended != "ok":
        setting, words, other = search.best, search.why_failed, None
        if block.ended == "timeout" and slow < _SLOW_TRIES:
            slow += 1
            workers = min(2 * max(setting.workers, 1), search.space.most_workers)
            other = replace(setting, workers=workers) if workers > setting.workers else None
            other = None if other is not None and search.memory.obstacle(other) else other
        elif block.ended in DEADLY and deaths < _BASELINE_TRIES:
            deaths += 1
            smaller = _shrunk(search, setting, block.ended == "gpu_memory")
            other = next((one for one in smaller if search.memory.obstacle(one) is None), None)
        if other is None:
            more = "; a larger --budget gives each block more time" if block.ended == "timeout" else ""
            raise SearchEndedError(f"{words}{more}")
        search.take(other, words)
        why = f"{in_words(other, setting)}, because {words}"
    search.base = search.best
    trainer = search.rate(search.base, "step", "baseline", "the trainer alone, on a batch that stays")
    readers = search.rate(search.base, "readers", "baseline", "the readers alone, no step computed")
    if trainer is None or readers is None:
        raise SearchEndedError(search.why_failed)
    search.ended["baseline"] = (
        f"{block.rate:.3g} samples/s; readers alone deliver {readers:.3g}, the trainer alone takes {trainer:.3g}"
    )


def _fit(search: Search) -> str:
    """Make the source the best, or a smaller setting that is predicted to fit, if possible with room; returns why."""
    source = search.best
    if (obstacle := search.memory.obstacle(source)) is None:
        return "the unchanged config, to compare with"
    fitting = (one for one in _shrunk(search, source) if search.memory.obstacle(one) is None)
    if (first := next(fitting, None)) is None:
        kept = f" with --keep {','.join(search.space.kept)}" if search.space.kept else ""
        smallest = f"even the smallest setting does not fit{kept}: {obstacle} for the unchanged config"
        raise SearchEndedError(f"{smallest}; raise that limit, or take smaller patches")
    search.take(next((one for one in chain((first,), fitting) if all(_has_room(search, one))), first), obstacle)
    return f"{in_words(search.best, source)}, because the unchanged config does not fit: {obstacle}"


def _has_room(search: Search, setting: Setting) -> tuple[bool, bool]:
    """Whether it fits into the memory of host and GPU if the planner is off by as much as it may be."""
    space, vram = search.space, search.planner.vram_bytes(setting)
    on_host = search.planner.ram_bytes(setting) <= space.ram_limit_bytes / GROWTH
    return on_host, vram is None or space.vram_limit_bytes is None or vram <= space.vram_limit_bytes / GROWTH


def _shrunk(search: Search, setting: Setting, on_gpu: bool | None = None) -> Iterator[Setting]:
    """Ever smaller settings that change no kept knob; `on_gpu` = the GPU's memory is short, None = as it is planned."""
    while True:
        short = _has_room(search, setting) == (True, False) if on_gpu is None else on_gpu
        smaller = (one for one in _smaller(setting, short) if search.space.kept_by(one) is None)
        if (found := next(smaller, None)) is None:
            return
        yield (setting := found)


def _smaller(setting: Setting, on_gpu: bool) -> Iterator[Setting]:
    """Half the prefetch and half the readers, or one of them; then smaller micro-batches."""
    if not on_gpu:
        prefetch = max(setting.prefetch_factor // 2, 1)
        workers = max(setting.workers // 2, min(setting.workers, 1))
        shorter = replace(setting, prefetch_factor=prefetch)
        halves = (replace(shorter, workers=workers), replace(setting, workers=workers), shorter)
        yield from (half for half in halves if half != setting)
    total = setting.global_batch
    for batch in range(setting.train_batch_size - 1, 0, -1):
        if total % batch == 0:
            yield replace(setting, train_batch_size=batch, accumulate_steps=total // batch)
            return


# As many readers and requests as the trainer needs, and no more.


def feed(search: Search) -> None:
    """Raise readers and requests until they can deliver more than the trainer takes, or to a knee or a cap."""
    more_requests = search.space.remote
    while True:
        supply = search.supply(search.best)
        # Without readers, reading and computing take turns: there is no more to gain than the rest to 1.
        enough = ENOUGH[search.space.goal] if search.best.workers else 1 - SMALLEST_GAIN
        if supply is None or supply >= enough:
            search.ended["readers"] = search.why_failed if supply is None else f"fed: {_reader_words(search)}"
            return
        setting, words = _more_readers(search, supply, more_requests)
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
            search.ended["readers"] = f"cap: {search.why_failed}" if found is None else f"knee: {changes}: {found.text}"
            return
        shorter = setting.prefetch_factor < search.best.prefetch_factor
        room = "; less prefetch makes room for them in memory" if shorter else ""
        search.take(
            setting,
            f"readers alone deliver {have * (1 + found.gain):.3g} samples/s instead of {have:.3g}; "
            f"the trainer takes {search.trainer_rate():.3g}{room}",
        )


def _more_readers(search: Search, supply: float, more_requests: bool) -> tuple[Setting | None, str]:
    """More requests where readers mostly wait for the store, else more readers; and why, or why there are none."""
    best, space, why = search.best, search.space, _reader_words(search)
    if more_requests and search.rates.waiting_share(best) > 0.5 and best.requests < space.most_requests:
        setting = replace(best, requests=min(2 * best.requests, space.most_requests))
        if search.memory.obstacle(setting) is None:
            return setting, why
    limit = space.cores / cpu_s if (cpu_s := search.rates.cpu_s("readers", best)) else math.inf
    have = search.rates.measured("readers", best) or 0.0
    if have > 0.95 * limit:
        return None, f"cap: all {space.cores:g} cores are busy at {have:.3g} samples/s"
    count = max(best.workers, 1)
    wanted = min(at_least(ENOUGH[space.goal] / supply * count), 4 * count, space.most_workers)
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
    """Take the fewest readers that are enough: for the trainer, or for nearly the most that readers can deliver."""
    best, supply, goal = search.best, search.supply(search.best), search.space.goal
    if supply is None or best.workers <= 1:
        return
    lost = -WITHIN[goal]
    need = min(ENOUGH[goal], (1 + lost) * supply)
    each = max(supply / best.workers, search.rates.per_reader(best) / search.trainer_rate())

    def is_settled(found: Comparison) -> bool:
        # The present readers stay unless fewer are shown to be enough: keeping them needs no proof.
        return found.is_above(-LARGE_GAIN) or found.is_below(lost) or found.gain < -LARGE_GAIN

    tries = [count for count in fewer_than(best.workers) if count >= 0.8 * need / each]
    for setting in (replace(best, workers=count) for count in tries[:2]):
        if search.memory.obstacle(setting) is not None:
            continue
        if supply >= ENOUGH[goal]:
            reached, why = search.supply(setting), ""
            is_enough = reached is not None and reached >= need
        else:
            words = in_words(setting, best)
            found = search.in_turn((setting, "readers"), (best, "readers"), "readers", words, is_settled, SOME_PAIRS)
            is_enough = found is not None and found.gain >= lost and found.is_above(-LARGE_GAIN)
            why = "" if found is None else f", {found.text}"
        if is_enough:
            search.take(setting, f"fewer readers are enough: {_reader_words(search, setting)}{why}")
            return


def _reader_words(search: Search, setting: Setting | None = None) -> str:
    have = search.rates.measured("readers", setting or search.best) or 0.0
    return f"readers alone deliver {have:.3g} samples/s, the trainer alone takes {search.trainer_rate():.3g}"


# The whole run of what was found, in turn with what may be better and with the baseline.


def confirm(search: Search) -> None:
    """Measure the whole run of the best; where it waits though its readers could deliver, try what may help."""
    block = search.measure(search.best, "run", "confirm", "the whole run of what was found")
    if block.ended != "ok":
        search.undecided.append(f"{in_words(search.best, search.base)}: {search.why_failed}")
        readers = {knob: getattr(search.best, knob) for knob in ("workers", "requests", "prefetch_factor")}
        search.best = replace(search.base, **readers)  # with the prefetch that made room for them
        block = search.measure(search.best, "run", "confirm", "the readers of what was found, and nothing else")
    if block.ended != "ok":
        search.best, search.ended["confirm"] = search.base, search.why_failed
        return
    tried = {search.best}
    for _ in range(_MOST_RIVALS):
        starved = max(1 - (search.supply(search.best) or 1.0), 0.0)  # what no smoother delivery could avoid
        if (block.data_share or 0.0) <= max(_WAITS, starved + SMALLEST_GAIN):
            break
        rival = next((rival for rival in _rivals_of(search, search.best) if rival not in tried), None)
        if rival is None:
            break
        tried.add(rival)
        found = search.in_turn((rival, "run"), (search.best, "run"), "confirm", in_words(rival, search.best))
        if found is None:
            search.ended["confirm"] = search.why_failed
            break
        if found.is_above(0.0) and found.gain >= SMALLEST_GAIN:
            search.take(rival, f"whole run: {found.text}")
            block = search.rates.of("run", rival)[-1]
        else:
            search.give_up(in_words(rival, search.best), found)
    search.ended["confirm"] = (
        f"{block.rate:.3g} samples/s, waiting for data {100 * (block.data_share or 0):.0f} % of the time"
    )


def _rivals_of(search: Search, best: Setting) -> list[Setting]:
    """Settings that may help where the run waits for data though its readers could deliver."""
    space = search.space
    rivals = [
        replace(best, prefetch_factor=min(2 * best.prefetch_factor, space.most_prefetch)),
        replace(best, workers=min(at_least(2 * best.workers), space.most_workers)),
        replace(best, requests=min(2 * best.requests, space.most_requests) if space.remote else best.requests),
    ]
    return [rival for rival in rivals if search.memory.obstacle(rival) is None]


def compare_with_base(search: Search) -> None:
    """Measure the gain over the baseline in turn, or once where it is large and more would cost much."""
    if search.best == search.base:
        return
    rates = [search.rates.of("run", setting)[-1].rate for setting in (search.best, search.base)]
    each_s = search.expected_s(search.base, "run") + search.expected_s(search.best, "run")
    if rates[0] > (1 + SURE) * rates[1] and 3 * each_s > _DEAR * search.space.budget_s:
        search.with_base = [(rates[0], rates[1])]
        return
    worth = WITHIN[search.space.goal]

    def is_settled(found: Comparison) -> bool:
        if _is_cheaper(search):
            return found.is_above(-worth) or found.is_below(-worth) or _waits_little(search)
        return found.is_above(0.0) or found.is_below(worth)

    words, pairs = in_words(search.best, search.base), search.with_base
    if search.in_turn((search.best, "run"), (search.base, "run"), "confirm", words, is_settled, pairs=pairs) is None:
        search.undecided.append(f"the comparison with the baseline: {search.why_failed}")
