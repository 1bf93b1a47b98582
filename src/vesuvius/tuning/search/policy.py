"""The policy of a tune: what to measure next, and what to recommend.

Readers and trainer are measured apart (capacity R of the readers, rate T of the steps), so that neither hides the
other: readers are raised until R exceeds T, steps are made faster by larger micro-batches and switches, and what comes
of both is confirmed by blocks of the whole run in turn with its rivals.  Uses no clock, randomness or file: the same
blocks give the same questions and the same answer.
"""

from __future__ import annotations

from vesuvius.tuning.search.baseline import measure_baseline
from vesuvius.tuning.search.confirm import SURE, compare_with_base, confirm
from vesuvius.tuning.search.pairs import Comparison, compare
from vesuvius.tuning.search.rates import trainer_knobs
from vesuvius.tuning.search.readers import feed, fewer_readers
from vesuvius.tuning.search.recommendation import SMALLEST_GAIN, Recommendation, Verdict
from vesuvius.tuning.search.search import AT_ONCE, Search, SearchEndedError
from vesuvius.tuning.search.steps import raise_steps
from vesuvius.tuning.setting import in_words
from vesuvius.tuning.space import WITHIN


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
        reason = "nothing more to try"
    except SearchEndedError as ended:
        reason = str(ended)
        search.undecided.append(reason)
    return _recommend(search, reason)


def _recommend(search: Search, reason: str) -> Recommendation:
    source = search.space.source
    if not search.rates.measured_settings():
        return Recommendation("none", source, source, reason, ended=search.ended)
    gain = compare(search.with_base) if search.with_base else None
    verdict = _verdict(search, gain)
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
    reasons = {knob: search.because.get(knob, "changed together with other keys") for knob in best.changes(source)}
    gain = gain if best == search.best else None
    return Recommendation(verdict, best, search.base, reason, reasons, search.ended, gain, tuple(search.rivals))


def _verdict(search: Search, gain: Comparison | None) -> Verdict:
    """What is sure: with fewer than three pairs, a large gain alone."""
    if search.best == search.base:
        return "undecided" if search.undecided or "confirm" not in search.ended else "unchanged"
    if gain is None:
        return "undecided"
    if gain.gain > SURE - 1:
        return "better"
    if gain.low is None:
        return "undecided"
    if _is_cheaper(search) and gain.gain >= -WITHIN[search.space.goal]:
        return "better"
    if gain.is_above(0.0) and gain.gain >= WITHIN[search.space.goal]:
        return "better"
    if gain.is_below(WITHIN[search.space.goal]) or gain.gain < SMALLEST_GAIN:
        return "unchanged"
    return "undecided"


def _is_promising(search: Search) -> bool:
    """Whether what was measured so far predicts a clear gain."""
    expected, base = search.rates.run(search.best), search.rates.run(search.base)
    return expected is not None and base is not None and expected > (1 + AT_ONCE) * base


def _is_cheaper(search: Search) -> bool:
    costs = [(s.workers, s.requests, s.prefetch_factor * s.train_batch_size) for s in (search.best, search.base)]
    return costs[0] < costs[1] and trainer_knobs(search.best) == trainer_knobs(search.base)
