"""What to take in the end: the cheapest of the settings that are as good as the best, and why, with figures.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from vesuvius.config_words import to_yaml
from vesuvius.lab.tune.policy.climb import percent
from vesuvius.lab.tune.policy.memory_line import groups_apart
from vesuvius.lab.tune.policy.prediction import death_text
from vesuvius.lab.tune.policy.state import State
from vesuvius.lab.tune.terms.known import SMALLEST_GAIN
from vesuvius.lab.tune.terms.setting import Knob, Setting
from vesuvius.lab.tune.terms.space import WITHIN, Space
from vesuvius.lab.tune.terms.trial import Stop
from vesuvius.observe.units import size_text

Cost = tuple[int, int, int, int, int, int]


def cost(setting: Setting, space: Space, allocator: str) -> Cost:
    """What a setting takes of the machine, to compare: a total order of settings, free of measured noise.

    Args:
        allocator: that was found to be the better one.
    """
    switches = setting.changes(space.source).keys() - {
        "workers", "requests", "prefetch_factor", "train_batch_size", "accumulate_steps", "cuda_allocator"
    }  # fmt: skip
    return (
        setting.workers,
        space.batches_ahead(setting) * setting.train_batch_size,
        setting.requests,
        setting.train_batch_size,
        len(switches),
        int(setting.cuda_allocator != allocator),
    )


def choose(state: State, among: Sequence[Setting] = ()) -> Setting:
    """The cheapest within 3 % (goal `cost`: 10 %) of the fastest, of those settings that were accepted on the way.

    A setting whose gain was within the noise was not accepted: the luckiest of many would win else.  One that died is
    never taken; where no other was accepted, any that was measured is, and where all died, the source.

    Args:
        among: only these, where any of them may be taken; empty = all.
    """
    takeable = _takeable(state)
    takeable = [setting for setting in takeable if setting in among] or takeable
    if not takeable:
        return state.space.source
    rates = {setting: state.known.rate(setting).samples_s for setting in takeable}
    least = (1 - WITHIN[state.space.goal]) * max(rates.values())
    good = [setting for setting, rate in rates.items() if rate >= least]
    return min(good, key=lambda setting: cost(setting, state.space, state.best.cuda_allocator))


def _takeable(state: State) -> list[Setting]:
    """Settings to choose from, of the best kind of which there are any."""
    alive = [setting for setting in state.known.settings if not state.known.died(setting)]
    safe = [setting for setting in alive if state.forecast.obstacle(setting) is None]
    kinds = (set(safe) & set(state.accepted), safe, set(alive) & set(state.accepted), alive)
    best = next(filter(None, kinds), [])
    return [setting for setting in alive if setting in best]


def rival(state: State, winner: Setting) -> Setting | None:
    """What the winner has to beat once more: the fastest other that may still be tried; None = there is none."""
    others = [s for s in state.known.settings if s != winner and state.forecast.obstacle(s) is None]
    return max(others, key=lambda setting: state.known.rate(setting).samples_s, default=None)


def stop(state: State, end: str, best: Setting, checked: bool) -> Stop:
    """The end of a tune in which something was measured."""
    fastest = state.known.fastest()
    if fastest is None:
        end = f"{end}; every setting that was measured died in another trial, and the config stays as it is"
        return Stop(best, best, end, {}, state.ended, False)
    stages = "; ".join(f"{stage}: {why}" for stage, why in state.ended.items())
    reasons = {knob: _reason(state, best, knob) for knob in best.changes(state.space.source)}
    return Stop(best, fastest, f"{end}: {stages}", {str(k): why for k, why in reasons.items()}, state.ended, checked)


def _reason(state: State, best: Setting, knob: Knob) -> str:
    """From trials that differ in this knob alone: what it gave, and what the next value would."""
    value, source = getattr(best, knob), getattr(state.space.source, knob)
    head = f"{to_yaml(source)} -> {to_yaml(value)}"
    pairs = _pairs(state, best, knob)
    if not pairs:
        return f"{head}: {state.because.get(knob, 'changed together with the others')}"
    with_it, without = pairs[0]
    a, b = state.known.rate(with_it).samples_s, state.known.rate(without).samples_s
    before = getattr(without, knob)
    figures = f"({a:.4g} against {b:.4g}{'' if before == source else f' with {to_yaml(before)}'})"
    if a >= 1.5 * b:
        gave = f"{a / b:.1f} times the samples/s {figures}"
    elif knob == "cuda_allocator":
        vram = [size_text(state.known.measured(one).vram_bytes or 0) for one in (with_it, without)]
        gave = f"{vram[0]} of GPU memory instead of {vram[1]}, {percent(a / b - 1)} samples/s {figures}"
    elif a >= b * (1 + SMALLEST_GAIN):
        gave = f"{percent(a / b - 1)} samples/s {figures}"
    elif knob in state.because:
        gave = state.because[knob]
    else:
        gave = f"as many samples/s within {WITHIN[state.space.goal]:.0%} at less cost {figures}"
    return "; ".join([f"{head}: {gave}", *_beyond(state, with_it, without, knob)])


def _group(knob: Knob) -> str:
    return "batch" if knob in ("train_batch_size", "accumulate_steps") else knob


def _pairs(state: State, best: Setting, knob: Knob) -> list[tuple[Setting, Setting]]:
    """Measured settings with the value that was taken, each with one that differs in this knob alone.

    Those first that lie near to the best; the value of the source before others.
    """
    value, source = getattr(best, knob), getattr(state.space.source, knob)
    pairs = [
        (one, other)
        for one in state.known.settings
        for other in state.known.settings
        if getattr(one, knob) == value and groups_apart(one, other) == {_group(knob)} and getattr(other, knob) != value
    ]
    return sorted(pairs, key=lambda pair: (getattr(pair[1], knob) != source, len(groups_apart(pair[0], best))))


def _beyond(state: State, with_it: Setting, without: Setting, knob: Knob) -> list[str]:
    """What the next larger value gave, in words; empty where none was tried, or the knob has no order."""
    value = getattr(with_it, knob)
    if knob == "accumulate_steps" or isinstance(value, bool) or not isinstance(value, int):
        return []
    group = {_group(knob)}
    tried = [entry for entry in state.known.entries if groups_apart(entry.trial.setting, with_it) == group]
    larger = sorted(
        (e for e in tried if getattr(e.trial.setting, knob) > value), key=lambda e: getattr(e.trial.setting, knob)
    )
    if not larger or larger[0].trial.setting == without:
        return []
    setting = larger[0].trial.setting
    if not state.known.good(setting):
        return [death_text(larger[0])]
    gain = state.known.gain(setting, with_it)
    below = f", below {SMALLEST_GAIN:.0%}" if gain < SMALLEST_GAIN else ""
    return [f"{getattr(setting, knob)} gave {percent(gain)}{below}"]
