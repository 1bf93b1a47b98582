"""`gpu_benchmark_comparison.png` and `performance_summary_table.png`: the charts and the table, for slides.  Pure."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from vesuvius.benchmark.page import Memory, table_of
from vesuvius.benchmark.paired import BANDS, Interval
from vesuvius.benchmark.results import Result
from vesuvius.runlog.units import GIB, number

_BLUE, _GREEN, _RED, _GREY = "#1d5fd1", "#2e8b57", "#c0392b", "#6b7785"
_LONGEST = 34
_MEMORIES = (("VRAM", "vram_bytes"), ("largest worker", "worker_bytes"), ("RAM", "ram_bytes"))


def draw_comparison(title: str, results: Sequence[Result], memory: Memory) -> bytes:
    """Speed, speed over the baseline or efficiency, memory, and starts or the memory over time; a PNG."""
    ranks = any(each.ranks for each in results)
    figure, axes = _figure(2, 2, (12, 2 * max(2.6, 0.42 * len(results) + 1.3)), title)
    _bars(axes[0][0], "samples/s", results, [each.samples_s for each in results], _BLUE)
    if ranks:
        _efficiency(axes[0][1], results)
    else:
        axes[0][1].axvline(1.0, color=_GREY, linestyle="--", linewidth=1)
        _bars(axes[0][1], "times as fast as the baseline", results, [each.speed for each in results], _GREEN)
    name, key = next((each for each in _MEMORIES if _figures(results, each[1])), _MEMORIES[-1])
    _bars(
        axes[1][0],
        f"{name}{' of rank 0' if ranks else ''} at its peak, GiB",
        results,
        [_alone(size, GIB) for size in _figures(results, key) or [None] * len(results)],
        _BLUE,
    )
    if memory:
        for label, (seconds, sizes) in memory.items():
            axes[1][1].plot(seconds, np.asarray(sizes) / GIB, label=label, linewidth=1.2)
        axes[1][1].set(xlabel="seconds", ylabel="GiB", ylim=(0, None))
        axes[1][1].set_title("memory of each rank over time", fontsize=10)
        axes[1][1].legend(fontsize=7)
    else:
        starts = [_alone(each.start_s, 1) for each in results]
        _bars(axes[1][1], "start before the steady pace, s", results, starts, _GREY)
    return _png(figure)


def draw_table(title: str, results: Sequence[Result]) -> bytes:
    """The table of results; a PNG."""
    table = table_of(results)
    rows = [[_short(cell) for cell in row] for row in table.rows]
    widths = [max(map(len, column)) + 2 for column in zip(table.columns, *rows, strict=True)]
    figure, axes = _figure(1, 1, (max(6.0, 0.085 * sum(widths)), 0.9 + 0.32 * (len(rows) + 1)), title)
    axes[0][0].axis("off")
    drawn = axes[0][0].table(
        rows, colLabels=table.columns, colWidths=[width / sum(widths) for width in widths], cellLoc="left", loc="center"
    )
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(8)
    drawn.scale(1, 1.5)
    for (row, _), cell in drawn.get_celld().items():
        cell.set_edgecolor("#dde2e8")
        cell.set_facecolor("#eef1f5" if row == 0 else "#ffffff")
    return _png(figure)


def _figure(rows: int, columns: int, size: tuple[float, float], title: str) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _bars(axes: Any, title: str, results: Sequence[Result], values: Sequence[Interval | None], colour: str) -> None:
    """A bar and its interval for each cell; a cross where there is none because it failed."""
    for place, (result, value) in enumerate(zip(results, values, strict=True)):
        if value is not None:
            spread = [[value.mid - value.low], [value.high - value.mid]] if value.high > value.low else None
            axes.barh(place, value.mid, color=colour, xerr=spread, ecolor="#1b2430", capsize=3, height=0.62)
            axes.text(max(value.high, 0), place, f"  {number(value.mid)}", va="center", fontsize=8)
        elif result.cause:
            axes.plot(0, place, "x", color=_RED, markersize=9, markeredgewidth=2, clip_on=False)
    axes.set_yticks(range(len(results)), [_short(each.label) for each in results], fontsize=8)
    axes.margins(x=0.16)
    axes.set(xlim=(0, None), ylim=(len(results) - 0.5, -0.5))
    axes.set_title(title, fontsize=10)


def _alone(value: float | None, unit: float) -> Interval | None:
    return None if value is None else Interval(value / unit, value / unit, value / unit, 0.0, 1)


def _figures(results: Sequence[Result], key: str) -> list[float | None]:
    """A figure of each cell; empty where none has it."""
    found = [(each.figures or {}).get(key) for each in results]
    return found if any(value is not None for value in found) else []


def _efficiency(axes: Any, results: Sequence[Result]) -> None:
    known = [each for each in results if each.efficiency is not None]
    x, y = [each.ranks for each in known], [100 * (each.efficiency or 0.0) for each in known]
    speeds = [each.speed or Interval(1.0, 1.0, 1.0, 0.0, 1) for each in known]
    ends = np.array([(1 - speed.low / speed.mid, speed.high / speed.mid - 1) for speed in speeds]).reshape(-1, 2)
    axes.errorbar(x, y, yerr=ends.T * y, fmt="o-", color=_GREEN, ecolor="#1b2430", capsize=3)
    for least, name in BANDS[:-1]:
        axes.axhline(100 * least, color=_GREY, linestyle="--", linewidth=1)
        axes.annotate(
            f" {name}", (1, 100 * least), xycoords=("axes fraction", "data"), fontsize=7, va="bottom", ha="right"
        )
    axes.set(xlabel="ranks", ylabel="%", xticks=x)
    axes.set_ylim(0, max([105.0, *(1.05 * (1 + ends[:, 1]) * y)]))
    axes.set_title("efficiency of scaling", fontsize=10)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"...{text[3 - _LONGEST :]}"
