"""Charts of a run, and the parts of its time.  Pure."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from vesuvius.report.curves import Chart, Series, banded, chart, wants_log
from vesuvius.report.page import TimePart
from vesuvius.report.records import Column, RunRecords, SystemRecord, figure, merge
from vesuvius.runlog.records import Record
from vesuvius.runlog.units import GIB, quantile

_MOST_CURVES = 4


def build_charts(records: RunRecords) -> list[Chart]:
    return [*_learning(records), *_time(records), *_memory(records)]


def _time(records: RunRecords) -> Iterator[Chart]:
    steps = records.columns
    chosen = ~records.first if (~records.first).any() else np.ones(len(records.first), dtype=bool)
    x = steps["step"][chosen]
    groups = {
        "data wait": steps["data_s"],
        "compute": steps["forward_s"] + steps["backward_s"] + steps["optimizer_s"],
        "host": steps["h2d_s"] + steps["host_s"],
    }
    if np.any(steps["comm_s"]):
        groups["other ranks"] = steps["comm_s"]
    parts = [banded(name, x, seconds[chosen]) for name, seconds in groups.items()]
    yield from chart("parts", "Parts of a step, without the first step of each session", "s", parts)
    yield from chart("step_s", "Step time, without pauses", "s", [banded("step", steps["step"], steps["work_s"])])


def _learning(records: RunRecords) -> Iterator[Chart]:
    steps = records.columns
    for key, title in (("loss", "Training loss"), ("grad_norm", "Gradient norm"), ("lr", "Learning rate")):
        series = [banded(key, steps["step"], steps[key])]
        yield from chart(key, title, "", series, log=wants_log(series) and key != "lr")
    validations = records.validations
    x = [figure(record.get("step")) for record in validations]
    error = [banded("EMA weights", x, [figure(record.get("relative_error")) for record in validations])]
    title = "Validation error, relative to the stationary Wiener filter"
    judged = any("bin_sigmas" in record for record in validations)  # else it is not compared with other runs' error
    key, of = ("relative_error", "") if judged else ("relative_error_all", ", mean over all levels")
    yield from chart(key, title + of, "", error, limits=(("stationary Wiener filter", 1.0),))
    bins = _bins(validations, x)
    yield from chart("bins", "Validation error by noise level", "", bins, log=wants_log(bins))


def _bins(validations: Sequence[Record], x: Sequence[float]) -> list[Series | None]:
    """A curve for up to four bins of timesteps, from the first to the last; EMA weights."""
    last: Record = next((r for r in reversed(validations) if r.get("bin_edges")), {})
    rows = [((record.get("weights") or {}).get("ema") or {}).get("relative_bins") or [] for record in validations]
    names = [f"sigma {sigma:.2g}" for sigma in last.get("bin_sigmas", ())]
    names = names or [f"t {low} to {high - 1}" for low, high in pairwise(last.get("bin_edges", ()))]
    shown = np.unique(np.linspace(0, len(names) - 1, min(len(names), _MOST_CURVES)).round().astype(int))
    return [
        banded(names[index], x, [figure(row[index]) if index < len(row) else np.nan for row in rows]) for index in shown
    ]


def _memory(records: RunRecords) -> Iterator[Chart]:
    system, steps = records.system, records.columns
    names = {"run": "used_bytes", "trainer": "trainer_bytes", "shared memory": "shared_bytes"}
    series = [_range(label, system, [name]) for label, name in names.items()]
    yield from chart("ram", "RAM", "GiB", series, limits=_limit([record.limit_bytes for record in system[-1:]]))
    readers = _ranges(system, "worker ", "workers, including replaced ones")
    yield from chart("workers", "Private RAM of each worker", "GiB", readers)
    reserved = banded("reserved", steps["step"], steps["vram_used_bytes"] / GIB)
    yield from chart("vram", "VRAM", "GiB", [reserved], limits=_limit(steps["vram_limit_bytes"][-1:]))
    busy = _range("cores", system, ["cores"], 1.0)
    yield from chart("cores", "Busy cores of the machine", "cores", [busy])
    gpus = _ranges(system, "GPU ", "GPUs", 0.01)
    yield from chart("gpu_busy", "GPU busy (a kernel runs)", "%", gpus)


def _ranges(system: Sequence[SystemRecord], prefix: str, many: str, unit: float = GIB) -> list[Series | None]:
    """A curve for each of up to four figures of a kind, or one for more."""
    names = [*dict.fromkeys(name for record in system for name in record.bands if name.startswith(prefix))]
    if len(names) > _MOST_CURVES:
        return [_range(f"{len(names)} {many}", system, names, unit)]
    return [_range(name, system, [name], unit) for name in names]


def _range(label: str, system: Sequence[SystemRecord], names: Sequence[str], unit: float = GIB) -> Series | None:
    """A curve of the mean of some figures with a band from minimum to maximum."""
    known = [(each.step, [each.bands[name] for name in names if name in each.bands]) for each in system]
    rows = [(step, *merge(bands)) for step, bands in known if bands]
    x, low, total, high, count = np.array(rows, dtype=float).reshape(-1, 5).T
    return banded(label, x, total / count / unit, low / unit, high / unit)


def _limit(last_bytes: Column | Sequence[float]) -> tuple[tuple[str, float], ...]:
    return tuple(("limit", float(size) / GIB) for size in last_bytes if np.isfinite(size))


WORK = {
    "data wait": "data_s", "transfer": "h2d_s", "forward": "forward_s", "backward": "backward_s",
    "optimizer": "optimizer_s", "other ranks": "comm_s", "host": "host_s",
}  # fmt: skip
"""Column of each part of a step without its pause; `optimizer` includes clipping and EMA, `host` all the rest."""


def split_time(records: RunRecords) -> tuple[TimePart, ...]:
    """The parts of the time of all timed steps; the first step of a session, which starts the readers, is one."""
    columns = records.columns
    known = np.isfinite(columns["work_s"] + sum(columns[key] for key in WORK.values())) & records.timed
    if not known.any():
        return ()
    first, later = known & records.first, known & ~records.first
    total_s = float(columns["step_s"][known].sum())
    parts = work_parts(records, later, total_s)
    if first.any():
        start = float(columns["work_s"][first].sum())
        parts.append(TimePart("first step of each session", start, _share(start, total_s)))
    pause = float(columns["pause_s"][known].sum())
    return (*parts, TimePart("pauses", pause, _share(pause, total_s)))


def work_parts(records: RunRecords, chosen: NDArray[np.bool_], total_s: float) -> list[TimePart]:
    """The parts of the chosen steps without pauses, with their shares of `total_s`."""
    parts = []
    for name, key in WORK.items() if chosen.any() else ():
        values = records.columns[key][chosen].tolist()
        spent_s = math.fsum(values)
        if key != "comm_s" or spent_s:
            p50, p95 = quantile(values, 0.5), quantile(values, 0.95)
            parts.append(TimePart(name, spent_s, _share(spent_s, total_s), p50, p95))
    return parts


def _share(seconds: float, total_s: float) -> float:
    return seconds / total_s if total_s else 0.0
