"""A conservative, B balanced, C aggressive: three settings to choose from, each with what it gives and takes.  Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from vesuvius.lab.tune.policy.climb import batch_ladder, percent, prefetch_ladder, requests_ladder
from vesuvius.lab.tune.terms.known import Known
from vesuvius.lab.tune.terms.setting import Setting, in_words
from vesuvius.lab.tune.terms.space import WITHIN, Space
from vesuvius.lab.tune.terms.trial import Bound, Measured, Prediction, Risk, Stop
from vesuvius.observe.units import format_percent, size_text

SLOWEST = 0.85
"""A is at least this share of B's samples a second."""

_LESS_MEMORY = 0.95  # saving less than this is not worth a slower run
_GAIN = 0.01  # a step beyond what was measured has to promise more


@dataclass(frozen=True)
class Horizon:
    """How long the run is.

    Attributes:
        steps_per_epoch: optimizer steps.
        epochs: of the whole run.
        global_batch: samples of an optimizer step as the source has it, over all ranks.
        max_steps: where the run ends before its epochs do; None = it does not.
    """

    steps_per_epoch: int
    epochs: int
    global_batch: int
    max_steps: int | None

    @property
    def steps(self) -> int:
        """Of the whole run."""
        steps = self.steps_per_epoch * self.epochs
        return steps if self.max_steps is None else min(steps, self.max_steps)


@dataclass(frozen=True)
class Option:
    """A setting to choose.

    Attributes:
        name: 'A conservative', 'B balanced', 'C aggressive'.
        measured: whether the figures were; else they are predicted.
        global_batch: samples of an optimizer step, over all ranks.
        samples_s: None where nothing was ever measured, and then the times are None too.
        ram_bytes: host memory of the whole run at its peak: of a trial, and what a longer run takes more.
        vram_bytes: GPU memory at its peak; None on a CPU.
        step_s: mean seconds of an optimizer step.
        epoch_s, total_s: of the training steps of an epoch and of the whole run; without validation, saving, pictures.
        risk: how near to the memory limits it comes.
        overrides: what to write behind `vesuvius train` with the source config.
        words: why this one.
    """

    name: str
    setting: Setting
    measured: bool
    global_batch: int
    samples_s: float | None
    ram_bytes: int
    vram_bytes: int | None
    step_s: float | None
    epoch_s: float | None
    total_s: float | None
    risk: Risk
    overrides: tuple[str, ...]
    words: str


def options(
    known: Known,
    stop: Stop,
    space: Space,
    predict: Callable[[Setting], Prediction],
    obstacle: Callable[[Setting], str | None],
    horizon: Horizon,
) -> tuple[Option, Option, Option]:
    """A: the least memory at 85 % of B's samples a second.  B: the setting to take.  C: the fastest, or a step beyond.

    Args:
        known: all trials.  A setting that died in any of its own is neither A nor C.
        predict: what a setting would take, after these trials.
        obstacle: why a setting may not be tried; None where it may.  C has none.
    """

    def option(name: str, setting: Setting, words: str) -> Option:
        return _option(name, setting, words, known, predict(setting), space, horizon)

    lean, lean_words = _leaner(known, stop.best, space)
    fast, fast_words = _faster(known, stop, space, predict, obstacle)
    return (
        option("A conservative", lean, lean_words),
        option("B balanced", stop.best, _balanced(known, stop, space)),
        option("C aggressive", fast, fast_words),
    )


def _option(
    name: str, setting: Setting, words: str, known: Known, expected: Prediction, space: Space, horizon: Horizon
) -> Option:
    measured = known.measured(setting) if known.good(setting) else None
    figures = measured or expected
    batch = horizon.global_batch * setting.global_batch // space.source.global_batch
    step_s = batch / figures.samples_s if figures.samples_s else None
    if batch != horizon.global_batch:
        words += f"; {grown_words(batch, horizon)}"
    return Option(
        name=name,
        setting=setting,
        measured=measured is not None,
        global_batch=batch,
        samples_s=figures.samples_s,
        ram_bytes=figures.ram_bytes + expected.later_bytes,
        vram_bytes=figures.vram_bytes,
        step_s=step_s,
        epoch_s=step_s * horizon.steps_per_epoch if step_s is not None else None,
        total_s=step_s * horizon.steps if step_s is not None else None,
        risk=expected.risk,
        overrides=tuple(setting.overrides(space.source)),
        words=words,
    )


def grown_words(batch: int, horizon: Horizon) -> str:
    """What a batch that is not the source's means for the run."""
    return (
        f"a step holds {batch} samples instead of {horizon.global_batch}, and the number of steps stays; training.lr "
        "was chosen for the smaller batch and may want to be raised: watch the loss"
    )


def _balanced(known: Known, stop: Stop, space: Space) -> str:
    """Why the setting to take is taken, though another may have had more samples a second."""
    within = WITHIN[space.goal]
    words = "what to run: " + (
        f"the cheapest setting within {format_percent(within)} of the most samples/s"
        if stop.best != space.source
        else "the config as it is"
    )
    if not known.good(stop.best) or not known.good(stop.fastest):
        return words
    gain, noise = known.gain(stop.fastest, stop.best), known.noise(stop.fastest, stop.best)
    doubtful = within < gain <= noise
    return f"{words}; the {percent(gain)} of C may be noise (±{format_percent(noise)})" if doubtful else words


def _leaner(known: Known, best: Setting, space: Space) -> tuple[Setting, str]:
    """The setting with the least memory that is still fast enough, and why."""
    least = format_percent(SLOWEST)
    if not known.good(best):
        return best, "the same as B: nothing was measured"
    top = known.measured(best)

    def memory(setting: Setting) -> float:
        """Share of both limits together: a saving on either counts."""
        took = known.measured(setting)
        vram = (took.vram_bytes or 0) / space.vram_limit_bytes if space.vram_limit_bytes else 0.0
        return took.ram_bytes / space.ram_limit_bytes + vram

    fitting = [
        setting
        for setting in known.settings
        if not known.died(setting)
        and known.rate(setting).samples_s >= SLOWEST * top.samples_s
        and memory(setting) <= _LESS_MEMORY * memory(best)
    ]
    if not fitting:
        return best, f"the same as B: no setting that takes less memory was measured to reach {least} of it"
    lean = min(fitting, key=lambda setting: (memory(setting), setting.workers, -known.rate(setting).samples_s))
    against = _against(known.measured(lean), top)
    return lean, f"the least memory that was measured at {least} of B and more: {against}"


def _faster(
    known: Known,
    stop: Stop,
    space: Space,
    predict: Callable[[Setting], Prediction],
    obstacle: Callable[[Setting], str | None],
) -> tuple[Setting, str]:
    """The fastest setting that was measured; where that is B, the next step of what holds it up, and why."""
    best, fastest = stop.best, stop.fastest
    if not known.good(best):
        return best, "the same as B: nothing was measured"
    top = known.measured(best)
    if fastest != best and known.good(fastest) and not known.died(fastest):
        return fastest, f"the fastest that was measured: {_against(known.measured(fastest), top)}"
    for setting in _beyond(best, top.bound, space):
        if known.good(setting) or known.died(setting) or obstacle(setting) is not None:
            continue
        samples_s = predict(setting).samples_s
        if samples_s is not None and samples_s > (1 + _GAIN) * top.samples_s:
            words = f"a step beyond what was measured: {in_words(setting, best)}; its figures are predicted"
            return setting, words
    return best, "the same as B: it is the fastest that was measured, and no step beyond it fits and promises more"


def _beyond(best: Setting, bound: Bound, space: Space) -> list[Setting]:
    """Larger values of what holds a setting up, the likeliest first, within the caps."""
    if bound != "data-bound":
        return batch_ladder(space).above(best)[:1]
    workers = min(max(2 * best.workers, 2), space.most_workers)
    more = [replace(best, workers=workers)] if workers > best.workers else []
    if space.remote:
        more += requests_ladder(space).above(best)[:1]
    return more + prefetch_ladder(space).above(best)[:1]


def _against(one: Measured, other: Measured) -> str:
    """`-8.3 % samples/s, -3.10 GiB of RAM, +0.50 GiB of VRAM`."""
    parts = [f"{percent(one.samples_s / other.samples_s - 1)} samples/s"]
    parts.append(f"{_signed(one.ram_bytes - other.ram_bytes)} of RAM")
    if one.vram_bytes is not None and other.vram_bytes is not None:
        parts.append(f"{_signed(one.vram_bytes - other.vram_bytes)} of VRAM")
    return ", ".join(parts)


def _signed(size_bytes: int) -> str:
    return f"{'-' if size_bytes < 0 else '+'}{size_text(abs(size_bytes))}"
