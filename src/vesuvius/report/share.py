"""Where the time of a run went: parts that add up, their classes, and the targets they are held to.  Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vesuvius.monitor.quantile import quantile
from vesuvius.monitor.window import Thresholds
from vesuvius.report.content import Target, TimePart
from vesuvius.report.records import Column, RunRecords
from vesuvius.runlog.units import format_percent

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
    shares = [total / whole_s if whole_s else 0.0 for _, _, total, _, _ in rows]
    tenths = rounded_together([1000 * share for share in shares])
    return tuple(
        TimePart(name, kind, total, share, tenth / 10, p50, p95)
        for (name, kind, total, p50, p95), share, tenth in zip(rows, shares, tenths, strict=True)
    )


def rounded_together(values: Sequence[float]) -> list[int]:
    """Whole numbers whose sum is the rounded sum of the values: those with the largest remainders are rounded up."""
    down = [math.floor(value) for value in values]
    short = round(math.fsum(values)) - sum(down)
    up = sorted(range(len(values)), key=lambda place: down[place] - values[place])[:short]
    return [low + (place in up) for place, low in enumerate(down)]


def _row(name: str, kind: str, seconds: Column) -> Row:
    values = seconds.tolist()
    return name, kind, float(seconds.sum()), quantile(values, 0.5), quantile(values, 0.95)


def targets_of(parts: Sequence[TimePart], thresholds: Thresholds) -> tuple[Target, ...]:
    """The working time of the steps after the first, held to what is good."""
    kinds = {kind: math.fsum(part.total_s for part in parts if part.kind == kind) for _, kind, _ in WORK}
    whole = math.fsum(kinds.values())
    if not whole:
        return ()
    least, most = thresholds.gpu_share_good, thresholds.data_share_good
    shares = {kind: seconds / whole for kind, seconds in kinds.items()}
    wanted = f"at most {format_percent(most)}"
    compute, waits = shares["compute"], {"I/O": "data (I/O)", "transfer": "copies", "host": "the host"}
    if shares["ranks"]:
        waits["ranks"] = "other ranks"
    return (
        Target("the device computes", f"at least {format_percent(least)}", format_percent(compute), compute >= least),
        *(
            Target(f"waits for {name}", wanted, format_percent(shares[kind]), shares[kind] <= most)
            for kind, name in waits.items()
        ),
    )
