"""Previews: generated patches next to real ones, with histogram and spectrum of both, as a picture and as a record."""

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
from torch import Tensor

from vesuvius.config import Config
from vesuvius.diffusion.estimate import Denoise, generate
from vesuvius.diffusion.randomness import Purpose
from vesuvius.diffusion.schedule import Schedule
from vesuvius.runlog.files import write_atomically
from vesuvius.runlog.held import where
from vesuvius.training.stop import StoppedError
from vesuvius.training.validation.pictures import (
    MontageCell,
    Scale,
    draw_grid,
    orthogonal_slices,
    with_charts,
)
from vesuvius.training.validation.texture import (
    HISTOGRAM_EDGES,
    correlation_distance,
    histogram_distance,
    measure_texture,
    spectrum_distance_db,
)
from vesuvius.training.validation.validation import Reference
from vesuvius.volumes.geometry import FloatTriple

log = logging.getLogger(__name__)

PREVIEWED = 2
"""Patches of a sample picture; each costs a whole run of the sampler."""

_FIGURES = ("air", "means_std", "planarity")  # of a `Texture`
_DISTANCES = (histogram_distance, correlation_distance, spectrum_distance_db)


def make_preview(
    config: Config,
    run: Path,
    step: int,
    denoise: Denoise,
    schedule: Schedule,
    reference: Reference,
    voxel_size_um: FloatTriple | None,
    stop: Callable[[], bool],
) -> dict[str, Any] | None:
    """Generate patches, write `samples/step_<step>.png` atomically, and return the record of the preview.

    Row n of the picture shows patch n of the reference and a patch generated from its labels (or without labels, if the
    model has none).  A patch depends on (seed, n) and its labels alone: the pictures of a run show the same patches
    improve.  The curves are means over the generated patches and over the whole reference.

    Args:
        schedule: on the device that generates, as are the reference's conditions; at least PREVIEWED patches.
        stop: polled after each sampling step; if it returns True, nothing is written and None is returned.

    Returns picture (relative to `run`), figures of both sets and their distances; with a warning in the log, NaN if
    generated values are not finite.
    """

    def stop_if_wanted(step: int, x: Tensor) -> None:
        if stop():
            raise StoppedError

    def draw(row: int, with_condition: bool = True) -> NDArray[np.float32]:
        """Model values [Z, Y, X], generated from the condition of that patch of the reference or without it."""
        condition, diffusion = reference.condition([row]), config.diffusion
        if condition is not None and not with_condition:
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
    given = "labels" if config.data.labels else "condition"
    name, without = (f"generated from {given}" if shown else "generated"), None
    columns = {f"real, {'held out' if reference.held_out else 'from training'}": real[: len(rows)]}
    try:
        # One at a time: a batch could need more memory than a training step.
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
    with_charts(montage, textures, reference.grey).save(png := io.BytesIO(), format="PNG")
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
        texture = measure_texture(without)
        record["unconditional"] = {figure: getattr(texture, figure) for figure in _FIGURES}
    return record
