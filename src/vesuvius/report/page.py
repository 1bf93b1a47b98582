"""The one page of report, profile, bench, tune and evaluate.

It needs nothing else (style, curves and pictures are in it) and has no script.  All text comes from files that users
write: the template escapes every value.
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vesuvius.errors import storage_errors
from vesuvius.report.content import Picture, RunReport, Table
from vesuvius.report.curves import POINTS, Chart, draw, thinned
from vesuvius.runlog.files import write_whole
from vesuvius.runlog.redact import redact, redacted

FOLDER = "reports"
_MOST_PICTURES = 6
_WIDTH, _WIDTH_OF_MANY = 640, 360


def write_page(
    folder: Path,
    name: str,
    reports: Sequence[RunReport],
    made: str,
    pictures: Sequence[Picture] = (),
    tables: Sequence[Table] = (),
    charts: Sequence[Chart] = (),
) -> None:
    """Write NAME.html (for up to eight runs of less than 2 MB), whole or not at all, without secrets.

    Args:
        made: when and by which command.
        pictures: in addition to the previews of the runs.
        tables, charts: of the comparison of several runs.

    Raises:
        StorageError: the folder cannot be written.
    """
    shown = ([*each] for each in (pictures, tables, charts))
    page = render_html(redacted([*reports]), redact(made), *(redacted(each) for each in shown))
    with storage_errors("a report must be writable", "choose another folder, or free some space"):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{name}.html", page.encode())


def render_html(
    reports: Sequence[RunReport],
    made: str,
    pictures: Sequence[Picture] = (),
    tables: Sequence[Table] = (),
    charts: Sequence[Chart] = (),
) -> str:
    """The page with the previews of the runs, which it reads; where many share it, curves have fewer points."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("vesuvius.report"), autoescape=True, finalize=_printable, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    points = max(POINTS // len(reports), 30)
    shown = [*pictures, *_previews(reports)]
    return environment.get_template("page.html").render(
        title=" and ".join(report.name for report in reports),
        reports=[(each, [draw(thinned(chart, points)) for chart in each.charts]) for each in reports],
        made=made,
        pictures=[(each.caption, each.data and base64.b64encode(each.data).decode("ascii")) for each in shown],
        tables=tables,
        charts=[draw(chart) for chart in charts],
    )


def _previews(reports: Sequence[RunReport]) -> list[Picture]:
    """Six previews of the whole course of a run, or the last ones of several; reads files."""
    most = max(_MOST_PICTURES // len(reports), 1)
    width = _WIDTH if len(reports) <= _MOST_PICTURES else _WIDTH_OF_MANY
    found = []
    for report in reports:
        every, last = max((len(report.previews) - 1) / max(most - 1, 1), 1), len(report.previews) - 1
        places = {round(last - every * place) for place in range(min(most, last + 1))}
        for step, name in (report.previews[place] for place in sorted(places)):
            found.append(Picture(f"{report.name}, step {step}", _small(Path(report.directory) / name, width)))
    return found


def _small(path: Path, width: int) -> bytes | None:
    """A JPEG; None where the file cannot be read."""
    from PIL import Image

    file = io.BytesIO()
    try:
        with Image.open(path) as image:
            image.thumbnail((width, 2 * width), Image.Resampling.LANCZOS)
            image.convert("RGB").save(file, format="JPEG", quality=75)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # as Pillow has it
        return None
    return file.getvalue()


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
