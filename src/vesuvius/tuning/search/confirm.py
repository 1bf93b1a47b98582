"""The last stage: the whole run of what was found, in turn with what may be better and with the baseline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vesuvius.tuning.search.rates import reader_knobs
from vesuvius.tuning.search.recommendation import SMALLEST_GAIN
from vesuvius.tuning.search.search import Search, ladder, percent
from vesuvius.tuning.setting import Setting, in_words

SURE = 1.5
"""A larger gain needs no interval if that would cost much of the budget."""

_WAITS = 0.05  # share of the time that a fed trainer may wait
_MOST_RIVALS = 6
_DEAR = 0.1  # share of the budget from which on three pairs cost much


def confirm(search: Search) -> None:
    """Measure the whole run of the best; where it stays below what was predicted, compare it with what may help."""
    block = search.measure(search.best, "run", "confirm", "the whole run of what was found")
    if block.ended != "ok":
        search.undecided.append(f"{in_words(search.best, search.base)}: {search.why_failed}")
        readers = {knob: getattr(search.best, knob) for knob in ("workers", "requests", "prefetch_factor")}
        search.best = replace(search.base, **readers)  # with the prefetch that made room for them
        block = search.measure(search.best, "run", "confirm", "the readers of what was found, and nothing else")
    if block.ended != "ok":
        search.best, search.ended["confirm"] = search.base, search.why_failed
        return
    for _ in range(_MOST_RIVALS):
        limit = search.rates.limit(search.best) or block.rate
        if (block.data_share or 0.0) <= _WAITS or block.rate >= (1 - SMALLEST_GAIN) * min(limit, search.trainer_rate()):
            break
        rival = next(_rivals_of(search, search.best), None)
        if rival is None:
            break
        found = search.pairs(rival, search.best, "run", "confirm")
        if found is None:
            search.ended["confirm"] = search.why_failed
            break
        search.rivals.append((rival, search.best, found))
        if found.is_above(0.0) and found.gain >= SMALLEST_GAIN:
            search.note(search.best, rival, f"{percent(found.gain)} samples/s, measured in turn")
            search.best = rival
            block = search.rates.of("run", rival)[-1]
    search.ended["confirm"] = (
        f"{block.rate:.3g} samples/s, waiting for data {100 * (block.data_share or 0):.0f} % of the time"
    )


def _rivals_of(search: Search, best: Setting) -> Iterator[Setting]:
    """Settings that may help where the run waits for data though its readers could deliver."""
    space, tried = search.space, {(*reader_knobs(a), a.prefetch_factor) for a, _, _ in search.rivals}
    rivals = [
        replace(best, prefetch_factor=min(2 * best.prefetch_factor, space.most_prefetch)),
        replace(best, workers=min(ladder(2 * best.workers), space.most_workers)),
    ]
    if space.remote:
        rivals.append(replace(best, requests=min(2 * best.requests, space.most_requests)))
    for rival in rivals:
        new = rival != best and (*reader_knobs(rival), rival.prefetch_factor) not in tried
        if new and search.memory.obstacle(rival) is None:
            yield rival


def compare_with_base(search: Search) -> None:
    """Measure the gain over the baseline in turn, or once where it is large and more would cost much."""
    if search.best == search.base:
        return
    each_s = search.expected_s(search.base, "run") + search.expected_s(search.best, "run")
    rates = [search.rates.of("run", setting)[-1].rate for setting in (search.best, search.base)]
    if rates[0] > SURE * rates[1] and 3 * each_s > _DEAR * search.space.budget_s:
        search.with_base = [(rates[0], rates[1])]
    elif search.pairs(search.best, search.base, "run", "confirm", search.with_base) is None:
        search.undecided.append(f"the comparison with the baseline: {search.why_failed}")
