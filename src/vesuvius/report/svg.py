"""A chart as SVG of a few kilobytes, coloured by the page's style: `c0` to `c9` are its curves.  Pure."""

from __future__ import annotations

import math
from html import escape

import numpy as np

from vesuvius.report.curves import Chart, Series
from vesuvius.report.records import Column
from vesuvius.runlog.units import number

COLOURS = 10
_WIDTH, _HEIGHT = 400, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 12, 32
# A curve whose largest value is so many times what is usual is cut off, and its spikes marked: else it is a flat line.
_SPIKE, _ROOM = 4.0, 1.5
_TICKS = 4  # of an axis, about


def draw(chart: Chart) -> str:
    """The picture; its title and unit are read out, its curves are named by the page."""
    bottom, top = y_range(chart)
    scale = _Scale(chart, bottom, top)
    words = escape(f"{chart.title}, {chart.unit}, over {chart.x_label}", quote=True)
    body = [*_grid(chart, scale), *(_stack(chart, scale) if chart.stacked else _lines(chart, scale))]
    for name, value in chart.limits:
        if bottom <= value <= top:
            y = scale.y(np.array([value]))[0]
            body.append(
                f'<path class="limit" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"><title>{escape(name)}</title></path>'
            )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{words}">{"".join(body)}</svg>'


def off_scale(chart: Chart) -> float | None:
    """The largest value where it lies beyond the axis; None where all is shown."""
    largest = _largest(chart)
    return largest if largest > y_range(chart)[1] * (1 + 1e-9) else None


def y_range(chart: Chart) -> tuple[float, float]:
    """Ends of the axis: from 0, or the decades of a logarithmic one; a limit near the curves is inside."""
    if chart.log:
        low, high = min(s.low.min() for s in chart.series), max(s.high.max() for s in chart.series)
        return 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high * 1.0001))
    largest, least = _largest(chart), min(float(s.low.min()) for s in chart.series)
    usual = float(np.quantile(_tops(chart), 0.97))
    top = _ROOM * usual if usual > 0 and largest > _SPIKE * usual else largest
    near = [value for _, value in chart.limits if top < value <= 2.5 * top]
    top = max([top, *near]) * 1.04
    return min(least, 0.0), top if top > min(least, 0.0) else 1.0


def _tops(chart: Chart) -> Column:
    if chart.stacked:
        total: Column = np.sum([s.mid for s in chart.series], axis=0)
        return total
    return np.concatenate([s.mid for s in chart.series])


def _largest(chart: Chart) -> float:
    return float(_tops(chart).max()) if chart.stacked else max(float(s.high.max()) for s in chart.series)


class _Scale:
    """From values to places in the picture."""

    def __init__(self, chart: Chart, bottom: float, top: float) -> None:
        self.left = min(float(s.x.min()) for s in chart.series)
        self.right = max(float(s.x.max()) for s in chart.series)
        if self.right <= self.left:
            self.left, self.right = self.left - 0.5, self.left + 0.5
        self._log = chart.log
        self.bottom, self.top = bottom, top

    def x(self, values: Column) -> Column:
        return _LEFT + (values - self.left) / (self.right - self.left) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, values: Column) -> Column:
        inside = np.clip(values, self.bottom, self.top)
        if self._log:
            share = np.log(inside / self.bottom) / math.log(self.top / self.bottom)
        else:
            share = (inside - self.bottom) / (self.top - self.bottom)
        places: Column = _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)
        return places

    def y_ticks(self) -> list[float]:
        if not self._log:
            return _ticks(self.bottom, self.top)
        decades = range(round(math.log10(self.bottom)), round(math.log10(self.top)) + 1)
        return [10.0**decade for decade in decades][:: max(len(decades) // 5, 1)]


def _ticks(low: float, high: float) -> list[float]:
    """Round values within an interval."""
    step = 10 ** math.floor(math.log10((high - low) / _TICKS))
    step *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (factor * step) <= _TICKS + 1)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _grid(chart: Chart, scale: _Scale) -> list[str]:
    parts = []
    for value in scale.y_ticks():
        y = scale.y(np.array([value]))[0]
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 3.5:.1f}" text-anchor="end">{_tick(value)}</text>')
    whole = all((series.x % 1 == 0).all() for series in chart.series)  # steps, rounds
    for value in (tick for tick in _ticks(scale.left, scale.right) if tick % 1 == 0 or not whole):
        x = scale.x(np.array([value]))[0]
        anchor = "end" if x > _WIDTH - 30 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 14}" text-anchor="{anchor}">{_tick(value)}</text>')
    parts.append(
        f'<text class="axis" x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">{escape(chart.x_label)}</text>'
    )
    return parts


def _tick(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-")
    return f"{value:.4g}"


def _lines(chart: Chart, scale: _Scale) -> list[str]:
    parts = []
    for index, series in enumerate(chart.series):
        colour = index % COLOURS
        x, low, mid, high = scale.x(series.x), scale.y(series.low), scale.y(series.mid), scale.y(series.high)
        if (series.high > series.low).any():
            parts.append(f'<path class="band c{colour}" d="{_path(x, high)}L{_points(x[::-1], low[::-1])}Z"/>')
        if len(x) == 1:
            parts.append(f'<circle class="dot c{colour}" cx="{x[0]:.1f}" cy="{mid[0]:.1f}" r="3"/>')
        else:
            parts.append(f'<path class="line c{colour}" d="{_path(x, mid)}"/>')
        parts += _spikes(x, series.high, scale, colour)
    return parts


def _spikes(x: Column, values: Column, scale: _Scale, colour: int) -> list[str]:
    """A mark at the upper edge for each value beyond it."""
    above = x[values > scale.top * (1 + 1e-9)]
    marks = "".join(f"M{place - 3:.1f} {_TOP}l3 -6l3 6z" for place in above)
    return [f'<path class="spike c{colour}" d="{marks}"/>'] if marks else []


def _stack(chart: Chart, scale: _Scale) -> list[str]:
    parts = []
    x = scale.x(chart.series[0].x)
    below = np.zeros_like(x)
    for index, series in enumerate(chart.series):
        above = below + np.maximum(series.mid, 0.0)
        upper, lower = scale.y(above), scale.y(below)
        if len(x) == 1:
            x_of, upper, lower = np.array([_LEFT, _WIDTH - _RIGHT], dtype=float), upper.repeat(2), lower.repeat(2)
        else:
            x_of = x
        parts.append(
            f'<path class="area c{index % COLOURS}" d="{_path(x_of, upper)}L{_points(x_of[::-1], lower[::-1])}Z"/>'
        )
        below = above
    return parts + _spikes(x, below, scale, 0)


def _path(x: Column, y: Column) -> str:
    return "M" + _points(x, y)


def _points(x: Column, y: Column) -> str:
    return " ".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))


def legend(chart: Chart) -> list[tuple[int, str, str]]:
    """Colour, name and what the curve came to, for the line below the picture."""
    return [(index % COLOURS, series.label, _came_to(chart, series)) for index, series in enumerate(chart.series)]


def _came_to(chart: Chart, series: Series) -> str:
    if chart.stacked:
        return f"mean {number(float(series.mid.mean()))} {chart.unit}"
    spread = f"{number(float(series.low.min()))} to {number(float(series.high.max()))}"
    return f"last {number(float(series.mid[-1]))}, {spread}" if chart.x_label == "step" else spread
