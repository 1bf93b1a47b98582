"""An array as it lies in files: in chunks, or in pages that are numbered along its first axes, mapped or decoded."""

from __future__ import annotations

import gzip
import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.errors import ConfigError, DataError, VesuviusError, one_line
from vesuvius.runlog.units import format_sizes

Get = Callable[[tuple[Any, ...]], NDArray[Any]]
"""The voxels at an index: a slice or a number for each stored axis."""


@dataclass(frozen=True)
class Stored:
    """An array in files."""

    files: Sequence[Path]
    names: str  # a letter for each axis: Z, Y, X, and others
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    get: Get
    unit: tuple[int, ...] | None = None  # what is decoded at once; None = any part can be read by itself
    scale_zyx: Sequence[float] | None = None
    units_zyx: Sequence[str | None] = (None, None, None)


def paged(shape: tuple[int, ...], lead: int, page: Callable[[int], NDArray[Any]]) -> Get:
    """Of pages numbered along the first `lead` axes; one is open at a time."""

    def get(index: tuple[Any, ...]) -> NDArray[Any]:
        ranges = [range(n)[i] if isinstance(i, slice) else [i] for n, i in zip(shape[:lead], index, strict=False)]
        numbers = (int(np.ravel_multi_index(place, shape[:lead])) for place in itertools.product(*ranges))
        found = np.stack([np.array(page(number)[index[lead:]]) for number in numbers])
        sizes = [len(each) for each, i in zip(ranges, index, strict=False) if isinstance(i, slice)]
        return found.reshape(*sizes, *found.shape[1:])

    return get


def flat(file: Path, names: str, shape: Sequence[int], dtype: Any, start: int, **space: Any) -> Stored:
    """Voxels from byte `start` of a file on, as in memory."""
    shape, dtype, lead, size = _pages(names, shape, dtype)
    check_length(file, start + math.prod(shape) * dtype.itemsize)

    def page(number: int) -> NDArray[Any]:
        return np.memmap(file, dtype, "r", start + number * size, shape[lead:])

    return Stored([file], names, shape, dtype, paged(shape, lead, page), **space)


def gzipped(file: Path, names: str, shape: Sequence[int], dtype: Any, start: int, skip: int, **space: Any) -> Stored:
    """The same in gzip data from byte `start` on, after `skip` bytes of these; read from the front to the end."""
    shape, dtype, lead, size = _pages(names, shape, dtype)
    compressed = file.open("rb")
    compressed.seek(start)
    stream = gzip.GzipFile(fileobj=compressed)

    def page(number: int) -> NDArray[Any]:
        stream.seek(skip + number * size)
        if len(data := stream.read(size)) < size:
            raise EOFError(f"its data end after {stream.tell()} bytes")
        return np.frombuffer(data, dtype).reshape(shape[lead:])

    return Stored([file], names, shape, dtype, paged(shape, lead, page), (*(1,) * lead, *shape[lead:]), **space)


def _pages(names: str, shape: Sequence[int], dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any], int, int]:
    """Shape and dtype; the axes that pages are numbered along, down to the first of z, y and x; bytes of a page."""
    shape, dtype, lead = tuple(map(int, shape)), np.dtype(dtype), min(map(names.find, "ZYX")) + 1
    return shape, dtype, lead, math.prod(shape[lead:]) * dtype.itemsize


def named(shape: Sequence[int]) -> str:
    """Letters for an array that names no axes: z, y and x come last, but for up to 4 channels behind longer axes."""
    channels = len(shape) > 3 and shape[-1] <= 4 < min(shape[-4:-1])
    space = "ZYX"[max(0, 3 - len(shape)) :] + "C" * channels
    return "T" * (len(shape) - len(space)) + space


def check_length(file: Path, due: int) -> None:
    """Raises DataError for a file that ends before all of its voxels."""
    if (there := file.stat().st_size) < due:
        raise DataError(f"The file is cut short: {file} has {there} bytes, of at least {due}; copy it again")


def library(name: str) -> Any:
    """A package that an installation may lack.  Raises ConfigError."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"this format needs the package {name}; got {one_line(error)}; pip install 'vesuvius-diffusion[import]'"
        ) from error


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Make DataErrors of what libraries raise, whatever it is."""
    try:
        yield
    except VesuviusError:
        raise
    except Exception as error:
        text, remedy = one_line(error), "copy it again if it is damaged, or convert it to TIFF"
        for word, package in (("imagecodecs", "imagecodecs"), ("filter", "hdf5plugin")):
            remedy = f"pip install {package}" if word in text else remedy
        raise DataError(f"{what}: {type(error).__name__}: {text}; {remedy}") from error


def refuse(rule: str, got: object, path: object, remedy: str) -> DataError:
    """The error for what is no volume."""
    return DataError(f"{rule}; got {got} in {path}; {remedy}")


def sized(shape: Sequence[int], dtype: object) -> str:
    """A shape and a dtype in words."""
    return f"{format_sizes(shape)} {dtype}"
