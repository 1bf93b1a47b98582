"""The plan of a tune: what a good engineer would try, one change at a time, always from the best so far.

A generator: it asks for a trial, is sent what came of it, and ends with what to take.  It holds no clock, no chance and
no file: fed with the same entries, it asks for the same trials.
"""

from __future__ import annotations

from collections.abc import Generator

from vesuvius.lab.tune.policy.baseline import HopelessError, baseline
from vesuvius.lab.tune.policy.choice import choose, rival, stop
from vesuvius.lab.tune.policy.climb import climb, fewer_workers, prefetch_ladder, requests_ladder, workers_ladder
from vesuvius.lab.tune.policy.prediction import death_text
from vesuvius.lab.tune.policy.state import CHECK_TRIALS, Asking, EnoughError, State
from vesuvius.lab.tune.policy.switches import raise_batch, recompute_for_batch, switches
from vesuvius.lab.tune.terms.setting import Setting, in_words
from vesuvius.lab.tune.terms.space import WITHIN, Planner, Space
from vesuvius.lab.tune.terms.trial import Entry, Stop, Trial

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
    best, checked = yield from check(state)
    return stop(state, end, best, checked)


def _raise_all(state: State) -> Asking[None]:
    """Data first, because a step that waits gains nothing by being faster; then the step; then what is too much."""
    if state.now.cause == "prefetch too small":  # readers had to stop: more of them would stop as well
        yield from _prefetch(state)
    if _readers_may_help(state):
        cause = f" ({state.now.cause})" if state.now.cause else ""
        yield from climb(state, workers_ladder(state), f"{state.now.bound}{cause}: more readers")
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


def check(state: State) -> Asking[tuple[Setting, bool]]:
    """The winner and its rival once more, in turn, so that a drift of the machine meets both.

    One pair does where the winner holds: is still within the goal of its rival, by all trials of the two.  One that
    loses within the noise is tried once more; one that loses beyond it gives way to what is now the cheapest within
    the goal, which has to hold as well.

    Returns:
        What to take, and whether it ran again, in turn with another.
    """
    first = winner = choose(state)
    other = rival(state, winner)
    tried: list[Setting] = []
    words: list[str] = []
    while len(tried) < CHECK_TRIALS:
        if other is None:
            words.append("not entered: no other setting was measured that may be tried again")
            break
        pair = (winner, other)
        obstacle = next(filter(None, map(state.forecast.obstacle, pair)), None) or state.no_room(pair)
        if obstacle:
            words.append(obstacle)
            break
        try:
            both = yield from _once_more(state, winner, other)
        except EnoughError as enough:  # the first of the two took longer than was thought
            words.append(str(enough))
            break
        if not both:
            words.append(death_text(state.known.deaths[-1]))
            break
        tried += pair
        words.append(f"measured once more each, in turn: {_verdict(state, winner, other)}")
        if state.known.gain(winner, other) >= -WITHIN[state.space.goal]:
            break
        if state.known.is_gain(other, winner):
            state.accept(other)
            loser, winner = winner, choose(state)
            other = loser if winner == other else other
    best = choose(state, tried)
    instead = f"; so another is taken: {in_words(best, first)}" if best != first else ""
    state.ended["check"] = "; ".join(words) + instead
    return best, best in tried


def _once_more(state: State, winner: Setting, other: Setting) -> Asking[bool]:
    """One trial of each; whether both ended well."""
    for setting, rest, against in ((winner, other, "runner-up"), (other, winner, "winner")):
        why = f"again, in turn with the {against}: {in_words(setting, rest)}"
        if (yield from state.attempt(setting, "check", why, True)) is None:
            return False
    return True


def _verdict(state: State, winner: Setting, other: Setting) -> str:
    rates = [state.known.rate(setting) for setting in (winner, other)]
    (a, b) = (f"{rate.samples_s:.4g} ± {rate.samples_s * rate.half_width:.2g}" for rate in rates)
    return f"{a} samples/s, and {b} with {in_words(other, winner)}"
