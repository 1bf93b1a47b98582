"""Pictures of generated volumes: middle slices next to the labels and, for held-out labels, to the real voxels."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, Triple
from vesuvius.errors import ConfigError, storage_errors
from vesuvius.generate.common import OnProgress
from vesuvius.generate.sample_zarr import to_model_values
from vesuvius.generate.volume.inputs import InputConfig
from vesuvius.generate.volume.run import VolumeRequest, generate_volume
from vesuvius.runlog.units import format_sizes
from vesuvius.stream.start.prepare import IntensityRange
from vesuvius.training.checkpoint.format import find_checkpoint
from vesuvius.training.checkpoint.trained import CheckpointInfo, read_checkpoint_info
from vesuvius.training.validation.pictures import (
    MontageCell,
    Scale,
    UInt8,
    draw_grid,
    joined_slices,
    orthogonal_slices,
    with_charts,
)
from vesuvius.training.validation.texture import measure_texture
from vesuvius.volume_tools.partial import partial_path
from vesuvius.volumes.box import Box, box_along, box_at, scale, shape_of, slices, triple
from vesuvius.volumes.volume import open_volume

Float32 = NDArray[np.float32]
_SCALE = 2
_CHARTS_PX = 220
_LONGEST = 512  # pixels along an axis; of larger volumes a coarser level is shown
_WIDTH_PX = 256  # small volumes are magnified to about this


def check_picture(request: VolumeRequest, picture: Path) -> None:
    """Raise ConfigError if the picture of a volume that is not there yet would replace a file."""
    if picture.exists() and not request.out.exists() and not partial_path(request.out).exists():
        raise ConfigError(
            f"{picture} exists and would be replaced by a picture of the volume; move it away, or choose another --out"
        )


def draw_volume_picture(request: VolumeRequest, picture: Path) -> None:
    """Write a PNG with the middle slices of a finished volume and of its labels.  Raises DataError, StorageError."""
    intensity = read_checkpoint_info(find_checkpoint(request.checkpoint)).data.intensities.volumes[request.volume_index]
    shown, scale = _volume_slices(request.out, intensity)
    cells = [MontageCell("generated from the labels" if request.labels_out else "generated", shown)]
    if request.labels_out is not None:
        cells.insert(0, MontageCell("labels", _volume_slices(request.labels_out, None)[0]))
    grid = draw_grid(cells, f"{request.out.name}: middle slices", scale, len(cells))
    with storage_errors(f"the picture {picture}", "the volume is complete; run the command again for the picture"):
        grid.save(picture)


def _volume_slices(path: Path, intensity: IntensityRange | None) -> tuple[UInt8, Scale]:
    """Middle slices of a volume, black to white over `intensity` (None = from 0 to the largest value); their scale."""
    for level in itertools.count():
        with open_volume(ArrayConfig(path=str(path), level=level)) as volume:
            shape, size_um = volume.shape_zyx, volume.voxel_size_um
            longest = Scale.of(size_um, 1).longest_side(shape)
            if longest > _LONGEST and (path / str(level + 1)).is_dir():
                continue
            z, y, x = (size // 2 for size in shape)
            faces = volume[z], volume[:, y], volume[:, :, x]
            break
    intensity = intensity or IntensityRange(0, max(1, *(float(face.max()) for face in faces)))
    scale = Scale.of(size_um, max(1, _WIDTH_PX // longest))
    across_z, across_y, across_x = (to_model_values(face, intensity) for face in faces)
    return joined_slices(across_z, across_y, across_x, scale), scale


def held_out_box(info: CheckpointInfo, most_zyx: Triple) -> Box:
    """The middle of the held-out part of a run's first volume, at most of this size."""
    held_out = info.data.volumes[0].validation
    assert held_out is not None
    cuts = [max(0, size - most) for size, most in zip(shape_of(held_out), most_zyx, strict=True)]
    return box_along((lo + cut // 2, hi - cut + cut // 2) for lo, hi, cut in zip(*held_out, cuts, strict=True))


def generate_held_out(run: Path, most_zyx: Triple, out: Path, picture: Path, on_progress: OnProgress) -> None:
    """Generate a volume from the labels in the middle of the held-out part, and draw it next to the real voxels.

    `run` has labels and its first volume a held-out part; the volume is at most `most_zyx` large.  Raises as
    `generate_volume`.
    """
    info = read_checkpoint_info(find_checkpoint(run))
    data, spec, intensity = info.config.data, info.config.data.volumes[0], info.data.intensities.volumes[0]
    assert spec.condition is not None
    box = held_out_box(info, most_zyx)
    given = InputConfig(condition=spec.condition, box=box)
    generate_volume(VolumeRequest(info.checkpoint, "ema", (), 0, 4, 0, out, None, workers=1, inputs=given), on_progress)
    whole, found = ((0, 0, 0), shape_of(box)), []
    for source, part in ((spec, box), (spec.condition, box), (ArrayConfig(path=str(out)), whole)):
        with open_volume(source, data.store) as volume:
            found.append(volume.read(part))
    real, labels, generated = found
    title = (
        f"{format_sizes(shape_of(box))} voxels after {info.step} steps of training; middle slices across z (top) and "
        "y (bottom)"
    )
    columns = {
        "real (held out)": to_model_values(real, intensity),
        "labels": labels * (2 / max(1, labels.max())) - 1,
        "generated from the labels": to_model_values(generated, intensity),
    }
    scale = Scale.of(info.data.volumes[0].voxel_size_um, _SCALE)
    width = round(labels.shape[2] * scale.pixels_zyx[2])
    cells = [MontageCell(name, orthogonal_slices(voxels, scale)[:, :width]) for name, voxels in columns.items()]
    textures = {
        name: measure_texture(patches_of(columns[name], data.patch_size)) for name in columns if name != "labels"
    }
    drawn = with_charts(draw_grid(cells, title, scale, len(cells)), textures, intensity, _CHARTS_PX)
    with storage_errors(f"the picture {picture}", f"free some space; {out} is complete"):
        drawn.save(picture)


def patches_of(voxels: Float32, patch_zyx: Triple) -> list[Float32]:
    """The patches of a volume that lie next to each other, partial ones left out."""
    grid = (size // patch for size, patch in zip(voxels.shape, patch_zyx, strict=True))
    return [voxels[slices(box_at(scale(triple(index), patch_zyx), patch_zyx))] for index in np.ndindex(*grid)]
