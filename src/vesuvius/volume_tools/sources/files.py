"""Files that hold a whole array: raw, npy, NIfTI, NRRD, HDF5; and N5, a folder of chunks."""

from __future__ import annotations

import importlib
import json
import logging
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from vesuvius.config import Triple
from vesuvius.errors import ConfigError
from vesuvius.volume_tools.sources.stored import Stored, flat, gzipped, library, named, refuse, sized

log = logging.getLogger(__name__)

_UNIT_BYTES = 2**24  # that are decoded at once, where chunks are smaller
_C_TYPES = {
    "char": "i1", "uchar": "u1", "short": "i2", "ushort": "u2", "int": "i4", "uint": "u4", "longlong": "i8",
    "ulonglong": "u8", "float": "f4", "double": "f8",
}  # fmt: skip


def open_raw(file: Path, shape_zyx: Triple, dtype: str) -> Stored:
    """Voxels and nothing else."""
    try:
        stored = flat(file, "ZYX", shape_zyx, dtype, 0)
    except TypeError as error:
        raise ConfigError(f"--dtype must be one of numpy's, e.g. uint16 or >u2; got {dtype}; correct it") from error
    if more := file.stat().st_size - math.prod(shape_zyx) * stored.dtype.itemsize:
        got = f"{more} bytes more than {sized(shape_zyx, dtype)}"
        raise refuse(
            "--shape and --dtype must fit the file",
            got,
            file,
            f"correct them; without a header of {more} bytes it is `tail -c +{more + 1}`",
        )
    return stored


def open_npy(file: Path) -> Stored:
    """As numpy.save writes it, in C or Fortran order; axes (Z, Y, X)."""
    array = np.load(file, mmap_mode="r")
    step = 1 if array.flags.c_contiguous else -1
    return flat(file, named(array.shape)[::step], array.shape[::step], array.dtype, array.offset)


def open_nifti(file: Path) -> Stored:
    """Stored (X, Y, Z), x fastest.  The affine is not applied but for the size of a voxel, nor is the scaling."""
    image = library("nibabel").load(file)
    data, header = image.dataobj, image.header
    if (data.slope, data.inter) != (1, 0):
        words = "%s: voxels are imported as stored; scl_slope %g and scl_inter %g are not applied"
        log.warning(words, file, data.slope, data.inter)
    shape = (*data.shape, 1, 1)[: max(3, len(data.shape))]
    names = ("XYZT" + "C" * len(shape))[: len(shape)]
    space = {"scale_zyx": header.get_zooms()[2::-1], "units_zyx": [header.get_xyzt_units()[0]] * 3}
    array = names[::-1], shape[::-1], data.dtype
    if file.suffix == ".gz":
        return gzipped(file, *array, 0, data.offset, **space)
    return flat(file, *array, data.offset, **space)


def open_nrrd(file: Path) -> Stored:
    """Stored (X, Y, Z), x fastest; other axes where `kinds` says so.  Of space directions the lengths are kept."""
    with file.open("rb") as stream:
        header: dict[str, Any] = library("nrrd").read_header(stream)
        start = stream.tell()
    sizes, encoding = header["sizes"].tolist(), header["encoding"]
    detached = header.get("data file", header.get("datafile"))
    data = file if detached is None else file.parent / detached
    skips = [header.get(f"{what} skip", header.get(f"{what}skip", 0)) for what in ("line", "byte")]
    if encoding not in ("raw", "gzip", "gz") or any(skips) or not data.is_file():
        got = f"encoding {encoding}, voxels in {data.name}, skips of {skips}"
        rule = "an NRRD file must be raw or gzip, its voxels in one file, nothing before them"
        raise refuse(rule, got, file, "write it anew: unu save -f nrrd -e gzip")
    kinds = header.get("kinds") or ["domain"] * len(sizes)
    spatial = [axis for axis, kind in enumerate(kinds) if kind in ("domain", "space", "none", "???")]
    names, scale, units = named(sizes[::-1])[::-1], None, None
    if len(spatial) == 3:
        names = "".join("XYZ"[spatial.index(axis)] if axis in spatial else "C" for axis in range(len(sizes)))
        if "space directions" in header:
            scale = [float(np.linalg.norm(header["space directions"][axis])) for axis in spatial]
            units = header.get("space units")
        elif "spacings" in header:
            scale = [header["spacings"][axis] for axis in spatial]
            units = [header["units"][axis] for axis in spatial] if "units" in header else None
    word = re.sub(r"^signed |_t$| int$|(?<=long) (?=long)", "", header["type"].replace("unsigned ", "u"))
    dtype = np.dtype(_C_TYPES.get(word, word)).newbyteorder(">" if header.get("endian") == "big" else "<")
    space: dict[str, Any] = {"scale_zyx": scale and scale[::-1], "units_zyx": (units or [None] * 3)[::-1]}
    array = names[::-1], sizes[::-1], dtype, 0 if detached else start
    return flat(data, *array, **space) if encoding == "raw" else gzipped(data, *array, 0, **space)


def open_hdf5(file: Path, inside: str) -> Stored:
    """A dataset (Z, Y, X), named unless it is the only one of three axes; its attribute element_size_um is z, y, x."""
    h5py = library("h5py")
    with suppress(ImportError):
        importlib.import_module("hdf5plugin")  # more filters
    root = h5py.File(file, "r")
    found = list[str]()
    root.visititems(lambda name, item: found.append(name) if len(getattr(item, "shape", ())) > 2 else None)
    name = inside.strip("/") or (found[0] if len(found) == 1 else "")
    if name not in found:
        raise _which(file, inside, found)
    data = root[name]
    size = data.attrs.get("element_size_um")
    space = {} if size is None else {"scale_zyx": list(size)[-3:], "units_zyx": ["um"] * 3}
    if data.chunks is None and (start := data.id.get_offset()) is not None:
        return flat(file, named(data.shape), data.shape, data.dtype, start, **space)
    unit = data.chunks and _chunks_at_once(data.chunks, data.shape, data.dtype)
    return Stored([file], named(data.shape), data.shape, data.dtype, data.__getitem__, unit, **space)


def open_n5(folder: Path, inside: str) -> Stored:
    """A dataset, stored (X, Y, Z)."""
    path = (folder / inside.strip("/")).resolve()
    about = json.loads((path / "attributes.json").read_text())
    if "dimensions" not in about:
        names = sorted(str(each.parent.relative_to(folder)) for each in folder.rglob("attributes.json"))
        raise _which(folder, inside, [name for name in names if name != "."])
    spec = {"driver": "n5", "kvstore": {"driver": "file", "path": str(path)}}
    data = library("tensorstore").open(spec, read=True).result().T
    shape, dtype = tuple(data.shape), np.dtype(data.dtype.numpy_dtype)
    pixel = about.get("pixelResolution")
    size, units = about.get("resolution"), about.get("units")
    if isinstance(pixel, dict):
        size, units = pixel["dimensions"], [pixel.get("unit")] * 3
    space = {"scale_zyx": size and size[2::-1], "units_zyx": (units or [None] * 3)[2::-1]}
    unit = _chunks_at_once(data.chunk_layout.read_chunk.shape, shape, dtype)
    files = [path / "attributes.json"]
    return Stored(files, named(shape), shape, dtype, lambda index: data[index].read().result(), unit, **space)


def _chunks_at_once(chunks: Sequence[int], shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """As many along the last axis as are worth a call."""
    many = max(1, _UNIT_BYTES // (math.prod(chunks) * dtype.itemsize))
    return (*chunks[:-1], min(shape[-1], chunks[-1] * many))


def _which(path: Path, inside: str, found: Sequence[str]) -> Exception:
    there = ", ".join(found[:8]) or "no dataset of three axes"
    return refuse(
        "one dataset is imported",
        f"{inside or 'none named'}, of {there},",
        path,
        f"name it: {path}:/{found[0] if found else 'DATASET'}",
    )
