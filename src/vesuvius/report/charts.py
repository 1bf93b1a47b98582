"""The charts of a run, and where its time went: parts that add up, and their classes.  Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from vesuvius.report.curves import Chart, Series, banded, chart, wants_log
from vesuvius.report.page import TimePart
from vesuvius.report.records import Column, RunRecords, figure
from vesuvius.runlog.records import Record
from vesuvius.runlog.units import GIB, quantile

_MOST_READERS = 10


def build_charts(records: RunRecords) -> list[Chart]:
    """All charts that the records have figures for, in the order of the page."""
    return [*_time(records), *_learning(records), *_memory(records), *_machine(records)]


def _time(records: RunRecords) -> Iterator[Chart]:
    steps, work = records.columns, work_columns(records)
    chosen = ~records.first if (~records.first).any() else np.ones(len(records.first), dtype=bool)
    x = steps["step"][chosen]
    parts = [banded(name, x, work[key][chosen]) for name, kind, key in WORK if kind != "ranks" or np.any(work[key])]
    yield from chart("parts", "Parts of a step, without the first of each session", "s", parts)
    step_s = steps["step_s"] - steps["pause_s"]
    yield from chart("step_s", "Time of a step, without pauses", "s", [banded("step", steps["step"], step_s)])


def _learning(records: RunRecords) -> Iterator[Chart]:
    steps = records.columns
    titles = {
        "loss": ("Loss of training", "loss"),
        "grad_norm": ("Gradient norm", "norm"),
        "lr": ("Learning rate", "1"),
    }
    for key, (title, unit) in titles.items():
        series = [banded(key, steps["step"], steps[key])]
        yield from chart(key, title, unit, series, log=wants_log(series) and key != "lr")
    validations = records.of_kind("validation")
    x = [figure(record.get("step")) for record in validations]
    error = [banded("averaged weights", x, [figure(record.get("relative_error")) for record in validations])]
    title = "Validation: error over that of the best linear filter"
    yield from chart("relative_error", title, "ratio", error, limits=(("as good as a linear filter", 1.0),))
    bins = _bins(validations, x)
    yield from chart("bins", "Validation by noise level (t)", "ratio", bins, log=wants_log(bins))


def _bins(validations: Sequence[Record], x: Sequence[float]) -> list[Series | None]:
    """A curve for each bin of timesteps, of the averaged weights."""
    edges: list[int] = next((r["bin_edges"] for r in reversed(validations) if r.get("bin_edges")), [])
    rows = [((record.get("weights") or {}).get("ema") or {}).get("relative_bins") or [] for record in validations]
    return [
        banded(f"t {low} to {high - 1}", x, [figure(row[place]) if place < len(row) else np.nan for row in rows])
        for place, (low, high) in enumerate(pairwise(edges))
    ]


def _memory(records: RunRecords) -> Iterator[Chart]:
    system, steps = records.system, records.columns
    x = _steps_of(system)
    series = [_range("run", x, system, "used_bytes"), _range("trainer", x, system, "trainer_bytes")]
    series += [_range("shared memory (object store, volumes kept in memory)", x, system, "shared_bytes")]
    limits = _limit([figure(record.get("limit_bytes")) for record in system[-1:]])
    yield from chart("ram", "RAM", "GiB", series, limits=limits)
    yield from chart("readers", "RAM of each reader (private)", "GiB", _readers(system, x))
    reserved = banded("reserved", steps["step"], steps["vram_used_bytes"] / GIB)
    yield from chart("vram", "VRAM", "GiB", [reserved], limits=_limit(steps["vram_limit_bytes"][-1:]))


def _readers(system: Sequence[Record], x: Column) -> list[Series | None]:
    """A curve for each reader; of many, what they range over."""
    sizes = [record.get("readers") or {} for record in system]
    pids = list(dict.fromkeys(pid for each in sizes for pid in each))
    if len(pids) <= _MOST_READERS:
        return [banded(f"reader {pid}", x, [figure(each.get(pid)) / GIB for each in sizes]) for pid in pids]
    known = [[figure(size) / GIB for size in each.values()] or [np.nan] for each in sizes]
    low, mid, high = ([float(of(each)) for each in known] for of in (np.min, np.mean, np.max))
    return [banded(f"{len(pids)} readers, including replaced ones", x, mid, low, high)]


def _machine(records: RunRecords) -> Iterator[Chart]:
    system = records.system
    x = _steps_of(system)
    busy = banded("cores", x, [figure(record.get("cores_busy")) for record in system])
    yield from chart("cores", "Busy cores of the machine", "cores", [busy])
    gpus = [gpu for record in system[-1:] for gpu in record.get("gpus") or []]
    series = []
    for index in (gpu.get("index") for gpu in gpus):
        seen = [{gpu.get("index"): gpu for gpu in record.get("gpus") or []}.get(index, {}) for record in system]
        series.append(_range(f"GPU {index}", x, seen, "busy", 0.01))
    yield from chart("gpu_busy", "Time in which a kernel ran", "%", series)


def _steps_of(records: Sequence[Record]) -> Column:
    """A session's first records come before the loop has said where it is: they stand where the run was."""
    steps = np.array([figure(record.get("step")) for record in records])
    return np.maximum.accumulate(np.nan_to_num(steps))


def _range(label: str, x: Column, records: Sequence[Record], key: str, unit: float = GIB) -> Series | None:
    """A field of the monitor's records that is [min, mean, max]."""
    values = [record.get(key) or [None] * 3 for record in records]
    low, mid, high = ([figure(each[place]) / unit for each in values] for place in range(3))
    return banded(label, x, mid, low, high)


def _limit(last_bytes: Column | Sequence[float]) -> tuple[tuple[str, float], ...]:
    return tuple(("limit", float(size) / GIB) for size in last_bytes if np.isfinite(size))


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
