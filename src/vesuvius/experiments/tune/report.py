"""A tune as a report: options A, B and C, the lines of the log, and the page that all reports have.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vesuvius.config.describe import to_yaml
from vesuvius.errors import ConfigError
from vesuvius.experiments.tune.measurement import Planner, SearchSpace, Setting, in_words
from vesuvius.experiments.tune.memory import ENDED_BY, PredictedMemory, Risk, does_not_fit
from vesuvius.experiments.tune.search import (
    KINDS,
    SHOWN,
    SMALLEST_GAIN,
    Entry,
    Recommendation,
    Search,
    fewer_than,
)
from vesuvius.report.content import RunReport, Table, filled
from vesuvius.runlog.units import format_duration, format_percent, number, size_text

SLOWEST = 0.85
"""A is at least this share of B's samples per second."""

_GAIN = 0.01  # a step beyond what was measured has to promise more
_OPTION_COLUMNS = ("option", "samples/s", "step", "whole run", "RAM", "VRAM", "memory risk", "changes", "why")
_BLOCK_COLUMNS = (
    "#", "stage", "measured", "changes", "samples/s", "waited for data", "RAM", "took", "ended", "why"
)  # fmt: skip
_NOTE = (
    "~ = predicted.  Times are of training steps alone, without validation, saving and pictures.  Memory risk: how "
    "near the peak of the whole run comes to the limits: low below 70 %, medium below 90 %."
)


@dataclass(frozen=True)
class Option:
    """A setting to choose."""

    name: str  # 'A conservative', 'B balanced', 'C aggressive'
    measured: bool  # whether the whole run was measured with it; else its figures are predicted
    samples_s: float | None  # None where nothing is known, and then the times are None too
    # ram_bytes, vram_bytes: peak of the whole run; `vram_bytes` None on a CPU
    ram_bytes: int
    vram_bytes: int | None
    # step_s, total_s: of an optimizer step, and of all training steps without validation, saving, pictures
    step_s: float | None
    total_s: float | None
    risk: Risk  # how near it comes to the memory limits
    overrides: tuple[str, ...]  # what to write behind `vesuvius train` with the source config
    words: str  # why this one


def build_options(found: Recommendation, search: Search, steps: int) -> tuple[Option, Option, Option]:
    """A: the least memory at 85 % of B's samples/s.  B: the recommendation.  C: the fastest, or a step beyond.

    Args:
        steps: optimizer steps of the whole run.
    """
    rates, memory, source = search.rates, search.memory, search.space.source

    def option(name: str, setting: Setting, words: str) -> Option:
        samples_s = rates.run(setting)
        step_s = setting.global_batch / samples_s if samples_s else None
        return Option(
            name=name,
            measured=bool(rates.of("run", setting)),
            samples_s=samples_s,
            ram_bytes=memory.run_ram_bytes(setting),
            vram_bytes=memory.vram_bytes(setting),
            step_s=step_s,
            total_s=None if step_s is None else step_s * steps,
            risk=memory.risk(setting),
            overrides=tuple(setting.overrides(source)),
            words=words,
        )

    return (
        option("A conservative", *_leaner(found.best, search)),
        option("B balanced", found.best, "the config as it is" if found.best == source else "what to run"),
        option("C aggressive", *_faster(found.best, search)),
    )


def _leaner(best: Setting, search: Search) -> tuple[Setting, str]:
    memory, rate = search.memory, search.rates.run
    smaller = (
        replace(best, workers=workers, prefetch_factor=prefetch)
        for workers in range(1, best.workers + 1)
        for prefetch in {best.prefetch_factor, max(best.prefetch_factor // 2, 1)}
    )
    allowed = (s for s in smaller if memory.obstacle(s) is None)
    fits = [s for s in allowed if (top := rate(best)) and (rate(s) or 0.0) >= SLOWEST * top]
    lean = min(fits, key=memory.run_ram_bytes, default=best)
    if lean == best or memory.run_ram_bytes(lean) >= memory.run_ram_bytes(best):
        return best, f"the same as B: nothing smaller reaches {SLOWEST:.0%} of it"
    return lean, f"the least memory at {SLOWEST:.0%} of B or more: {in_words(lean, best)}"


def _faster(best: Setting, search: Search) -> tuple[Setting, str]:
    rates, space = search.rates, search.space
    if (top := rates.run(best)) is None:
        return best, "the same as B: nothing was measured"
    more_workers = replace(best, workers=min(2 * max(best.workers, 1), space.most_workers))
    more_prefetch = replace(best, prefetch_factor=min(2 * best.prefetch_factor, space.most_prefetch))
    for setting in (*rates.measured_settings(), more_workers, more_prefetch):
        faster = (rates.run(setting) or 0.0) > (1 + _GAIN) * top
        if setting != best and faster and search.memory.obstacle(setting) is None:
            how = "was measured, though not surely" if rates.of("run", setting) else "is predicted"
            return setting, f"faster, as {how}: {in_words(setting, best)}"
    return best, "the same as B: no step beyond it fits and promises more"


def headline(found: Recommendation, space: SearchSpace) -> str:
    """What came of it, in one line."""
    match found.certainty:
        case "none":
            said = f"; the run itself: {space.evidence.text}" if space.evidence else ""
            return f"no recommendation: {found.reason}{said}"
        case "unchanged" if not found.complete:
            return f"no gain found yet: {found.reason}"
        case "unchanged":
            return f"nothing to change: {found.reason}"
        case "likely":
            return f"B, likely, not sure: {_gain_words(found)}"
    cheaper = "at a lower cost: " if found.gain and found.gain.gain < SMALLEST_GAIN else ""
    return f"B: {cheaper}{_gain_words(found)}"


def _gain_words(found: Recommendation) -> str:
    """`2.31 times the samples/s (95 %: 2.20 to 2.43, 4 pairs of blocks in turn)`."""
    gain = found.gain
    if gain is None:
        times = "not known how many" if found.predicted is None else f"{1 + found.predicted:.2f}"
        return f"{times} times the samples/s, as readers alone and steps alone predict; no whole run was compared"
    times = f"{1 + gain.gain:.2f} times the samples/s"
    if gain.low is None or gain.high is None:
        return f"{times} ({'one pair' if gain.pairs == 1 else f'{gain.pairs} pairs'} of blocks in turn: no interval)"
    return f"{times} (95 %: {1 + gain.low:.2f} to {1 + gain.high:.2f}, {gain.pairs} pairs of blocks in turn)"


def summary(found: Recommendation, search: Search) -> dict[str, str]:
    """What held the baseline up, what to change, what that gives, and why it ended."""
    rates, source, evidence = search.rates, search.space.source, search.space.evidence
    base = rates.of("run", source)
    lines = {
        "Bottleneck": (base[-1].text if base else "") or found.ended.get("baseline", "not measured"),
        "What to change": in_words(found.best, source),
    }
    if evidence is not None:
        lines["The run itself"] = f"{number(evidence.samples_s)} samples/s at step {evidence.step}: {evidence.text}"
    if rates.run(source) and rates.run(found.best) and found.best != source:
        mark = "" if base and rates.of("run", found.best) else "~"
        best, before = number(rates.run(found.best)), number(rates.run(source))
        lines["What it gives"] = f"{mark}{best} samples/s instead of {mark}{before}"
    if found.written != found.best:
        lines["In the tuned config"] = (
            f"{in_words(found.written, source)}; the rest of B was not measured in at least {SHOWN} pairs"
        )
    if found.unsettled:
        lines["Not settled"] = "; ".join(found.unsettled)
    return lines | {"Why it ended": found.reason}


def block_line(entry: Entry) -> str:
    """The line for the end of a block."""
    block = entry.block
    begin = f"Block {entry.number} took {format_duration(block.seconds)}: "
    if block.ended != "ok":
        return f"{begin}ended by {ENDED_BY[block.ended]}: {block.cause}"
    waited = "" if block.data_share is None else f", waited for data {format_percent(block.data_share)}"
    memory = "" if block.ram_bytes is None else f", {memory_words(block.ram_bytes, block.vram_bytes)}"
    return f"{begin}{number(block.rate)} samples/s{waited}{memory}"


def plan_lines(space: SearchSpace, planner: Planner, machine: str) -> list[str]:
    """The lines of `--dry-run`: limits, budget, and the planned memory of what may be tried.

    Raises:
        ConfigError: the config does not fit.
    """
    memory, source = PredictedMemory(space, planner, ()), space.source
    total, workers = source.global_batch, sorted({*fewer_than(space.most_workers), space.most_workers})
    if obstacle := memory.obstacle(source):
        raise ConfigError(does_not_fit(obstacle))
    sizes = [*range(1, total + 1), *((total << n for n in range(1, 20)) if space.scale_batch else ())]
    batches = [size for size in sizes if size <= space.most_batch and (size > total or total % size == 0)]
    readers = (replace(source, workers=count) for count in workers)
    powers = (1 << n for n in range(20))
    counts = [n for n in powers if source.requests < n <= space.most_requests] if space.remote else []
    requests = (replace(source, requests=count) for count in counts)
    pieces = (replace(source, train_batch_size=size, accumulate_steps=max(total // size, 1)) for size in batches)
    lines = list[str]()
    for setting in dict.fromkeys((source, *readers, *requests, *pieces)):
        words, obstacle = _sizes(memory, setting), memory.obstacle(setting)
        what = " ".join(setting.overrides(source)) or "the config as it is"
        lines.append(f"{what}: {words}{f'; not started: {obstacle}' if obstacle else ''}")
    return [
        f"machine  {machine}{f'; {space.others}' if space.others else ''}",
        *([f"the run  {space.evidence.text}"] if space.evidence else []),
        f"limits   {memory_words(space.ram_limit_bytes, space.vram_limit_bytes)}, {space.most_workers} workers, "
        f"{f'{space.most_requests} requests, ' if space.remote else ''}"
        f"prefetch_factor {space.most_prefetch}, train_batch_size {space.most_batch}",
        f"budget   {format_duration(space.budget_s)}, {space.block_s:.0f} s to measure in each block; may be tried:",
        *lines,
        "dry run: what is tried of it depends on what is measured; nothing was written",
    ]


def closing_lines(found: Recommendation, search: Search, options: Sequence[Option]) -> list[str]:
    """The last lines of the log: result, options, changes."""
    return [
        headline(found, search.space),
        *(f"{label}: {sentence}" for label, sentence in summary(found, search).items()),
        *(_option_line(_option_row(option)) for option in options),
        *(f"{knob}: {reason}" for knob, reason in found.reasons.items()),
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
    """The report.

    Args:
        facts: of the tune as a whole, beside those of its summary: a label and a value each.
        config_text: the resolved source.
    """
    source = search.space.source
    tables = (
        Table("Options", _OPTION_COLUMNS, tuple(map(_option_row, options)), _NOTE),
        Table(
            "Why each value",
            ("key", "before", "now", "why"),
            tuple(
                (knob, to_yaml(getattr(source, knob)), to_yaml(value), found.reasons.get(knob, "measured"))
                for knob, value in found.best.changes(source).items()
            ),
        ),
        Table("Where each stage stopped", ("stage", "why"), tuple(found.ended.items())),
        Table("All blocks", _BLOCK_COLUMNS, tuple(_block_row(entry, source) for entry in search.entries)),
    )
    return RunReport(
        name=f"{name}: tune",
        directory=directory,
        facts={**summary(found, search), **facts},
        verdict=headline(found, search.space),
        tables=filled(*tables),
        config_text=config_text,
    )


def _option_row(option: Option) -> tuple[str, ...]:
    mark = "" if option.measured else "~"
    return (
        option.name,
        mark + number(option.samples_s) if option.samples_s else "-",
        mark + _seconds(option.step_s) if option.step_s else "-",
        mark + format_duration(option.total_s) if option.total_s else "-",
        size_text(option.ram_bytes),
        size_text(option.vram_bytes),
        option.risk,
        " ".join(option.overrides) or "none",
        option.words,
    )


def _option_line(row: Sequence[str]) -> str:
    """`A conservative: samples/s 9.5, step 0.1 s, ..., why: what to run`."""
    return f"{row[0]}: " + ", ".join(f"{name} {cell}" for name, cell in zip(_OPTION_COLUMNS[1:], row[1:], strict=True))


def _block_row(entry: Entry, source: Setting) -> tuple[str, ...]:
    block = entry.block
    return (
        str(entry.number),
        entry.stage,
        KINDS[block.kind],
        " ".join(block.setting.overrides(source)) or "none",
        number(block.rate or None),
        format_percent(block.data_share),
        size_text(block.ram_bytes),
        format_duration(block.seconds),
        "ok" if block.ended == "ok" else f"ended by {ENDED_BY[block.ended]}: {block.cause}".removesuffix(": "),
        entry.why,
    )


def _seconds(span_s: float) -> str:
    return f"{number(span_s)} s" if span_s < 60 else format_duration(span_s)


def _sizes(memory: PredictedMemory, setting: Setting) -> str:
    return memory_words(memory.run_ram_bytes(setting), memory.vram_bytes(setting))


def memory_words(ram_bytes: int, vram_bytes: int | None) -> str:
    vram = "" if vram_bytes is None else f", {size_text(vram_bytes)} of VRAM"
    return f"{size_text(ram_bytes)} of RAM{vram}"
