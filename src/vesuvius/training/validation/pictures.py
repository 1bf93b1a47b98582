"""Pictures of patches and volumes: orthogonal slices in captioned grids, with a scale bar and curves below."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from vesuvius.stream.start.prepare import IntensityRange
from vesuvius.training.validation.texture import HISTOGRAM_EDGES, Texture
from vesuvius.volumes.geometry import FloatTriple

UInt8 = NDArray[np.uint8]

GAP, LINE = 4, 20  # pixels between slices; of a line of text
BACKGROUND = 51  # not black, so that a slice of air alone is visible
_INK = 235
_SMALLEST_SIDE = 96
_ASPECT = 1.5  # width to height of a grid, approximately
_DPI, MIN_WIDTH = 100, 540  # of the curves; a title wraps at this width or that of the grid
_COLOURS = ("#6ec6ff", "#ffa62b")  # real, generated
_STYLE = dict.fromkeys(("figure.facecolor", "axes.facecolor"), str(BACKGROUND / 255)) | {
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#5c5c5c",
    "font.size": 8,
    "axes.titlesize": 9,
    "legend.fontsize": 8,
}


def magnification(shape_zyx: Sequence[int]) -> int:
    """Integer factor by which the slices of a patch are enlarged.  Pure."""
    return max(1, -(-_SMALLEST_SIDE // max(shape_zyx)))


def orthogonal_slices(patch: NDArray[Any], scale: int) -> UInt8:
    """The middle slices of a patch [Z, Y, X] as `joined_slices`.  Pure."""
    z, y, x = (size // 2 for size in patch.shape)
    return joined_slices(patch[z], patch[:, y], patch[:, :, x], scale)


def joined_slices(across_z: NDArray[Any], across_y: NDArray[Any], across_x: NDArray[Any], scale: int) -> UInt8:
    """Slices [Y, X], [Z, X] and [Z, Y] as three faces of a box, each voxel `scale` pixels wide.  Pure.

    Top left: the slice across z; below it across y (x to the right in both); to its right across x (z to the right).
    -1 and NaN are black, +1 is white.  A gap follows each slice on the right and below.
    """
    depth, height, width = (size * scale + GAP for size in (len(across_y), *across_z.shape))
    picture = np.full((height + depth, width + depth), BACKGROUND, np.uint8)
    for top, left, face in ((0, 0, across_z), (height, 0, across_y), (0, width, across_x.T)):
        shown = np.clip(np.nan_to_num(face, nan=-1), -1, 1)
        grey = ((shown + 1) * 127.5).astype(np.uint8).repeat(scale, 0).repeat(scale, 1)
        picture[top : top + grey.shape[0], left : left + grey.shape[1]] = grey
    return picture


def middle_slice(patch: NDArray[Any], scale: int) -> UInt8:
    """The middle slice across z, each voxel `scale` pixels wide, with a gap on the right and below.  Pure."""
    _, height, width = patch.shape
    return orthogonal_slices(patch, scale)[: height * scale + GAP, : width * scale + GAP]


@dataclass(frozen=True)
class MontageCell:
    """A picture in a grid and the caption above it."""

    caption: str
    picture: UInt8


@dataclass(frozen=True)
class ScaleBar:
    """Size of what a grid shows."""

    pixels: float  # per voxel
    voxel_size_um: FloatTriple | None  # edge lengths (z, y, x); None = unknown, and the bar counts voxels

    def fitted(self, width: int) -> tuple[int, str]:
        """Width in pixels of the longest bar of 1, 2 or 5 times a power of ten along x in `width`; its label.  Pure."""
        size_um = self.voxel_size_um[2] if self.voxel_size_um else None
        longest = width / self.pixels * (size_um or 1)
        power = 10.0 ** math.floor(math.log10(longest))
        length = max(factor * power for factor in (1, 2, 5) if factor * power <= longest)
        pixels = round(length / (size_um or 1) * self.pixels)
        if self.voxel_size_um is None:
            return pixels, f"{length:g} voxels"
        bar = f"{length / 1000:g} mm" if length >= 1000 else f"{length:g} µm"
        sizes = sorted({f"{size:.4g}" for size in self.voxel_size_um})
        if len(sizes) == 1:
            return pixels, f"{bar}   (voxel {sizes[0]} µm)"
        voxel = " x ".join(f"{size:.4g}" for size in self.voxel_size_um)  # slices show cubes: the bar is that of x
        return pixels, f"{bar} along x   (voxel {voxel} µm)"


def draw_grid(cells: Sequence[MontageCell], title: str, scale_bar: ScaleBar, columns: int | None = None) -> Image.Image:
    """Cells of one size below a title, with a scale bar at the bottom.  Pure.

    Args:
        columns: cells in a row; None = as many as make the grid about 1.5 times as wide as high.
    """
    height, width = cells[0].picture.shape
    height, width = height + LINE, max(width, *(_text_width(cell.caption) + GAP for cell in cells)) + 2 * GAP
    columns = columns or min(len(cells), math.ceil(math.sqrt(_ASPECT * len(cells) * height / width)))
    rows = -(-len(cells) // columns)
    letters = (max(columns * width, MIN_WIDTH) - 2 * GAP) * len(title) // max(_text_width(title), 1)
    lines = textwrap.wrap(title, max(letters, 1), break_long_words=False)
    top, bar, label = len(lines) * LINE, *scale_bar.fitted(cells[0].picture.shape[1])
    needed = [columns * width, GAP + bar + 2 * GAP + _text_width(label), *(_text_width(line) + GAP for line in lines)]
    image = Image.new("L", (max(needed) + GAP, top + rows * height + LINE), BACKGROUND)
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(lines):
        draw.text((GAP, number * LINE + 1), line, fill=_INK, font=_font())
    for number, cell in enumerate(cells):
        x, y = GAP + number % columns * width, top + number // columns * height
        draw.text((x, y + 1), cell.caption, fill=_INK, font=_font())
        image.paste(Image.fromarray(cell.picture), (x, y + LINE))
    y = image.height - LINE
    draw.rectangle((GAP, y + 8, GAP + bar - 1, y + 11), fill=_INK)
    draw.text((GAP + bar + 2 * GAP, y + 1), label, fill=_INK, font=_font())
    return image


def _text_width(text: str) -> int:
    return math.ceil(_font().getlength(text))


@cache
def _font() -> ImageFont.FreeTypeFont:
    import matplotlib  # it comes with the font

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"), 13)


def with_charts(
    montage: Image.Image, textures: Mapping[str, Texture], grey: IntensityRange | None, height: int = 300
) -> Image.Image:
    """A montage with histograms and radial power spectra below it, `height` pixels high.

    Non-finite curves, or parts of curves, are left out.  Uses no pyplot, so no figure stays open.

    Args:
        textures: name in the legend -> texture, real first.
        grey: grey values of the model values -1 and +1; None if they differ between volumes.
    """
    # Imported here: most sessions draw nothing for hours, and other users of this package never do.
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    edges, label = HISTOGRAM_EDGES, "grey value: -1 to +1 of each volume's range"
    if grey is not None:
        edges, label = grey.low + (edges + 1) / 2 * (grey.high - grey.low), "grey value"
    with style.context(["dark_background", _STYLE]):
        width = max(montage.width, MIN_WIDTH)
        figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        for (name, texture), colour in zip(textures.items(), _COLOURS, strict=True):
            left.stairs(texture.histogram, edges, color=colour, label=name)
            seen = texture.power > 0  # false for NaN; a logarithmic axis shows neither
            right.plot(texture.frequency[seen], texture.power[seen], color=colour, label=name)
        used = np.flatnonzero(sum(np.nan_to_num(texture.histogram) for texture in textures.values()))
        if len(used):
            left.set_xlim(edges[used[0]], edges[used[-1] + 1])
        left.set(title="Grey values", xlabel=label, ylabel="share of voxels")
        right.set(title="Radial power spectrum", xlabel="cycles per voxel", ylabel="power", yscale="log")
        left.legend()
        right.legend()
        canvas.draw()  # type: ignore[no-untyped-call]
    image = Image.new("RGB", (width, montage.height + height), (BACKGROUND,) * 3)
    image.paste(montage, (0, 0))
    charts = np.asarray(canvas.buffer_rgba())[..., :3]  # type: ignore[no-untyped-call]
    image.paste(Image.fromarray(charts), (0, montage.height))
    return image
