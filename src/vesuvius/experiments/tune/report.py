"""What a tune says of its findings: options A, B and C, the page, the lines of the log, and the tuned config.

The tuned config `extends` the source and sets the keys that differ, each with its reason: `workers: 6  # was 2; ...`.
"""

from __future__ import annotations

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
from vesuvius.experiments.tune.measurement import Block, Planner, SearchSpace, Setting, in_words
from vesuvius.experiments.tune.policy import Recommendation, does_not_fit
from vesuvius.experiments.tune.predict import ENDED_BY, PredictedMemory, Risk
from vesuvius.experiments.tune.search import KINDS, SHOWN, Search
from vesuvius.report.page import RunReport, Table, filled
from vesuvius.runlog.units import format_count, format_duration, format_number, format_percent, format_size

MARK = "Written by vesuvius tune"
"""Begins the header: a file that does not begin so belongs to the user and is never replaced."""

SLOWEST = 0.85
"""A is at least this share of B's samples per second."""

_GAIN = 0.01  # a step beyond what was measured has to promise more
_OPTION_COLUMNS = ("option", "samples/s", "step", "whole run", "RAM", "VRAM", "memory risk", "changes", "why")
_BLOCK_COLUMNS = ("#", "stage", "measured", "changes", "samples/s", "waited for data", "RAM", "took", "ended", "why")
_LONGEST_VALUE = 60  # characters of the value before, in a comment of the tuned config
_NOTE = (
    "~ = predicted.  Times are of training steps alone, without validation, saving and pictures.  Memory risk: how "
    "near the peak of the whole run comes to the limits: low below 70 %, medium below 90 %."
)


@dataclass(frozen=True)
class Option:
    """A setting to choose."""

    name: str
    measured: bool  # whether the whole run was measured with it; else its figures are predicted
    samples_s: float | None  # None where nothing is known, and then the times are None too
    ram_bytes: int  # peak of the whole run, as vram_bytes, which is None on a CPU
    vram_bytes: int | None
    step_s: float | None
    total_s: float | None  # of all training steps
    risk: Risk
    overrides: tuple[str, ...]  # what to write behind `vesuvius train` with the source config
    words: str  # why this one


def build_options(found: Recommendation, search: Search, steps: int) -> list[Option]:
    """A: the least memory at 85 % of B's samples/s.  B: the recommendation.  C: the fastest, or a step beyond.

    Args:
        steps: optimizer steps of the whole run.
    """
    rates, memory, source, best, space = search.rates, search.memory, search.base, found.best, search.space

    def rate(setting: Setting) -> float:
        return rates.expected("run", setting) or 0.0

    smaller = [replace(best, workers=workers) for workers in range(1, best.workers + 1)]
    fit = [s for s in smaller if rate(best) and rate(s) >= SLOWEST * rate(best) and memory.obstacle(s) is None]
    lean = min([best, *fit], key=memory.run_ram_bytes)
    beyond = (
        *rates.runs(),
        replace(best, workers=min(2 * max(best.workers, 1), space.most_workers)),
        replace(best, prefetch_factor=min(2 * best.prefetch_factor, space.most_prefetch)),
    )
    faster = (s for s in beyond if rate(s) > (1 + _GAIN) * rate(best) > 0 and memory.obstacle(s) is None)
    fast = next(faster, best)
    how = "measured, though not surely" if rates.of("run", fast) else "predicted"
    chosen = {
        "A conservative": (lean, f"the least memory at {SLOWEST:.0%} of B or more: {in_words(lean, best)}"),
        "B balanced": (best, "the config as it is" if best == source else "what to run"),
        "C aggressive": (fast, f"faster, as {how}: {in_words(fast, best)}"),
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
            words="the same as B: nothing else fits and promises more" if setting == best and name[0] != "B" else words,
        )

    return [option(name, *each) for name, each in chosen.items()]


def headline(found: Recommendation) -> str:
    """What came of it, in one line."""
    if found.certainty == "none":
        return f"no recommendation: {found.reason}"
    if found.certainty == "unchanged":
        return f"{'nothing to change' if found.complete else 'no gain found yet'}: {found.reason}"
    gain, sure = found.gain, "B, likely, not sure" if found.certainty == "likely" else "B"
    if gain is None:
        times = "not known how many" if found.predicted is None else f"{1 + found.predicted:.2f}"
        proof = "as readers alone and steps alone predict; no whole run was compared"
        return f"{sure}: {times} times the samples/s, {proof}"
    pairs = f"{gain.pairs} pair{'s' * (gain.pairs > 1)} of blocks in turn"
    ends = [f"{1 + end:.2f}" for end in gain.ends]
    proof = f"95 %: {' to '.join(ends)}, {pairs}" if ends else f"{pairs}: no interval"
    return f"{sure}: {1 + gain.gain:.2f} times the samples/s ({proof})"


def summary(found: Recommendation, search: Search) -> dict[str, str]:
    """What held the baseline up, what to change, what that gives, and why it ended."""
    rates, source = search.rates, search.base
    base = rates.of("run", source)
    alone = next((words for stage, words in search.notes if stage == "baseline"), "not measured")
    lines = {
        "Bottleneck": (base[-1].text if base else "") or alone,
        "What to change": in_words(found.best, source),
    }
    if found.written != found.best:
        lines["In the tuned config"] = f"nothing: B was not measured in at least {SHOWN} pairs with the config as it is"
    return lines | {"Why it ended": found.reason}


def block_line(number_of: int, block: Block) -> str:
    """The line for the end of a block."""
    begin = f"Block {number_of} took {format_duration(block.seconds)}: "
    if block.ended != "ok":
        return begin + _end_words(block)
    waited = "" if block.data_share is None else f", waited for data {format_percent(block.data_share)}"
    memory = "" if block.ram_bytes is None else f", {memory_words(block.ram_bytes, block.vram_bytes)}"
    return f"{begin}{format_number(block.rate)} samples/s{waited}{memory}"


def plan_lines(space: SearchSpace, planner: Planner, machine: str) -> list[str]:
    """The lines of `--dry-run`: limits, budget, and the planned memory of what may be tried.

    Raises ConfigError: the config does not fit.
    """
    memory, source = PredictedMemory(space, planner, ()), space.source
    if obstacle := memory.obstacle(source):
        raise ConfigError(does_not_fit(obstacle))
    total, powers = source.global_batch, [1 << n for n in range(20)]
    workers = [*(count for count in powers if count < space.most_workers), space.most_workers]
    requests = [count for count in powers if source.requests < count <= space.most_requests]
    sizes = [size for size in range(1, space.most_batch + 1) if total % size == 0]
    settings = (
        source,
        *(replace(source, workers=count) for count in workers),
        *(replace(source, requests=count) for count in requests),
        *(replace(source, train_batch_size=size, accumulate_steps=total // size) for size in sizes),
    )
    lines = []
    for setting in dict.fromkeys(settings):
        what, obstacle = " ".join(setting.overrides(source)) or "the config as it is", memory.obstacle(setting)
        words = memory_words(memory.run_ram_bytes(setting), memory.vram_bytes(setting))
        lines.append(f"{what}: {words}{f'; not started: {obstacle}' if obstacle else ''}")
    return [
        f"machine  {machine}{f'; {space.others}' if space.others else ''}",
        f"limits   {memory_words(space.ram_limit_bytes, space.vram_limit_bytes)}, "
        f"{format_count(space.most_workers, 'worker')}, {f'{space.most_requests} requests, ' if requests else ''}"
        f"prefetch_factor {space.most_prefetch}, train_batch_size {space.most_batch}",
        f"budget   {format_duration(space.budget_s)}, {space.block_s:.0f} s to measure in each block; may be tried:",
        *lines,
        "dry run: what is tried of it depends on what is measured; nothing was written",
    ]


def build_page(
    name: str,
    directory: str,
    found: Recommendation,
    search: Search,
    options: Sequence[Option],
    facts: Mapping[str, str],
    config_text: str,
) -> RunReport:
    """The report; `facts` of the tune as a whole stand beside those of its summary."""
    values = [
        (knob, to_yaml(getattr(search.base, knob)), to_yaml(getattr(found.best, knob)), why)
        for knob, why in found.reasons.items()
    ]
    blocks = [
        (
            str(number_of),
            cell.stage,
            KINDS[cell.kind],
            " ".join(cell.setting.overrides(search.base)) or "none",
            format_number(block.rate or None),
            format_percent(block.data_share),
            format_size(block.ram_bytes),
            format_duration(block.seconds),
            "ok" if block.ended == "ok" else _end_words(block),
            cell.why,
        )
        for number_of, (cell, block) in enumerate(zip(search.asked, search.blocks, strict=True))
    ]
    tables = (
        Table("Options", _OPTION_COLUMNS, tuple(map(_option_row, options)), _NOTE),
        Table("Why each value", ("key", "before", "now", "why"), tuple(values)),
        Table("What was not taken, and where each stage stopped", ("stage", "why"), tuple(search.notes)),
        Table("All blocks", _BLOCK_COLUMNS, tuple(blocks)),
    )
    return RunReport(
        name=f"{name}: tune",
        directory=directory,
        facts={**summary(found, search), **facts},
        verdict=headline(found),
        tables=filled(*tables),
        config_text=config_text,
    )


def _option_row(option: Option) -> tuple[str, ...]:
    mark = "" if option.measured else "~"
    return (
        option.name,
        mark + format_number(option.samples_s) if option.samples_s else "-",
        f"{mark}{format_number(option.step_s)} s" if option.step_s else "-",
        mark + format_duration(option.total_s) if option.total_s else "-",
        format_size(option.ram_bytes),
        format_size(option.vram_bytes),
        option.risk,
        " ".join(option.overrides) or "none",
        option.words,
    )


def _end_words(block: Block) -> str:
    return f"ended by {ENDED_BY[block.ended]}: {block.cause}".removesuffix(": ")


def memory_words(ram_bytes: int, vram_bytes: int | None) -> str:
    """`3 GiB of RAM, 40 GiB of VRAM`."""
    vram = "" if vram_bytes is None else f", {format_size(vram_bytes)} of VRAM"
    return f"{format_size(ram_bytes)} of RAM{vram}"


def tuned_path(source: Path) -> Path:
    """`configs/exp001_full.yaml` -> `configs/exp001_full.tuned.yaml`."""
    return source.with_name(f"{source.stem}.tuned{source.suffix or '.yaml'}")


def tuned_yaml(
    source_name: str, source: Config, wanted: Config, reasons: Mapping[str, str], header: Sequence[str]
) -> str:
    """The text of a config that extends the source, beside which it will stand, and reads as `wanted`.  Pure.

    Args:
        source, wanted: as read without and with what the tune changes.
        reasons: by full key (`training.workers`); others are "as set for the tune".
        header: lines for the top, without `#`; one that begins with `MARK` comes before them.
    """
    first = f"{MARK} from {source_name}; the next tune of it replaces this file."
    comments: dict[str, str] = {}

    def changed(before: BaseModel, after: BaseModel, above: str = "") -> BaseModel:
        """Only the fields that differ; a list is one value, as files that extend others have it."""
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
    """Check before the first block that the tuned config of a source can be written.  Does I/O.

    Raises:
        ConfigError: a tune has written the source, or has not written what lies in the place of the tuned config.
        StorageError: the folder of the source cannot be written.
    """
    if _is_ours(source):
        raise ConfigError(f"{source} was written by a tune: tune the config that it extends, or remove its first line")
    path = tuned_path(source)
    if os.path.lexists(path) and not _is_ours(path):
        raise ConfigError(f"{path} would be replaced, and no tune has written it (no '# {MARK}' at its top); rename it")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise StorageError(f"{path.parent} cannot be written, where the tuned config goes; change its permissions")


def _is_ours(path: Path) -> bool:
    """Whether it is a file that a tune has written."""
    begin = f"# {MARK}".encode()
    return path.is_file() and path.read_bytes()[: len(begin)] == begin


def _clean(words: str) -> str:
    """One line that a YAML comment may hold."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(words.split()))
