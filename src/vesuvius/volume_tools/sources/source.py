"""Turns an array in files into a volume: finds its axes z, y and x, and selects an index along the others."""

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
from vesuvius.volumes.store.objects import display_address, is_remote

_OPENERS: dict[str, Callable[[Path], Stored]] = {
    ".tif": slices.open_tiff, ".tiff": slices.open_tiff, ".btf": slices.open_tiff, ".npy": files.open_npy,
    ".nrrd": medical.open_nrrd, ".nhdr": medical.open_nrrd,
    **dict.fromkeys((".nii", ".nii.gz", ".hdr", ".hdr.gz", ".img", ".img.gz"), medical.open_nifti),
}  # fmt: skip

_FOLDERS = {  # files in a folder: what it is, and what to do
    (".zarray", ".zgroup", ".zattrs", "zarr.json"): (
        "a zarr", "it needs no import: give it to vesuvius as it is, or to `vesuvius volume copy`"
    ),
    ("snapshots", "transactions"): ("an icechunk repository", "export an array to zarr with the package icechunk"),
    ("info",): ("a precomputed volume of Neuroglancer", "export it to TIFF slices with the package cloud-volume"),
}  # fmt: skip
_OTHERS = {  # endings of files that hold no scan themselves: what to do
    (".zip", ".npz", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst"): "unpack it first",
    (".ims",): "Imaris pads its arrays with zeros: export TIFF, or rename it to .h5 and crop what is imported",
    (".json", ".parquet"): "if it is a kerchunk reference, export an array to zarr with the package xarray",
}


def open_source(
    path: str, select: tuple[int, ...] = (), shape: Triple | None = None, dtype: np.dtype[Any] | None = None
) -> Stored:
    """Open a scan, a file or folder, for HDF5 and N5 with `:/dataset`, as an array (Z, Y, X) in native byte order.

    `select` has an index for each axis longer than 1, in stored order, except z, y and x; `shape` and `dtype` are for a
    file without a header.  Reads headers.  Raises ConfigError: the format is unknown; DataError, also from its `get`:
    the scan is unreadable, truncated or not a volume, or its library is not installed.
    """
    if (shape is None) != (dtype is None):
        raise ConfigError("--shape and --dtype describe a file without a header together; give both or neither")
    with library_errors(path):
        file, inside = _split(path)
        stored = files.open_raw(file, shape, dtype) if shape and dtype is not None else _opened(file, inside)
    if 0 in stored.shape:
        raise refuse(path, f"it has no voxels: its shape is {format_sizes(stored.shape)}", "write or export it again")
    if stored.dtype.kind not in "buif" or stored.dtype.itemsize > 8:
        problem = f"its voxels are {stored.dtype}, not bool, integers or floats of up to 8 bytes"
        raise refuse(path, problem, "convert them")
    # By its size: `longlong` is another type than int64 for numpy, and unknown to zarr.
    axes, native = _axes(stored, select, path), np.dtype(f"{stored.dtype.kind}{stored.dtype.itemsize}")

    def get(index: tuple[slice, ...]) -> NDArray[Any]:
        with library_errors(path, f"slice {index[0].start}: "):
            voxels = np.asarray(stored.get(axes.stored(index, axes.select)))
            return axes.to_zyx(voxels).astype(native, copy=False)

    def finish() -> None:
        with library_errors(path):
            stored.finish()

    shape, unit = axes.zyx_of(stored.shape), axes.zyx_of(stored.unit)
    return replace(stored, names="ZYX", shape=shape, dtype=native, get=get, unit=unit, finish=finish)


def _split(path: str) -> tuple[Path, str]:
    """The file or folder, and the name of a dataset in it, which may contain colons too.  Raises DataError: absent."""
    parts = path.split(":")
    for head in (":".join(parts[:end]) for end in range(len(parts), 0, -1)):
        if head and Path(head).exists():
            return Path(head), path[len(head) + 1 :]
    if is_remote(path):
        remedy = "download it first; `vesuvius volume copy` reads only zarr from there"
        raise refuse(display_address(path), "it is an address, and only files on a disk can be imported", remedy)
    file = Path(path.rpartition(":")[0] or path)
    there = next(each for each in file.absolute().parents if each.exists())
    problem = f"there is no {file}" if there == file.absolute().parent else f"the folder {there} has no such path"
    if file.is_symlink():
        problem = f"it is a link to {file.readlink()}, which does not exist"
    raise refuse(path, problem, "correct the path, or mount the disk")


def _opened(file: Path, inside: str) -> Stored:
    if file.is_dir():
        if any(each.suffix.lower() == ".n5" for each in (file, *file.parents)) or (file / "attributes.json").exists():
            return containers.open_n5(file, inside)
        has_slices = bool(slices.files_in(file))
        if not has_slices and dicom.is_dicom(file):
            return dicom.open_dicom(file, inside)
        if inside or not has_slices:
            for names, (kind, remedy) in _FOLDERS.items():
                if any((folder / name).exists() for folder in (file, file / inside.strip("/")) for name in names):
                    raise refuse(file, f"it is {kind}", remedy)
        return containers.open_n5(file, inside) if inside else slices.open_folder(file)
    name = file.name.lower()
    if containers.is_hdf5(file) and not name.endswith(".ims"):
        return containers.open_hdf5(file, inside)
    for ending, opener in _OPENERS.items():
        if name.endswith(ending):
            return opener(file)
    if dicom.is_dicom(file):
        return dicom.open_dicom(file, inside)
    for endings, remedy in _OTHERS.items():
        if name.endswith(endings):
            raise refuse(file, f"{file.suffix} files cannot be imported", remedy)
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
