"""A report in words: its sentences, the lines of the log, and the Markdown.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from vesuvius.runlog.markdown import escaped, table
from vesuvius.runlog.units import format_duration, format_percent, number, size_text
from vesuvius.tuning.report.options import Option
from vesuvius.tuning.report.report import Report, Row
from vesuvius.tuning.search.pairs import Comparison
from vesuvius.tuning.search.recommendation import SMALLEST_GAIN, Entry, Step
from vesuvius.tuning.space import Space

_BAD = {
    "guard": "ended by the memory guard",
    "gpu_memory": "GPU out of memory",
    "killed": "killed",
    "failed": "failed",
    "timeout": "ran out of time",
}
_KINDS = {"run": "whole run", "readers": "readers alone", "step": "steps alone"}


def headline(report: Report) -> str:
    """What came of it, in one line."""
    match report.verdict:
        case "none":
            return f"no recommendation: {report.reason}"
        case "unchanged" if report.changes:
            return "the config does not fit this machine; B is the nearest that does, and no other change is worth it"
        case "unchanged":
            return "nothing to change: nothing that was tried is worth a change"
        case "undecided":
            return f"undecided: {report.reason}"
    if report.gain is None:
        return "B is recommended"
    if report.gain.gain < SMALLEST_GAIN:
        return f"B: as fast at a lower cost: {gain_words(report.gain)}"
    return f"B: {gain_words(report.gain)}"


def gain_words(gain: Comparison) -> str:
    """`2.31 times the samples/s (95 %: 2.20 to 2.43, 4 pairs of blocks in turn)`."""
    times = f"{1 + gain.gain:.2f} times the samples/s"
    if gain.low is None or gain.high is None:
        return f"{times} (from one block each: no interval)"
    return f"{times} (95 %: {1 + gain.low:.2f} to {1 + gain.high:.2f}, {gain.pairs} pairs of blocks in turn)"


def summary(report: Report) -> list[tuple[str, str]]:
    """What held the baseline up, what to run, what it gives, why it ended: a label and a sentence each."""
    before, after = report.rates
    changed = ", ".join(f"{change.knob} {change.before} -> {change.after}" for change in report.changes)
    sentences = [
        ("Bottleneck", report.held_up or "not measured"),
        ("What to run now", f"{report.tuned}: {changed or 'nothing changed'}"),
        ("Why it ended", report.reason),
    ]
    if before and after and report.changes:
        sentences.insert(2, ("What it gives", f"{number(after)} samples/s instead of {number(before)}"))
    return sentences


def yaml_header(report: Report) -> list[str]:
    """Lines for the top of the tuned config."""
    return [
        f"{report.date}: {headline(report)}.  {len(report.blocks)} blocks in {format_duration(report.spent_s)}.",
        f"Command: {report.command}",
        f"Measured on: {report.machine}",
    ]


def step_line(step: Step) -> str:
    """The line for the begin of a block."""
    rate = "" if step.rate is None else f"{number(step.rate)} samples/s, "
    return (
        f"Block {step.number} {step.stage}, {_KINDS[step.kind]}: {step.why}; expected {rate}"
        f"{_memory(step.ram_bytes, step.vram_bytes)}, {format_duration(step.seconds)}"
    )


def block_line(entry: Entry) -> str:
    """The line for the end of a block."""
    block = entry.block
    begin = f"Block {entry.step.number} took {format_duration(block.seconds)}: "
    if block.ended != "ok":
        return f"{begin}{_BAD[block.ended]}: {block.cause}"
    waited = "" if block.data_share is None else f", waited for data {format_percent(block.data_share)}"
    memory = "" if block.ram_bytes is None else f", {_memory(block.ram_bytes, block.vram_bytes)}"
    return f"{begin}{number(block.rate)} samples/s{waited}{memory}"


def plan_lines(steps: Sequence[Step], space: Space, machine: str) -> list[str]:
    """The lines of `--dry-run`: limits, budget, and the blocks to expect if every change is a gain."""
    vram = "" if space.vram_limit_bytes is None else f", {size_text(space.vram_limit_bytes)} of GPU memory"
    lines = [
        f"machine  {machine}",
        f"limits   at most {size_text(space.ram_limit_bytes)} of RAM{vram}, {space.most_workers} workers, "
        f"prefetch_factor {space.most_prefetch}, train_batch_size {space.most_batch}",
        f"budget   {format_duration(space.budget_s)}; the blocks to expect if nearly every change is a gain:",
    ]
    lines += [
        f"block {step.number:<3} {step.stage:9} {_KINDS[step.kind]:13} "
        f"{' '.join(step.setting.overrides(space.source)) or 'the config as it is'}; "
        f"{_memory(step.ram_bytes, step.vram_bytes)}, {format_duration(step.seconds)}"
        for step in steps
    ]
    total_s = sum(step.seconds for step in steps)
    return [*lines, f"dry run: about {len(steps)} blocks, {format_duration(total_s)}; nothing was written"]


def closing_lines(report: Report, directory: object) -> list[str]:
    """The last lines of the log: result, options, changes, and where the report is."""
    return [
        headline(report),
        *(f"{label}: {sentence}" for label, sentence in summary(report)),
        *(option_line(option) for option in report.options),
        *(f"{change.knob} {change.before} -> {change.after}: {change.reason}" for change in report.changes),
        f"report: {directory}/report.md",
        f"run it: {report.train_command}",
    ]


def option_line(option: Option) -> str:
    """An option in one line."""
    about = "" if option.measured else "about "
    parts = [f"{about}{number(option.samples_s)} samples/s" if option.samples_s else "samples/s not known"]
    if option.step_s is not None and option.total_s is not None:
        parts += [f"a step in {_seconds(option.step_s)}", f"{format_duration(option.total_s)} for the whole run"]
    parts.append(_memory(option.ram_bytes, option.vram_bytes))
    return f"{option.name}: {', '.join(parts)}, memory risk {option.risk} ({option.words})"


def render_markdown(report: Report) -> str:
    """The whole report; the curves lie beside it as curves.png."""
    lines = [f"# Tune of {escaped(report.name)}", "", f"**{escaped(headline(report))}.**", ""]
    lines += [f"- **{label}:** {escaped(sentence)}" for label, sentence in summary(report)]
    lines += ["", "```", report.train_command, "```", ""]
    lines += table("Options", _OPTION_COLUMNS, [_option_row(option) for option in report.options])
    lines += [*(f"- {escaped(f'{option.name}: {option.words}')}" for option in report.options), ""]
    lines += [
        "~ = predicted.  Times are of training steps alone, without validation, saving and pictures.  Memory risk: how "
        "near the peak of the whole run comes to the limits: low below 70 %, medium below 90 %.",
        "",
    ]
    changes = [(change.knob, change.before, change.after, change.reason) for change in report.changes]
    lines += table("Why each value", ("key", "before", "now", "why"), changes)
    lines += table("Where each stage stopped", ("stage", "why"), list(report.ended.items()))
    lines += ["![samples/s and memory of all blocks](curves.png)", ""]
    lines += table("All blocks", _BLOCK_COLUMNS, [_block_row(row) for row in report.blocks])
    lines += ["## How this was made", "", *(f"- {escaped(line)}" for line in _origin(report)), ""]
    return "\n".join(lines)


_OPTION_COLUMNS = ("option", "samples/s", "step", "whole run", "RAM", "VRAM", "memory risk", "changes to the source")
_BLOCK_COLUMNS = (
    "#", "stage", "measured", "changes to the source", "samples/s", "predicted", "waited for data", "RAM", "predicted",
    "took", "ended",
)  # fmt: skip


def _option_row(option: Option) -> tuple[str, ...]:
    mark = "" if option.measured else "~"
    return (
        option.name,
        mark + number(option.samples_s) if option.samples_s else "-",
        mark + _seconds(option.step_s) if option.step_s else "-",
        mark + format_duration(option.total_s) if option.total_s else "-",
        size_text(option.ram_bytes),
        "-" if option.vram_bytes is None else size_text(option.vram_bytes),
        option.risk,
        " ".join(option.overrides) or "none",
    )


def _block_row(row: Row) -> tuple[str, ...]:
    return (
        str(row.number),
        row.stage,
        _KINDS[row.kind],
        row.changed,
        number(row.samples_s),
        number(row.predicted_samples_s),
        "-" if row.data_share is None else format_percent(row.data_share),
        "-" if row.ram_bytes is None else size_text(row.ram_bytes),
        size_text(row.predicted_ram_bytes),
        format_duration(row.seconds),
        "ok" if row.ended == "ok" else f"{_BAD[row.ended]}: {row.cause}".removesuffix(": "),
    )


def _origin(report: Report) -> list[str]:
    limits = f"Limits: {size_text(report.ram_limit_bytes)} of RAM"
    if report.vram_limit_bytes is not None:
        limits += f", {size_text(report.vram_limit_bytes)} of VRAM"
    return [
        f"Command: {report.command}",
        f"Config: {report.source} -> {report.tuned}",
        f"Machine: {report.machine}",
        f"Goal: {report.goal}; {len(report.blocks)} blocks took {format_duration(report.spent_s)} of a budget of "
        f"{format_duration(report.budget_s)}",
        f"{limits}; no block is started that is predicted to pass them",
        f"Date: {report.date}; " + ", ".join(f"{name} {version}" for name, version in report.versions.items()),
    ]


def _seconds(span_s: float) -> str:
    return f"{number(span_s)} s" if span_s < 60 else format_duration(span_s)


def _memory(ram_bytes: int, vram_bytes: int | None) -> str:
    vram = "" if vram_bytes is None else f", {size_text(vram_bytes)} of VRAM"
    return f"{size_text(ram_bytes)} of RAM{vram}"
