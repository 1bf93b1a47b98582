"""The tables of a report, as plain text, which Markdown and the page share.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

from vesuvius.lab.tune.report.options import Option
from vesuvius.lab.tune.report.report import NEAR, Report, TrialRow
from vesuvius.observe.units import format_duration, format_percent, size_text

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
        (q.quantity, str(q.trials), f"{q.within} of {q.trials}", _share(q.share), _share(q.median_error))
        for q in report.quality
    )
    columns = ("quantity", "first trials of a setting", f"within {format_percent(NEAR)}", "share", "median error")
    return Table("How good the predictions were", columns, (False, True, True, True, True), rows)


def trials_table(report: Report) -> Table:
    """All trials, in order."""
    on_gpu = report.vram_limit_bytes is not None
    columns = ["#", "stage", "changed", "samples/s", "predicted", "waited for data", "RAM", "predicted"]
    columns += ["VRAM", "predicted"] * on_gpu + ["took", "ended"]
    numeric = [column not in ("stage", "changed", "ended") for column in columns]
    rows = tuple(_trial_row(row, on_gpu) for row in report.trials)
    return Table("All trials", tuple(columns), tuple(numeric), rows)


def seconds(span_s: float) -> str:
    """'0.389 s'; from a minute on as `format_duration`."""
    return f"{number(span_s)} s" if span_s < 60 else format_duration(span_s)


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
        samples = f"{number(row.samples_s)} ±{format_percent((row.high - row.low) / 2 / row.samples_s)}"
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
        _share(row.data_share),
        *memory,
        format_duration(row.seconds),
        "ok" if row.ended == "ok" else f"{_BAD[row.ended]}: {row.cause}".removesuffix(": "),
    )


def _with_error(shown: str, error: float | None) -> str:
    return shown if error is None else f"{shown} ({round(100 * error):+d} %)"


def _share(share: float | None) -> str:
    return "-" if share is None else format_percent(share)
