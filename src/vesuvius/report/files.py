"""`vesuvius report`: reads the runs, writes the folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from vesuvius.errors import StorageError
from vesuvius.report.compare import comparison, named_apart
from vesuvius.report.curves import Chart
from vesuvius.report.html import render_html
from vesuvius.report.markdown import render_markdown
from vesuvius.report.model import RunReport, Table, build
from vesuvius.report.pictures import Picture, embed
from vesuvius.report.records import read_run
from vesuvius.runlog.files.whole_file import write_whole

FOLDER = "reports"


def write_report(runs: Sequence[Path], out: Path | None, command: str) -> Path:
    """Write report.html and report.md of one or several runs, and return their folder.

    Args:
        out: the folder; None = one named by the time, below the first run's `reports/`.

    Raises:
        StorageError: it cannot be written.
    """
    reports = named_apart([build(read_run(run)) for run in runs])
    tables, charts = comparison(reports)
    made = f"Made {time.strftime('%Y-%m-%d %H:%M:%S %Z')} by: {command}"
    folder = out or new_folder(runs[0] / FOLDER)
    write_pages(folder, "report", reports, tables, charts, embed(reports), made)
    return folder


def write_pages(
    folder: Path,
    name: str,
    reports: Sequence[RunReport],
    tables: Sequence[Table],
    charts: Sequence[Chart],
    pictures: Sequence[Picture],
    made: str,
) -> None:
    """Write NAME.html and NAME.md, each whole or not at all.  Raises StorageError."""
    page = render_html(reports, tables, charts, pictures, made)
    text = render_markdown(reports, tables, made, f"{name}.html")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{name}.html", page.encode())
        write_whole(folder / f"{name}.md", text.encode())
    except OSError as error:
        raise StorageError(f"a report must be writable; got {error}; choose another folder, or make room") from error


def new_folder(parent: Path) -> Path:
    """A folder named by the time of day that is not there yet."""
    name = time.strftime("%Y%m%d_%H%M%S")
    names = [name, *(f"{name}_{count}" for count in range(2, 1000))]
    return next(parent / each for each in names if not (parent / each).exists())
