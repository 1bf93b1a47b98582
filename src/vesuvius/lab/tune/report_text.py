"""A report in words: its sentences and tables, which Markdown and the page share, and the Markdown.  Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from vesuvius.lab.tune.options import Option
from vesuvius.lab.tune.report import NEAR, Report, TrialRow
from vesuvius.observe.units import format_duration, size_text

_BAD = {
    "guard": "ended by the memory guard",
    "gpu_memory": "GPU out of memory",
    "killed": "killed",
    "failed": "failed",
    "timeout": "ran out of time",
}


@dataclass(frozen=True)
class Table:
    """Columns and rows of plain text; `numeric` columns stand at the right."""

    title: str
    columns: tuple[str, ...]
    numeric: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]


def number(value: float | None) -> str:
    """Three significant digits, '-' for None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def headline(report: Report) -> str:
    """What came of it, in one line."""
    if report.gain is None:
        return "no recommendation: no trial ended well"
    if not report.changes:
        return "the config is as it should be: nothing that was tried is worth a change"
    return f"B: {number(report.gain)} times the baseline's samples/s"


def summary(report: Report) -> list[tuple[str, str]]:
    """What held the baseline up, what to run, what it gives, how sure: a label and a sentence each."""
    return [
        ("What held it up", _held_up(report)),
        ("What to run now", _to_run(report)),
        ("What it gives", _gives(report)),
        ("How sure", _how_sure(report)),
    ]


def yaml_header(report: Report) -> list[str]:
    """Lines for the top of the tuned config."""
    return [
        f"{report.date}: {headline(report)}, after {len(report.trials)} trials in {format_duration(report.spent_s)}.",
        f"Command: {report.command}",
        *(f"Measured on: {line}" for line in report.machine),
    ]


def options_table(report: Report) -> Table:
    """A, B, C side by side."""
    on_gpu = report.vram_limit_bytes is not None
    columns = ["option", "samples/s", "times baseline", "step", "epoch", "whole run", "RAM"]
    columns += ["VRAM"] * on_gpu + ["memory risk", "changes to the source"]
    numeric = [column not in ("option", "memory risk", "changes to the source") for column in columns]
    rows = tuple(_option_row(report, option, on_gpu) for option in report.options)
    return Table("Options", tuple(columns), tuple(numeric), rows)


def changes_table(report: Report) -> Table:
    """Why each knob has its value."""
    rows = tuple((change.knob, change.before, change.after, change.reason) for change in report.changes)
    return Table("Why each value", ("key", "before", "now", "why"), (False,) * 4, rows)


def stages_table(report: Report) -> Table:
    """Why each stage was left."""
    return Table("Where each stage stopped", ("stage", "why it was left"), (False,) * 2, tuple(report.ended.items()))


def quality_table(report: Report) -> Table:
    """Predictions against measurements."""
    rows = tuple(
        (q.quantity, str(q.trials), f"{q.within} of {q.trials}", _percent(q.share), _percent(q.median_error))
        for q in report.quality
    )
    columns = ("quantity", "trials", f"within {_percent(NEAR)}", "share", "median error")
    return Table("How good the predictions were", columns, (False, True, True, True, True), rows)


def trials_table(report: Report) -> Table:
    """All trials, in order."""
    on_gpu = report.vram_limit_bytes is not None
    columns = ["#", "stage", "changed", "samples/s", "predicted", "waited for data", "RAM", "predicted"]
    columns += ["VRAM", "predicted"] * on_gpu + ["took", "ended"]
    numeric = [column not in ("stage", "changed", "ended") for column in columns]
    rows = tuple(_trial_row(row, on_gpu) for row in report.trials)
    return Table("All trials", tuple(columns), tuple(numeric), rows)


def render_markdown(report: Report) -> str:
    """The whole report; the curves lie beside it as curves.png."""
    lines = [f"# Tune of {_escaped(report.name)}", "", f"**{_escaped(headline(report))}.**", ""]
    for label, sentence in summary(report):
        lines += [f"- **{label}:** {_escaped(sentence)}"]
    lines += ["", "```", report.train_command, "```", ""]
    lines += _markdown_table(options_table(report))
    lines += [*(f"- {_escaped(words)}" for words in option_words(report)), "", _escaped(times_note(report)), ""]
    for table in (changes_table(report), stages_table(report)):
        lines += _markdown_table(table)
    lines += [f"The tune ended: {_escaped(report.reason)}.", "", "![samples/s, RAM and VRAM per knob](curves.png)", ""]
    for table in (trials_table(report), quality_table(report)):
        lines += _markdown_table(table)
    lines += ["## How this was made", "", *(f"- {_escaped(line)}" for line in origin(report)), ""]
    return "\n".join(lines)


def option_words(report: Report) -> list[str]:
    """Why each option is what it is."""
    return [f"{option.name}: {option.words}" for option in report.options]


def option_line(option: Option) -> str:
    """An option in one line, for a terminal."""
    about = "" if option.measured else "about "
    parts = [f"{about}{number(option.samples_s)} samples/s" if option.samples_s else "samples/s not known"]
    if option.step_s is not None and option.total_s is not None:
        parts += [f"a step in {seconds(option.step_s)}", f"{format_duration(option.total_s)} for the whole run"]
    parts.append(f"{size_text(option.ram_bytes)} of RAM")
    if option.vram_bytes is not None:
        parts.append(f"{size_text(option.vram_bytes)} of VRAM")
    return f"{option.name}: {', '.join(parts)}, memory risk {option.risk} ({option.words})"


def times_note(report: Report) -> str:
    """What the times of the options are of."""
    h = report.horizon
    note = (
        f"An epoch is {h.steps_per_epoch} steps, the whole run {h.epochs} of them; times are of training steps alone, "
        "without validation, saving and pictures. ~ = predicted, not measured. Memory risk: how near the peak comes to "
        "the limits."
    )
    if report.scale_batch:
        note += " The batch was allowed to grow: the number of steps stays, and a step may hold more samples."
    return note


def origin(report: Report) -> list[str]:
    """How the report came about."""
    limits = f"Limits: {size_text(report.ram_limit_bytes)} of RAM"
    if report.vram_limit_bytes is not None:
        limits += f", {size_text(report.vram_limit_bytes)} of VRAM"
    return [
        f"Command: {report.command}",
        f"Config: {report.source}" + (f" -> {report.tuned}" if report.tuned else ""),
        *(f"Machine: {line}" for line in report.machine),
        f"Goal: {report.goal}; {len(report.trials)} trials took {format_duration(report.spent_s)} of a budget of "
        f"{format_duration(report.budget_s)}",
        f"{limits}; no trial is started that is predicted to pass them",
        f"Date: {report.date}; " + ", ".join(f"{name} {version}" for name, version in report.versions.items()),
    ]


def _held_up(report: Report) -> str:
    baseline = report.baseline
    if baseline is None:
        return f"not known: no trial of the baseline ended well ({report.reason})"
    which = "" if baseline.as_the_source else " (the config made smaller until it fitted)"
    kind = baseline.bound if baseline.cause is None else f"{baseline.bound} ({baseline.cause})"
    # The run's own words begin with the kind and end in what it would have tried next, which the tune has done.
    verdict = baseline.verdict.removeprefix(f"{kind}: ").partition("; step p50 ")[0]
    return f"{kind}: the baseline{which} {verdict}" if verdict else f"{kind}: the baseline{which}"


def _to_run(report: Report) -> str:
    if report.tuned is None:
        return f"{report.source} as it is"
    changed = ", ".join(f"{change.knob} {change.before} -> {change.after}" for change in report.changes)
    return f"{report.tuned}: {changed}"


def _gives(report: Report) -> str:
    best, baseline = report.best, report.baseline
    if report.gain is None or baseline is None or best.step_s is None or best.total_s is None:
        return "not measured"
    step, total = seconds(best.step_s), format_duration(best.total_s)
    if not report.changes:
        return f"{number(best.samples_s)} samples/s, a step in {step}, {total} for the whole run"
    return (
        f"{number(report.gain)} times the samples/s: {number(best.samples_s)} instead of {number(baseline.samples_s)}; "
        f"a step in {step} instead of {seconds(baseline.step_s)}; {total} for the whole run instead of "
        f"{format_duration(baseline.total_s)}"
    )


def _how_sure(report: Report) -> str:
    sure = report.sureness
    if sure is None:
        return "not at all: the figures are predicted" if report.best.samples_s else "nothing was measured"
    half = (sure.high - sure.low) / (sure.high + sure.low)
    trials = f"{len(sure.trials)} trials" if len(sure.trials) > 1 else "one trial"
    words = [f"samples/s are known to ±{_percent(half)} (95 %), from {sure.steps} steps in {trials}"]
    words.append(
        "measured again beside its runner-up, in turns" if sure.checked else "not measured again beside a rival"
    )
    words += [
        f"predictions of {q.quantity} were within {_percent(NEAR)} in {q.within} of {q.trials} trials"
        for q in report.quality
        if q.trials
    ]
    return "; ".join(words)


def _option_row(report: Report, option: Option, on_gpu: bool) -> tuple[str, ...]:
    mark = "" if option.measured else "~"
    gain = option.samples_s / report.baseline.samples_s if option.samples_s and report.baseline else None
    spans = [option.step_s, option.epoch_s, option.total_s]
    shown = [
        "-" if span is None else mark + (seconds(span) if i == 0 else format_duration(span))
        for i, span in enumerate(spans)
    ]
    memory = [option.ram_bytes, option.vram_bytes][: 1 + on_gpu]
    return (
        option.name,
        mark + number(option.samples_s) if option.samples_s else "-",
        mark + number(gain) if gain else "-",
        *shown,
        *("-" if size is None else mark + size_text(size) for size in memory),
        option.risk,
        " ".join(option.overrides) or "none",
    )


def _trial_row(row: TrialRow, on_gpu: bool) -> tuple[str, ...]:
    samples = "-"
    if row.samples_s is not None and row.low is not None and row.high is not None:
        samples = f"{number(row.samples_s)} ±{_percent((row.high - row.low) / 2 / row.samples_s)}"
    sizes: list[tuple[int | None, int | None, float | None]] = [(row.ram_bytes, row.predicted_ram_bytes, row.ram_error)]
    sizes += [(row.vram_bytes, row.predicted_vram_bytes, row.vram_error)] * on_gpu
    memory = [
        text
        for measured, predicted, error in sizes
        for text in (
            "-" if measured is None else size_text(measured),
            "-" if predicted is None else _with_error(size_text(predicted), error),
        )
    ]
    return (
        str(row.number),
        row.stage,
        row.changed,
        samples,
        _with_error(number(row.predicted_samples_s), row.samples_error),
        _percent(row.data_share),
        *memory,
        format_duration(row.seconds),
        "ok" if row.ended == "ok" else f"{_BAD[row.ended]}: {row.cause}".removesuffix(": "),
    )


def seconds(span_s: float) -> str:
    """'0.389 s'; from a minute on as `format_duration`."""
    return f"{number(span_s)} s" if span_s < 60 else format_duration(span_s)


def _with_error(shown: str, error: float | None) -> str:
    return shown if error is None else f"{shown} ({round(100 * error):+d} %)"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}".removesuffix(".0") + " %"


def _markdown_table(table: Table) -> list[str]:
    if not table.rows:
        return []
    rule = ["---:" if right else "---" for right in table.numeric]
    rows: list[Sequence[str]] = [table.columns, rule, *([_escaped(cell) for cell in row] for row in table.rows)]
    return [f"## {table.title}", "", *(f"| {' | '.join(row)} |" for row in rows), ""]


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    text = " ".join(text.replace("&", "&amp;").replace("<", "&lt;").split())
    return re.sub(r"([\\`*\[\]|~]|(?<![a-zA-Z0-9])_|_(?![a-zA-Z0-9]))", r"\\\1", text)
