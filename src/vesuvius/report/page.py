"""The one page of report, profile, bench, tune and evaluate, as HTML and as Markdown.

The page needs nothing else (style, curves and pictures are in it) and has no script.  All text comes from files that
users write: the template escapes every value.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vesuvius.errors import storage_errors
from vesuvius.report.content import Picture, RunReport, Table
from vesuvius.report.curves import POINTS, Chart, thinned
from vesuvius.report.markdown import render_markdown
from vesuvius.report.pictures import embed
from vesuvius.runlog.files import write_whole
from vesuvius.runlog.redact import redact, redacted

FOLDER = "reports"


def write_pages(
    folder: Path,
    name: str,
    reports: Sequence[RunReport],
    made: str,
    pictures: Sequence[Picture] = (),
    tables: Sequence[Table] = (),
    charts: Sequence[Chart] = (),
) -> None:
    """Write NAME.html (for up to eight runs of less than 2 MB) and NAME.md, each whole or not at all, without secrets.

    Args:
        made: when and by which command.
        pictures: in addition to the previews of the runs.
        tables, charts: of the comparison of several runs.

    Raises:
        StorageError: the folder cannot be written.
    """
    reports, pictures, tables, made = redacted([*reports]), redacted([*pictures]), redacted([*tables]), redact(made)
    charts = redacted([*charts])
    page = render_html(reports, made, pictures, tables, charts)
    text = render_markdown(reports, made, f"{name}.html", tables)
    with storage_errors("a report must be writable", "choose another folder, or free some space"):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{name}.html", page.encode())
        write_whole(folder / f"{name}.md", text.encode())


def render_html(
    reports: Sequence[RunReport],
    made: str,
    pictures: Sequence[Picture] = (),
    tables: Sequence[Table] = (),
    charts: Sequence[Chart] = (),
) -> str:
    """The page with the previews of the runs, which it reads; where many share it, curves have fewer points."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from vesuvius.report.draw import draw  # imports matplotlib

    environment = Environment(
        loader=PackageLoader("vesuvius.report"), autoescape=True, finalize=_printable, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    points = max(POINTS // len(reports), 30)
    shown = [*pictures, *embed(reports)]
    return environment.get_template("page.html").render(
        title=" and ".join(report.name for report in reports),
        reports=[(each, [draw(thinned(chart, points)) for chart in each.charts]) for each in reports],
        made=made,
        pictures=[(each.caption, each.data and base64.b64encode(each.data).decode("ascii")) for each in shown],
        tables=tables,
        charts=[draw(chart) for chart in charts],
    )


def _printable(value: Any) -> Any:
    """Of a text, a question mark in place of each character that XML does not allow."""
    if type(value) is not str:
        return value
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in value)


def made_by(command: str) -> str:
    """When a page was made, and by what."""
    return f"Made {time.strftime('%Y-%m-%d %H:%M:%S %Z')} by: {command}"


def new_folder(parent: Path) -> Path:
    """A folder named by the time of day that is not there yet."""
    name = time.strftime("%Y%m%d_%H%M%S")
    names = [name, *(f"{name}_{count}" for count in range(2, 1000))]
    return next(parent / each for each in names if not (parent / each).exists())
