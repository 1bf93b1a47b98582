"""A bench as a report: the same page and tables as a run's.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vesuvius.benchmark.paired import BANDS, Interval
from vesuvius.benchmark.results import RANKS, Result, span_words, told_apart, verdict
from vesuvius.report.content import RunReport, Table, filled
from vesuvius.report.curves import Chart, banded, chart
from vesuvius.runlog.units import GIB, format_percent, number, size_text

Memory = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""Seconds and bytes of what holds memory, by its name."""

METHOD = (
    "Each measurement is a process of its own, ended with its children.  All cells are measured once a round, every "
    "other round in reverse order, and speeds are ratios within a round: drift of the machine cancels.  Figures are "
    "medians over the rounds; the interval in brackets is two of the values, which hold the true median between them "
    "with the probability in the column level."
)
_TRAINING = (
    "Samples/s are measured at the steady pace: steps count once kernels have been chosen, the first prefetched "
    "batches used up, and each region in flight read.  Start is the time before that, beyond the usual time of its "
    "steps: imports, opening, readers, compilation.  The break-even step is where a cell has made up for a longer "
    "start."
)
_LOADER = (
    "A loader is read as fast as it delivers, without a training step, after its buffers have been used up "
    "twice.  vesuvius reads as the config says; the others read random patches of its first volume, with spawned "
    "workers, prefetch_factor 2 and one decoding thread each.  Data wait: of a consumer that takes two "
    "thirds of what is delivered."
)
_RANKS = (
    "Each rank has the batch of the config, so that the work of a rank stays the same.  Efficiency is the speed per "
    "rank, relative to the first cell: "
)


def build_page(
    name: str, directory: str, facts: Mapping[str, str], results: Sequence[Result], memory: Memory, config_text: str
) -> RunReport:
    """The report of a bench."""
    ranks, loader = any(each.ranks for each in results), any("wait_share" in (each.figures or {}) for each in results)
    method = [METHOD, _LOADER if loader else _TRAINING]
    if ranks:
        least = ", ".join(f"{band} from {format_percent(low)}" for low, band in BANDS[:-1])
        method.append(f"{_RANKS}{least}, {BANDS[-1][1]} below.")
    failed = Table("Failed", ("cell", "cause"), tuple((each.label, each.cause) for each in results if each.cause))
    how = Table("Method", ("",), tuple((text,) for text in method))
    return RunReport(
        name=name,
        directory=directory,
        facts=facts,
        verdict=verdict(results),
        charts=(*_over_axis(results), *_over_rounds(results), *_memory(memory)),
        tables=filled(table_of(results), failed, how),
        config_text=config_text,
    )


def table_of(results: Sequence[Result]) -> Table:
    """A row for each cell; a column that is known of none is left out."""
    rows = [_row(each, place == 0) for place, each in enumerate(results)]
    columns = [name for name in rows[0] if any(row.get(name, "-") not in ("", "-") for row in rows)]
    return Table("Results", tuple(columns), tuple(tuple(row.get(name, "-") for name in columns) for row in rows))


def _row(result: Result, is_base: bool) -> dict[str, str]:
    figures, speed = result.figures or {}, result.speed
    even = "-" if result.even_step is None else f"{result.even_step:.0f}"
    if speed and told_apart(speed) and result.even_step is None and result.start_s is not None:
        even = "never"
    row = {
        "cell": result.label,
        "samples/s": "failed" if result.samples_s is None else _with_span(result.samples_s),
        "times as fast": "baseline" if is_base else _with_span(speed),
        "level": format_percent(result.samples_s.level if result.samples_s else None),
        "rounds": str(len(result.rates)),
    }
    if result.ranks:
        row |= {
            "efficiency": format_percent(result.efficiency),
            "band": result.band,
            "exchange": f"{number(figures.get('comm_s'))} s, {format_percent(figures.get('comm_share'))}",
        }
    return row | {
        "step, s": number(figures.get("step_s")),
        "start, s": number(result.start_s),
        "of that compilation, s": number(figures.get("compile_s")),
        "break-even step": even if "batch" in figures else "-",
        "data wait": format_percent(figures.get("data_share", figures.get("wait_share"))),
        "RAM of rank 0" if result.ranks else "RAM": size_text(figures.get("ram_bytes")),
        "VRAM": size_text(figures.get("vram_bytes")),
        "largest worker": size_text(figures.get("worker_bytes")),
    }


def _with_span(interval: Interval | None) -> str:
    if interval is None or interval.level <= 0:
        return number(interval.mid if interval else None)
    return f"{number(interval.mid)} ({span_words(interval)})"


def _over_axis(results: Sequence[Result]) -> list[Chart]:
    """Samples/s over the values of the only axis, where these are numbers; a curve for each loader.

    For ranks also what would be linear.
    """
    axes = [each.overrides[0].partition("=") for each in results if len(each.overrides) == 1]
    if len(axes) < len(results) or len({key for key, _, _ in axes}) != 1:
        return []
    key, series = axes[0][0], []
    for loader in dict.fromkeys(each.loader for each in results):
        known = sorted(
            (float(value), each.samples_s)
            for (_, _, value), each in zip(axes, results, strict=True)
            if each.loader == loader and each.samples_s and _is_number(value)
        )
        if len(known) < 2:
            continue
        x, found = [value for value, _ in known], [interval for _, interval in known]
        low, high = [each.low for each in found], [each.high for each in found]
        series.append(banded(loader or "median and interval", x, [each.mid for each in found], low, high))
        if key == RANKS:
            series.append(banded("linear", x, [found[0].mid * each / x[0] for each in x]))
    return chart("axis", f"Speed over {key}", "samples/s", series, x_label=key)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()


def _over_rounds(results: Sequence[Result]) -> list[Chart]:
    series = [banded(each.label, [round + 1 for round in each.rates], [*each.rates.values()]) for each in results]
    note = "what all cells share is the machine's"
    return chart("rounds", "Speed in each round", "samples/s", series, x_label="round", note=note)


def _memory(memory: Memory) -> list[Chart]:
    series = [banded(name, seconds, np.asarray(sizes) / GIB) for name, (seconds, sizes) in memory.items()]
    return chart("memory", "Memory of each rank", "GiB", series, x_label="seconds", note="of the trainer process")
