"""A volume of an array in files: which of its axes are z, y and x, where the others are fixed, how large a voxel is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import ConfigError, DataError
from vesuvius.runlog.units import format_sizes
from vesuvius.volume_tools.sources.files import open_hdf5, open_n5, open_nifti, open_npy, open_nrrd, open_raw
from vesuvius.volume_tools.sources.slices import open_folder, open_tiff
from vesuvius.volume_tools.sources.stored import Stored, library_errors, refuse
from vesuvius.volumes.box import Box, format_box, slices, triple
from vesuvius.volumes.geometry import VOXELS, Axes, Geometry

_UNITS = {
    "nm": "nanometer", "um": "micrometer", "\u00b5m": "micrometer", "\u03bcm": "micrometer", "\\u00B5m": "micrometer",
    "micron": "micrometer", "microns": "micrometer", "mm": "millimeter", "cm": "centimeter", "m": "meter",
}  # fmt: skip
"""What formats write, in words of OME-Zarr."""


@dataclass(frozen=True)
class Source:
    """A volume to import."""

    files: Sequence[Path]
    shape_zyx: Triple
    dtype: np.dtype[Any]  # in native byte order
    read: Callable[[Box], NDArray[Any]]  # raises DataError
    unit_zyx: Triple | None  # what is decoded at once; None = any box can be read by itself
    geometry: Geometry


def open_source(path: str, select: tuple[int, ...] = (), raw: tuple[Triple, str] | None = None) -> Source:
    """Open a scan; reads headers.

    Args:
        path: a file or folder; for HDF5 and N5 with `:/dataset`.
        select: the index along each axis, in stored order, that is longer than 1 and none of z, y, x.
        raw: shape and dtype of a file without a header.

    Raises:
        ConfigError: the format is not known, or its library is not installed.
        DataError: it cannot be read, is cut short, or is no volume.
    """
    file, inside = Path(path), ""
    if not file.exists():
        head, colon, inside = path.rpartition(":")
        file = Path(head if colon else path)
    if not file.exists():
        raise DataError(f"what is imported must exist; got {path}; correct the path")
    with library_errors(f"{path} cannot be opened"):
        stored = _opened(file, inside, raw)
    if stored.dtype.kind not in "buif" or stored.dtype.itemsize > 8:
        raise refuse("voxels are bool, or integers or floats of up to 8 bytes", stored.dtype, path, "convert them")
    axes, dtype = _axes(stored, select, path), stored.dtype.newbyteorder("=")

    def read(box: Box) -> NDArray[Any]:
        with library_errors(f"The voxels {format_box(box)} of {path} cannot be read"):
            voxels = np.asarray(stored.get(axes.stored(slices(box), axes.select)))
            return axes.to_zyx(voxels).astype(dtype, copy=False)

    unit = None if stored.unit is None else axes.zyx_of(stored.unit)
    return Source(stored.files, axes.zyx_of(stored.shape), dtype, read, unit, _geometry(stored))


def _opened(file: Path, inside: str, raw: tuple[Triple, str] | None) -> Stored:
    name = file.name.lower()
    if raw is not None:
        return open_raw(file, *raw)
    if file.is_dir():
        return open_n5(file, inside) if (file / "attributes.json").exists() else open_folder(file)
    if name.endswith((".tif", ".tiff", ".btf")):
        return open_tiff(file)
    if name.endswith((".h5", ".hdf5", ".hdf", ".nxs")):
        return open_hdf5(file, inside)
    if name.endswith((".nii", ".nii.gz")):
        return open_nifti(file)
    if name.endswith((".nrrd", ".nhdr")):
        return open_nrrd(file)
    if name.endswith(".npy"):
        return open_npy(file)
    raise ConfigError(
        "what is imported is a folder of slices or N5, or a file .tif, .h5, .nii, .nii.gz, .nrrd, .nhdr or .npy; got "
        f"{file}; add --shape Z,Y,X --dtype T if it holds raw voxels, or convert it to TIFF"
    )


def _axes(stored: Stored, select: tuple[int, ...], path: str) -> Axes:
    got = f"axes {stored.names} of shape {format_sizes(stored.shape)}"
    if any(stored.names.count(letter) != 1 for letter in "ZYX"):
        remedy = "name the axes as they are, e.g. with ImageJ's Image > Properties, and save it again"
        raise refuse("a volume has three axes z, y, x, each once", got, path, remedy)
    zyx = triple(map(stored.names.index, "ZYX"))
    others = [axis for axis in range(len(stored.shape)) if axis not in zyx]
    longer = [axis for axis in others if stored.shape[axis] > 1]
    fixed = dict(zip(longer, select, strict=False))
    if len(select) != len(longer) or any(i >= stored.shape[axis] for axis, i in fixed.items()):
        raise refuse(
            "a volume has three axes z, y, x, and --select fixes the others (channels, times, colours) that are longer "
            "than 1",
            f"{got} with --select {','.join(map(str, select)) or '(none)'}",
            path,
            f"set --select to {len(longer)} of 0..N-1, e.g. {','.join('0' * len(longer))}"
            if longer
            else "leave it out",
        )
    return Axes(zyx, tuple(fixed.get(axis, 0) for axis in others))


def _geometry(stored: Stored) -> Geometry:
    """Where a voxel's size is known along all axes."""
    sizes = [float(size) for size in stored.scale_zyx or ()]
    if not sizes or not all(math.isfinite(size) and size > 0 for size in sizes):
        return VOXELS
    units = [_UNITS.get(unit or "", unit if unit in _UNITS.values() else None) for unit in stored.units_zyx]
    return Geometry(triple(sizes), (0.0, 0.0, 0.0), triple(units))
