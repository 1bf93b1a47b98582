"""The page of report, profile, bench, tune and evaluate: headline, bar chart, curves, tables, pictures, facts.

The page is self-contained (style, curves and pictures are embedded) and has no script.  Its text comes from files that
users write: the template escapes every value.
"""

import base64
import io
import math
import re
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vesuvius.errors import storage_errors
from vesuvius.report.curves import COLORS, POINTS, Chart, draw, thinned
from vesuvius.report.records import file_inside
from vesuvius.runlog.files import write_atomically
from vesuvius.runlog.redact import redact, redacted
from vesuvius.runlog.units import format_duration, format_number

NOT_KNOWN = "not known"
PASS, FAIL = "✓ ", "✗ "
"""Begin a table cell that the page colors."""

PARTS_NOTE = (
    "The first step of a session includes starting the workers and choosing kernels; pauses are validation, previews "
    "and checkpoint copies.  Waits hidden behind computation count as 0."
)

_FIGURE = re.compile(r"(~?-?[\d.,]+[\w+-]*( [%\w/]+)?|-|not known|)")
_UNKNOWN = ("", "-", NOT_KNOWN)
_LONG_TEXT = 32  # characters from which a column is wide enough for sentences
_TERMINAL_WIDTH = 100


@dataclass(frozen=True)
class Table:
    """A table with a title; each row has a cell for each column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    @property
    def classes(self) -> list[str]:
        """CSS class of each column: `n` for figures (right-aligned), `t` for sentences, else empty."""
        columns = list(zip(*self.rows, strict=True))
        is_long = [any(len(cell) > _LONG_TEXT for cell in column) for column in columns]
        return [
            "n" if all(map(_FIGURE.fullmatch, c)) else "t" if t else "" for c, t in zip(columns, is_long, strict=True)
        ]

    @property
    def text(self) -> str:
        """The table for a terminal of 100 columns: if rows are longer, the widest column of words is wrapped."""
        rows = [self.columns, *self.rows] if any(self.columns) else [*self.rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        words = [width * (kind != "n") for width, kind in zip(widths, self.classes, strict=True)]
        widest, excess = words.index(max(words)), sum(widths) + 2 * len(widths) - 2 - _TERMINAL_WIDTH
        longest_word = max((len(word) for row in rows for word in row[widest].split()), default=0)
        widths[widest] = max(widths[widest] - max(excess, 0), longest_word)
        lines = [self.title]
        for row in rows:
            for index, piece in enumerate(textwrap.wrap(row[widest], max(widths[widest], 1)) or [""]):
                cells = [piece if column == widest else "" if index else cell for column, cell in enumerate(row)]
                lines.append("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
        return "\n".join(lines)


def filled(*tables: Table) -> tuple[Table, ...]:
    """The tables that have rows, without columns in which nothing is known."""
    return tuple(_without_unknown(table) for table in tables if table.rows)


def _without_unknown(table: Table) -> Table:
    kept = [column for column, cells in enumerate(zip(*table.rows, strict=True)) if {*cells} - {*_UNKNOWN}]
    columns, *rows = (tuple(row[column] for column in kept) for row in (table.columns, *table.rows))
    return replace(table, columns=columns, rows=tuple(rows))


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    text: str  # at the end of the bar
    color: int = COLORS["compute"]
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Bars:
    title: str
    bars: tuple[Bar, ...]
    note: str = ""
    limit: float | None = None  # a vertical line

    @property
    def top(self) -> float:
        return max((bar.high or bar.value for bar in self.bars), default=0.0) or 1.0


@dataclass(frozen=True)
class Picture:
    """A JPEG with its caption; `data` is None if the file could not be read."""

    caption: str
    data: bytes | None


@dataclass(frozen=True)
class TimePart:
    name: str
    total_s: float  # over all steps
    share: float  # of the recorded time
    p50_s: float = math.nan  # p50_s, p95_s: per step; NaN if the part is not measured per step
    p95_s: float = math.nan


@dataclass(frozen=True)
class RunReport:
    """A run, profile, bench, tune or evaluation, ready to be shown."""

    name: str  # unique on a page: runs of one name have their directory appended
    directory: str
    headline: str  # answers the question of the page in one or two sentences
    facts: Mapping[str, str]
    highlights: tuple[str, ...] = ()  # facts that stand below the headline
    tone: Literal["good", "bad", ""] = ""
    commands: tuple[str, ...] = ()  # to type next
    bars: Bars | None = None  # first chart; None = the parts of the time
    parts: tuple[TimePart, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    previews: tuple[tuple[int, str], ...] = ()  # step and path (relative to `directory`) of each picture
    config: Mapping[str, str] = field(default_factory=dict)  # keys and values, for comparing runs
    config_text: str = ""
    parts_note: str = PARTS_NOTE

    @property
    def lead(self) -> Bars | None:
        if self.bars or not self.parts:
            return self.bars
        bars = (Bar(p.name, p.share, f"{100 * p.share:.1f} %", COLORS.get(p.name, COLORS["host"])) for p in self.parts)
        return Bars("Where the time goes", tuple(bars))

    @property
    def details(self) -> Table:
        rows = tuple((label, value) for label, value in self.facts.items() if label not in self.highlights)
        return Table("Details", ("", ""), rows)

    @property
    def all_tables(self) -> tuple[Table, ...]:
        """The parts of the time, then all others."""
        shown = list(self.parts)
        if shown:
            shown.append(TimePart("total", math.fsum(p.total_s for p in shown), math.fsum(p.share for p in shown)))
        rows = tuple(
            (
                part.name,
                format_duration(part.total_s),
                f"{100 * part.share:.1f} %",
                *("" if math.isnan(seconds) else format_number(1000 * seconds) for seconds in (part.p50_s, part.p95_s)),
            )
            for part in shown
        )
        columns = ("part", "total", "share", "p50 per step, ms", "p95 per step, ms")
        return filled(Table("Time by part", columns, rows, self.parts_note), *self.tables)

    @property
    def text(self) -> str:
        """Headline, facts and tables for a terminal."""
        lines = [self.name, "", self.headline, *(f"Next: {command}" for command in self.commands), ""]
        lines += [f"{label}: {self.facts[label]}" for label in self.highlights if label in self.facts]
        return "\n".join([*lines, *(f"\n{table.text}" for table in filled(*self.all_tables, self.details))])


FOLDER = "reports"
_MOST_PICTURES = 6
_WIDTH, _WIDTH_OF_MANY = 640, 360


def write_page(folder: Path, name: str, html: str) -> None:
    """Write NAME.html atomically.  Raises StorageError: the folder cannot be written."""
    with storage_errors(f"the report {folder / name}.html", "free some space or choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{name}.html", html.encode())


def render_html(
    reports: Sequence[RunReport],
    made: str,
    pictures: Sequence[Picture] = (),
    comparison: RunReport | None = None,
    refresh_s: int = 0,
) -> str:
    """Render the page (below 2 MB for up to eight runs), without secrets.  Reads the preview pictures of the runs.

    `pictures` come in addition; the `comparison` of several runs comes first.  A browser reloads it after `refresh_s`.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("vesuvius.report"), autoescape=True, finalize=_printable, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    points = max(POINTS // len(reports), 30)
    shown = [*pictures, *_previews(reports)]
    every = redacted([*([comparison] if comparison else []), *reports])
    return environment.get_template("page.html").render(
        title=every[0].name,
        reports=[(each, [draw(thinned(chart, points)) for chart in each.charts]) for each in every],
        made=redact(made),
        pictures=[(redact(each.caption), each.data and base64.b64encode(each.data).decode()) for each in shown],
        refresh_s=refresh_s,
    )


def _previews(reports: Sequence[RunReport]) -> list[Picture]:
    """Six previews spread over a run, or the last previews of several runs; reads files."""
    most = max(_MOST_PICTURES // len(reports), 1)
    width = _WIDTH if len(reports) <= _MOST_PICTURES else _WIDTH_OF_MANY
    pictures = []
    for report in reports:
        count = len(report.previews)
        shown = np.linspace(count - 1, 0, min(most, count)).round().astype(int)
        for step, name in (report.previews[index] for index in reversed(shown)):
            file = file_inside(Path(report.directory), name)
            pictures.append(Picture(f"{report.name}, step {step}", _small(file, width) if file else None))
    return pictures


def _small(path: Path, width: int) -> bytes | None:
    from PIL import Image

    file = io.BytesIO()
    try:
        with Image.open(path, formats=("PNG", "JPEG")) as image:
            image.thumbnail((width, 2 * width), Image.Resampling.LANCZOS)
            image.convert("RGB").save(file, format="JPEG", quality=75)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # Pillow raises all of them
        return None
    return file.getvalue()


_LINES = str.maketrans("", "", "\n\t")


def _printable(value: Any) -> Any:
    """Replace characters that XML does not allow by question marks."""
    if type(value) is not str or value.translate(_LINES).isprintable():
        return value
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in value)


def made_by(command: str) -> str:
    """`Made 2026-11-26 12:00:00 UTC by: COMMAND`."""
    return f"Made {time.strftime('%Y-%m-%d %H:%M:%S %Z')} by: {command}"


def new_folder(parent: Path, create: bool = False) -> Path:
    """A folder named by the time that does not exist yet, unless it is to be created.  Raises StorageError."""
    name, count = time.strftime("%Y%m%d_%H%M%S"), 1
    while (folder := parent / (name if count == 1 else f"{name}_{count}")).exists():
        count += 1
    with storage_errors(f"the folder {folder}", "free some space or choose another one"):
        try:
            if create:
                folder.mkdir(parents=True)
        except FileExistsError:  # another process was first
            return new_folder(parent, create)
    return folder
