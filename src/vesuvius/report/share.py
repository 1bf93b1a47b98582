"""Where the time of a run went: parts that add up, and their classes.  Pure."""

from __future__ import annotations

import math

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
    whole_s, pauses = float(columns["step_s"][known].sum()), columns["pause_s"]
    parts = work_parts(records, later, whole_s)
    if first.any():
        start = float((columns["step_s"] - pauses)[first].sum())
        parts.append(TimePart("first step of each session", "start", start, _share(start, whole_s)))
    pause = float(pauses[known].sum())
    return (*parts, TimePart("pauses", "pause", pause, _share(pause, whole_s)))


def work_parts(records: RunRecords, chosen: NDArray[np.bool_], whole_s: float) -> list[TimePart]:
    """The parts of the chosen steps without their pauses, and their shares of `whole_s`; other ranks if there were."""
    work, parts = work_columns(records), []
    for name, kind, key in WORK if chosen.any() else ():
        values = work[key][chosen].tolist()
        total = math.fsum(values)
        if kind != "ranks" or total:
            p50, p95 = quantile(values, 0.5), quantile(values, 0.95)
            parts.append(TimePart(name, kind, total, _share(total, whole_s), p50, p95))
    return parts


def _share(seconds: float, whole_s: float) -> float:
    return seconds / whole_s if whole_s else 0.0
