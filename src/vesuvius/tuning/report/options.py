"""A conservative, B balanced, C aggressive: three settings to choose from, each with what it gives and takes.  Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vesuvius.tuning.search.memory import Memory, Risk
from vesuvius.tuning.search.rates import Rates
from vesuvius.tuning.search.recommendation import Recommendation
from vesuvius.tuning.setting import Setting, in_words
from vesuvius.tuning.space import Space

SLOWEST = 0.85
"""A is at least this share of B's samples per second."""

_GAIN = 0.01  # a step beyond what was measured has to promise more


@dataclass(frozen=True)
class Horizon:
    """How long the run is: optimizer steps per epoch and in all, and samples per step of the source."""

    steps_per_epoch: int
    steps: int
    global_batch: int


@dataclass(frozen=True)
class Option:
    """A setting to choose.

    Attributes:
        name: 'A conservative', 'B balanced', 'C aggressive'.
        measured: whether the whole run was measured with it; else its figures are predicted.
        samples_s: None where nothing is known, and then the times are None too.
        ram_bytes, vram_bytes: peak of the whole run; `vram_bytes` None on a CPU.
        step_s, total_s: of an optimizer step, and of all training steps without validation, saving, pictures.
        risk: how near it comes to the memory limits.
        overrides: what to write behind `vesuvius train` with the source config.
        words: why this one.
    """

    name: str
    measured: bool
    samples_s: float | None
    ram_bytes: int
    vram_bytes: int | None
    step_s: float | None
    total_s: float | None
    risk: Risk
    overrides: tuple[str, ...]
    words: str


def build_options(
    found: Recommendation, space: Space, rates: Rates, memory: Memory, horizon: Horizon
) -> tuple[Option, Option, Option]:
    """A: the least memory at 85 % of B's samples/s.  B: the recommendation.  C: the fastest, or a step beyond."""
    best = found.best
    lean, lean_words = _leaner(best, space, rates, memory)
    fast, fast_words = _faster(best, space, rates, memory)
    what = "the config as it is" if best == space.source else "what to run"
    named = (("A conservative", lean, lean_words), ("B balanced", best, what), ("C aggressive", fast, fast_words))
    a, b, c = (_option(name, setting, words, space, rates, memory, horizon) for name, setting, words in named)
    return a, b, c


def _option(
    name: str, setting: Setting, words: str, space: Space, rates: Rates, memory: Memory, horizon: Horizon
) -> Option:
    samples_s, vram = rates.run(setting), memory.vram(setting)
    batch = horizon.global_batch * setting.global_batch // space.source.global_batch
    step_s = batch / samples_s if samples_s else None
    return Option(
        name=name,
        measured=bool(rates.of("run", setting)),
        samples_s=samples_s,
        ram_bytes=memory.run_ram_bytes(setting),
        vram_bytes=None if vram is None else vram.expected_bytes,
        step_s=step_s,
        total_s=None if step_s is None else step_s * horizon.steps,
        risk=memory.risk(setting),
        overrides=tuple(setting.overrides(space.source)),
        words=words,
    )


def _leaner(best: Setting, space: Space, rates: Rates, memory: Memory) -> tuple[Setting, str]:
    top = rates.run(best)
    allowed = [s for s in _smaller(best) if space.kept_by(s) is None and not memory.died(s)]
    fits = [s for s in allowed if top and (rates.run(s) or 0.0) >= SLOWEST * top]
    lean = min(fits, key=memory.run_ram_bytes, default=best)
    if lean == best or memory.run_ram_bytes(lean) >= memory.run_ram_bytes(best):
        return best, f"the same as B: nothing smaller reaches {SLOWEST:.0%} of it"
    return lean, f"the least memory at {SLOWEST:.0%} of B or more: {in_words(lean, best)}"


def _smaller(best: Setting) -> Iterator[Setting]:
    for workers in range(1, best.workers + 1):
        for prefetch in {best.prefetch_factor, max(best.prefetch_factor // 2, 1)}:
            yield replace(best, workers=workers, prefetch_factor=prefetch)


def _faster(best: Setting, space: Space, rates: Rates, memory: Memory) -> tuple[Setting, str]:
    top = rates.run(best)
    if top is None:
        return best, "the same as B: nothing was measured"
    beyond = [
        replace(best, workers=min(2 * max(best.workers, 1), space.most_workers)),
        replace(best, prefetch_factor=min(2 * best.prefetch_factor, space.most_prefetch)),
    ]
    for setting in [*rates.measured_settings(), *beyond]:
        faster = (rates.run(setting) or 0.0) > (1 + _GAIN) * top
        if setting != best and faster and memory.obstacle(setting) is None:
            how = "was measured, within what is worth a change" if rates.of("run", setting) else "is predicted"
            return setting, f"faster, as {how}: {in_words(setting, best)}"
    return best, "the same as B: no step beyond it fits and promises more"
