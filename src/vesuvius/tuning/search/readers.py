"""The second stage: as many readers and requests as the trainer needs, and no more."""

from __future__ import annotations

import math
from dataclasses import replace

from vesuvius.tuning.block import DEADLY
from vesuvius.tuning.search.search import Search, ladder, percent
from vesuvius.tuning.setting import Setting, in_words
from vesuvius.tuning.space import WITHIN

_KNEE = 0.08  # more readers or requests that raise R by less are not worth it
_MOST_DEATHS = 3  # after which readers are raised no more


def feed(search: Search) -> None:
    """Raise readers and requests until they can deliver more than the trainer takes, or to a knee or a cap."""
    more_requests = search.space.remote
    while True:
        have, target = search.readers_of(search.best), search.target_rate()
        if search.best.workers == 0:  # reading and computing take turns
            have = search.rates.limit(search.best)
        if have is None or have >= target:
            search.ended["readers"] = _fed_words(search)
            return
        setting, words = _more_readers(search, have, target, more_requests)
        if setting is None:
            search.ended["readers"] = words
            return
        rate = search.rate(setting, "readers", "readers", f"{in_words(setting, search.best)}: {words}")
        requests = setting.requests != search.best.requests
        if rate is None or rate < (1 + _KNEE) * have:
            failed = (
                search.why_failed if rate is None else f"{percent(rate / have - 1)} by {in_words(setting, search.best)}"
            )
            if requests:
                more_requests = False
                continue
            if rate is None and search.blocks[-1].ended in DEADLY and search.deaths() <= _MOST_DEATHS:
                continue  # what died bars all that is no smaller
            search.ended["readers"] = f"cap: {failed}" if rate is None else f"knee: {failed}"
            return
        search.note(
            search.best,
            setting,
            f"readers alone deliver {rate:.3g} samples/s instead of {have:.3g}; "
            f"the trainer takes {search.trainer_rate():.3g}",
        )
        search.best = setting


def _more_readers(search: Search, have: float, target: float, more_requests: bool) -> tuple[Setting | None, str]:
    """More requests where readers mostly wait for the store, else more readers; and why, or why there are none."""
    best, space = search.best, search.space
    why = f"readers alone deliver {have:.3g} samples/s, the trainer takes {search.trainer_rate():.3g}"
    if more_requests and search.rates.waiting_share(best) > 0.5 and best.requests < space.most_requests:
        setting = replace(best, requests=min(2 * best.requests, space.most_requests))
        if search.memory.obstacle(setting) is None:
            return setting, why
    limit = search.space.cores / cpu_s if (cpu_s := search.rates.cpu_s("readers", best)) else math.inf
    if have > 0.95 * limit:
        return None, f"cap: all {space.cores:g} cores are busy at {have:.3g} samples/s"
    each = have / max(best.workers, 1)
    wanted = min(ladder(target / each), 4 * max(best.workers, 1), space.most_workers)
    obstacle = f"cap: workers {best.workers} of at most {space.most_workers}"
    for workers in range(wanted, best.workers, -1):
        setting = replace(best, workers=workers)
        found = search.memory.obstacle(setting)
        if found is None:
            return setting, why
        obstacle = f"cap: workers {best.workers}: {found}"
    shorter = replace(best, workers=best.workers + 1, prefetch_factor=max(best.prefetch_factor // 2, 1))
    fits = shorter.prefetch_factor < best.prefetch_factor and search.memory.obstacle(shorter) is None
    if fits and wanted > best.workers and not search.deaths():
        return shorter, why
    return None, obstacle


def fewer_readers(search: Search) -> None:
    """Take the fewest readers that are enough: for the trainer, or for the most that readers can deliver."""
    best, have = search.best, search.readers_of(search.best)
    each = search.rates.per_reader(best)
    if have is None or each is None or best.workers <= 1:
        return
    need = min(search.target_rate(), (1 - WITHIN[search.space.goal]) * have)
    setting = replace(best, workers=max(ladder(need / each), 1))
    if setting.workers >= best.workers or search.memory.obstacle(setting) is not None:
        return
    rate = search.rates.measured_readers(setting)
    if rate is None:
        why = f"fewer readers may be enough: {each:.3g} samples/s each, {need:.3g} needed"
        rate = search.rate(setting, "readers", "readers", f"{in_words(setting, best)}: {why}")
    if rate is not None and rate >= 0.95 * need:
        search.note(
            best,
            setting,
            f"{rate:.3g} samples/s of the readers are enough; the trainer takes {search.trainer_rate():.3g}",
        )
        search.best = setting


def _fed_words(search: Search) -> str:
    have = search.rates.measured_readers(search.best) or 0.0
    return f"fed: readers alone deliver {have:.3g} samples/s, the trainer alone takes {search.trainer_rate():.3g}"
