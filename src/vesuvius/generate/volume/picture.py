"""Pictures of generated volumes: middle slices next to the labels and, for held-out labels, to the real voxels."""

import itertools
import math
from contextlib import suppress
from pathlib import Path

import numpy as np
import zarr
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin

from vesuvius.config import ArrayConfig, StoreConfig, Triple
from vesuvius.errors import ConfigError, storage_errors
from vesuvius.generate.sample_zarr import to_model_values
from vesuvius.generate.volume.inputs import InputConfig
from vesuvius.generate.volume.run import VolumeRequest, generate_volume
from vesuvius.predict.progress import OnProgress
from vesuvius.stream.start.prepare import IntensityRange
from vesuvius.training.checkpoint.format import find_checkpoint
from vesuvius.training.checkpoint.trained import read_checkpoint_info
from vesuvius.training.validation.pictures import MontageCell, Scale, UInt8, draw_grid, joined_slices, with_charts
from vesuvius.training.validation.texture import measure_texture
from vesuvius.volume_tools.partial import partial_path
from vesuvius.volumes.box import Box, box_along, box_at, shape_of, slices, triple
from vesuvius.volumes.volume import open_volume

_LONGEST = 512  # pixels along an axis; of larger volumes a coarser level is shown
_CHARTS_PX = 220
_SOFTWARE = "vesuvius sample"  # in the metadata of the picture
_WIDTH_PX = 256  # small volumes are magnified to about this


def check_picture(request: VolumeRequest, picture: Path) -> None:
    """Raise ConfigError if the picture of a volume that is not there yet would replace a file of another kind."""
    if picture.exists() and not request.out.exists() and not partial_path(request.out).exists():
        with suppress(OSError), Image.open(picture) as found:
            if found.info.get("Software") == _SOFTWARE:
                return
        raise ConfigError(
            f"{picture} exists and would be replaced by a picture of the volume; move it away, or choose another --out"
        )


def draw_volume_picture(request: VolumeRequest, picture: Path, real: ArrayConfig | None = None) -> None:
    """Write a PNG with the middle slices of a finished volume, of its labels, and of the `real` voxels of its box.

    With `real`, it also has histograms and power spectra of both, which are read whole.

    Raises DataError, StorageError.
    """
    info = read_checkpoint_info(find_checkpoint(request.checkpoint))
    intensity, box = info.data.intensities.volumes[request.volume_index], request.inputs.box
    store = info.config.data.store
    shown, scale = _middle_slices(ArrayConfig(path=str(request.out)), None, intensity, store)
    cells = []
    if real is not None:
        assert request.inputs.condition is not None
        cells.append(MontageCell("real (held out)", _middle_slices(real, box, intensity, store)[0]))
        cells.append(MontageCell("labels", _middle_slices(request.inputs.condition, box, None, store)[0]))
    elif request.labels_out is not None:
        labels = ArrayConfig(path=str(request.labels_out))
        cells.append(MontageCell("labels", _middle_slices(labels, None, None, store)[0]))
    cells.append(MontageCell("generated from the labels" if cells else "generated", shown))
    title = f"{request.out.name}: middle slices, after {info.step} steps of training"
    drawn = draw_grid(cells, title, scale, len(cells))
    if real is not None:
        textures = {}
        for cell, spec, part in ((cells[0], real, box), (cells[-1], ArrayConfig(path=str(request.out)), None)):
            with open_volume(spec, store) as volume:
                voxels = to_model_values(volume.read(part) if part else volume[:], intensity)
            textures[cell.caption] = measure_texture(_patches_of(voxels, info.config.data.patch_size))
        drawn = with_charts(drawn, textures, intensity, _CHARTS_PX)
    with storage_errors(f"the picture {picture}", "the volume is complete; run the command again for the picture"):
        marked = PngImagePlugin.PngInfo()
        marked.add_text("Software", _SOFTWARE)
        drawn.save(picture, pnginfo=marked)


def draw_prediction(volume: ArrayConfig, box: Box | None, prediction: Path, picture: Path) -> None:
    """Write a PNG with the middle slices of a volume, or of a box of it, next to those of what was predicted there.

    At most 512 voxels along each axis are shown, of the first channel.  Raises DataError, StorageError.
    """
    store = StoreConfig()
    with open_volume(volume, store) as source:
        whole = box or ((0, 0, 0), source.shape_zyx)
    channels = len(zarr.open_array(prediction / "0", mode="r").shape) - 3
    out = ArrayConfig(path=str(prediction), select=(0,) * channels)
    with open_volume(out, store) as predicted:
        factors = [out / size for out, size in zip(predicted.shape_zyx, shape_of(whole), strict=True)]
    shown = middle_box(whole, triple([_LONGEST] * 3))
    there = box_along(
        (math.floor((lo - first) * by), math.floor((hi - first) * by))
        for lo, hi, first, by in zip(*shown, whole[0], factors, strict=True)
    )
    before, scale = _middle_slices(volume, shown, None, store)
    cells = [MontageCell("volume", before), MontageCell("prediction", _middle_slices(out, there, None, store)[0])]
    drawn = draw_grid(cells, f"{prediction.name}: middle slices", scale, len(cells))
    with storage_errors(f"the picture {picture}", "the volume is complete; run the command again for the picture"):
        drawn.save(picture)


def _middle_slices(
    spec: ArrayConfig, box: Box | None, intensity: IntensityRange | None, store: StoreConfig
) -> tuple[UInt8, Scale]:
    """Middle slices of a volume or a box, black to white over `intensity` (None = 0 or below to the largest value)."""
    for level in itertools.count(spec.level):
        with open_volume(spec.model_copy(update={"level": level}), store) as volume:
            ends, size_um = box or ((0, 0, 0), volume.shape_zyx), volume.voxel_size_um
            longest = Scale.of(size_um, 1).longest_side(shape_of(ends))
            if longest > _LONGEST and box is None and Path(spec.path, str(level + 1)).is_dir():
                continue
            middle = [(lo + hi) // 2 for lo, hi in zip(*ends, strict=True)]
            planes = (
                box_along((middle[a], middle[a] + 1) if a == axis else (ends[0][a], ends[1][a]) for a in range(3))
                for axis in range(3)
            )
            faces = [volume.read(plane).squeeze(axis) for axis, plane in enumerate(planes)]
            break
    if intensity is None:
        low = min(0.0, *(float(face.min()) for face in faces))
        intensity = IntensityRange(low, max(*(float(face.max()) for face in faces), low + 1e-6))
    scale = Scale.of(size_um, max(1, _WIDTH_PX // longest))
    across_z, across_y, across_x = (to_model_values(face, intensity) for face in faces)
    return joined_slices(across_z, across_y, across_x, scale), scale


def _patches_of(voxels: NDArray[np.float32], patch_zyx: Triple) -> list[NDArray[np.float32]]:
    """The patches of a volume that lie next to each other, partial ones left out."""
    grid = (size // patch for size, patch in zip(voxels.shape, patch_zyx, strict=True))
    return [
        voxels[slices(box_at(triple(np.multiply(index, patch_zyx).tolist()), patch_zyx))] for index in np.ndindex(*grid)
    ]


def middle_box(box: Box, most_zyx: Triple) -> Box:
    """The middle of a box, at most of this size."""
    cuts = [max(0, size - most) for size, most in zip(shape_of(box), most_zyx, strict=True)]
    return box_along((lo + cut // 2, hi - cut + cut // 2) for lo, hi, cut in zip(*box, cuts, strict=True))


def generate_held_out(run: Path, most_zyx: Triple, out: Path, picture: Path, on_progress: OnProgress) -> None:
    """Generate a volume from the labels in the middle of the held-out part, and draw it next to the real voxels.

    `run` has labels and its first volume a held-out part; the volume is at most `most_zyx` large.  Raises as
    `generate_volume`.
    """
    info = read_checkpoint_info(find_checkpoint(run))
    spec, held_out = info.config.data.volumes[0], info.data.volumes[0].validation
    assert held_out is not None
    given = InputConfig(condition=spec.condition, box=middle_box(held_out, most_zyx))
    request = VolumeRequest(info.checkpoint, "ema", (), 0, 4, 0, out, None, workers=1, inputs=given)
    generate_volume(request, on_progress)
    draw_volume_picture(request, picture, spec)
