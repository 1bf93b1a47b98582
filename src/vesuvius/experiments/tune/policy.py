"""The policy of a tune: what to measure next, and what to recommend.

Readers and trainer are measured apart (capacity R of the readers, rate T of the steps), so that neither hides the
other.  What limits the run comes first: readers and requests are raised until R exceeds T, and only then are steps made
faster by larger micro-batches and switches.  What comes of it is confirmed by whole runs in turn with the baseline, for
which a part of the budget is kept.  Uses no clock, randomness or file: the same blocks give the same questions and the
same answer.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from vesuvius.experiments.paired import Comparison, compare
from vesuvius.experiments.tune.measurement import BlockKind, Setting, in_words, trainer_knobs
from vesuvius.experiments.tune.memory import does_not_fit
from vesuvius.experiments.tune.search import (
    SHOWN,
    SMALLEST_GAIN,
    SURE,
    Certainty,
    Recommendation,
    Search,
    SearchEndedError,
    TimeToConfirmError,
    at_least,
)
from vesuvius.experiments.tune.stages import feed, fewer_readers, raise_steps, words_of

_WAITS = 0.05  # share of the time that a fed trainer may wait
_MOST_RIVALS = 6


def recommend(search: Search) -> Recommendation:
    """Measure until nothing more is to be gained or the budget is spent, and return what to use."""
    try:
        measure_baseline(search)
        with suppress(TimeToConfirmError):
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
    base, reason = search.base, cut_short or "nothing more to try"
    if cut_short:
        search.ended.setdefault("baseline", cut_short)
    gain = compare(search.with_base) if search.with_base else None
    predicted = _predicted_gain(search)
    certainty, best = _certainty(search, gain, predicted), search.best
    if certainty == "unchanged" and best != base and gain is not None:
        reason = f"{in_words(best, base)} is not worth it: {gain.text}"
    elif certainty == "unchanged" and not cut_short:
        is_tried = any(block.setting != base for block in search.blocks)
        reason = "no change that was tried is worth it" if is_tried else "there was nothing to try"
    best = base if certainty == "unchanged" else best
    if (obstacle := search.memory.obstacle(best)) is not None:  # a later block may have run out of memory
        search.unsettled.append(f"{in_words(best, base)} cannot be recommended: {obstacle}")
        safe = (setting for setting in (base, *search.rates.measured_settings()) if not search.memory.obstacle(setting))
        certainty, best, gain, predicted = "unchanged", next(safe, base), None, None
    if not any(block.ended == "ok" for block in search.blocks) or search.memory.obstacle(best) is not None:
        return Recommendation("none", base, base, reason, ended=search.ended, complete=False)
    shown = best if certainty != "likely" or (gain is not None and gain.pairs >= SHOWN) else search.shown
    return Recommendation(
        certainty,
        best,
        best if search.memory.obstacle(shown) is not None else shown,
        reason,
        {knob: search.because.get(knob, "changed together with other keys") for knob in best.changes(base)},
        search.ended,
        tuple(dict.fromkeys(search.unsettled)),
        gain,
        predicted,
        complete=not cut_short,
    )


def _predicted_gain(search: Search) -> float | None:
    """Of the best over the baseline, as the slower of readers and trainer has it."""
    best, base = search.rates.run(search.best), search.rates.run(search.base)
    return best / base - 1 if best and base else None


def _certainty(search: Search, gain: Comparison | None, predicted: float | None) -> Certainty:
    """How sure the best is, from whole runs in turn; before there are some, from its parts."""
    if search.best == search.base:
        return "unchanged"
    if gain is None:
        return "likely" if _is_cheaper(search) or (predicted or 0.0) >= SMALLEST_GAIN else "unchanged"
    if _is_cheaper(search):
        if gain.is_above(-SMALLEST_GAIN) or _waits_little(search):
            return "sure"
        return "likely" if gain.gain >= -SMALLEST_GAIN else "unchanged"
    if gain.gain < SMALLEST_GAIN:
        return "unchanged"
    return "sure" if gain.is_above(0.0) or (gain.pairs >= SHOWN and gain.low is None and gain.gain > SURE) else "likely"


def _is_cheaper(search: Search) -> bool:
    costs = [(s.workers, s.requests, s.prefetch_factor * s.train_batch_size) for s in (search.best, search.base)]
    return costs[0] < costs[1] and trainer_knobs(search.best) == trainer_knobs(search.base)


def _waits_little(search: Search) -> bool:
    """Whether the best waits so little for data in each of its runs that more readers could not gain what counts."""
    shares = [block.data_share for block in search.rates.of("run", search.best)]
    return all(share is not None and share <= SMALLEST_GAIN for share in shares)


def measure_baseline(search: Search) -> None:
    """Measure what the readers deliver and what the steps take, alone, with the unchanged config.

    Raises:
        SearchEndedError: it does not fit into memory, or cannot be measured.
    """
    if obstacle := search.memory.obstacle(search.base):
        raise SearchEndedError(does_not_fit(obstacle))
    kinds: tuple[tuple[BlockKind, str], ...] = (("readers", "no step computed"), ("step", "on a batch that stays"))
    for kind, words in kinds:
        block = search.measure(search.base, kind, "baseline", f"the unchanged config, {words}")
        if block.ended != "ok" or not block.rate:
            raise SearchEndedError(f"the unchanged config cannot be measured: {search.why_failed}")
    search.ended["baseline"] = words_of(search)


# The whole run of what was found, in turn with what may be better and with the baseline.


def confirm(search: Search) -> None:
    """Measure the whole run of the best, or of its readers alone if that fails."""
    block = search.measure(search.best, "run", "confirm", "the whole run of what was found")
    if block.ended != "ok":
        search.unsettled.append(f"{in_words(search.best, search.base)}: {search.why_failed}")
        readers = {knob: getattr(search.best, knob) for knob in ("workers", "requests", "prefetch_factor")}
        # With the prefetch that made room for them.
        search.best = replace(search.base, **readers)
        search.shown = search.base
        block = search.measure(search.best, "run", "confirm", "the readers of what was found, and nothing else")
    if block.ended != "ok":
        search.best, search.ended["confirm"] = search.base, search.why_failed
        return
    search.ended["confirm"] = (
        f"{block.rate:.3g} samples/s, waiting for data {100 * (block.data_share or 0):.0f} % of the time"
    )
    with suppress(TimeToConfirmError):
        smooth(search)


def smooth(search: Search) -> None:
    """Where the whole run waits though its readers could deliver (bursts), try what may help."""
    tried = {search.best}
    for _ in range(_MOST_RIVALS):
        waits = search.rates.of("run", search.best)[-1].data_share or 0.0
        starved = max(1 - (search.supply(search.best) or 1.0), 0.0)  # what no smoother delivery could avoid
        rival = next((rival for rival in _rivals_of(search, search.best) if rival not in tried), None)
        if waits <= max(_WAITS, starved + SMALLEST_GAIN) or rival is None:
            return
        tried.add(rival)
        found = search.in_turn((rival, "run"), (search.best, "run"), "delivery", in_words(rival, search.best))
        if found is None:
            search.ended["delivery"] = search.why_failed
            return
        if found.gain >= SMALLEST_GAIN and (found.is_above(0.0) or found.gain > SURE):
            search.take(rival, f"whole run: {found.text}", found.pairs)
        else:
            search.give_up(in_words(rival, search.best), found)


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
    """Measure the gain over the baseline in turn."""
    if search.best == search.base:
        return

    def is_settled(found: Comparison) -> bool:
        if _is_cheaper(search):
            return found.is_above(-SMALLEST_GAIN) or found.is_below(-SMALLEST_GAIN) or _waits_little(search)
        return found.is_above(0.0) or found.is_below(SMALLEST_GAIN)

    words, pairs = in_words(search.best, search.base), search.with_base
    if search.in_turn((search.best, "run"), (search.base, "run"), "confirm", words, is_settled, pairs=pairs) is None:
        search.unsettled.append(f"the comparison with the baseline: {search.why_failed}")
