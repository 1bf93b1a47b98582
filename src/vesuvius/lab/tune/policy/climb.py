"""Raise one number while it pays: to the knee, the noise or a cap; and the search for fewer readers that do as well."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from vesuvius.lab.tune.policy.prediction import death_text
from vesuvius.lab.tune.policy.state import Asking, State
from vesuvius.lab.tune.policy.throughput import readers_rate
from vesuvius.lab.tune.terms.known import SMALLEST_GAIN
from vesuvius.lab.tune.terms.setting import Knob, Setting
from vesuvius.lab.tune.terms.space import WITHIN, Space
from vesuvius.lab.tune.terms.trial import Stage

_RESERVE = 1.25
"""Readers that are taken away leave this much more than the trainer takes: volumes and neighbours vary."""
_FEWER_TRIES = 3
_DEAR = 0.1  # share of the budget


@dataclass(frozen=True)
class Ladder:
    """How a knob is raised.

    Attributes:
        knob: the one that is named.
        above: larger settings than a given one, the next to try first, then those to try instead where memory forbids
            it; empty at the cap.
        cap: what ends it above a setting, in words.
    """

    stage: Stage
    knob: Knob
    above: Callable[[Setting], list[Setting]]
    cap: Callable[[Setting], str]

    def value(self, setting: Setting) -> int:
        return int(getattr(setting, self.knob))


def climb(state: State, ladder: Ladder, why: str) -> Asking[None]:
    """Go up from the best while each step gains more than 3 % and more than the noise.

    What died, or was slower, is a ceiling: then the middle below it is tried.
    """
    ceiling: Setting | None = None
    end = ""
    while not state.too_many_deaths(ladder.stage):
        setting, obstacle = _next(state, ladder, ceiling)
        if setting is None:
            end = end or f"cap: {obstacle}"
            break
        base, deaths = state.best, len(state.known.deaths)
        rate = yield from state.compare(setting, ladder.stage, _why(state, ladder, why, ceiling))
        if rate is None:
            if len(state.known.deaths) > deaths:
                end = f"cap: {death_text(state.known.deaths[-1])}"
            ceiling = setting
            continue
        if state.known.is_gain(setting, base):
            state.accept(setting)
            continue
        gain = state.known.gain(setting, base)
        end = _no_gain(state, ladder, setting, base)
        if gain > -max(SMALLEST_GAIN, state.known.noise(setting, base)):
            break
        ceiling = setting
    state.ended[ladder.stage] = end or f"cap: {death_text(state.known.deaths[-1])}"


def workers_ladder(state: State) -> Ladder:
    """Doubling, or more where trials are dear and data far behind; from reading in the trainer to two."""
    space = state.space

    def above(setting: Setting) -> list[Setting]:
        top = min(_factor(state, setting) * max(setting.workers, 1), space.most_workers)
        return [replace(setting, workers=workers) for workers in range(top, setting.workers, -1)]

    return Ladder("workers", "workers", above, lambda _: f"{space.most_workers} workers are the most here")


def _factor(state: State, setting: Setting) -> int:
    """Four times the readers where a trial eats a tenth of the budget and even so many would not feed the trainer."""
    if not state.known.good(setting) or state.forecast.predict(setting).seconds < _DEAR * state.space.budget_s:
        return 2
    trainer_s = state.known.measured(setting).trainer_s
    readers = readers_rate(setting, setting, state.known.measured(setting))
    return 4 if setting.workers > 0 and 4 * readers * trainer_s <= 1 else 2


def requests_ladder(space: Space) -> Ladder:
    """Doubling."""

    def above(setting: Setting) -> list[Setting]:
        top = min(2 * setting.requests, space.most_requests)
        return [replace(setting, requests=top)] if top > setting.requests else []

    return Ladder("requests", "requests", above, lambda _: f"{space.most_requests} requests in flight are the most")


def prefetch_ladder(space: Space) -> Ladder:
    """Doubling, as far as more batches are put together ahead."""

    def above(setting: Setting) -> list[Setting]:
        top = min(2 * setting.prefetch_factor, space.most_prefetch)
        larger = [replace(setting, prefetch_factor=factor) for factor in range(setting.prefetch_factor, top + 1)]
        gains = [b for a, b in pairwise(larger) if space.batches_ahead(b) > space.batches_ahead(a)]
        return gains[::-1]

    def cap(setting: Setting) -> str:
        if setting.prefetch_factor < space.most_prefetch:
            return "training.prefetch_mib allows no more"
        return f"prefetch_factor {space.most_prefetch} is the most"

    return Ladder("prefetch", "prefetch_factor", above, cap)


def batch_ladder(space: Space) -> Ladder:
    """Larger pieces of the same effective batch; of a larger one where that is allowed and all is one piece."""

    def above(setting: Setting) -> list[Setting]:
        batch, total = setting.train_batch_size, setting.global_batch
        if setting.accumulate_steps > 1:
            pieces = [piece for piece in range(batch + 1, total + 1) if total % piece == 0]
            top = next((piece for piece in pieces if piece >= 2 * batch), total)
            wanted = [piece for piece in reversed(pieces) if piece <= min(top, space.most_batch)]
            return [replace(setting, train_batch_size=p, accumulate_steps=total // p) for p in wanted]
        if not space.scale_batch:
            return []
        top = min(2 * batch, space.most_batch)
        sizes = sorted({top, min(3 * batch // 2, top)} - {batch}, reverse=True)
        return [replace(setting, train_batch_size=size) for size in sizes if size > batch]

    def cap(setting: Setting) -> str:
        if space.scale_batch or setting.accumulate_steps > 1:
            return f"micro-batches of {space.most_batch} are the most"
        return (
            f"the effective batch is {setting.global_batch}: `--scale-batch`, or a larger training.accumulate_steps in "
            "the config, lets larger micro-batches be tried"
        )

    return Ladder("batch", "train_batch_size", above, cap)


def fewer_workers(state: State) -> Asking[None]:
    """Try fewer readers that should still do, three times at most."""
    fastest, within = state.best, WITHIN[state.space.goal]
    fed = not state.hungry
    for _ in range(_FEWER_TRIES):
        setting = _enough(state, fastest, fed)
        if setting is None:
            return
        why = f"{state.now.bound}: {setting.workers} workers may do as well within {within:.0%}"
        rate = yield from state.attempt(setting, "workers", why)
        if rate is None:
            return
        gain = state.known.gain(setting, fastest)
        words = f"knee: {setting.workers} instead of {fastest.workers} workers gave {percent(gain)}"
        state.ended["workers"] = f"{words}, {'within' if gain >= -within else 'beyond'} {within:.0%}"
        if gain >= -within:
            state.accept(setting)
            if fed:
                return


def percent(gain: float) -> str:
    """`+1.3 %`."""
    return f"{100 * gain:+.1f} %"


def _enough(state: State, fastest: Setting, fed: bool) -> Setting | None:
    """The next to try of fewer readers than the best has; None where that saves none.

    Where the trainer is fed, the fewest that give a quarter more than it takes; else the middle of what is possible.
    """
    rate = state.known.rate(fastest).samples_s
    least = rate * (1 - WITHIN[state.space.goal])
    line = [s for s in state.known.settings if replace(s, workers=fastest.workers) == fastest]
    slow = [s for s in line if state.known.rate(s).samples_s < least]
    lowest = max((_linear(s, state.known.rate(s).samples_s, least) for s in slow), default=1)
    wanted = rate * _RESERVE if state.space.goal == "samples_s" else least
    possible = [replace(fastest, workers=workers) for workers in range(max(lowest, 1), state.best.workers)]
    possible = [s for s in possible if s not in line and state.forecast.obstacle(s) is None]
    possible = [s for s in possible if _RESERVE * _readers(state, line, s, alone=True) >= least]
    if not fed:
        return possible[len(possible) // 2] if possible else None
    return next((setting for setting in possible if wanted <= _readers(state, line, setting) < math.inf), None)


def _readers(state: State, line: Sequence[Setting], setting: Setting, alone: bool = False) -> float:
    """Samples a second that its readers can give, by the nearest setting that differs in their number alone.

    Args:
        alone: as if each had a processor for itself to decode, which those of that setting may have had to share.
    """
    base = min(line, key=lambda s: abs(math.log2(max(s.workers, 1) / setting.workers)))
    measured = state.known.measured(base)
    if alone and measured.reader_s and measured.decode_s:
        decode_s = min(measured.decode_s, measured.reader_s)
        saved_s = decode_s * (1 - min(state.space.cores / max(base.workers, 1), 1.0))
        measured = replace(measured, reader_s=measured.reader_s - saved_s, decode_s=decode_s - saved_s)
    return readers_rate(setting, base, measured)


def _linear(slow: Setting, rate: float, least: float) -> int:
    """Readers that would give `least` if they scaled perfectly from a setting that is too slow; more than it has."""
    return max(math.ceil(max(slow.workers, 1) * least / rate), slow.workers + 1)


def _next(state: State, ladder: Ladder, ceiling: Setting | None) -> tuple[Setting | None, str]:
    """The next setting to try, or why there is none."""
    above = ladder.above(state.best)
    if ceiling is not None:
        middle = (ladder.value(state.best) + ladder.value(ceiling)) // 2
        above = [setting for setting in above if ladder.value(setting) <= middle]
    obstacle = ""
    for setting in above:
        found = state.forecast.obstacle(setting)
        if found is None:
            return setting, ""
        obstacle = f"{ladder.knob} {ladder.value(setting)}: {found}"
    return None, obstacle or ladder.cap(state.best)


def _why(state: State, ladder: Ladder, why: str, ceiling: Setting | None) -> str:
    if ceiling is None:
        return why
    return f"between {ladder.value(state.best)} and {ladder.value(ceiling)}, which was too much"


def _no_gain(state: State, ladder: Ladder, setting: Setting, base: Setting) -> str:
    gain, noise = state.known.gain(setting, base), state.known.noise(setting, base)
    words = f"{ladder.knob} {ladder.value(base)} -> {ladder.value(setting)} gave {percent(gain)}"
    if gain <= SMALLEST_GAIN:
        return f"knee: {words}, below {SMALLEST_GAIN:.0%}"
    return f"noise: {words}, within the noise of {100 * noise:.1f} %"
