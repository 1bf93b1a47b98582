"""Opens NIfTI and NRRD."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from vesuvius.volume_tools.sources.files import Stored, contiguous, default_axes, geometry, refuse

_C_TYPES = {"char": "i1", "uchar": "u1", "int": "i4", "uint": "u4", "float": "f4"}  # NRRD names unknown to numpy


def open_nifti(file: Path) -> Stored:
    """Open NIfTI, stored (X, Y, Z), x fastest.  Of the affine only the voxel size is used; voxels are not rescaled."""
    image = import_module("nibabel").load(file)
    data, header = image.dataobj, image.header
    names = ("XYZT" + "C" * len(data.shape))[: len(data.shape)]
    packed = 0 if file.suffix == ".gz" else None
    stored = contiguous(file, names[::-1], data.shape[::-1], data.dtype, data.offset, packed)
    return replace(stored, geometry=geometry(header.get_zooms()[2::-1], [header.get_xyzt_units()[0]] * 3))


def open_nrrd(file: Path) -> Stored:
    """Open NRRD, stored (X, Y, Z), x fastest, after any color axis.  Of space directions only the lengths are used."""
    with file.open("rb") as stream:
        header: dict[str, Any] = import_module("nrrd").read_header(stream)
        start = stream.tell()
    detached = header.get("data file", header.get("datafile"))
    data, encoding = file.parent / (detached or file.name), header["encoding"]
    if encoding not in ("raw", "gzip", "gz") or any("skip" in key for key in header) or not data.is_file():
        problem = f"its encoding is {encoding} and its voxels are in {data.name}, not raw or gzip data in one file"
        raise refuse(file, problem, "convert it: unu save -f nrrd -e gzip")
    word = header["type"].removesuffix("_t").replace("unsigned ", "u").replace("signed ", "")
    dtype = np.dtype(_C_TYPES.get(word, word)).newbyteorder(">" if header.get("endian") == "big" else "<")
    shape, start = header["sizes"][::-1].tolist(), 0 if detached else start
    stored = contiguous(data, default_axes(shape), shape, dtype, *((start,) if encoding == "raw" else (0, start)))
    sizes, units = header.get("spacings", ()), header.get("units")
    if "space directions" in header:
        sizes, units = [np.linalg.norm(row) for row in header["space directions"]], header.get("space units")
    sizes = [size for size in sizes if size > 0]  # NaN for color
    return replace(stored, geometry=geometry(sizes[::-1], (units or [None] * 3)[::-1]))
