"""Opens arrays in HDF5 and in N5, a folder of chunks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from vesuvius.volume_tools.sources.files import Stored, default_axes, geometry, refuse

_UNIT_BYTES = 2**24  # decoded at once if chunks are smaller


def open_hdf5(file: Path, inside: str) -> Stored:
    """Open a dataset (Z, Y, X), which needs a name unless it is the only one with three axes.

    Its attribute element_size_um is z, y, x.
    """
    with suppress(ImportError):
        import_module("hdf5plugin")  # more filters
    root, found = import_module("h5py").File(file, "r"), list[str]()
    root.visititems(lambda name, item: found.append(name) if len(getattr(item, "shape", ())) > 2 else None)
    name = inside.strip("/") or (found[0] if len(found) == 1 else "")
    if name not in found:
        problem = f"it has no dataset {inside}" if inside else f"it has {len(found)} datasets of three axes or more"
        raise refuse(file, problem, f"choose one: {', '.join(f'{file}:/{each}' for each in found[:8]) or '-'}")
    data = root[name]
    names = default_axes(data.shape)
    chunks = data.chunks or [1 if axis <= names.find("Z") else size for axis, size in enumerate(data.shape)]
    size = data.attrs.get("element_size_um", ())
    unit = _at_once(chunks, data.shape, data.dtype)
    voxel = geometry(size[-3:], ["um"] * 3)
    return Stored([file], names, data.shape, data.dtype, data.__getitem__, unit, voxel)


def open_n5(folder: Path, inside: str) -> Stored:
    """Open a dataset, stored (X, Y, Z)."""
    path = (folder / inside.strip("/")).resolve()
    about = json.loads((path / "attributes.json").read_text())
    spec = {"driver": "n5", "kvstore": {"driver": "file", "path": str(path)}}
    data = import_module("tensorstore").open(spec, read=True).result().T
    shape, dtype, pixel = data.shape, np.dtype(data.dtype.numpy_dtype), about.get("pixelResolution", {})
    unit = _at_once(data.chunk_layout.read_chunk.shape, shape, dtype)
    voxel = geometry(pixel.get("dimensions", ())[2::-1], [pixel.get("unit")] * 3)
    files = [path / "attributes.json"]
    return Stored(files, default_axes(shape), shape, dtype, lambda index: data[index].read().result(), unit, voxel)


def _at_once(chunks: Sequence[int], shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[int, ...]:
    """Extend chunks along the last axis so that a read is worth its overhead."""
    many = max(1, _UNIT_BYTES // (math.prod(chunks) * dtype.itemsize))
    return (*chunks[:-1], min(shape[-1], chunks[-1] * many))
