"""The curves of a tune: samples a second and memory over the values of each knob that was turned.

A column for each knob, a row for each quantity.  Filled = measured, with its interval; hollow = predicted; a cross
stands for a trial that ended badly, where it was predicted.  Numbers are those of the trials.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vesuvius.lab.tune.terms.setting import Setting
from vesuvius.lab.tune.terms.space import Space
from vesuvius.lab.tune.terms.trial import Entry, Measured, Prediction
from vesuvius.observe.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH_IN, _HEIGHT_IN, _DPI = 3.6, 2.5, 120
_LINES = ("o-", "s--", "^:", "D-.")  # one for each group of trials that differ in the knob alone


@dataclass(frozen=True)
class _Look:
    paper: str
    ink: str
    grid: str
    measured: str
    bad: str
    limit: str


_LIGHT = _Look("#ffffff", "#1c2128", "#e3e6ea", "#1d5fd1", "#c62828", "#b26a00")
_DARK = _Look("#14171b", "#e3e6ea", "#2c323a", "#7db0ff", "#ff8a80", "#ffb74d")


@dataclass(frozen=True)
class _Column:
    """Trials over the values of one knob.

    Attributes:
        labels: of the places on the axis.
        groups: trials that are joined, each with its place.
    """

    title: str
    labels: tuple[str, ...]
    groups: tuple[tuple[tuple[int, Entry], ...], ...]
    joined: bool = True


@dataclass(frozen=True)
class _Row:
    """A quantity: how to take it from a prediction and a measurement, and the limit that it stays below."""

    title: str
    predicted: Callable[[Prediction], float | None]
    measured: Callable[[Measured], float | None]
    limit: float | None
    interval: bool


def draw_curves(entries: Sequence[Entry], space: Space, *, dark: bool = False) -> bytes:
    """Draw them as a PNG.  Neither pyplot nor a figure that outlives the call."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    look = _DARK if dark else _LIGHT
    columns, rows = _columns(entries), _rows(space)
    figure = Figure(
        figsize=(max(_WIDTH_IN * len(columns), 2 * _WIDTH_IN), _HEIGHT_IN * len(rows) + 0.4),
        dpi=_DPI,
        facecolor=look.paper,
        layout="constrained",
    )
    canvas = FigureCanvasAgg(figure)
    grid = figure.subplots(len(rows), len(columns), squeeze=False, sharex="col", sharey="row")
    for axes_row, row in zip(grid, rows, strict=True):
        for axes, column in zip(axes_row, columns, strict=True):
            _draw(axes, column, row, look)
        axes_row[0].set_ylabel(row.title, color=look.ink, fontsize=9)
        axes_row[0].set_ylim(bottom=0)
    for axes, column in zip(grid[0], columns, strict=True):
        axes.set_title(column.title, color=look.ink, fontsize=10)
    _explain(figure, look)
    file = io.BytesIO()
    canvas.print_png(file)  # type: ignore[no-untyped-call]
    return file.getvalue()


def _columns(entries: Sequence[Entry]) -> list[_Column]:
    """One for each knob that was turned, then one for the switches; where none was, all trials by number."""
    numeric = [
        ("workers", lambda s: s.workers, lambda s: replace(s, workers=0)),
        ("data.store.requests", lambda s: s.requests, lambda s: replace(s, requests=0)),
        ("prefetch_factor", lambda s: s.prefetch_factor, lambda s: replace(s, prefetch_factor=0)),
        (
            "train_batch_size",
            lambda s: s.train_batch_size,
            lambda s: replace(s, train_batch_size=0, accumulate_steps=0),
        ),
    ]
    columns = [column for name, value, rest in numeric if (column := _knob_column(name, value, rest, entries))]
    if switches := [entry for entry in entries if entry.trial.stage == "switches"]:
        places = tuple(enumerate(switches))
        labels = tuple("\n".join(textwrap.wrap(entry.trial.changed, 14)) for entry in switches)
        columns.append(_Column("switches", labels, (places,), joined=False))
    if not columns:
        labels = tuple(str(entry.trial.number) for entry in entries)
        columns = [_Column("trial", labels, (tuple(enumerate(entries)),), joined=False)]
    return columns


def _knob_column(
    name: str, value: Callable[[Setting], int], rest: Callable[[Setting], Setting], entries: Sequence[Entry]
) -> _Column | None:
    """Trials that differ in one knob alone, joined by the rest of their settings; None where it was not turned."""
    groups: dict[Setting, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(rest(entry.trial.setting), []).append(entry)
    turned = [group for group in groups.values() if len({value(entry.trial.setting) for entry in group}) > 1]
    values = sorted({value(entry.trial.setting) for group in turned for entry in group})
    if not values:
        return None
    places = tuple(
        tuple(sorted(((values.index(value(e.trial.setting)), e) for e in group), key=lambda placed: placed[0]))
        for group in turned
    )
    return _Column(name, tuple(map(str, values)), places)


def _rows(space: Space) -> list[_Row]:
    rows = [
        _Row("samples/s", lambda p: p.samples_s, lambda m: m.samples_s, None, interval=True),
        _Row(
            "RAM, GiB",
            lambda p: p.ram_bytes / GIB,
            lambda m: m.ram_bytes / GIB,
            space.ram_limit_bytes / GIB,
            interval=False,
        ),
    ]
    if space.vram_limit_bytes is not None:
        vram = _Row(
            "VRAM, GiB", lambda p: _gib(p.vram_bytes), lambda m: _gib(m.vram_bytes), _gib(space.vram_limit_bytes), False
        )
        rows.append(vram)
    return rows


def _draw(axes: Axes, column: _Column, row: _Row, look: _Look) -> None:
    for group, line in zip(column.groups, _LINES * len(column.groups), strict=False):
        _draw_group(axes, group, line, row, look, column.joined)
    if row.limit is not None:
        axes.axhline(row.limit, color=look.limit, linewidth=1.2, linestyle="--")
    axes.set_xticks(range(len(column.labels)), column.labels)
    axes.set_xlim(-0.5, len(column.labels) - 0.5)
    axes.margins(y=0.12)
    axes.set_facecolor(look.paper)
    axes.tick_params(which="both", colors=look.ink, labelsize=8)
    for spine in axes.spines.values():
        spine.set_color(look.grid)
    axes.grid(color=look.grid, axis="y")
    axes.set_axisbelow(True)


def _draw_group(
    axes: Axes, group: Sequence[tuple[int, Entry]], line: str, row: _Row, look: _Look, joined: bool
) -> None:
    means: dict[int, list[float]] = {}
    numbers: dict[int, list[tuple[int, float]]] = {}
    for place, entry in group:
        predicted, measured = row.predicted(entry.trial.prediction), entry.outcome.measured
        value = row.measured(measured) if entry.outcome.ended == "ok" and measured is not None else None
        # Where nothing was predicted either it stands on the axis: that it was tried must be seen.
        height = value if value is not None else predicted or 0.0
        numbers.setdefault(place, []).append((entry.trial.number, height))
        if value is None or measured is None:
            axes.plot(place, height, "x", color=look.bad, markersize=9, markeredgewidth=2)
            continue
        if predicted is not None:
            axes.plot(place, predicted, line[0], markerfacecolor="none", color=look.ink, markersize=9, alpha=0.6)
        means.setdefault(place, []).append(value)
        error: Any = [[value - measured.low], [measured.high - value]] if row.interval else None
        axes.errorbar(place, value, yerr=error, fmt=line[0], color=look.measured, markersize=5, capsize=4)
    if joined and means:
        axes.plot(list(means), [sum(v) / len(v) for v in means.values()], line[1:], color=look.measured, linewidth=1.2)
    if row.interval:
        _number(axes, numbers, look)


def _number(axes: Axes, numbers: dict[int, list[tuple[int, float]]], look: _Look) -> None:
    """Writes the numbers of the trials at a place beside the topmost of them."""
    for place, trials in numbers.items():
        axes.annotate(
            ", ".join(str(number) for number, _ in sorted(trials)),
            (place, max(height for _, height in trials)),
            xytext=(6, 5),
            textcoords="offset points",
            fontsize=7,
            color=look.ink,
        )


def _explain(figure: Any, look: _Look) -> None:
    """What the marks mean, above all charts."""
    from matplotlib.lines import Line2D

    marks = [
        Line2D([], [], marker="o", linestyle="", color=look.measured, label="measured, 95 % interval"),
        Line2D([], [], marker="o", linestyle="", markerfacecolor="none", color=look.ink, label="predicted"),
        Line2D([], [], marker="x", linestyle="", color=look.bad, markeredgewidth=2, label="ended badly"),
        Line2D([], [], linestyle="--", color=look.limit, label="limit"),
    ]
    figure.legend(
        handles=marks, loc="outside upper center", ncols=len(marks), fontsize=8, frameon=False, labelcolor=look.ink
    )


def _gib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / GIB
