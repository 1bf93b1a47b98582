"""Pictures of patches: orthogonal slices side by side, in rows and grids, and the curves below them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from vesuvius.training.validation.texture import HISTOGRAM_EDGES, Texture

UInt8 = NDArray[np.uint8]

GAP, HEADING = 4, 16
PAPER = 51  # around the slices: on black, one that is all air would not be seen
_SMALLEST_SIDE = 96
_WIDTH_TO_HEIGHT = 1.5  # of a grid, about
_HEIGHT, _DPI = 300, 100  # of the curves
_GENERATED, _REAL = "#ffa62b", "#6ec6ff"
_STYLE = dict.fromkeys(("figure.facecolor", "axes.facecolor"), str(PAPER / 255)) | {
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#5c5c5c",
    "font.size": 8,
    "axes.titlesize": 9,
    "legend.fontsize": 8,
}


def magnification(shape_zyx: Sequence[int]) -> int:
    """By which whole factor a patch is enlarged for its slices to be seen.  Pure."""
    return max(1, -(-_SMALLEST_SIDE // max(shape_zyx)))


def orthogonal_slices(patch: NDArray[Any], scale: int) -> UInt8:
    """The middle slices of a patch [Z, Y, X] as three faces of a box, each pixel `scale` wide.  Pure.

    Across z top left, across y below it (both with x to the right), across x on its right (z to the right).  -1 and NaN
    are black, +1 white.  A gap lies right of and below each slice.
    """
    z, y, x = (size // 2 for size in patch.shape)
    depth, height, width = (size * scale + GAP for size in patch.shape)
    picture = np.full((height + depth, width + depth), PAPER, np.uint8)
    for top, left, face in ((0, 0, patch[z]), (height, 0, patch[:, y]), (0, width, patch[:, :, x].T)):
        shown = np.clip(np.nan_to_num(face, nan=-1), -1, 1)
        grey = ((shown + 1) * 127.5).astype(np.uint8).repeat(scale, 0).repeat(scale, 1)
        picture[top : top + grey.shape[0], left : left + grey.shape[1]] = grey
    return picture


def middle_slice(patch: NDArray[Any], scale: int) -> UInt8:
    """The middle slice across z, each pixel `scale` wide, with a gap right of and below it.  Pure."""
    _, height, width = patch.shape
    return orthogonal_slices(patch, scale)[: height * scale + GAP, : width * scale + GAP]


@dataclass(frozen=True)
class MontageCell:
    """One picture of a grid and the line above it."""

    caption: str
    picture: UInt8


def draw_grid(cells: Sequence[MontageCell], title: str, columns: int | None = None) -> Image.Image:
    """Cells of one size in rows of so many below a title; None = about as wide as high.  Pure."""
    height, width = cells[0].picture.shape
    height, width = height + HEADING, max(width, *(_text_width(cell.caption) for cell in cells)) + 3 * GAP
    columns = columns or min(len(cells), math.ceil(math.sqrt(_WIDTH_TO_HEIGHT * len(cells) * height / width)))
    rows = -(-len(cells) // columns)
    image = Image.new("L", (max(columns * width, _text_width(title) + 2 * GAP), HEADING + rows * height), PAPER)
    draw = ImageDraw.Draw(image)
    draw.text((GAP, 2), title, fill=255)
    for number, cell in enumerate(cells):
        left, top = number % columns * width, HEADING + number // columns * height
        draw.text((left + GAP, top + 2), cell.caption, fill=255)
        image.paste(Image.fromarray(cell.picture), (left, top + HEADING))
    return image


def _text_width(text: str) -> int:
    """Pixels that `ImageDraw.text` takes for it."""
    return math.ceil(ImageFont.load_default().getlength(text))


def draw_charts(width: int, generated: Texture, real: Texture) -> UInt8:
    """Draw histograms and radial power spectra side by side: uint8 [300, width, 3].

    Curves or parts of them that are not finite are missing.  Neither pyplot nor a figure that outlives the call.
    """
    # Only here: most sessions of a run draw nothing for hours, and others that use this package never do.
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style.context(["dark_background", _STYLE]):
        figure = Figure(figsize=(width / _DPI, _HEIGHT / _DPI), dpi=_DPI, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        for texture, colour, name in ((real, _REAL, "real"), (generated, _GENERATED, "generated")):
            left.stairs(texture.histogram, HISTOGRAM_EDGES, color=colour, label=name)
            seen = texture.power > 0  # false for NaN: a logarithmic axis has no place for either
            right.plot(texture.frequency[seen], texture.power[seen], color=colour, label=name)
        left.set(title="intensity", xlabel="model value", ylabel="share of voxels")
        right.set(title="radial power spectrum", xlabel="cycles per voxel", ylabel="power", yscale="log")
        left.legend()
        right.legend()
        canvas.draw()  # type: ignore[no-untyped-call]
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()  # type: ignore[no-untyped-call]
