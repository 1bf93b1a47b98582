"""The picture of a tune: samples per second and memory of all blocks, in the order in which they were measured."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from vesuvius.runlog.units import GIB
from vesuvius.tuning.report.report import Row

_COLOURS = {"run": "#1d5fd1", "readers": "#2e8b57", "step": "#b26a00"}
_LABELS = {"run": "whole run", "readers": "readers alone", "step": "steps alone"}


def draw_curves(rows: Sequence[Row], ram_limit_bytes: int, vram_limit_bytes: int | None) -> bytes:
    """Draw them as a PNG: filled = measured, hollow = predicted, a cross = ended badly (on the axis)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    memories: list[tuple[str, str, str, int]] = [("RAM, GiB", "ram_bytes", "predicted_ram_bytes", ram_limit_bytes)]
    if vram_limit_bytes is not None:
        memories.append(("VRAM, GiB", "vram_bytes", "predicted_vram_bytes", vram_limit_bytes))
    width_in = min(max(6.0, 0.28 * len(rows)), 20.0)
    figure = Figure(figsize=(width_in, 2.4 * (1 + len(memories))), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(1 + len(memories), 1, sharex=True, squeeze=False)[:, 0]
    for row in rows:
        _draw(axes[0], row, row.samples_s, row.predicted_samples_s)
        for below, (_, measured, predicted, _) in zip(axes[1:], memories, strict=True):
            _draw(below, row, _gib(getattr(row, measured)), _gib(getattr(row, predicted)))
    axes[0].set_ylabel("samples/s")
    for below, (title, _, _, limit_bytes) in zip(axes[1:], memories, strict=True):
        below.set_ylabel(title)
        below.axhline(limit_bytes / GIB, color="#c62828", linewidth=1, linestyle="--")
    for one in axes:
        one.set_ylim(bottom=0)
        one.grid(axis="y", color="#e3e6ea")
    axes[-1].set_xlabel("block")
    _explain(figure)
    file = io.BytesIO()
    canvas.print_png(file)  # type: ignore[no-untyped-call]
    return file.getvalue()


def _draw(axes: Any, row: Row, measured: float | None, predicted: float | None) -> None:
    colour = _COLOURS[row.kind]
    if row.ended != "ok":
        axes.plot(row.number, 0.0, "x", color="#c62828", markersize=8, markeredgewidth=2, clip_on=False)
        return  # nothing was measured: its prediction is in the table
    if predicted is not None:
        axes.plot(row.number, predicted, "o", markerfacecolor="none", color=colour, markersize=8, alpha=0.5)
    if measured is not None:
        axes.plot(row.number, measured, "o", color=colour, markersize=4)


def _explain(figure: Any) -> None:
    from matplotlib.lines import Line2D

    marks = [Line2D([], [], marker="o", linestyle="", color=_COLOURS[kind], label=_LABELS[kind]) for kind in _COLOURS]
    marks += [
        Line2D([], [], marker="o", linestyle="", markerfacecolor="none", color="#555555", label="predicted"),
        Line2D([], [], marker="x", linestyle="", color="#c62828", markeredgewidth=2, label="ended badly"),
        Line2D([], [], linestyle="--", color="#c62828", label="limit"),
    ]
    figure.legend(handles=marks, loc="outside upper center", ncols=3, fontsize=8, frameon=False)


def _gib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / GIB
