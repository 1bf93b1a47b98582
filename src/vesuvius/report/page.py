"""The one page of report, profile, bench, tune and evaluate, and what it shows: facts, times, charts and tables.

It needs nothing else (style, curves and pictures are in it) and has no script.  All text comes from files that users
write: the template escapes every value.
"""

from __future__ import annotations

import base64
import io
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vesuvius.errors import storage_errors
from vesuvius.report.curves import POINTS, Chart, draw, thinned
from vesuvius.runlog.files import write_atomically
from vesuvius.runlog.redact import redact, redacted
from vesuvius.runlog.units import format_duration

NOT_KNOWN = "not known"
PARTS_NOTE = (
    "The first step of a session holds the start of the readers and the choice of kernels; pauses are validation, "
    "previews and copies for checkpoints.  A wait that is hidden behind computing counts 0."
)

_FIGURE = re.compile(r"(-?[\d.,]+[\w+-]*( [%\w/]+)?|-|not known|)")


@dataclass(frozen=True)
class Table:
    """A table with its title; the rows are as long as the columns."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    @property
    def classes(self) -> list[str]:
        """Of each column: `n` for one of figures, which stands to the right, else empty."""
        return ["n" if all(map(_FIGURE.fullmatch, column)) else "" for column in zip(*self.rows, strict=True)]

    @property
    def text(self) -> str:
        """For a terminal: the title, and a line for each row."""
        rows = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        cells = ((cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join([self.title, *("  ".join(row).rstrip() for row in cells)])


def filled(*tables: Table) -> tuple[Table, ...]:
    """Those that have rows."""
    return tuple(table for table in tables if table.rows)


@dataclass(frozen=True)
class Picture:
    """A JPEG with its words; None where the file could not be read."""

    caption: str
    data: bytes | None


@dataclass(frozen=True)
class TimePart:
    """A part of the time."""

    name: str
    kind: str
    total_s: float  # over all steps
    share: float  # of the time that was recorded
    # p50_s, p95_s: of a step; NaN where the part has none
    p50_s: float = math.nan
    p95_s: float = math.nan


@dataclass(frozen=True)
class RunReport:
    """A run, a profile, a bench, a tune or an evaluation, ready to be written down."""

    name: str  # of several with one name, with the directory
    directory: str
    facts: Mapping[str, str]  # what came of it: a label and a value each, the same labels for every run
    verdict: str  # in words
    parts: tuple[TimePart, ...] = ()  # where the time went
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    previews: tuple[tuple[int, str], ...] = ()  # pictures, relative to the directory, with the step of each
    config: Mapping[str, str] = field(default_factory=dict)  # keys and values, by which runs are compared
    config_text: str = ""
    parts_note: str = PARTS_NOTE  # what the parts hold

    @property
    def time_table(self) -> Table:
        """A row for each part of the time, and the total."""
        total = TimePart("total", "", math.fsum(p.total_s for p in self.parts), math.fsum(p.share for p in self.parts))
        rows = tuple(
            (
                part.name,
                part.kind,
                format_duration(part.total_s),
                f"{100 * part.share:.1f} %",
                *("" if math.isnan(seconds) else format_duration(seconds) for seconds in (part.p50_s, part.p95_s)),
            )
            for part in (*self.parts, total)
        )
        return Table("Where the time went", ("part", "class", "time", "share", "p50", "p95"), rows, self.parts_note)

    @property
    def text(self) -> str:
        """What the page says in words and tables, for a terminal."""
        lines = [self.name, "", self.verdict, "", *(f"{label}: {value}" for label, value in self.facts.items())]
        tables = (*([self.time_table] if self.parts else []), *self.tables)
        return "\n".join([*lines, *(f"\n{table.text}" for table in tables)])


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
    with storage_errors(f"the report {folder / name}.html", "free some space or choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{name}.html", page.encode())


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
