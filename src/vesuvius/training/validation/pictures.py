"""Pictures of patches and volumes: orthogonal slices in captioned grids, with a scale bar and curves below.

A preview is such a picture of generated patches next to real ones, made during training.
"""

import io
import logging
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

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
from vesuvius.runlog.held import where
from vesuvius.stream.start.prepare import IntensityRange
from vesuvius.training.stop import StoppedError
from vesuvius.training.validation import texture
from vesuvius.training.validation.texture import HISTOGRAM_EDGES, Texture, measure_texture
from vesuvius.training.validation.validation import ValidationPatches
from vesuvius.volumes.box import triple
from vesuvius.volumes.geometry import FloatTriple

log = logging.getLogger(__name__)

PREVIEWED = 2
"""Patches of a preview; each costs a whole run of the sampler."""

UInt8 = NDArray[np.uint8]

GAP, LINE = 4, 20  # pixels between slices; of a line of text
BACKGROUND = 51  # not black, so that a slice of air alone is visible
_INK = 235
_SMALLEST_SIDE = 96
_MOST_STRETCHED = 16  # a size along z that metadata state wrongly would give a picture of gigabytes
_ASPECT = 1.5  # width to height of a grid, approximately
_DPI, MIN_WIDTH = 100, 540  # of the curves; a title wraps at this width or that of the grid
_COLORS = ("#6ec6ff", "#ffa62b")  # real, generated
_STYLE = dict.fromkeys(("figure.facecolor", "axes.facecolor"), str(BACKGROUND / 255)) | {
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#5c5c5c",
    "font.size": 8,
    "axes.titlesize": 9,
    "legend.fontsize": 8,
}


@dataclass(frozen=True)
class Scale:
    """Pixels of a voxel along z, y and x, in proportion to its edges up to 16:1, and their lengths; None = unknown."""

    pixels_zyx: FloatTriple
    voxel_size_um: FloatTriple | None

    @classmethod
    def of(cls, voxel_size_um: FloatTriple | None, pixels: float) -> Self:
        """Return the scale that gives the shortest edge this many pixels."""
        size_um = voxel_size_um or (1.0, 1.0, 1.0)
        shortest = min(size_um)
        return cls(triple(pixels * min(size / shortest, _MOST_STRETCHED) for size in size_um), voxel_size_um)

    @classmethod
    def of_patch(cls, shape_zyx: Sequence[int], voxel_size_um: FloatTriple | None) -> Self:
        """Return the smallest scale with whole pixels that makes the longest side of a patch about 96 pixels long."""
        longest = cls.of(voxel_size_um, 1).longest_side(shape_zyx)
        return cls.of(voxel_size_um, max(1, math.ceil(_SMALLEST_SIDE / longest)))

    def longest_side(self, shape_zyx: Sequence[int]) -> float:
        return max(size * pixels for size, pixels in zip(shape_zyx, self.pixels_zyx, strict=True))

    def bar(self, width: int) -> tuple[int, str]:
        """Width in pixels of the longest bar of 1, 2 or 5 times a power of ten along x in `width`; its label."""
        size_um, pixels = self.voxel_size_um[2] if self.voxel_size_um else 1.0, self.pixels_zyx[2]
        longest = width / pixels * size_um
        power = 10.0 ** math.floor(math.log10(longest))
        length = max(factor * power for factor in (1, 2, 5) if factor * power <= longest * (1 + 1e-9))  # log10 rounds
        bar = round(length / size_um * pixels)
        if self.voxel_size_um is None:
            return bar, f"{length:g} voxels"
        sizes = [f"{size:.4g}" for size in self.voxel_size_um]
        voxel = sizes[0] if len(set(sizes)) == 1 else " x ".join(sizes)
        return bar, f"{f'{length / 1000:g} mm' if length >= 1000 else f'{length:g} µm'}   (voxel {voxel} µm)"


def orthogonal_slices(patch: NDArray[Any], scale: Scale) -> UInt8:
    """The middle slices of a patch [Z, Y, X] as `joined_slices`.  Pure."""
    z, y, x = (size // 2 for size in patch.shape)
    return joined_slices(patch[z], patch[:, y], patch[:, :, x], scale)


def joined_slices(across_z: NDArray[Any], across_y: NDArray[Any], across_x: NDArray[Any], scale: Scale) -> UInt8:
    """Slices [Y, X], [Z, X] and [Z, Y] as three faces of a box.  Pure.

    Top left: the slice across z; below it across y (x to the right in both); to its right across x (z to the right).
    -1 and NaN are black, +1 is white.  A gap follows each slice on the right and below.
    """
    z, y, x = scale.pixels_zyx
    faces = _enlarged(across_z, y, x), _enlarged(across_y, z, x), _enlarged(across_x.T, y, z)
    height, width = (size + GAP for size in faces[0].shape)
    picture = np.full((height + len(faces[1]) + GAP, width + faces[2].shape[1] + GAP), BACKGROUND, np.uint8)
    for top, left, face in zip((0, height, 0), (0, 0, width), faces, strict=True):
        picture[top : top + face.shape[0], left : left + face.shape[1]] = face
    return picture


def _enlarged(face: NDArray[Any], high: float, wide: float) -> UInt8:
    """Intensities of a slice, each voxel so many pixels high and wide."""
    rows, columns = (np.arange(round(n * each)) // each for n, each in zip(face.shape, (high, wide), strict=True))
    shown = np.clip(np.nan_to_num(face, nan=-1), -1, 1)
    intensity: UInt8 = ((shown + 1) * 127.5).astype(np.uint8)[np.ix_(rows.astype(int), columns.astype(int))]
    return intensity


def middle_slice(patch: NDArray[Any], scale: Scale) -> UInt8:
    """The middle slice across z, with a gap on the right and below.  Pure."""
    _, y, x = scale.pixels_zyx
    return np.pad(_enlarged(patch[len(patch) // 2], y, x), ((0, GAP), (0, GAP)), constant_values=BACKGROUND)


@dataclass(frozen=True)
class MontageCell:
    caption: str
    picture: UInt8


def draw_grid(cells: Sequence[MontageCell], title: str, scale: Scale, columns: int | None = None) -> Image.Image:
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
    top, bar, label = len(lines) * LINE, *scale.bar(cells[0].picture.shape[1])
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
    montage: Image.Image, textures: Mapping[str, Texture], intensity: IntensityRange | None, height: int = 300
) -> Image.Image:
    """A montage with histograms and radial power spectra below it, `height` pixels high.

    Non-finite parts of curves are left out.  Uses no pyplot, so no figure stays open.

    Args:
        textures: by name in the legend, real first.
        intensity: intensities of the model values -1 and +1; None if they differ between volumes.
    """
    # imported here, because most sessions draw nothing for hours
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    edges, label = HISTOGRAM_EDGES, "intensity: -1 to +1 of each volume's range"
    if intensity is not None:
        edges, label = intensity.low + (edges + 1) / 2 * (intensity.high - intensity.low), "intensity"
    with style.context(["dark_background", _STYLE]):
        width = max(montage.width, MIN_WIDTH)
        figure = Figure(figsize=(width / _DPI, height / _DPI), dpi=_DPI, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        for (name, texture), color in zip(textures.items(), _COLORS, strict=True):
            left.stairs(texture.histogram, edges, color=color, label=name)
            seen = texture.power > 0  # false for NaN; a logarithmic axis shows neither
            right.plot(texture.frequency[seen], texture.power[seen], color=color, label=name)
        used = np.flatnonzero(sum(np.nan_to_num(texture.histogram) for texture in textures.values()))
        if len(used):
            left.set_xlim(edges[used[0]], edges[used[-1] + 1])
        left.set(title="Intensities", xlabel=label, ylabel="share of voxels")
        right.set(title="Radial power spectrum", xlabel="cycles per voxel", ylabel="power", yscale="log")
        left.legend()
        right.legend()
        canvas.draw()  # type: ignore[no-untyped-call]
    image = Image.new("RGB", (width, montage.height + height), (BACKGROUND,) * 3)
    image.paste(montage, (0, 0))
    charts = np.asarray(canvas.buffer_rgba())[..., :3]  # type: ignore[no-untyped-call]
    image.paste(Image.fromarray(charts), (0, montage.height))
    return image


_FIGURES = ("air", "means_std", "planarity")  # of a `Texture`
_DISTANCES = (texture.histogram_distance, texture.correlation_distance, texture.spectrum_distance_db)


def make_preview(
    config: Config,
    run: Path,
    step: int,
    denoise: Denoise,
    schedule: Schedule,
    reference: ValidationPatches,
    voxel_size_um: FloatTriple | None,
    stop: Callable[[], bool],
) -> dict[str, Any] | None:
    """Generate patches, write `samples/step_<step>.png` atomically, and return the record of the preview.

    Row n of the picture shows patch n of the reference and a patch generated from its labels, if the model has any.  A
    patch depends on (seed, n) and its labels alone: the pictures of a run show the same patches improve.

    Returns picture (relative to `run`), figures of both sets and their distances, which are NaN with a warning if
    generated values are not finite; None, and nothing is written, if `stop` returns True after a sampling step.
    """

    def stop_if_wanted(step: int, x: Tensor) -> None:
        if stop():
            raise StoppedError

    def draw(row: int, with_condition: bool = True) -> NDArray[np.float32]:
        condition, diffusion, shape = reference.condition([row]), config.diffusion, (1, *config.data.patch_size)
        if condition is not None and not with_condition:
            condition, diffusion = torch.zeros_like(condition), diffusion.model_copy(update={"sampler_guidance": 1.0})
        options: Any = {"condition": condition, "purpose": Purpose.PREVIEW, "on_step": stop_if_wanted}
        drawn, _ = generate(denoise, schedule, diffusion, config.seed, [row], shape, schedule.device, **options)
        return drawn[0, 0].cpu().numpy()

    rows = range(PREVIEWED)
    real = [reference.x_0([row])[0, 0].cpu().numpy() for row in range(len(reference))]
    shown = [intensities for row in rows if (intensities := reference.condition_intensities(row)) is not None]
    given = "labels" if config.data.class_values else "condition"
    name, without = (f"generated from {given}" if shown else "generated"), None
    columns = {f"real, {'held out' if reference.held_out else 'from training'}": real[: len(rows)]}
    try:
        # one at a time, because a batch could need more memory than a training step
        generated = [draw(row) for row in rows]
        columns |= {given: shown, name: generated} if shown else {name: generated}
        if shown and config.diffusion.condition_dropout > 0:
            columns[f"generated without {given}"] = without = [draw(row, with_condition=False) for row in rows]
    except StoppedError:
        return None
    both = {"generated": measure_texture(generated), "real": measure_texture(real)}
    if nonfinite := both["generated"].nonfinite:
        voxels = sum(patch.size for patch in generated)
        text = "%d of %d generated voxels are not finite at step %d; check loss and grad_norm of the preceding steps"
        log.warning(text, nonfinite, voxels, step)
    scale = Scale.of_patch(config.data.patch_size, voxel_size_um)
    picture = Path("samples") / f"step_{step:08d}.png"
    cells = [
        MontageCell(caption, np.vstack([orthogonal_slices(patch, scale) for patch in patches]))
        for caption, patches in columns.items()
    ]
    montage = draw_grid(cells, f"{config.name}, step {step}", scale, len(cells))
    textures = {"real": both["real"], name: both["generated"]}
    with_charts(montage, textures, reference.intensity).save(png := io.BytesIO(), format="PNG")
    file = where(run / picture)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, png.getvalue())
    record = {
        "picture": picture.as_posix(),
        "histogram": {"edges": HISTOGRAM_EDGES.tolist()} | {key: t.histogram.tolist() for key, t in both.items()},
        "spectrum": {"frequency": both["real"].frequency.tolist()} | {key: t.power.tolist() for key, t in both.items()},
        "correlation": {key: [along.tolist() for along in t.correlation] for key, t in both.items()},
        **{figure: {key: getattr(t, figure) for key, t in both.items()} for figure in _FIGURES},
        **{distance.__name__: math.nan if nonfinite else distance(*both.values()) for distance in _DISTANCES},
    }
    if without:
        unconditional = measure_texture(without)
        record["unconditional"] = {figure: getattr(unconditional, figure) for figure in _FIGURES}
    return record
