"""The first stage: the config as it is, or the nearest smaller setting that memory allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vesuvius.lab.tune.policy.memory_line import STEEPEST
from vesuvius.lab.tune.policy.prediction import death_text
from vesuvius.lab.tune.policy.state import Asking, State
from vesuvius.lab.tune.terms.known import DEADLY
from vesuvius.lab.tune.terms.setting import Setting, in_words

_TRIES = 4  # each is a death of a machine that was thought to hold it
_SLOW_TRIES = 2  # with more readers, each of which eats a whole trial of the budget


class HopelessError(Exception):
    """No setting ran."""


def baseline(state: State) -> Asking[None]:
    """Measure what there is to compare with.

    Raises:
        HopelessError: nothing ran, in words.
    """
    setting, why = _fitting(state)
    deaths, slow = 0, 0
    while deaths < _TRIES:
        rate = yield from state.attempt(setting, "baseline", why)
        if rate is not None:
            state.accept(setting)
            state.ended["baseline"] = f"measured: {rate.samples_s:.4g} samples/s, {state.now.bound}"
            return
        words = death_text(state.known.deaths[-1])
        ended = state.known.deaths[-1].outcome.ended
        if ended == "timeout":
            other, slow = _more_readers(state, setting, words, slow), slow + 1
        elif ended in DEADLY:
            other, deaths = _smaller(state, setting, words, on_gpu=ended == "gpu_memory"), deaths + 1
        else:
            raise HopelessError(words)
        _note(state, setting, other, words)
        why = f"{in_words(other, setting)}, because {words}"
        setting = other
    raise HopelessError(f"{_TRIES} trials of ever smaller settings ended badly; {death_text(state.known.deaths[-1])}")


def _smaller(state: State, setting: Setting, words: str, on_gpu: bool) -> Setting:
    """What to try after a death: the nearest of the halved settings that may be tried."""
    smaller = next(filter(state.space.allows, _halved(setting, on_gpu)), None)
    while smaller is not None and state.forecast.obstacle(smaller) is not None:
        smaller = next(filter(state.space.allows, _halved(smaller, on_gpu)), None)
    if smaller is None:
        raise HopelessError(f"{words}; nothing smaller is left{state.space.but_for_kept}")
    return smaller


def _more_readers(state: State, setting: Setting, words: str, slow: int) -> Setting:
    """What to try where steps are too slow to be measured, most likely because of the data: twice the readers."""
    workers = min(2 * setting.workers, state.space.most_workers)
    larger = replace(setting, workers=workers)
    if slow == _SLOW_TRIES or workers <= setting.workers or state.forecast.obstacle(larger) is not None:
        raise HopelessError(f"{words}; a larger --budget gives each trial more time")
    return larger


def _fitting(state: State) -> tuple[Setting, str]:
    """The source, or what is left of it when knobs are lowered until memory should do.

    Lowered, it is lowered so far that it fits even if the planner is as wrong as it may be: the way up costs less than
    a death.  Only where nothing is that small, what fits by the plan must do.
    """
    source = state.space.source
    obstacle = state.forecast.obstacle(source)
    if obstacle is None:
        return source, "the config as it is: what all else is compared with"
    fits: Setting | None = None
    setting: Setting | None = source
    while setting is not None and not _is_roomy(state, setting):
        fits = setting if state.forecast.obstacle(setting) is None else fits
        setting = _step_down(state, setting)
    setting = setting or fits
    if setting is None:
        even = f"even the smallest setting does not fit{state.space.but_for_kept}"
        raise HopelessError(f"{even}: {obstacle} for the config as it is")
    _note(state, source, setting, obstacle)
    return setting, f"{in_words(setting, source)}, because the config as it is does not fit: {obstacle}"


def _is_roomy(state: State, setting: Setting) -> bool:
    ram, vram = state.forecast.planned(setting)
    room, limit_bytes = state.space.ram_limit_bytes / STEEPEST, state.space.vram_limit_bytes
    return ram <= room and (vram is None or limit_bytes is None or vram <= limit_bytes / STEEPEST)


def _step_down(state: State, setting: Setting) -> Setting | None:
    """One knob lower by one, the first that takes less of the memory that is short."""
    ram, vram = state.forecast.planned(setting)
    short_of_vram = (
        vram is not None and state.space.vram_limit_bytes is not None and vram > state.space.vram_limit_bytes
    )
    lowered = list(filter(state.space.allows, _lowered(setting)))
    for smaller in lowered:
        its_ram, its_vram = state.forecast.planned(smaller)
        saves = (its_vram or 0) < (vram or 0) if short_of_vram else its_ram < ram
        if saves:
            return smaller
    return next(iter(lowered), None)


def _lowered(setting: Setting) -> Iterator[Setting]:
    """Fewer batches ahead, fewer readers, smaller micro-batches; never another effective batch."""
    if setting.prefetch_factor > 1:
        yield replace(setting, prefetch_factor=setting.prefetch_factor - 1)
    if setting.workers > 1:
        yield replace(setting, workers=setting.workers - 1)
    yield from _smaller_batch(setting)


def _halved(setting: Setting, on_gpu: bool) -> Iterator[Setting]:
    """After a death larger steps, in both knobs that take the host's memory, or in one where the other is kept."""
    if not on_gpu and max(setting.prefetch_factor, setting.workers) > 1:
        workers = max(setting.workers // 2, min(setting.workers, 1))
        fewer = replace(setting, workers=workers)
        shorter = replace(setting, prefetch_factor=max(setting.prefetch_factor // 2, 1))
        yield replace(shorter, workers=workers)
        yield from (one for one in (shorter, fewer) if one != setting)
    yield from _smaller_batch(setting)


def _smaller_batch(setting: Setting) -> Iterator[Setting]:
    total = setting.global_batch
    for batch in range(setting.train_batch_size - 1, 0, -1):
        if total % batch == 0:
            yield replace(setting, train_batch_size=batch, accumulate_steps=total // batch)
            return


def _note(state: State, before: Setting, after: Setting, why: str) -> None:
    for knob in after.changes(before):
        state.because[knob] = why
