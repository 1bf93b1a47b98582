"""Curves of a report and their drawings.  Pure.

A curve reduces many values to a few hundred points, each with the minimum and maximum of the values it stands for, so a
spike of one step stays visible in a run of 100,000.  Matplotlib draws them as SVG, in colors set by the page's style.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike, NDArray

from vesuvius.report.records import Column
from vesuvius.runlog.units import format_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 240
COLORS = {
    "data wait": 0, "transfer": 1, "compute": 2, "forward": 2, "backward": 3, "optimizer": 4, "other ranks": 5,
    "host": 7, "baseline": 7, "ideal": 7, "best": 6, "generated": 2, "held out": 6, "training": 7,
}  # fmt: skip
"""The color of a thing on all pages, as a number of the style's `--c0` to `--c15`."""

_OTHERS = (2, 6, 4, 8, 9, 1, 3, 5, 10, 11, 12, 13, 14, 15)  # colors of all other curves, in order
# If the largest value exceeds the usual ones by more than `_SPIKE`, the axis is cut and spikes are marked.
_SPIKE, _ROOM = 4.0, 1.5
# Placeholders in the drawing for the page's own colors; curves have `#fe0100` to `#fe010f`.
_INK, _GRID, _LIMIT = "#fe01a0", "#fe01a1", "#fe01a2"
_NAMES = {_INK: "soft", _GRID: "rule", _LIMIT: "bad"} | {f"#fe01{index:02x}": f"c{index}" for index in range(16)}


@dataclass(frozen=True)
class Series:
    """A curve with its band; finite arrays of equal length, ordered by `x`."""

    label: str
    x: Column
    low: Column
    mid: Column
    high: Column
    last: float  # value, which the last point may average with others
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Up to four curves over one axis."""

    key: str  # identifies the chart among those of other runs
    title: str
    unit: str
    series: tuple[Series, ...]
    x_label: str = "step"
    limits: tuple[tuple[str, float], ...] = ()  # names and values of horizontal lines
    log: bool = False  # logarithmic axis; needs values above 0


def banded(
    label: str,
    x: ArrayLike,
    mid: ArrayLike,
    low: ArrayLike | None = None,
    high: ArrayLike | None = None,
    points: int = POINTS,
) -> Series | None:
    """Reduce values in order of time to a series of at most `points` points; None if no value is finite.

    A point of `mid` is the mean of neighbors in `x`; `low`, `high`: range of each value that is itself a mean.
    """
    given = (x, mid, mid if low is None else low, mid if high is None else high)
    figures = np.array([np.asarray(each, dtype=float) for each in given])
    xs, mids, lows, highs = figures[:, np.isfinite(figures).all(axis=0)]
    if not len(xs):
        return None
    last, order = float(mids[-1]), np.argsort(xs, kind="stable")  # a resumed run repeats steps
    xs, mids, lows, highs = (values[order] for values in (xs, mids, lows, highs))
    # First index of each group of neighbors.
    starts = np.unique(np.linspace(0, len(xs), min(len(xs), points), endpoint=False).astype(np.intp))
    lows, highs = np.minimum.reduceat(lows, starts), np.maximum.reduceat(highs, starts)
    return Series(label, _means(xs, starts), lows, _means(mids, starts), highs, last)


def thinned(chart: Chart, points: int) -> Chart:
    """The chart with at most `points` points in each curve; spikes stay."""
    if all(len(each.x) <= points for each in chart.series):
        return chart
    fewer = ((each, banded(each.label, each.x, each.mid, each.low, each.high, points)) for each in chart.series)
    series = tuple(replace(few, last=of.last, dashed=of.dashed) for of, few in fewer if few is not None)
    return replace(chart, series=series)


def chart(key: str, title: str, unit: str, series: Sequence[Series | None], **more: object) -> list[Chart]:
    """A list with the chart of the series that are not None; empty if all are."""
    there = tuple(each for each in series if each is not None)
    return [Chart(key, title, unit, there, **more)] if there else []  # type: ignore[arg-type]


def wants_log(series: Sequence[Series | None]) -> bool:
    """Whether all values are positive and span more than a factor of 20."""
    there = [each for each in series if each is not None]
    if not there or min(each.low.min() for each in there) <= 0:
        return False
    return bool(max(each.mid.max() for each in there) > 20 * min(each.mid.min() for each in there))


def _means(values: Column, starts: NDArray[np.intp]) -> Column:
    sizes = np.diff(np.append(starts, len(values)))
    means: Column = np.add.reduceat(values, starts) / sizes
    return means


@dataclass(frozen=True)
class Figure:
    """A drawn chart and the lines below it."""

    chart: Chart
    svg: Markup
    legend: tuple[tuple[int, str, str], ...]  # of each curve: color, name, last value and range
    limits: tuple[tuple[str, str], ...]
    note: str


def draw(chart: Chart) -> Figure:
    """Draw a chart as SVG, with a text alternative."""
    curves = zip(_colors(chart), chart.series, strict=True)
    legend = tuple((color, each.label, _figures(chart, each)) for color, each in curves)
    limits = tuple((name, f"{format_number(value)} {chart.unit}") for name, value in chart.limits)
    largest = _largest(chart)
    note = f"beyond the axis: up to {format_number(largest)} {chart.unit}" if largest > y_range(chart)[1] else ""
    return Figure(chart, _svg(chart), legend, limits, note)


def _colors(chart: Chart) -> list[int]:
    """A color for each curve: that of its name, unless another curve has it; they repeat after fourteen."""
    chosen: list[int] = []
    for index, series in enumerate(chart.series):
        wanted = [COLORS[series.label]] if series.label in COLORS else []
        free = (each for each in (*wanted, *_OTHERS) if each not in chosen)
        chosen.append(next(free, _OTHERS[index % len(_OTHERS)]))
    return chosen


def _svg(chart: Chart) -> Markup:
    # Neither pyplot nor a figure that outlives the call.
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "vesuvius", "path.simplify": False, "font.size": 10.0}
    with rc_context(style | {"font.sans-serif": ["DejaVu Sans"]}):
        canvas = Canvas(figsize=(5.0, 2.5))
        axes = canvas.add_axes((0.115, 0.17, 0.865, 0.77))
        bottom, top = y_range(chart)
        axes.set(ylim=(bottom, top), yscale="log" if chart.log else "linear")
        _lines(axes, chart, top)
        for _, value in chart.limits:
            if bottom <= value <= top:
                axes.axhline(value, color=_LIMIT, linewidth=1.2, dashes=(4, 3))
        _dress(axes, chart)
        file = io.StringIO()
        canvas.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _inline(file.getvalue(), ", ".join(filter(None, (chart.title, chart.unit, f"over {chart.x_label}"))))


def _dress(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import MaxNLocator, NullFormatter

    axes.set_xlabel(chart.x_label, color=_INK, loc="right", labelpad=1, parse_math=False)
    axes.tick_params(which="both", left=False, bottom=False, labelcolor=_INK)
    axes.spines[:].set_visible(False)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    is_integer = all((series.x % 1 == 0).all() for series in chart.series)  # steps, rounds
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=is_integer, min_n_ticks=1))
    axes.xaxis.set_major_formatter("{x:,.6g}")
    axes.yaxis.set_major_formatter("{x:,.6g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    if not chart.log:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))


def _lines(axes: Axes, chart: Chart, top: float) -> None:
    for number, series in zip(_colors(chart), chart.series, strict=True):
        color = f"#fe01{number:02x}"
        if (series.high > series.low).any():
            axes.fill_between(series.x, series.low, series.high, color=color, alpha=0.25, linewidth=0)
        marker, style = "o" if len(series.x) < 8 and not series.dashed else None, "--" if series.dashed else "-"
        axes.plot(series.x, series.mid, color=color, linewidth=1.4, linestyle=style, marker=marker, markersize=4)
        above = series.x[series.high > top * (1 + 1e-9)]
        if len(above):  # a mark at the upper edge for each value beyond it
            axes.plot(above, np.full(len(above), top), "^", color=color, markersize=4, clip_on=False, gid="spikes")


def _inline(svg: str, words: str) -> Markup:
    """The drawing as an element of the page: without header, coordinates rounded to a tenth, in the page's colors."""
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->| xmlns(:\w+)?=\"[^\"]*\"", "", svg, flags=re.S)
    svg = re.sub(r'(?<= d=")[^"]*', lambda path: re.sub(r"(\.\d)\d+", r"\1", " ".join(path[0].split())), svg)
    svg = re.sub(r"#fe01[0-9a-f]{2}", lambda color: f"var(--{_NAMES[color[0]]})", svg)
    svg = re.sub(r' id="[\w.]+_\d+"|\n *', "", svg[svg.index("<svg") :])  # of groups: several drawings share a page
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(words)}"', 1))


def y_range(chart: Chart) -> tuple[float, float]:
    """Ends of the vertical axis, which starts at 0 unless it is logarithmic; limits near the curves are inside."""
    least, largest = min(float(s.low.min()) for s in chart.series), _largest(chart)
    if chart.log:
        return least / 1.2, largest * 1.2
    usual = float(np.quantile(np.concatenate([s.mid for s in chart.series]), 0.97))
    top = _ROOM * usual if usual > 0 and largest > _SPIKE * usual else largest
    near = [value for _, value in chart.limits if top < value <= 2.5 * top]
    top = max([top, *near]) * 1.04
    return min(least, 0.0), top if top > min(least, 0.0) else 1.0


def _largest(chart: Chart) -> float:
    return max(float(s.high.max()) for s in chart.series)


def _figures(chart: Chart, series: Series) -> str:
    spread = f"{format_number(float(series.low.min()))} to {format_number(float(series.high.max()))}"
    return f"last {format_number(series.last)}, {spread}" if chart.x_label == "step" else spread
