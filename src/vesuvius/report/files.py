"""`vesuvius report`: reads the runs, writes the folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vesuvius.errors import storage_errors
from vesuvius.report.compare import comparison, named_apart
from vesuvius.report.curves import POINTS, thinned
from vesuvius.report.html import render_html
from vesuvius.report.markdown import render_markdown
from vesuvius.report.model import RunReport, build
from vesuvius.report.pictures import Picture, embed
from vesuvius.report.records import read_run
from vesuvius.runlog.files.whole_file import write_whole
from vesuvius.runlog.redact import redact, redacted

FOLDER = "reports"
_MOST_BYTES = 1_900_000  # of a page
_POINTS = (POINTS, POINTS // 2, POINTS // 4, POINTS // 8)  # of a curve: fewer where many runs share the page
_CURVES_BYTES = 1_300_000


def write_report(runs: Sequence[Path], out: Path | None, command: str) -> Path:
    """Write report.html and report.md of one or several runs, and return their folder.

    Args:
        out: the folder; None = one named by the time, below the first run's `reports/`.

    Raises:
        StorageError: it cannot be written.
    """
    folder = out or new_folder(runs[0] / FOLDER)
    write_pages(folder, "report", named_apart([build(read_run(run)) for run in runs]), made_by(command))
    return folder


def write_pages(
    folder: Path, name: str, reports: Sequence[RunReport], made: str, pictures: Sequence[Picture] = ()
) -> None:
    """Write NAME.html, of less than 2 MB, and NAME.md, each whole or not at all, and without secrets.

    Raises StorageError.

    Args:
        pictures: beside the previews of the runs.
    """
    reports, pictures, made = redacted(list(reports)), redacted(list(pictures)), redact(made)
    tables, charts = comparison(reports)
    for points in _POINTS:
        thin = [replace(each, charts=tuple(thinned(chart, points) for chart in each.charts)) for each in reports]
        page = render_html(thin, tables, charts, pictures, made)
        if len(page.encode()) <= _CURVES_BYTES:
            break
    previews = embed(reports, (_MOST_BYTES - len(page.encode())) * 3 // 4)  # base64 takes a third more
    page = render_html(thin, tables, charts, [*pictures, *previews], made) if previews else page
    text = render_markdown(reports, tables, made, f"{name}.html")
    with storage_errors("a report must be writable", "choose another folder, or free some space"):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{name}.html", page.encode())
        write_whole(folder / f"{name}.md", text.encode())


def made_by(command: str) -> str:
    """When a page was made, and by what."""
    return f"Made {time.strftime('%Y-%m-%d %H:%M:%S %Z')} by: {command}"


def new_folder(parent: Path) -> Path:
    """A folder named by the time of day that is not there yet."""
    name = time.strftime("%Y%m%d_%H%M%S")
    names = [name, *(f"{name}_{count}" for count in range(2, 1000))]
    return next(parent / each for each in names if not (parent / each).exists())
