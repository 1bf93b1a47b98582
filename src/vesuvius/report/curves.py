"""Curves of a report, and their drawings.  Pure.

A curve is many figures as a few hundred points, each with the least and the most that it stands for: a spike of one
step stays visible in a run of 100,000.  Matplotlib draws them as SVG, in colours that the page's style sets.
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
_COLOURS = 10
# A curve whose largest value is so many times what is usual is cut off, and its spikes marked: else it is a flat line.
_SPIKE, _ROOM = 4.0, 1.5
_INK, _GRID, _LIMIT = "#fe01a0", "#fe01a1", "#fe01a2"  # as the curves' `#fe0100` to `#fe0109`: names for the page's own
_NAMES = {_INK: "soft", _GRID: "rule", _LIMIT: "bad"} | {f"#fe01{index:02x}": f"c{index}" for index in range(_COLOURS)}


@dataclass(frozen=True)
class Series:
    """A curve with its band; arrays of equal length, finite, in order of `x`."""

    label: str
    x: Column
    low: Column
    mid: Column
    high: Column


@dataclass(frozen=True)
class Chart:
    """A picture."""

    key: str  # by which the same picture of other runs is found
    title: str
    unit: str
    series: tuple[Series, ...]
    x_label: str = "step"
    limits: tuple[tuple[str, float], ...] = ()  # horizontal lines, each with its name
    log: bool = False  # a logarithmic axis, where all values are above 0


def banded(
    label: str,
    x: ArrayLike,
    mid: ArrayLike,
    low: ArrayLike | None = None,
    high: ArrayLike | None = None,
    points: int = POINTS,
) -> Series | None:
    """A series of at most so many points; None where no value is finite.

    Args:
        mid: values; of several, the mean is drawn.
        low, high: what each value ranges over, if it is itself a mean.
    """
    given = (x, mid, mid if low is None else low, mid if high is None else high)
    figures = np.array([np.asarray(each, dtype=float) for each in given])
    xs, mids, lows, highs = figures[:, np.isfinite(figures).all(axis=0)]
    if not len(xs):
        return None
    # Where each of at most `points` runs of neighbours begins.
    starts = np.unique(np.linspace(0, len(xs), min(len(xs), points), endpoint=False).astype(np.intp))
    lows, highs = np.minimum.reduceat(lows, starts), np.maximum.reduceat(highs, starts)
    return Series(label, _means(xs, starts), lows, _means(mids, starts), highs)


def thinned(chart: Chart, points: int) -> Chart:
    """The chart with at most so many points in each curve; spikes stay."""
    if all(len(each.x) <= points for each in chart.series):
        return chart
    fewer = (banded(each.label, each.x, each.mid, each.low, each.high, points) for each in chart.series)
    return replace(chart, series=tuple(each for each in fewer if each is not None))


def chart(key: str, title: str, unit: str, series: Sequence[Series | None], **more: object) -> list[Chart]:
    """A chart of those series that there are, or none."""
    there = tuple(each for each in series if each is not None)
    return [Chart(key, title, unit, there, **more)] if there else []  # type: ignore[arg-type]


def wants_log(series: Sequence[Series | None]) -> bool:
    """Whether the values span more than a factor of 20, and none is 0 or below."""
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
    """A chart, drawn, with the lines below it."""

    chart: Chart
    svg: Markup
    legend: tuple[tuple[int, str, str], ...]  # of each curve: number of its colour, name, what it came to
    limits: tuple[tuple[str, str], ...]
    note: str


def draw(chart: Chart) -> Figure:
    """The picture, whose title and unit are read out; curves and limits are named below it by the page."""
    legend = tuple((i % _COLOURS, each.label, _came_to(chart, each)) for i, each in enumerate(chart.series))
    limits = tuple((name, f"{format_number(value)} {chart.unit}") for name, value in chart.limits)
    largest = _largest(chart)
    note = f"beyond the axis: up to {format_number(largest)} {chart.unit}" if largest > y_range(chart)[1] else ""
    return Figure(chart, _svg(chart), legend, limits, note)


def _svg(chart: Chart) -> Markup:
    # Neither pyplot nor a figure that outlives the call.
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "vesuvius", "path.simplify": False, "font.size": 10.0}
    with rc_context(style | {"font.sans-serif": ["DejaVu Sans"]}):
        canvas = Canvas(figsize=(5.0, 2.5))
        axes = canvas.add_axes((0.115, 0.15, 0.865, 0.79))
        bottom, top = y_range(chart)
        axes.set(ylim=(bottom, top), yscale="log" if chart.log else "linear")
        _lines(axes, chart, top)
        for _, value in chart.limits:
            if bottom <= value <= top:
                axes.axhline(value, color=_LIMIT, linewidth=1.2, dashes=(4, 3))
        _dress(axes, chart)
        file = io.StringIO()
        canvas.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _inline(file.getvalue(), f"{chart.title}, {chart.unit}, over {chart.x_label}")


def _dress(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import MaxNLocator, NullFormatter

    axes.set_xlabel(chart.x_label, color=_INK, loc="right", labelpad=1, parse_math=False)
    axes.tick_params(which="both", left=False, bottom=False, labelcolor=_INK)
    axes.spines[:].set_visible(False)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    is_whole = all((series.x % 1 == 0).all() for series in chart.series)  # steps, rounds
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=is_whole, min_n_ticks=1))
    axes.xaxis.set_major_formatter("{x:,.6g}")
    axes.yaxis.set_major_formatter("{x:,.6g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    if not chart.log:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))


def _lines(axes: Axes, chart: Chart, top: float) -> None:
    for index, series in enumerate(chart.series):
        colour = f"#fe01{index % _COLOURS:02x}"
        if (series.high > series.low).any():
            axes.fill_between(series.x, series.low, series.high, color=colour, alpha=0.25, linewidth=0)
        axes.plot(series.x, series.mid, color=colour, linewidth=1.2, marker="o" if len(series.x) == 1 else None)
        above = series.x[series.high > top * (1 + 1e-9)]
        if len(above):  # a mark at the upper edge for each value beyond it
            axes.plot(above, np.full(len(above), top), "^", color=colour, markersize=4, clip_on=False, gid="spikes")


def _inline(svg: str, words: str) -> Markup:
    """The drawing as an element of a page: without a header, its figures to a tenth, its colours those of the page."""
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->| xmlns(:\w+)?=\"[^\"]*\"", "", svg, flags=re.S)
    svg = re.sub(r'(?<= d=")[^"]*', lambda path: re.sub(r"(\.\d)\d+", r"\1", " ".join(path[0].split())), svg)
    svg = re.sub(r"#fe01[0-9a-f]{2}", lambda colour: f"var(--{_NAMES[colour[0]]})", svg)
    svg = re.sub(r' id="[\w.]+_\d+"|\n *', "", svg[svg.index("<svg") :])  # of groups: several drawings share a page
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(words)}"', 1))


def y_range(chart: Chart) -> tuple[float, float]:
    """Ends of the axis: from 0, or around the values of a logarithmic one; a limit near the curves is inside."""
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


def _came_to(chart: Chart, series: Series) -> str:
    spread = f"{format_number(float(series.low.min()))} to {format_number(float(series.high.max()))}"
    return f"last {format_number(float(series.mid[-1]))}, {spread}" if chart.x_label == "step" else spread
