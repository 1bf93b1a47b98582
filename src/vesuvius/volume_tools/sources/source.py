"""Turns an array in files into a volume: finds its axes z, y and x, and selects an index along the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import ConfigError
from vesuvius.runlog.units import format_sizes
from vesuvius.volume_tools.sources import containers, dicom, files, medical, slices
from vesuvius.volume_tools.sources.files import Stored, library_errors, refuse
from vesuvius.volumes.box import triple
from vesuvius.volumes.geometry import Axes

_OPENERS: dict[str, Callable[[Path], Stored]] = {
    ".tif": slices.open_tiff, ".tiff": slices.open_tiff, ".btf": slices.open_tiff, ".npy": files.open_npy,
    ".nrrd": medical.open_nrrd, ".nhdr": medical.open_nrrd,
    **dict.fromkeys((".nii", ".nii.gz", ".hdr", ".hdr.gz", ".img", ".img.gz"), medical.open_nifti),
}  # fmt: skip


def open_source(
    path: str, select: tuple[int, ...] = (), shape: Triple | None = None, dtype: np.dtype[Any] | None = None
) -> Stored:
    """Open a scan, a file or folder, for HDF5 and N5 with `:/dataset`, as an array (Z, Y, X) in native byte order.

    `select` has an index for each axis longer than 1, in stored order, except z, y and x; `shape` and `dtype` are for a
    file without a header.  Reads headers.  Raises ConfigError: the format is unknown; DataError, also from its `get`:
    the scan is unreadable, truncated or not a volume, or its library is not installed.
    """
    head, _, inside = path.rpartition(":")
    file, inside = (Path(head), inside) if head and not Path(path).exists() else (Path(path), "")
    with library_errors(path):
        stored = files.open_raw(file, shape, dtype) if shape and dtype is not None else _opened(file, inside)
    if stored.dtype.kind not in "buif" or stored.dtype.itemsize > 8:
        problem = f"its voxels are {stored.dtype}, not bool, integers or floats of up to 8 bytes"
        raise refuse(path, problem, "convert them")
    axes, native = _axes(stored, select, path), stored.dtype.newbyteorder("=")

    def get(index: tuple[slice, ...]) -> NDArray[Any]:
        with library_errors(path, f"slice {index[0].start}: "):
            voxels = np.asarray(stored.get(axes.stored(index, axes.select)))
            return axes.to_zyx(voxels).astype(native, copy=False)

    def finish() -> None:
        with library_errors(path):
            stored.finish()

    shape, unit = axes.zyx_of(stored.shape), axes.zyx_of(stored.unit)
    return replace(stored, names="ZYX", shape=shape, dtype=native, get=get, unit=unit, finish=finish)


def _opened(file: Path, inside: str) -> Stored:
    if file.is_dir():
        if (file / "attributes.json").exists():
            return containers.open_n5(file, inside)
        if not slices.files_in(file) and dicom.is_dicom(file):
            return dicom.open_dicom(file, inside)
        return slices.open_folder(file)
    if file.suffix.lower() in (".h5", ".hdf5", ".hdf", ".nxs"):
        return containers.open_hdf5(file, inside)
    for ending, opener in _OPENERS.items():
        if file.name.lower().endswith(ending):
            return opener(file)
    if dicom.is_dicom(file):
        return dicom.open_dicom(file, inside)
    raise ConfigError(
        f"Cannot import {file}: it is not a folder of slices, and its name does not end in .tif, .h5, .nii, .nii.gz, "
        ".nrrd, .nhdr or .npy; add --shape Z,Y,X --dtype T if it holds raw voxels, or convert it to TIFF"
    )


def _axes(stored: Stored, select: tuple[int, ...], path: str) -> Axes:
    found = f"axes {stored.names} of shape {format_sizes(stored.shape)}"
    if any(stored.names.count(letter) != 1 for letter in "ZYX"):
        raise refuse(path, f"it has {found}, not Z, Y, X once each", "save it with these axis names")
    zyx = triple(map(stored.names.index, "ZYX"))
    others = [axis for axis in range(len(stored.shape)) if axis not in zyx]
    longer = [axis for axis in others if stored.shape[axis] > 1]
    fixed = dict(zip(longer, select, strict=False))
    if len(select) != len(longer) or any(i >= stored.shape[axis] for axis, i in fixed.items()):
        example = ",".join("0" * len(longer))
        remedy = f"give an index for each other axis, e.g. --select {example}" if longer else "omit --select"
        raise refuse(path, f"--select {','.join(map(str, select)) or '(none)'} does not fit {found}", remedy)
    return Axes(zyx, tuple(fixed.get(axis, 0) for axis in others))
