"""A conservative, B balanced, C aggressive: three settings to choose from, each with what it gives and takes.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vesuvius.lab.tune.setting import Setting, in_words
from vesuvius.lab.tune.space import WITHIN, Space
from vesuvius.lab.tune.trial import Entry, Prediction, Risk, Stop
from vesuvius.observe.units import size_text

SLOWEST = 0.85
"""A is at least this share of B's samples a second."""

_LESS_MEMORY = 0.95  # saving less than this is not worth a slower run
_GAIN = 0.01  # a step beyond what was measured has to promise more
_SURE = 0.001  # no interval is believed to be narrower, relative to its mean


@dataclass(frozen=True)
class Horizon:
    """How long the run is.

    Attributes:
        steps_per_epoch: optimizer steps.
        epochs: of the whole run.
        global_batch: samples of an optimizer step as the source has it, over all ranks.
    """

    steps_per_epoch: int
    epochs: int
    global_batch: int


@dataclass(frozen=True)
class Pooled:
    """All trials of one setting that ended well.

    Attributes:
        samples_s, low, high: mean, each trial weighted by how sure it is, and its 95 % confidence interval.
        ram_bytes, vram_bytes: the highest peak; VRAM None on a CPU.
        trials: their numbers.
        steps: measured in all of them.
        last: the last of them.
    """

    samples_s: float
    low: float
    high: float
    ram_bytes: int
    vram_bytes: int | None
    trials: tuple[int, ...]
    steps: int
    last: Entry


@dataclass(frozen=True)
class Option:
    """A setting to choose.

    Attributes:
        name: 'A conservative', 'B balanced', 'C aggressive'.
        measured: whether the figures were; else they are predicted.
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
    samples_s: float | None
    ram_bytes: int
    vram_bytes: int | None
    step_s: float | None
    epoch_s: float | None
    total_s: float | None
    risk: Risk
    overrides: tuple[str, ...]
    words: str


def pool(ledger: Sequence[Entry]) -> dict[Setting, Pooled]:
    """What was measured, by setting, in the order of the first trials."""
    found: dict[Setting, list[Entry]] = {}
    for entry in ledger:
        if entry.outcome.ended == "ok" and entry.outcome.measured is not None:
            found.setdefault(entry.trial.setting, []).append(entry)
    return {setting: _pooled(entries) for setting, entries in found.items()}


def options(
    ledger: Sequence[Entry],
    stop: Stop,
    space: Space,
    predict: Callable[[Setting], Prediction],
    horizon: Horizon,
) -> tuple[Option, Option, Option]:
    """A: the least memory at 85 % of B's samples a second.  B: the setting to take.  C: the fastest, or a step beyond.

    Args:
        predict: what a setting would take, after this ledger.
    """
    known = pool(ledger)

    def option(name: str, setting: Setting, words: str) -> Option:
        return _option(name, setting, words, known.get(setting), predict(setting), space, horizon)

    lean, lean_words = _leaner(known, stop.best, space)
    fast, fast_words = _faster(known, ledger, stop, space, predict)
    within = f"the cheapest setting within {100 * WITHIN[space.goal]:.0f} % of the most samples/s"
    balanced = f"what to run: {within if stop.best != space.source else 'the config as it is'}"
    return (
        option("A conservative", lean, lean_words),
        option("B balanced", stop.best, balanced),
        option("C aggressive", fast, fast_words),
    )


def _pooled(entries: list[Entry]) -> Pooled:
    measured = [entry.outcome.measured for entry in entries if entry.outcome.measured is not None]
    widths = [max((m.high - m.low) / 2, _SURE * m.samples_s) for m in measured]
    weights = [width**-2 for width in widths]
    mean = sum(m.samples_s * weight for m, weight in zip(measured, weights, strict=True)) / sum(weights)
    half = max(sum(weights) ** -0.5, max(abs(m.samples_s - mean) for m in measured))
    vram = [m.vram_bytes for m in measured if m.vram_bytes is not None]
    return Pooled(
        samples_s=mean,
        low=mean - half,
        high=mean + half,
        ram_bytes=max(m.ram_bytes for m in measured),
        vram_bytes=max(vram, default=None),
        trials=tuple(entry.trial.number for entry in entries),
        steps=sum(m.steps for m in measured),
        last=entries[-1],
    )


def _option(
    name: str, setting: Setting, words: str, known: Pooled | None, expected: Prediction, space: Space, horizon: Horizon
) -> Option:
    figures = known or expected
    batch = horizon.global_batch * setting.global_batch // space.source.global_batch
    step_s = batch / figures.samples_s if figures.samples_s else None
    epoch_s = step_s * horizon.steps_per_epoch if step_s is not None else None
    if batch != horizon.global_batch:
        words += f"; a step holds {batch} samples instead of {horizon.global_batch}, and the number of steps stays"
    return Option(
        name=name,
        setting=setting,
        measured=known is not None,
        samples_s=figures.samples_s,
        ram_bytes=figures.ram_bytes + expected.later_bytes,
        vram_bytes=figures.vram_bytes,
        step_s=step_s,
        epoch_s=epoch_s,
        total_s=epoch_s * horizon.epochs if epoch_s is not None else None,
        risk=expected.risk,
        overrides=tuple(setting.overrides(space.source)),
        words=words,
    )


def _leaner(known: Mapping[Setting, Pooled], best: Setting, space: Space) -> tuple[Setting, str]:
    """The setting with the least memory that is still fast enough, and why."""
    same = "the same as B: no setting that takes less memory was measured to reach 85 % of it"
    if best not in known:
        return best, "the same as B: nothing was measured"
    top = known[best]

    def memory(setting: Setting) -> float:
        """Share of both limits together: a saving on either counts."""
        pooled = known[setting]
        vram = (pooled.vram_bytes or 0) / space.vram_limit_bytes if space.vram_limit_bytes else 0.0
        return pooled.ram_bytes / space.ram_limit_bytes + vram

    fitting = [
        setting
        for setting, pooled in known.items()
        if pooled.samples_s >= SLOWEST * top.samples_s and memory(setting) <= _LESS_MEMORY * memory(best)
    ]
    if not fitting:
        return best, same
    lean = min(fitting, key=lambda setting: (memory(setting), setting.workers, -known[setting].samples_s))
    return lean, f"the least memory that was measured at 85 % of B and more: {_against(known[lean], top)}"


def _faster(
    known: Mapping[Setting, Pooled],
    ledger: Sequence[Entry],
    stop: Stop,
    space: Space,
    predict: Callable[[Setting], Prediction],
) -> tuple[Setting, str]:
    """The fastest setting that was measured; where that is B, the next step of what holds it up, and why."""
    if stop.best not in known:
        return stop.best, "the same as B: nothing was measured"
    top = known[stop.best]
    if stop.fastest != stop.best and stop.fastest in known:
        return stop.fastest, f"the fastest that was measured: {_against(known[stop.fastest], top)}"
    tried = {entry.trial.setting for entry in ledger}
    measured = top.last.outcome.measured
    bound = measured.bound if measured is not None else ""
    for setting in _beyond(stop.best, bound, space):
        expected = predict(setting)
        gains = expected.samples_s is not None and expected.samples_s > (1 + _GAIN) * top.samples_s
        if setting not in tried and gains and _fits(expected, space):
            return (
                setting,
                f"a step beyond what was measured: {in_words(setting, stop.best)}; its figures are predicted",
            )
    return stop.best, "the same as B: it is the fastest that was measured, and no step beyond it fits and promises more"


def _beyond(best: Setting, bound: str, space: Space) -> Iterator[Setting]:
    """Larger values of what holds a setting up, the likeliest first, within the caps."""
    if bound == "data-bound":
        if best.workers < space.most_workers:
            yield replace(best, workers=min(max(2 * best.workers, 1), space.most_workers))
        if space.remote and best.requests < space.most_requests:
            yield replace(best, requests=min(2 * best.requests, space.most_requests))
        if best.prefetch_factor < space.most_prefetch:
            yield replace(best, prefetch_factor=min(2 * best.prefetch_factor, space.most_prefetch))
        return
    batch = 2 * best.train_batch_size
    if batch <= space.most_batch:
        if best.accumulate_steps % 2 == 0:
            yield replace(best, train_batch_size=batch, accumulate_steps=best.accumulate_steps // 2)
        elif space.scale_batch:
            yield replace(best, train_batch_size=batch)


def _fits(expected: Prediction, space: Space) -> bool:
    vram_fits = (
        expected.vram_bytes is None or space.vram_limit_bytes is None or expected.vram_bytes <= space.vram_limit_bytes
    )
    return vram_fits and expected.ram_bytes + expected.later_bytes <= space.ram_limit_bytes


def _against(one: Pooled, other: Pooled) -> str:
    """`-8.3 % samples/s, -3.10 GiB of RAM, +0.50 GiB of VRAM`."""
    parts = [f"{one.samples_s / other.samples_s - 1:+.1%} samples/s".replace("%", " %")]
    parts.append(f"{_signed(one.ram_bytes - other.ram_bytes)} of RAM")
    if one.vram_bytes is not None and other.vram_bytes is not None:
        parts.append(f"{_signed(one.vram_bytes - other.vram_bytes)} of VRAM")
    return ", ".join(parts)


def _signed(size_bytes: int) -> str:
    return f"{'-' if size_bytes < 0 else '+'}{size_text(abs(size_bytes))}"
