"""The plan of a tune: what a good engineer would try, one change at a time, always from the best so far.

A generator: it asks for a trial, is sent what came of it, and ends with what to take.  It holds no clock, no chance and
no file: fed with the same entries, it asks for the same trials.
"""

from __future__ import annotations

from collections.abc import Generator

from vesuvius.lab.tune.baseline import HopelessError, baseline
from vesuvius.lab.tune.choice import choose, rival, stop
from vesuvius.lab.tune.climb import climb, fewer_workers, prefetch_ladder, requests_ladder, workers_ladder
from vesuvius.lab.tune.setting import Setting, in_words
from vesuvius.lab.tune.space import Planner, Space
from vesuvius.lab.tune.state import Asking, EnoughError, State
from vesuvius.lab.tune.switches import raise_batch, recompute_for_batch, switches
from vesuvius.lab.tune.trial import Entry, Stop, Trial

_OFTEN = 0.05  # share of the time, or of the batches, from which on the buffer counts as full, or as empty


def search(space: Space, planner: Planner) -> Generator[Trial, Entry, Stop]:
    """Try settings until nothing is gained any more.

    Yields:
        The next trial; expects its entry to be sent.

    Returns:
        What to take, and why.
    """
    state = State(space, planner)
    try:
        yield from baseline(state)
        yield from _raise_all(state)
        end = "all stages are through"
    except HopelessError as hopeless:
        return Stop(space.source, space.source, str(hopeless), {}, {"baseline": str(hopeless)}, False)
    except EnoughError as enough:
        end = str(enough)
    if not state.known.settings:
        return Stop(space.source, space.source, end, {}, {"baseline": end}, False)
    checked = yield from _check(state)
    return stop(state, end, checked)


def _raise_all(state: State) -> Asking[None]:
    """Data first, because a step that waits gains nothing by being faster; then the step; then what is too much."""
    if state.now.cause == "prefetch too small":  # readers had to stop: more of them would stop as well
        yield from _prefetch(state)
    if _readers_may_help(state):
        cause = f" ({state.now.cause})" if state.now.cause else ""
        yield from climb(state, workers_ladder(state.space), f"{state.now.bound}{cause}: more readers")
        yield from _requests(state)
    if "prefetch" not in state.ended:
        yield from _prefetch(state)
    if state.data_bound and state.space.on_gpu:
        for stage in ("batch", "switches"):
            state.ended[stage] = "not entered: data-bound, and a faster step would only wait longer"
    else:
        yield from _faster_steps(state)
    yield from fewer_workers(state)


def _faster_steps(state: State) -> Asking[None]:
    yield from raise_batch(state)
    full = state.ended["batch"].startswith("cap")
    before = state.best
    yield from switches(state)
    if full and state.best != before:
        yield from raise_batch(state)
    if state.space.on_gpu:
        yield from recompute_for_batch(state)


def _readers_may_help(state: State) -> bool:
    """Also where the trainer reads itself and has no time for it."""
    return state.hungry or (state.now.bound == "host-bound" and state.best.workers == 0)


def _requests(state: State) -> Asking[None]:
    if state.space.remote and state.data_bound and state.now.cause == "store latency":
        yield from climb(state, requests_ladder(state.space), "data-bound: store latency, which requests at once hide")


def _prefetch(state: State) -> Asking[None]:
    """A buffer that was full and yet ran empty is too small; one that only ran empty may be."""
    now = state.now
    bursts = min(now.buffer_full_share, now.ran_empty_share) > _OFTEN or now.cause == "prefetch too small"
    if bursts:
        yield from climb(state, prefetch_ladder(state.space), "all places ahead had been full, and yet ran empty")
    elif state.data_bound:
        yield from climb(state, prefetch_ladder(state.space), "still data-bound: more batches ahead, once")
    else:
        state.ended["prefetch"] = "not entered: the batches ahead last"


def _check(state: State) -> Asking[bool]:
    """The winner and its rival once more, in turn, so that a drift of the machine meets both; whether both ran."""
    winner = choose(state)
    other = rival(state, winner)
    if other is None:
        state.ended["check"] = "not entered: no other setting was measured"
        return False
    ran: list[Setting] = []
    for setting in (winner, other, winner, other):
        against = "runner-up" if setting == winner else "winner"
        compared = in_words(setting, other if setting == winner else winner)
        if state.forecast.obstacle(setting) is not None:
            break
        try:
            rate = yield from state.attempt(setting, "check", f"again, in turn with the {against}: {compared}", True)
        except EnoughError as enough:
            state.ended["check"] = str(enough)
            break
        if rate is not None:
            ran.append(setting)
    checked = {winner, other} <= set(ran)
    if checked:
        if state.known.is_gain(other, winner):
            state.accept(other)
        state.ended["check"] = f"measured {len(ran)} times more, in turn: {_verdict(state, winner, other)}"
    return checked


def _verdict(state: State, winner: Setting, other: Setting) -> str:
    rates = [state.known.rate(setting) for setting in (winner, other)]
    (a, b) = (f"{rate.samples_s:.4g} ± {rate.samples_s * rate.half_width:.2g}" for rate in rates)
    return f"{a} samples/s, and {b} with {in_words(other, winner)}"
