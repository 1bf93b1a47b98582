"""What a page of report, profile, bench, tune or evaluate shows: facts, where the time went, charts, tables.  Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from vesuvius.report.curves import Chart
from vesuvius.runlog.units import format_duration, number

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
                format_duration(part.total_s) if part.total_s >= 60 else f"{number(part.total_s)} s",
                f"{100 * part.share:.1f} %",
                *("" if math.isnan(seconds) else number(1000 * seconds) for seconds in (part.p50_s, part.p95_s)),
            )
            for part in (*self.parts, total)
        )
        return Table(
            "Where the time went", ("part", "class", "time", "share", "p50, ms", "p95, ms"), rows, self.parts_note
        )

    @property
    def text(self) -> str:
        """What the page says in words and tables, for a terminal."""
        lines = [self.name, "", self.verdict, "", *(f"{label}: {value}" for label, value in self.facts.items())]
        tables = (*([self.time_table] if self.parts else []), *self.tables)
        return "\n".join([*lines, *(f"\n{table.text}" for table in tables)])
