"""Previews: generated patches beside real ones and the curves of both, as a picture and as a record.

Pictures of patches are orthogonal slices side by side, in rows and grids.
"""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vesuvius.config import Config
from vesuvius.diffusion.estimate import Denoise, generate
from vesuvius.diffusion.randomness import Purpose
from vesuvius.diffusion.schedule import Schedule
from vesuvius.runlog.files import write_atomically
from vesuvius.training.validation.texture import (
    HISTOGRAM_EDGES,
    Texture,
    correlation_distance,
    histogram_distance,
    measure_texture,
    spectrum_distance_db,
)
from vesuvius.training.validation.validation import Reference

UInt8 = NDArray[np.uint8]

log = logging.getLogger(__name__)

GAP, HEADING = 4, 20
PAPER = 51  # around the slices: on black, one that is all air would not be seen
_SMALLEST_SIDE = 96
_WIDTH_TO_HEIGHT = 1.5  # of a grid, about
_DPI, _LEAST_CHART_WIDTH = 100, 540  # of the curves
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
    draw.text((GAP, 1), title, fill=255, font=_font())
    for number, cell in enumerate(cells):
        left, top = number % columns * width, HEADING + number // columns * height
        draw.text((left, top + 1), cell.caption, fill=255, font=_font())
        image.paste(Image.fromarray(cell.picture), (left, top + HEADING))
    return image


def _text_width(text: str) -> int:
    """Pixels that `ImageDraw.text` takes for it."""
    return math.ceil(_font().getlength(text))


@cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(14)  # at its own size, 10, spaces between words are lost


def with_charts(montage: Image.Image, generated: Texture, real: Texture, height: int = 300) -> Image.Image:
    """A montage with both curves below it.  Pure."""
    charts = draw_charts(max(montage.width, _LEAST_CHART_WIDTH), generated, real, height)
    image = Image.new("RGB", (charts.shape[1], montage.height + charts.shape[0]), (PAPER, PAPER, PAPER))
    image.paste(montage, (0, 0))
    image.paste(Image.fromarray(charts), (0, montage.height))
    return image


def draw_charts(width: int, generated: Texture, real: Texture, height: int = 300) -> UInt8:
    """Draw histograms and radial power spectra side by side: uint8 [height, width, 3].

    Curves or parts of them that are not finite are missing.  Neither pyplot nor a figure that outlives the call.
    """
    # Only here: most sessions of a run draw nothing for hours, and others that use this package never do.
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style.context(["dark_background", _STYLE]):
        figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, layout="constrained")
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


PREVIEWED = 2
"""Patches of a sample picture; each costs a whole run of the sampler."""

_FIGURES = ("air", "means_std", "planarity")  # of a `Texture`
_DISTANCES = (histogram_distance, correlation_distance, spectrum_distance_db)


class _StopWantedError(Exception):
    """The way out of the sampler."""


def make_preview(
    config: Config,
    run: Path,
    step: int,
    denoise: Denoise,
    schedule: Schedule,
    reference: Reference,
    stop: Callable[[], bool],
) -> dict[str, Any] | None:
    """Draw patches, write `samples/step_<step>.png` whole or not at all, and return what there is to record.

    Row n of the picture shows a generated patch beside patch n of the reference, whose condition it was drawn under.
    It follows from (seed, n) and that condition: the pictures of one run show the same patches growing.  The curves
    are means over the generated patches and over the whole reference.

    Args:
        run: the run directory.
        schedule: on the device to draw on, as are the reference's conditions, of PREVIEWED patches or more.
        stop: asked after each sampling step; where it says so, nothing is written and None returned.

    Returns:
        The fields of the record: picture (relative to the run), the figures of both and their distances, which are NaN
        where generated values are not finite; the log then has a warning.
    """

    def stop_if_wanted(step: int, x: Tensor) -> None:
        if stop():
            raise _StopWantedError

    def draw(row: int, left_out: bool = False) -> NDArray[np.float32]:
        """[Z, Y, X] in model values, under the condition of that patch of the reference, or `left_out`, without it."""
        condition, diffusion = reference.condition([row]), config.diffusion
        if left_out and condition is not None:
            condition, diffusion = torch.zeros_like(condition), diffusion.model_copy(update={"sampler_guidance": 1.0})
        drawn, _ = generate(
            denoise,
            schedule,
            diffusion,
            config.seed,
            [row],
            (1, *config.data.patch_size),
            schedule.device,
            condition=condition,
            purpose=Purpose.PREVIEW,
            on_step=stop_if_wanted,
        )
        return drawn[0, 0].cpu().numpy()

    rows = range(PREVIEWED)
    real = [reference.x_0([row])[0, 0].cpu().numpy() for row in range(len(reference))]
    shown = [greys for row in rows if (greys := reference.condition_greys(row)) is not None]
    columns = {f"real, {'held out' if reference.held_out else 'of training'}": real[: len(rows)]}
    unconditional = None
    try:
        # One after another: a batch of them could need more memory than a training step.
        generated = [draw(row) for row in rows]
        columns |= {"its condition": shown, "generated from it": generated} if shown else {"generated": generated}
        if shown and config.diffusion.condition_dropout > 0:
            columns["generated without"] = unconditional = [draw(row, left_out=True) for row in rows]
    except _StopWantedError:
        return None
    both = {"generated": measure_texture(generated), "real": measure_texture(real)}
    if nonfinite := both["generated"].nonfinite:
        voxels = sum(patch.size for patch in generated)
        text = "%d of %d generated voxels are not finite at step %d; check loss and grad_norm of the steps before"
        log.warning(text, nonfinite, voxels, step)
    scale, picture = magnification(config.data.patch_size), Path("samples") / f"step_{step:08d}.png"
    cells = [
        MontageCell(name, np.vstack([orthogonal_slices(patch, scale) for patch in patches]))
        for name, patches in columns.items()
    ]
    montage = draw_grid(cells, f"{config.name} step {step}", len(cells))
    with_charts(montage, both["generated"], both["real"]).save(png := io.BytesIO(), format="PNG")
    (run / picture).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(run / picture, png.getvalue())
    record = {
        "picture": picture.as_posix(),
        "histogram": {"edges": HISTOGRAM_EDGES.tolist()} | {name: t.histogram.tolist() for name, t in both.items()},
        "spectrum": {"frequency": both["real"].frequency.tolist()} | {n: t.power.tolist() for n, t in both.items()},
        "correlation": {name: [along.tolist() for along in t.correlation] for name, t in both.items()},
        **{figure: {name: getattr(t, figure) for name, t in both.items()} for figure in _FIGURES},
        **{far.__name__: math.nan if nonfinite else far(*both.values()) for far in _DISTANCES},
    }
    if unconditional:
        without = measure_texture(unconditional)
        record["unconditional"] = {figure: getattr(without, figure) for figure in _FIGURES}
    return record
