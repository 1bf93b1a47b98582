"""Samples on disk: OME-Zarr arrays with one chunk per sample, in a directory renamed into place when complete."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from numpy.typing import NDArray

from vesuvius.errors import ConfigError, storage_errors
from vesuvius.loader.intensity import intensity_scales, normalized
from vesuvius.runlog.files import flush_to_disk
from vesuvius.stream.start.prepare import IntensityRange
from vesuvius.volume_tools.partial import attribute, new_array
from vesuvius.volume_tools.pyramid import multiscale
from vesuvius.volumes.geometry import FloatTriple, Geometry

SAMPLES, CONDITIONS, MONTAGE = "samples.zarr", "conditions.zarr", "montage.png"
SAMPLE = "sample"
"""Kind of the record in the attributes of a group of samples."""


def sample_array(
    path: Path, shape: tuple[int, int, int, int], dtype: np.dtype[Any], voxel_size_um: FloatTriple | None
) -> zarr.Array[Any]:
    """Create an OME-Zarr 0.4 group with one array "0" of shape (count, Z, Y, X), one chunk per sample, and return it.

    The sample axis has a custom type, which OME-NGFF 0.4 allows before z, y and x.  Without a voxel size the scale is
    1.
    """
    unit = "micrometer" if voxel_size_um else None
    geometry = Geometry(voxel_size_um or (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (unit, unit, unit))
    metadata = multiscale(path.name.removesuffix(".zarr"), 1, geometry)
    metadata["axes"].insert(0, {"name": "sample", "type": "sample"})
    metadata["datasets"][0]["coordinateTransformations"][0]["scale"].insert(0, 1.0)
    zarr.create_group(path, zarr_format=2, attributes={"multiscales": [metadata]})
    # every chunk is written: a missing one is then known to be lost
    return new_array(path, "0", shape, dtype, (1, *shape[1:]), write_empty_chunks=True)


def record_samples(path: Path, record: dict[str, Any]) -> None:
    zarr.open_group(path, mode="r+").attrs[attribute(SAMPLE)] = record


def to_model_values(voxels: NDArray[Any], intensity: IntensityRange) -> NDArray[np.float32]:
    """Convert intensities or labels of any shape to model values, low to -1 and high to +1.  Pure."""
    stored = torch.from_numpy(np.ascontiguousarray(voxels)[None])
    return normalized(stored, intensity_scales([intensity]))[0].numpy()


def to_intensities(x_0: NDArray[np.float32], intensity: IntensityRange, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Convert model values to intensities, -1 to low and +1 to high; see `cast_intensities`.  Pure."""
    half = (intensity.high - intensity.low) / 2
    return cast_intensities(intensity.low + (x_0.astype(np.float64) + 1) * half, dtype)


def cast_intensities(intensities: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Clip intensities to the range of a dtype and cast them; integers and bool are rounded.  Pure."""
    if intensities.dtype == dtype:
        return intensities
    intensities = intensities.astype(np.float64)
    if dtype.kind == "f":
        limits = np.finfo(dtype)
        return intensities.clip(limits.min, limits.max).astype(dtype)
    least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    intensities, top = np.rint(intensities), float(most)
    # float64 cannot represent the largest 8-byte integer; the next value above it would wrap around.
    return intensities.clip(least, top if int(top) <= most else np.nextafter(top, 0)).astype(dtype)


def check_target(out: Path) -> None:
    if os.path.lexists(out):
        raise ConfigError(f"{out} already exists; choose another --out, or delete it")


@contextmanager
def atomic_directory(out: Path, what: str = "samples") -> Iterator[Path]:
    """Yield a new hidden directory next to `out`; at the end, flush it and rename it to `out`.

    After an error no new files are left.  Raises StorageError; `what` is the noun for messages.
    """
    with storage_errors(f"{what} to {out}", "free some space or choose another folder with --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
        staged = scratch / "new"
        try:
            staged.mkdir()
            yield staged
            for path in (*staged.rglob("*"), staged):
                flush_to_disk(path)
            staged.rename(out)
            flush_to_disk(out.parent)
        except BaseException:
            # zarr writes files concurrently and reports the first failure: others may still be created afterwards.
            for _ in range(4):
                shutil.rmtree(scratch, ignore_errors=True)
                time.sleep(0.05)
            raise
    shutil.rmtree(scratch, ignore_errors=True)
