"""The output of a tune: options A, B and C, page, log lines and tuned config.

The tuned config `extends` the source and sets the keys that differ, each with its reason: `workers: 6  # was 2; ...`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from vesuvius.config import Config
from vesuvius.config.describe import to_yaml
from vesuvius.config.load import dump_set_keys
from vesuvius.errors import ConfigError, StorageError, one_line
from vesuvius.experiments.tune.measurement import Planner, PredictedMemory, Result, Risk, SearchSpace, Setting, in_words
from vesuvius.experiments.tune.policy import Recommendation, does_not_fit
from vesuvius.experiments.tune.search import KINDS, Search
from vesuvius.report.curves import COLORS
from vesuvius.report.page import Bar, Bars, RunReport, Table, filled
from vesuvius.runlog.units import format_count, format_duration, format_gib, format_number, format_percent, format_size

MARK = "Written by vesuvius tune"
"""Start of the header; a file without it belongs to the user and is never replaced."""

SLOWEST = 0.85
"""Minimum speed of option A relative to B."""

_GAIN = 0.01  # minimum predicted gain of a setting beyond the measured ones
_LONGEST_VALUE = 60  # characters of an old value in a comment of the tuned config
_NOTE = (
    "~ = predicted.  Times are of training steps alone, without validation, checkpoints and previews.  Memory risk: "
    "peak of a full run relative to the limits: low below 70 %, medium below 90 %."
)


@dataclass(frozen=True)
class Option:
    name: str
    measured: bool  # whether full runs were measured; otherwise the figures are predicted
    samples_s: float | None  # None = not known, and so are the times
    ram_bytes: int  # peak of a full run
    vram_bytes: int | None  # peak of a full run; None on a CPU
    step_s: float | None
    total_s: float | None  # of all training steps
    risk: Risk
    overrides: tuple[str, ...]  # for `vesuvius train` with the source config
    words: str  # reason for this option


def build_options(recommendation: Recommendation, search: Search, steps: int) -> list[Option]:
    """A: the least memory at 85 % of B's samples/s.  B: the recommendation.  C: the fastest, or a step beyond."""
    rates, memory, source, best, space = search.rates, search.memory, search.base, recommendation.best, search.space

    def rate(setting: Setting) -> float:
        return rates.expected("run", setting) or 0.0

    smaller = [replace(best, workers=workers) for workers in range(1, best.workers + 1)]
    fit = [s for s in smaller if rate(best) and rate(s) >= SLOWEST * rate(best) and memory.obstacle(s) is None]
    smallest = min([best, *fit], key=memory.run_ram_bytes)
    beyond = (
        *rates.runs(),
        replace(best, workers=min(2 * max(best.workers, 1), space.most_workers)),
        replace(best, prefetch_factor=min(2 * best.prefetch_factor, space.most_prefetch)),
    )
    faster = (s for s in beyond if rate(s) > (1 + _GAIN) * rate(best) > 0 and memory.obstacle(s) is None)
    fast = next(faster, best)
    how = "measured, not confirmed" if rates.of("run", fast) else "predicted"
    chosen = {
        "A conservative": (smallest, f"least memory, >= {100 * SLOWEST:g} % of B's speed: {in_words(smallest, best)}"),
        "B balanced": (best, "the unchanged config" if best == source else "recommended"),
        "C aggressive": (fast, f"faster ({how}): {in_words(fast, best)}"),
    }

    def option(name: str, setting: Setting, words: str) -> Option:
        samples_s = rate(setting) or None
        step_s = setting.global_batch / samples_s if samples_s else None
        return Option(
            name=name,
            measured=bool(rates.of("run", setting)),
            samples_s=samples_s,
            ram_bytes=memory.run_ram_bytes(setting),
            vram_bytes=memory.vram_bytes(setting),
            step_s=step_s,
            total_s=step_s and step_s * steps,
            risk=memory.risk(setting),
            overrides=tuple(setting.overrides(source)),
            words="same as B: no other setting qualifies" if setting == best and name[0] != "B" else words,
        )

    return [option(name, *each) for name, each in chosen.items()]


def headline(result: Recommendation, source: Setting) -> str:
    """The result in one sentence, the gain first."""
    if result.certainty == "none":
        return f"No recommendation: {result.reason}"
    if result.certainty == "unchanged":
        return f"{'Keep the config' if result.complete else 'No gain found yet'}: {result.reason}"
    gain, changes = result.gain, in_words(result.best, source)
    if gain is None:
        times = "Speedup unknown" if result.predicted is None else f"{1 + result.predicted:.2f} times as fast"
        return f"{times}, predicted from reading and steps measured alone: {changes}"
    pairs = f"{gain.pairs} pair{'s' * (gain.pairs > 1)} of trials"
    ends = " to ".join(f"{1 + end:.2f}" for end in gain.ends)
    proof = f"95 %: {ends}, {pairs}" if ends else f"{pairs}, no interval"
    likely = "Likely " * (result.certainty == "likely")
    return f"{likely}{1 + gain.gain:.2f} times as fast ({proof}): {changes}"


def trial_line(number_of: int, result: Result) -> str:
    begin = f"Trial {number_of} took {format_duration(result.seconds)}: "
    if result.ended != "ok":
        return begin + result.end
    waited = "" if result.data_share is None else f", waited for data {format_percent(result.data_share)}"
    memory = "" if result.ram_bytes is None else f", {memory_words(result.ram_bytes, result.vram_bytes)}"
    return f"{begin}{format_number(result.rate)} samples/s{waited}{memory}"


def plan_lines(space: SearchSpace, planner: Planner, machine: str) -> list[str]:
    """The lines of `--dry-run`.  Raises ConfigError: the config does not fit into memory."""
    memory, source = PredictedMemory(space, planner, ()), space.source
    if obstacle := memory.obstacle(source):
        raise ConfigError(does_not_fit(obstacle))
    total, powers = source.global_batch, [1 << n for n in range(20)]
    requests = [count for count in powers if source.requests < count <= space.most_requests]
    sizes = [size for size in range(1, space.most_batch + 1) if total % size == 0]
    settings = (
        source,
        *(replace(source, workers=count) for count in powers if count < space.most_workers),
        replace(source, workers=space.most_workers),
        *(replace(source, requests=count) for count in requests),
        *(replace(source, train_batch_size=size, accumulate_steps=total // size) for size in sizes),
    )
    lines = [
        f"machine  {machine}{f'; {space.others}' if space.others else ''}",
        f"limits   {memory_words(space.ram_limit_bytes, space.vram_limit_bytes)}, "
        f"{format_count(space.most_workers, 'worker')}, {f'{space.most_requests} requests, ' if requests else ''}"
        f"prefetch_factor {space.most_prefetch}, train_batch_size {space.most_batch}",
        f"budget   {format_duration(space.budget_s)}, {space.trial_s:.0f} s to measure in each trial; settings to try:",
    ]
    for setting in dict.fromkeys(settings):
        what, obstacle = " ".join(setting.overrides(source)) or "the unchanged config", memory.obstacle(setting)
        words = memory_words(memory.run_ram_bytes(setting), memory.vram_bytes(setting))
        lines.append(f"{what}: {words}{f'; not started: {obstacle}' if obstacle else ''}")
    return [*lines, "dry run: the measurements decide which of these are tried; nothing was written"]


def build_page(
    name: str,
    directory: str,
    recommendation: Recommendation,
    search: Search,
    options: Sequence[Option],
    facts: Mapping[str, str],
    commands: Sequence[str],
    config_text: str,
) -> RunReport:
    """The page of a tune; `commands` are to be typed next."""
    base = search.rates.of("run", search.base)
    alone = next((words for stage, words in search.notes if stage == "baseline"), "not measured")
    summary = {"bottleneck before": (base[-1].text if base else "") or alone}
    if recommendation.written != recommendation.best:
        summary["tuned config"] = "no change yet: it is not sure that B is faster than the config"
    summary["end of tuning"] = recommendation.reason
    values = [
        (knob, to_yaml(getattr(search.base, knob)), to_yaml(getattr(recommendation.best, knob)), why)
        for knob, why in recommendation.reasons.items()
    ]
    rows = [
        (
            str(index),
            trial.stage,
            KINDS[trial.kind],
            format_number(result.rate or None),
            format_percent(result.data_share),
            format_gib(result.ram_bytes),
            f"{result.seconds:.0f}",
            "" if result.ended == "ok" else result.end,
            trial.why,
        )
        for index, (trial, result) in enumerate(zip(search.asked, search.results, strict=True))
    ]
    columns = ("#", "stage", "measured", "samples/s", "data wait", "RAM, GiB", "took, s", "failure", "why")
    tables = (
        _option_table(options),
        Table("Reason for each value", ("key", "before", "now", "why"), tuple(values)),
        Table("Rejected settings, and where each stage stopped", ("stage", "why"), tuple(search.notes)),
        Table("All trials", columns, tuple(rows)),
    )
    return RunReport(
        name=f"{name}: tune",
        directory=directory,
        facts={**summary, **facts},
        highlights=tuple(summary),
        headline=headline(recommendation, search.base),
        tone="bad" if recommendation.certainty == "none" else "" if recommendation.certainty == "unchanged" else "good",
        commands=tuple(commands),
        bars=_bars(options, search),
        tables=filled(*tables),
        config_text=config_text,
    )


def _bars(options: Sequence[Option], search: Search) -> Bars | None:
    before = search.rates.expected("run", search.base)
    if not before:
        return None
    mark = "" if search.rates.of("run", search.base) else "~"
    bars = [Bar("unchanged config", before, mark + format_number(before), COLORS["baseline"])]
    for option in options:
        is_best = option.name[0] == "B"
        if option.samples_s and option.overrides and (is_best or option.overrides != options[1].overrides):
            mark = "" if option.measured else "~"
            text = f"{mark}{format_number(option.samples_s)}: {option.samples_s / before:.2f}x"
            bars.append(Bar(option.name, option.samples_s, text, COLORS["best" if is_best else "compute"]))
    return Bars("Samples/s", tuple(bars), "~ = predicted.  x: speed relative to the unchanged config.")


def _option_table(options: Sequence[Option]) -> Table:
    rows = []
    for option in options:
        mark = "" if option.measured else "~"
        times = [format_duration(seconds) for seconds in (option.step_s, option.total_s) if seconds]
        speed = [mark + text for text in (format_number(option.samples_s), *times)] if times else ["-", "-", "-"]
        memory = (format_gib(option.ram_bytes), format_gib(option.vram_bytes), option.risk)
        rows.append((option.name, *speed, *memory, " ".join(option.overrides) or "none", option.words))
    columns = ("option", "samples/s", "step", "full run", "RAM, GiB", "VRAM, GiB", "memory risk", "changes", "why")
    return Table("Options", columns, tuple(rows), _NOTE)


def memory_words(ram_bytes: int, vram_bytes: int | None) -> str:
    """`3 GiB of RAM, 40 GiB of VRAM`."""
    vram = "" if vram_bytes is None else f", {format_size(vram_bytes)} of VRAM"
    return f"{format_size(ram_bytes)} of RAM{vram}"


def tuned_path(source: Path) -> Path:
    return source.with_name(f"{source.stem}.tuned{source.suffix or '.yaml'}")


def tuned_yaml(
    source_name: str, source: Config, wanted: Config, reasons: Mapping[str, str], header: Sequence[str]
) -> str:
    """The text of a config that extends the source (in the same folder) and reads as `wanted`.  Pure.

    `reasons` by full key (`training.workers`); others are "as set for the tune".  `header`: lines for the top.
    """
    first = f"{MARK} from {source_name}; tuning it again replaces this file."
    comments: dict[str, str] = {}

    def changed(before: BaseModel, after: BaseModel, above: str = "") -> BaseModel:
        """Only the fields that differ; a list is one value."""
        values: dict[str, Any] = {}
        for name in type(after).model_fields:
            old, new, path = getattr(before, name), getattr(after, name), f"{above}{name}"
            if old == new:
                continue
            if isinstance(old, BaseModel) and type(old) is type(new):
                values[name] = changed(old, new, f"{path}.")
                continue
            values[name] = new
            was = one_line(to_yaml(before.model_dump(mode="json")[name]), _LONGEST_VALUE)
            was += "" if name in before.model_fields_set else " by default"
            comments[path] = f"was {was}; {_clean(reasons.get(path, 'as set for the tune'))}"
        return type(after).model_construct(set(values), **values)

    sparse = changed(source, wanted)
    assert isinstance(sparse, Config)
    lines = [*(f"# {_clean(line)}".rstrip() for line in (first, *header)), "", f"extends: {to_yaml(source_name)}"]
    return "\n".join(lines) + "\n" + dump_set_keys(sparse, comments).lstrip("\n")


def check_tunable(source: Path) -> None:
    """Raise ConfigError or StorageError, before the first trial, if the tuned config cannot be written."""
    if _is_ours(source):
        raise ConfigError(f"{source} was written by vesuvius tune; tune the config it extends or remove its first line")
    path = tuned_path(source)
    if os.path.lexists(path) and not _is_ours(path):
        raise ConfigError(
            f"{path} was not written by vesuvius tune (no '# {MARK}' at its top) and would be replaced; rename it"
        )
    if not os.access(folder := path.parent, os.W_OK | os.X_OK):
        raise StorageError(f"{folder} is not writable, but the tuned config is written there; change its permissions")


def _is_ours(path: Path) -> bool:
    begin = f"# {MARK}".encode()
    return path.is_file() and path.read_bytes()[: len(begin)] == begin


def _clean(words: str) -> str:
    """Return one line that is valid in a YAML comment."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(words.split()))
