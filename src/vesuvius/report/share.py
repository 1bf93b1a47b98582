"""Where the time of a run went: parts that add up, and their classes.  Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vesuvius.report.content import TimePart
from vesuvius.report.records import Column, RunRecords
from vesuvius.runlog.units import quantile

WORK = (
    ("data wait", "I/O", "data_s"),
    ("transfer to the device", "transfer", "h2d_s"),
    ("forward", "compute", "forward_s"),
    ("backward", "compute", "backward_s"),
    ("optimizer, clipping, EMA", "compute", "optimizer_s"),
    ("waits for other ranks", "ranks", "comm_s"),
    ("host: the rest", "host", "host_s"),
)
"""Name, class and column of each part of a step without its pause."""

Row = tuple[str, str, float, float, float]
"""Name, class, seconds, p50 and p95 of a step."""


def work_columns(records: RunRecords) -> dict[str, Column]:
    """The columns of `WORK`."""
    columns = records.columns
    return {name: columns["other_s"] - columns["pause_s"] if name == "host_s" else columns[name] for _, _, name in WORK}


def split_time(records: RunRecords) -> tuple[TimePart, ...]:
    """The time of all steps with the last settings, whose parts add up to it; empty where no step was recorded.

    The first step of a session holds the start of the readers and the choice of kernels: it is a part of its own.
    """
    columns, work = records.columns, work_columns(records)
    known = np.isfinite(columns["step_s"]) & np.isfinite(columns["pause_s"]) & np.isfinite(sum(work.values()))
    known &= records.timed
    if not known.any():
        return ()
    first, later = known & records.first, known & ~records.first
    pauses = columns["pause_s"]
    rows = work_rows(records, later)
    if first.any():
        start = float((columns["step_s"] - pauses)[first].sum())
        rows.append(("first step of each session", "start", start, math.nan, math.nan))
    rows.append(("pauses", "pause", float(pauses[known].sum()), math.nan, math.nan))
    return shared_out(rows, float(columns["step_s"][known].sum()))


def work_rows(records: RunRecords, chosen: NDArray[np.bool_]) -> list[Row]:
    """The parts of the chosen steps without their pauses; other ranks where there were some."""
    work = work_columns(records)
    rows = [_row(name, kind, work[key][chosen]) for name, kind, key in WORK] if chosen.any() else []
    return [row for row in rows if row[1] != "ranks" or row[2]]


def shared_out(rows: Sequence[Row], whole_s: float) -> tuple[TimePart, ...]:
    """The parts with their shares of the time that was recorded."""
    return tuple(
        TimePart(name, kind, total, total / whole_s if whole_s else 0.0, p50, p95)
        for name, kind, total, p50, p95 in rows
    )


def _row(name: str, kind: str, seconds: Column) -> Row:
    values = seconds.tolist()
    return name, kind, float(seconds.sum()), quantile(values, 0.5), quantile(values, 0.95)
