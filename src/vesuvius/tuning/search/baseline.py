"""The first stage: the unchanged config, or the nearest smaller setting that fits into memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vesuvius.tuning.block import DEADLY
from vesuvius.tuning.search.memory_line import STEEPEST
from vesuvius.tuning.search.search import Search, SearchEndedError
from vesuvius.tuning.setting import Setting, in_words

_TRIES, _SLOW_TRIES = 4, 2  # after a lack of memory, and after a timeout


def measure_baseline(search: Search) -> None:
    setting, why = _fitting(search)
    deaths = slow = 0
    while (block := search.measure(setting, "run", "baseline", why)).ended != "ok":
        words, other = search.why_failed, None
        if block.ended == "timeout" and slow < _SLOW_TRIES:
            slow += 1
            workers = min(2 * max(setting.workers, 1), search.space.most_workers)
            other = replace(setting, workers=workers) if workers > setting.workers else None
            other = None if other is not None and search.memory.obstacle(other) else other
        elif block.ended in DEADLY and deaths < _TRIES:
            deaths += 1
            other = _next_smaller(search, setting, on_gpu=block.ended == "gpu_memory")
            while other is not None and search.memory.obstacle(other) is not None:
                other = _next_smaller(search, other, on_gpu=block.ended == "gpu_memory")
        if other is None:
            if block.ended == "timeout":
                words = f"{words}; a larger --budget gives each block more time"
            search.ended["baseline"] = words
            raise SearchEndedError(words)
        search.note(setting, other, words)
        setting, why = other, f"{in_words(other, setting)}, because {words}"
    search.base = search.best = setting
    trainer = search.rate(setting, "step", "baseline", "the trainer alone, on a batch that stays")
    readers = search.rate(setting, "readers", "baseline", "the readers alone, no step computed")
    if trainer is None or readers is None:
        search.ended["baseline"] = search.why_failed
        raise SearchEndedError(search.why_failed)
    search.ended["baseline"] = (
        f"{block.rate:.3g} samples/s; readers alone deliver {readers:.3g}, the trainer alone takes {trainer:.3g}"
    )


def _fitting(search: Search) -> tuple[Setting, str]:
    """The source, or a smaller setting that is predicted to fit, if possible with the planner's largest error."""
    source = search.space.source
    obstacle = search.memory.obstacle(source)
    if obstacle is None:
        return source, "the unchanged config, to compare with"
    fits: Setting | None = None
    setting: Setting | None = source
    while setting is not None:
        if search.memory.obstacle(setting) is None:
            fits = fits or setting
            if _is_roomy(search, setting):
                fits = setting
                break
        setting = _next_smaller(search, setting, on_gpu=_is_short_of_vram(search, setting))
    if fits is None:
        kept = f" with --keep {','.join(search.space.kept)}" if search.space.kept else ""
        words = f"even the smallest setting does not fit{kept}: {obstacle} for the unchanged config"
        search.ended["baseline"] = words
        raise SearchEndedError(words)
    search.note(source, fits, obstacle)
    return fits, f"{in_words(fits, source)}, because the unchanged config does not fit: {obstacle}"


def _is_roomy(search: Search, setting: Setting) -> bool:
    vram, limit_bytes = search.planner.vram_bytes(setting), search.space.vram_limit_bytes
    fits = vram is None or limit_bytes is None or vram <= limit_bytes / STEEPEST
    return fits and search.planner.ram_bytes(setting) <= search.space.ram_limit_bytes / STEEPEST


def _is_short_of_vram(search: Search, setting: Setting) -> bool:
    """Whether it is GPU memory alone that is short."""
    vram, limit_bytes = search.planner.vram_bytes(setting), search.space.vram_limit_bytes
    short = vram is not None and limit_bytes is not None and vram > limit_bytes / STEEPEST
    return short and search.planner.ram_bytes(setting) <= search.space.ram_limit_bytes / STEEPEST


def _next_smaller(search: Search, setting: Setting, on_gpu: bool) -> Setting | None:
    """The next smaller setting that changes no kept knob; None at the end."""
    return next((one for one in _smaller(setting, on_gpu) if search.space.kept_by(one) is None), None)


def _smaller(setting: Setting, on_gpu: bool) -> Iterator[Setting]:
    """Half the prefetch and half the readers, or one of them; then smaller micro-batches."""
    if not on_gpu:
        prefetch = max(setting.prefetch_factor // 2, 1)
        workers = max(setting.workers // 2, min(setting.workers, 1))
        shorter = replace(setting, prefetch_factor=prefetch)
        halves = (replace(shorter, workers=workers), replace(setting, workers=workers), shorter)
        yield from (half for half in halves if half != setting)
    total = setting.global_batch
    for batch in range(setting.train_batch_size - 1, 0, -1):
        if total % batch == 0:
            yield replace(setting, train_batch_size=batch, accumulate_steps=total // batch)
            return
