"""Arrays in files, and the simplest of them: raw and npy."""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import DataError
from vesuvius.runlog.units import format_sizes
from vesuvius.volumes.box import triple
from vesuvius.volumes.geometry import VOXELS, Geometry, has_color_last, unit_name


@dataclass(frozen=True)
class Stored:
    """An array in files."""

    files: Sequence[Path]
    names: str  # a letter for each axis: Z, Y, X and others
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    get: Callable[[tuple[Any, ...]], NDArray[Any]]  # part of one unit, by a slice or an integer for each axis
    unit: tuple[int, ...]  # shape that is decoded at once
    geometry: Geometry = VOXELS


def geometry(sizes_zyx: Sequence[Any], units_zyx: Sequence[str | None]) -> Geometry:
    """A geometry with this voxel size; `VOXELS` unless it is known along all axes."""
    sizes = [float(size) for size in sizes_zyx]
    if len(sizes) != 3 or not all(0 < size < math.inf for size in sizes):
        return VOXELS
    return Geometry(triple(sizes), (0, 0, 0), triple(map(unit_name, units_zyx)))


def paged(
    files: Sequence[Path], names: str, shape: Sequence[int], dtype: Any, lead: int, page: Callable[[int], Any]
) -> Stored:
    """An array of pages, each decoded as a whole and numbered along the first `lead` axes."""
    shape = tuple(map(int, shape))
    numbers = np.arange(math.prod(shape[:lead])).reshape(shape[:lead])

    def get(index: tuple[Any, ...]) -> NDArray[Any]:
        number = np.asarray(numbers[index[:lead]])
        return np.asarray(page(number.item())[index[lead:]])[(None,) * number.ndim]

    return Stored(files, names, shape, np.dtype(dtype), get, (*(1,) * lead, *shape[lead:]))


def contiguous(
    file: Path, names: str, shape: Sequence[int], dtype: Any, start: int, gzip_at: int | None = None
) -> Stored:
    """An array stored contiguously from byte `start` of a file, or of the gzip stream at byte `gzip_at`."""
    lead, dtype = min(map(names.find, "ZYX")) + 1, np.dtype(dtype)
    size = math.prod(shape[lead:]) * dtype.itemsize
    stream: Any = file.open("rb")
    if gzip_at is None:
        check_length(file, start + math.prod(shape) * dtype.itemsize)
    else:
        stream.seek(gzip_at)
        stream = gzip.GzipFile(fileobj=stream)

    def page(number: int) -> NDArray[Any]:
        stream.seek(start + number * size)
        return np.frombuffer(stream.read(size), dtype).reshape(shape[lead:])

    return paged([file], names, shape, dtype, lead, page)


def default_axes(shape: Sequence[int]) -> str:
    """Axis letters of an array without names: z, y, x come last, except for color channels."""
    return ("C" * len(shape) + "ZYX" + "C" * has_color_last(shape))[-len(shape) :]


def check_length(file: Path, due: int) -> None:
    """Raise DataError if a file is shorter than its voxels."""
    if (there := file.stat().st_size) < due:
        raise refuse(file, f"it is truncated: {there} bytes instead of {due}", "copy it again")


def refuse(path: object, problem: str, remedy: str) -> DataError:
    """The error for a scan that cannot be imported."""
    return DataError(f"Cannot import {path}: {problem}; {remedy}")


def describe(shape: Sequence[int], dtype: object) -> str:
    """'10x20x30 uint8'."""
    return f"{format_sizes(shape)} {dtype}"


# ---- formats


def open_raw(file: Path, shape_zyx: Triple, dtype: np.dtype[Any]) -> Stored:
    """Open a file that contains only voxels."""
    there, due = file.stat().st_size, math.prod(shape_zyx) * dtype.itemsize
    if there != due:
        problem = f"it has {there} bytes, but {describe(shape_zyx, dtype)} needs {due}"
        raise refuse(file, problem, "correct --shape and --dtype, or the file")
    return contiguous(file, "ZYX", shape_zyx, dtype, 0)


def open_npy(file: Path) -> Stored:
    """Open a file of numpy.save, in C or Fortran order; axes (Z, Y, X)."""
    array = np.load(file, mmap_mode="r")
    step = 1 if array.flags.c_contiguous else -1
    return contiguous(file, default_axes(array.shape)[::step], array.shape[::step], array.dtype, array.offset)
