"""`vesuvius report`: the page of one run, or of several with what differs and one curve of each in a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vesuvius.report.content import NOT_KNOWN, RunReport, Table, filled
from vesuvius.report.curves import Chart
from vesuvius.report.model import build
from vesuvius.report.page import FOLDER, made_by, new_folder, write_page
from vesuvius.report.records import read_run

_OVERLAID = ("loss", "relative_error", "step_s", "ram", "vram")


def write_report(runs: Sequence[Path], out: Path | None, command: str) -> Path:
    """Write report.html of one or several runs, and return their folder.

    Args:
        out: the folder; None = one named by the time, below the first run's `reports/`.

    Raises:
        StorageError: it cannot be written.
    """
    folder = out or new_folder(runs[0] / FOLDER)
    reports = named_apart([build(read_run(run)) for run in runs])
    tables, charts = comparison(reports)
    write_page(folder, "report", reports, made_by(command), (), tables, charts)
    return folder


def named_apart(reports: Sequence[RunReport]) -> list[RunReport]:
    """The reports, those of equal names with their directory."""
    names = [report.name for report in reports]
    return [replace(r, name=f"{r.name} ({r.directory})") if names.count(r.name) > 1 else r for r in reports]


def comparison(reports: Sequence[RunReport]) -> tuple[tuple[Table, ...], tuple[Chart, ...]]:
    """Tables of what differs, and charts that every run has a curve for or only some.  Empty for a single run."""
    if len(reports) < 2:
        return (), ()
    names = tuple(report.name for report in reports)
    facts = [(label, *(report.facts.get(label, NOT_KNOWN) for report in reports)) for label in reports[0].facts]
    keys = dict.fromkeys(key for report in reports for key in report.config)
    config = [(key, *(report.config.get(key, NOT_KNOWN) for report in reports)) for key in keys]
    result = Table("What differs in result", ("", *names), _different(facts))
    return filled(result, Table("What differs in config", ("key", *names), _different(config))), _overlaid(reports)


def _different(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    return tuple(row for row in rows if len(set(row[1:])) > 1)


def _overlaid(reports: Sequence[RunReport]) -> tuple[Chart, ...]:
    """The first curve of each chart, named by its run."""
    made = []
    for key in _OVERLAID:
        found = [(r.name, chart) for r in reports for chart in r.charts if chart.key == key]
        if found:
            series = tuple(replace(chart.series[0], label=name) for name, chart in found)
            log = all(chart.log for _, chart in found)
            made.append(replace(found[0][1], series=series, limits=(), log=log))
    return tuple(made)
