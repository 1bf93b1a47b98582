"""The charts of a run, from its records.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from vesuvius.report.curves import Chart, Series, banded, chart, wants_log
from vesuvius.report.records import Column, RunRecords, figure
from vesuvius.report.share import WORK, work_columns
from vesuvius.runlog.records import Record
from vesuvius.runlog.units import GIB

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
    series += [_range("object store and other shared memory", x, system, "shared_bytes")]
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
    yield from chart("cores", "Busy processors of the machine", "cores", [busy])
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
