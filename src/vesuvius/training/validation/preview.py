"""Previews: generated patches beside real ones and the curves of both, as a picture and as a record."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vesuvius.config import Config
from vesuvius.diffusion.estimate import Denoise, generate
from vesuvius.diffusion.randomness import Purpose
from vesuvius.diffusion.schedule import Schedule
from vesuvius.runlog.files import write_whole
from vesuvius.training.validation.pictures import (
    PAPER,
    MontageCell,
    draw_charts,
    draw_grid,
    magnification,
    orthogonal_slices,
)
from vesuvius.training.validation.texture import (
    HISTOGRAM_EDGES,
    correlation_distance,
    histogram_distance,
    measure_texture,
    spectrum_distance_db,
)
from vesuvius.training.validation.validation import Reference

log = logging.getLogger(__name__)

PREVIEWED = 2
"""Patches of a sample picture; each costs a whole run of the sampler."""

_LEAST_CHART_WIDTH = 540
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
        columns |= {"its condition": shown, "drawn under it": generated} if shown else {"generated": generated}
        if shown and config.diffusion.condition_dropout > 0:
            columns["drawn without"] = unconditional = [draw(row, left_out=True) for row in rows]
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
    charts = draw_charts(max(montage.width, _LEAST_CHART_WIDTH), **both)
    image = Image.new("RGB", (charts.shape[1], montage.height + charts.shape[0]), (PAPER, PAPER, PAPER))
    image.paste(montage, (0, 0))
    image.paste(Image.fromarray(charts), (0, montage.height))
    image.save(png := io.BytesIO(), format="PNG")
    (run / picture).parent.mkdir(parents=True, exist_ok=True)
    write_whole(run / picture, png.getvalue())
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
