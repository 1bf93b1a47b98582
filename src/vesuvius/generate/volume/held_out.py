"""A part of what was held out, its labels, and the same part generated from these labels, side by side."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vesuvius.config import ArrayConfig, DataConfig, Triple
from vesuvius.generate.common import OnProgress
from vesuvius.generate.volume.inputs import InputConfig
from vesuvius.generate.volume.run import VolumeRequest, generate_volume
from vesuvius.loader.intensity import intensity_scales, normalised
from vesuvius.plan.make_plan import split_volume
from vesuvius.runlog.units import format_sizes
from vesuvius.training.checkpoint.format import find_checkpoint
from vesuvius.training.checkpoint.trained import read_checkpoint_info
from vesuvius.training.validation.preview import MontageCell, draw_grid, orthogonal_slices, with_charts
from vesuvius.training.validation.texture import measure_texture
from vesuvius.volumes.box import Box, box_along, box_at, shape_of, slices, times, triple
from vesuvius.volumes.volume import open_volume

Float32 = NDArray[np.float32]
_SCALE = 2
_CHARTS_PX = 220


def generate_held_out(run: Path, most_zyx: Triple, out: Path, picture: Path, on_progress: OnProgress) -> None:
    """Generate a volume from the labels in the middle of the held-out part, and draw both side by side.

    Args:
        run: the run directory of a model with labels, whose first volume has a held-out part.
        most_zyx: the size of the volume, less where less is held out.
        out: the OME-Zarr to write.
        picture: the PNG to write.
        on_progress: as in `generate_volume`.

    Raises:
        DataError, and what `generate_volume` raises.
    """
    info = read_checkpoint_info(find_checkpoint(run))
    data, spec, scales = info.config.data, info.config.data.volumes[0], intensity_scales(info.data.greys.volumes[:1])
    assert spec.condition is not None
    box = held_out_box(data, most_zyx)

    def model_values(source: ArrayConfig, part: Box) -> Float32:
        with closing(open_volume(source, data.store)) as volume:
            values: Float32 = normalised(torch.from_numpy(volume.read(part)[None]), scales)[0].numpy()
        return values

    with closing(open_volume(spec.condition, data.store)) as volume:
        labels = volume.read(box)
    given = InputConfig(condition=spec.condition, box=box)
    generate_volume(VolumeRequest(info.checkpoint, "ema", (), 0, 4, 0, out, None, workers=1, inputs=given), on_progress)
    real, generated = model_values(spec, box), model_values(ArrayConfig(path=str(out)), ((0, 0, 0), shape_of(box)))
    title = f"{format_sizes(shape_of(box))} voxels after {info.step} steps of training; above z, below y is fixed"
    side_by_side(title, real, labels, generated, data.patch_size).save(picture)


def side_by_side(
    title: str, real: Float32, labels: NDArray[np.integer], generated: Float32, patch_zyx: Triple
) -> Image.Image:
    """Middle slices across z and y of three volumes of one shape; below, histogram and spectrum of two.  Pure.

    Args:
        real, generated: model values.
        patch_zyx: the spectra are means over patches of this size.
    """
    columns = {
        "real (held out)": real,
        "its labels": labels * (2 / max(1, labels.max())) - 1,
        "generated from the labels": generated,
    }
    shown = real.shape[2] * _SCALE
    cells = [MontageCell(name, orthogonal_slices(voxels, _SCALE)[:, :shown]) for name, voxels in columns.items()]
    of_generated, of_real = (measure_texture(patches_of(voxels, patch_zyx)) for voxels in (generated, real))
    return with_charts(draw_grid(cells, title, len(cells)), of_generated, of_real, _CHARTS_PX)


def patches_of(voxels: Float32, patch_zyx: Triple) -> list[Float32]:
    """The whole patches of a volume, next to each other."""
    grid = (size // patch for size, patch in zip(voxels.shape, patch_zyx, strict=True))
    return [voxels[slices(box_at(times(triple(place), patch_zyx), patch_zyx))] for place in np.ndindex(*grid)]


def held_out_box(data: DataConfig, most_zyx: Triple) -> Box:
    """The middle of what is held out of the first volume, at most of this size.  Reads its metadata."""
    with closing(open_volume(data.volumes[0], data.store)) as volume:
        held_out = split_volume(volume.name, volume.shape_zyx, data.patch_size, data.validation).validation
    assert held_out is not None
    cuts = [max(0, size - most) for size, most in zip(shape_of(held_out), most_zyx, strict=True)]
    return box_along((lo + cut // 2, hi - cut + cut // 2) for lo, hi, cut in zip(*held_out, cuts, strict=True))
