"""Arrays in files, and the simplest of them: raw and npy."""

import gzip
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import DataError, VesuviusError, needs_extra, one_line
from vesuvius.runlog.units import format_sizes
from vesuvius.volumes.box import triple
from vesuvius.volumes.geometry import AXIS_WORDS, VOXELS, Geometry, has_color_last, unit_name

log = logging.getLogger(__name__)


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
    backwards: bool = False  # whether units are read fastest from the last to the first
    finish: Callable[[], None] = lambda: None  # checks what no unit covers: the end of a stream


def geometry(sizes: Any, units: Any, names: str = "ZYX") -> Geometry:
    """A geometry with this voxel size; `VOXELS` if there is none, with a WARNING if it cannot be used.

    `sizes` and `units` are values for all axes, or lists along the axes `names`, or along z, y and x of these alone.
    """

    def zyx(values: Any) -> list[Any]:
        values = values if isinstance(values, list) else [values] * len(names)
        letters = names if len(values) == len(names) else [letter for letter in names if letter in "ZYX"]
        by_letter = dict(zip(letters, values, strict=True))
        return [by_letter[letter] for letter in "ZYX"]

    if sizes in (None, []):
        return VOXELS
    with suppress(KeyError, TypeError, ValueError):
        scale = triple(map(float, zyx(sizes)))
        if all(0 < size < math.inf for size in scale):
            return Geometry(scale, (0, 0, 0), triple(map(unit_name, zyx(units or None))))
    log.warning("the voxel size %s in the file cannot be used; set it with --voxel-size-um", sizes)
    return VOXELS


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
    file: Path, names: str, shape: Sequence[int], dtype: Any, start: int, gzip_at: int | None = None, last: bool = True
) -> Stored:
    """An array stored contiguously from byte `start` of a file, or of the gzip stream at byte `gzip_at`.

    If it is the `last` thing in the file, more bytes are refused.
    """
    lead, dtype = min(map(names.find, "ZYX")) + 1, np.dtype(dtype)
    size, end = math.prod(shape[lead:]) * dtype.itemsize, start + math.prod(shape) * dtype.itemsize
    raw: Any = file.open("rb")
    stream = raw
    if gzip_at is None:
        check_length(file, end, exact=last)

    def at(place: int) -> Any:
        nonlocal stream
        if gzip_at is not None and (stream is raw or place < stream.tell()):  # GzipFile would rewind to byte 0
            raw.seek(gzip_at)
            stream = gzip.GzipFile(fileobj=raw)
        stream.seek(place)
        return stream

    def page(number: int) -> NDArray[Any]:
        if len(voxels := at(start + number * size).read(size)) < size:
            raise refuse(file, f"it is truncated: less than {end} bytes after decompression", "copy it again")
        return np.frombuffer(voxels, dtype).reshape(shape[lead:])

    def finish() -> None:
        if gzip_at is not None and at(end).read(1):  # at the end of a stream, CRC and length are checked
            raise refuse(file, f"it has more than the {end} bytes of its header and voxels", "copy it again")

    return replace(paged([file], names, shape, dtype, lead, page), finish=finish)


def default_axes(shape: Sequence[int]) -> str:
    """Axis letters of an array without names, which is logged: z, y, x come last, except for color channels."""
    letters = ("C" * len(shape) + "ZYX" + "C" * has_color_last(shape))[-len(shape) :] if shape else ""
    log.info("the axes have no names in the file; %s voxels are read as %s", format_sizes(shape), ", ".join(letters))
    return letters


def axis_letters(candidates: Iterable[Any], shape: Sequence[int]) -> str:
    """Axis letters, by the first of these attributes that names x, y or z, else by position.

    An attribute is a list of names, or of objects with a name or key; the same as JSON; or text such as z:y:x or zyx.
    """
    for names in map(_names_in, candidates):
        words = [AXIS_WORDS.get(name, name) for name in names]
        found = [re.search("(?<![a-z])[xyz](?![a-z])", word) for word in words]
        if len(words) == len(shape) and any(found):
            letters = [each[0].upper() if each else "C" for each in found]
            others = [axis for axis, each in enumerate(found) if not each and words[axis][:1] not in ("c", "s")]
            if set("ZYX") - set(letters) == {"Z"} and len(others) == 1:
                log.info("no axis is named z; slices are taken along %s", names[others[0]] or "the one without a name")
                letters[others[0]] = "Z"
            return "".join(letters)
    return default_axes(shape)


def _names_in(value: Any) -> list[str]:
    """The names in an attribute, in lower case; none if it is anything else."""
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    value = value.decode(errors="replace") if isinstance(value, bytes) else value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            words = re.findall(r"[^\s:,;()\[\]]+", value)
            value = list(words[0]) if len(words) == 1 else words
    value = value.get("axes") if isinstance(value, dict) else value
    value = value if isinstance(value, list) else []
    named = [each.get("name", each.get("key")) if isinstance(each, dict) else each for each in value]
    return [(each.decode(errors="replace") if isinstance(each, bytes) else str(each)).strip().lower() for each in named]


def check_length(file: Path, due: int, exact: bool = False) -> None:
    """Raise DataError if a file is shorter than its voxels, or (if `exact`) longer."""
    if (there := file.stat().st_size) < due or (exact and there > due):
        problem = "it is truncated" if there < due else "bytes follow its voxels"
        raise refuse(file, f"{problem}: {there} bytes instead of {due}", "copy or write it again")


def refuse(path: object, problem: str, remedy: str) -> DataError:
    """The error for a scan that cannot be imported."""
    return DataError(f"Cannot import {path}: {problem}; {remedy}")


@contextmanager
def library_errors(path: str, where: str = "") -> Iterator[None]:
    """Raise any error of a library as a DataError."""
    try:
        with needs_extra(f"Reading {path}"):
            yield
    except VesuviusError:
        raise
    except Exception as error:
        text, remedy = one_line(error), "copy it again if it is damaged, or convert it to TIFF"
        if isinstance(error, PermissionError):
            remedy = "allow this user to read it"
        elif re.search("decode the pixel data|decompress .* pixel data", text):  # pydicom
            remedy = "pip install pylibjpeg pylibjpeg-libjpeg pylibjpeg-openjpeg, or decompress it with gdcmconv --raw"
        elif isinstance(error, ImportError) or re.search("imagecodecs|filter", text):
            remedy = "pip install 'vesuvius-diffusion[import]' hdf5plugin"
        raise refuse(path, f"{where}{type(error).__name__}: {text}", remedy) from error


# ---- formats


def open_raw(file: Path, shape_zyx: Triple, dtype: np.dtype[Any]) -> Stored:
    there, due = file.stat().st_size, math.prod(shape_zyx) * dtype.itemsize
    if there != due:
        problem = f"it has {there} bytes, but {format_sizes(shape_zyx)} {dtype} needs {due}"
        raise refuse(file, problem, "correct --shape and --dtype, or the file")
    return contiguous(file, "ZYX", shape_zyx, dtype, 0)


def open_npy(file: Path) -> Stored:
    """Open a file of numpy.save, in C or Fortran order; axes (Z, Y, X)."""
    array = np.load(file, mmap_mode="r")
    step = 1 if array.flags.c_contiguous else -1
    return contiguous(file, default_axes(array.shape)[::step], array.shape[::step], array.dtype, array.offset)
