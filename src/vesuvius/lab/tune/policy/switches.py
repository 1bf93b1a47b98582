"""The last round: switches that may make a step faster or smaller, each once, from the best so far."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vesuvius.lab.tune.policy.climb import batch_ladder, climb, percent, workers_ladder
from vesuvius.lab.tune.policy.prediction import death_text
from vesuvius.lab.tune.policy.state import Asking, State, is_hungry
from vesuvius.lab.tune.terms.known import SMALLEST_GAIN
from vesuvius.lab.tune.terms.setting import Knob, Setting, in_words
from vesuvius.lab.tune.terms.trial import Stage

_ON_GPU: tuple[tuple[Knob, Any, str], ...] = (
    ("amp", "auto", "half as many bytes a value, and tensor cores; numerics change: values are rounded to 16 bits"),
    ("compile", True, "fewer and larger kernels"),
    ("channels_last", True, "the order that cuDNN's kernels want"),
    ("cudnn_benchmark", True, "cuDNN times its kernels once"),
    ("checkpoint_levels", (), "nothing is computed twice"),
    ("cuda_allocator", "expandable", "fewer holes in GPU memory"),
)
_ON_CPU = tuple(switch for switch in _ON_GPU if switch[0] in ("compile", "channels_last"))
_FASTER = 0.1
"""Of the trainer's own seconds for a sample: they have no bursts, and the interval of the rate says nothing of them."""
_MOST_LEVELS = 2  # those of the highest resolution take nearly all of the memory


def switches(state: State) -> Asking[None]:
    """Each switch that is not set, kept where it gains, or saves GPU memory at no loss."""
    seen: list[str] = []
    for knob, value, why in _ON_GPU if state.space.on_gpu else _ON_CPU:
        if getattr(state.best, knob) == value or not _is_free(state, knob):
            continue
        setting = _with(state.best, knob, value)
        obstacle = state.forecast.obstacle(setting)
        if obstacle is not None:
            seen.append(f"{knob} not tried: {obstacle}")
        else:
            seen.append((yield from _one_switch(state, setting, knob, why)))
        state.ended["switches"] = "; ".join(seen)
    state.ended.setdefault("switches", "every switch is set already")


def _is_free(state: State, knob: Knob) -> bool:
    """Whether the config leaves a switch to us: a number format that it names stays, and runs that are to repeat do."""
    if knob == "amp":
        return state.space.source.amp == "off"
    return knob != "cudnn_benchmark" or not state.space.deterministic


def recompute_for_batch(state: State) -> Asking[None]:
    """Name levels to checkpoint where that, and only that, lets larger micro-batches fit: then the largest."""
    ladder, base = batch_ladder(state.space), state.best
    if base.checkpoint_levels or not (above := ladder.above(base)) or state.forecast.obstacle(above[0]) is None:
        return
    if not _larger_may_gain(state, above[0]):
        return
    for count in range(1, min(_MOST_LEVELS, len(state.space.levels)) + 1):
        setting, levels = None, state.space.levels[:count]
        while above and state.forecast.obstacle(larger := replace(above[0], checkpoint_levels=levels)) is None:
            setting, above = larger, ladder.above(larger)
        if setting is None:
            continue
        why = "levels that are computed twice make room for a larger micro-batch"
        rate = yield from state.compare(setting, "batch", why)
        if rate is not None and state.known.is_gain(setting, base):
            state.accept(setting)
            gain = percent(state.known.gain(setting, base))
            words = f"makes room for {in_words(setting, replace(base, checkpoint_levels=levels))}, together {gain}"
            state.because["checkpoint_levels"] = f"{words} samples/s"
            yield from feed(state)
        return


def raise_compute(state: State, setting: Setting, stage: Stage, why: str) -> Asking[bool]:
    """Try a setting whose steps may be faster, and feed it where it waits for data then; whether it was kept.

    A step that got faster shows no gain while the readers hold it up: then the workers are raised first.
    """
    base, ended, because = state.best, dict(state.ended), dict(state.because)
    rate = yield from state.compare(setting, stage, why)
    if rate is None:
        return False
    if state.known.is_gain(setting, base):
        state.accept(setting)
        yield from feed(state)
        return True
    measured, before = state.known.measured(setting), state.known.measured(base)
    # Larger pieces that wait for data are fed unless they are surely slower: more readers are what they lack.
    most_s = before.trainer_s * (1 + _FASTER if stage == "batch" else 1 / (1 + _FASTER))
    if not is_hungry(measured) or measured.trainer_s > most_s:
        return False
    accepted = list(state.accepted)
    state.accept(setting)
    yield from feed(state)
    if state.known.is_gain(state.best, base):
        return True
    state.best, state.accepted, state.ended, state.because = base, accepted, ended, because
    return False


def feed(state: State) -> Asking[None]:
    """Raise the workers again where a faster step waits for data."""
    if state.hungry:
        yield from climb(state, workers_ladder(state), "the step got faster and waits for data again")


def raise_batch(state: State) -> Asking[None]:
    """Larger micro-batches while they pay, fed where they wait for data."""
    ladder, why = batch_ladder(state.space), "fewer and larger pieces of a step cost less to launch"
    yield from climb(state, ladder, why)
    refused = next((s for s in ladder.above(state.best) if state.known.good(s) and not state.known.died(s)), None)
    fed = refused is not None and (yield from raise_compute(state, refused, "batch", why))
    if fed or state.hungry:
        yield from feed(state)
        yield from climb(state, ladder, why)


def _one_switch(state: State, setting: Setting, knob: Knob, why: str) -> Asking[str]:
    base, deaths = state.best, len(state.known.deaths)
    words = in_words(setting, base)
    kept = yield from raise_compute(state, setting, "switches", f"{words}: {why}")
    if len(state.known.deaths) > deaths and (state.known.died(setting) or not state.known.good(setting)):
        return f"{words} not taken: {death_text(state.known.deaths[-1])}"
    gain = state.known.gain(setting, base)
    if not kept and knob == "cuda_allocator" and _saves_vram(state, setting, base) and gain > -SMALLEST_GAIN:
        state.accept(setting)
        return f"{words} taken ({percent(gain)}, less GPU memory)"
    return f"{words} {'taken' if kept else 'not taken'} ({percent(gain)})"


def _larger_may_gain(state: State, larger: Setting) -> bool:
    """Whether what larger micro-batches have gained so far leaves a gain for the next, computing twice left aside."""
    sizes = {setting.train_batch_size for setting in state.known.settings}
    expected = state.forecast.predict(larger).samples_s or 0.0
    return len(sizes) < 2 or expected > (1 + SMALLEST_GAIN) * state.known.rate(state.best).samples_s


def _saves_vram(state: State, setting: Setting, base: Setting) -> bool:
    now, before = state.known.measured(setting).vram_bytes, state.known.measured(base).vram_bytes
    return now is not None and before is not None and now <= (1 - SMALLEST_GAIN) * before


def _with(setting: Setting, knob: Knob, value: Any) -> Setting:
    change: dict[str, Any] = {knob: value}
    return replace(setting, **change)
