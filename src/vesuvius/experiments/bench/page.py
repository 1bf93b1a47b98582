"""A bench as a report: the same page and tables as a run's.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vesuvius.experiments.bench.results import BANDS, Result, span_words, verdict
from vesuvius.report.content import RunReport, Table, filled
from vesuvius.runlog.units import format_percent, number, size_text

_METHOD = (
    "Each measurement is a process of its own, ended with its children.  All cells are measured once a round, every "
    "other round in reverse order, and speeds are ratios within a round: drift of the machine cancels.  Samples/s is "
    "the median of the rounds, with the slowest and the fastest; the speed is the mean of the ratios with an interval "
    "that, for all cells together, is wrong in 5 % of the benches.  Steps count once kernels have been chosen, the "
    "first prefetched batches used up, and each region in flight read.  Start is the time before that, beyond the "
    "usual time of its steps: imports, opening, readers, compilation."
)
_RANKS = (
    "Each rank has the batch of the config, so that the work of a rank stays the same.  Efficiency is the speed per "
    "rank, relative to the first cell: "
)


def build_page(
    name: str, directory: str, facts: Mapping[str, str], results: Sequence[Result], config_text: str
) -> RunReport:
    """The report of a bench."""
    method = [_METHOD]
    if any(each.ranks for each in results):
        least = ", ".join(f"{band} from {format_percent(low)}" for low, band in BANDS[:-1])
        method.append(f"{_RANKS}{least}, {BANDS[-1][1]} below.")
    failed = Table("Failed", ("cell", "cause"), tuple((each.label, each.cause) for each in results if each.cause))
    how = Table("Method", ("",), tuple((text,) for text in method))
    return RunReport(
        name=name,
        directory=directory,
        facts=facts,
        verdict=verdict(results),
        tables=filled(table_of(results), failed, how),
        config_text=config_text,
    )


def table_of(results: Sequence[Result]) -> Table:
    """A row for each cell; a column that is known of none is left out."""
    rows = [_row(each, place == 0) for place, each in enumerate(results)]
    columns = [name for name in rows[0] if any(row.get(name, "-") not in ("", "-") for row in rows)]
    return Table("Results", tuple(columns), tuple(tuple(row.get(name, "-") for name in columns) for row in rows))


def _row(result: Result, is_base: bool) -> dict[str, str]:
    figures, speed, ends = result.figures, result.speed, sorted(result.rates.values())
    rate = "failed" if result.samples_s is None else number(result.samples_s)
    if len(ends) > 1:
        rate += f" ({number(ends[0])} to {number(ends[-1])})"
    row = {"cell": result.label, "samples/s": rate, "times as fast": "baseline" if is_base else "-"}
    if speed is not None:
        row["times as fast"] = f"{number(1 + speed.gain)} ({span_words(speed)})"
    row["rounds"] = str(len(ends))
    if result.ranks:
        row |= {
            "efficiency": format_percent(result.efficiency),
            "exchange": f"{number(figures.get('comm_s'))} s, {format_percent(figures.get('comm_share'))}",
        }
    return row | {
        "step, s": number(figures.get("step_s")),
        "start, s": number(result.start_s),
        "data wait": format_percent(figures.get("data_share")),
        "RAM of rank 0" if result.ranks else "RAM": size_text(figures.get("ram_bytes")),
        "VRAM": size_text(figures.get("vram_bytes")),
    }
