"""The curves below a preview's pictures: histogram and power spectrum of generated against real patches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vesuvius.training.validation.montage import PAPER
from vesuvius.training.validation.texture import HISTOGRAM_EDGES, Texture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEIGHT, _DPI = 300, 100
_GENERATED, _REAL = "#ffa62b", "#6ec6ff"
_PAPER, _INK = f"#{PAPER:02x}{PAPER:02x}{PAPER:02x}", "#dddddd"


def draw_charts(width: int, generated: Texture, real: Texture) -> NDArray[np.uint8]:
    """Draw both charts side by side: uint8 [300, width, 3].

    Curves or parts of them that are not finite are missing.  Neither pyplot nor a figure that outlives the call.
    """
    # Only here: most sessions of a run draw nothing for hours, and others that use this package never do.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / _DPI, _HEIGHT / _DPI), dpi=_DPI, facecolor=_PAPER, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for texture, colour, name in ((real, _REAL, "real"), (generated, _GENERATED, "generated")):
        left.stairs(texture.histogram, HISTOGRAM_EDGES, color=colour, label=name)
        seen = texture.power > 0  # false for NaN: a logarithmic axis has no place for either
        right.plot(texture.frequency[seen], texture.power[seen], color=colour, label=name)
    right.set_yscale("log")
    _label(left, "intensity", "model value", "share of voxels")
    _label(right, "radial power spectrum", "cycles per voxel", "power")
    canvas.draw()  # type: ignore[no-untyped-call]
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()  # type: ignore[no-untyped-call]


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, color=_INK, fontsize=9)
    axes.set_xlabel(x, color=_INK, fontsize=8)
    axes.set_ylabel(y, color=_INK, fontsize=8)
    axes.set_facecolor(_PAPER)
    axes.tick_params(which="both", colors=_INK, labelsize=8)
    for spine in axes.spines.values():
        spine.set_color(_INK)
    axes.grid(color="#5c5c5c")
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, facecolor=_PAPER, edgecolor=_INK, labelcolor=_INK)
