"""TIFF stacks, and folders of TIFF or PNG slices."""

import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import mode
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from vesuvius.errors import one_line
from vesuvius.runlog.progress import with_progress
from vesuvius.runlog.units import format_sizes
from vesuvius.volume_tools.sources.files import (
    Stored,
    check_length,
    contiguous,
    geometry,
    library_errors,
    paged,
    refuse,
)
from vesuvius.volumes.geometry import VOXELS, Geometry

log = logging.getLogger(__name__)

_ENDINGS = (".tif", ".tiff", ".png")
_PNG_DTYPES = {"1": "?", "L": "u1", "I;16B": "u2"}  # raw modes that Pillow neither scales nor truncates


def open_tiff(file: Path) -> Stored:
    """Open a stack, including OME-TIFF and ImageJ; without an axis Z, one of the others becomes Z."""
    with _open_tiff(file) as tiff:
        series, pages = tiff.series[0], [page for one in tiff.series for page in one.pages]
        names, shape, dtype, voxel = series.axes, series.shape, series.dtype, _voxel_size(file, tiff)
        if None in pages:
            raise refuse(file, f"{pages.count(None)} of its slices are missing", "copy all files of the OME-TIFF")
        if len(tiff.series) > 1:  # slices or blocks of slices that were appended to the file
            kinds = {(page.axes, page.shape, page.dtype) for page in pages}
            if len(kinds) > 1 or any(one.axes.removesuffix(pages[0].axes) not in ("", "Q", "I") for one in tiff.series):
                found = ", ".join(f"{one.axes} {format_sizes(one.shape)} {one.dtype}" for one in tiff.series[:8])
                raise refuse(file, f"it has several images ({found}), not slices of one shape and dtype", "split it")
            names, shape = f"I{pages[0].axes}", (len(pages), *pages[0].shape)
        names, shape = _with_z(file, names, shape, pages[0].photometric in (0, 1))
        if series.dataoffset is not None and len(tiff.series) == 1:
            data = contiguous(file, names, shape, dtype.newbyteorder(tiff.byteorder), series.dataoffset, last=False)
            return replace(data, geometry=voxel)
        for page in pages:
            _check_page(page)

    def load(number: int) -> NDArray[Any]:
        with pages[number].parent.filehandle as handle:  # an OME-TIFF may consist of many files
            handle.open()
            return np.asarray(pages[number].asarray())

    files = sorted({Path(page.parent.filehandle.path) for page in pages})
    return replace(paged(files, names, shape, dtype, len(shape) - pages[0].ndim, load), geometry=voxel)


def open_folder(folder: Path) -> Stored:
    """Open a folder of slices, sorted by number."""
    files = files_in(folder)
    if len({file.suffix.lower() for file in files}) != 1:
        found = " and ".join(sorted({file.suffix for file in files})) or f"no {', '.join(_ENDINGS)}"
        raise refuse(folder, f"it has {found} files", "choose a folder with slices of one format")
    files = _in_order(files, folder)
    is_png = files[0].suffix.lower() == ".png"
    read = _png_header if is_png else _tiff_header
    headers = dict[tuple[tuple[int, ...], np.dtype[Any], str], Path]()
    for file in with_progress(files, f"reading the headers in {folder}", len(files)):
        if not file.stat().st_size:
            raise refuse(file, "it is empty", "copy it again")
        with library_errors(str(file)):
            headers.setdefault(read(file), file)
        if len(headers) > 1:
            (there, first), (here, _) = headers.items()
            has, first_has = (f"{format_sizes(shape)} {dtype}" for shape, dtype, _ in (here, there))
            problem = f"it has {has}, but {first.name} has {first_has}"
            raise refuse(file, problem, "correct or remove the slice")
    ((shape, dtype, names),) = headers

    def load(number: int) -> NDArray[Any]:
        file, library = files[number], import_module("PIL.Image" if is_png else "tifffile")
        with library_errors(str(file)):
            if is_png:
                library.open(file).verify()  # CRCs, and the end of the file, which decoding does not need
            read = library.open(file) if is_png else library.imread(file, key=0)
            return np.asarray(read).astype(dtype, copy=False)  # old versions of Pillow return 16 bits as 32

    return paged(files, f"Z{names}", (len(files), *shape), dtype, 1, load)


def files_in(folder: Path) -> list[Path]:
    """The slices in a folder, unsorted."""
    return [file for file in folder.iterdir() if file.suffix.lower() in _ENDINGS and file.name[0] != "."]


def _in_order(files: list[Path], folder: Path) -> list[Path]:
    """Sort slices by the first number in their names that varies.

    Raises DataError: a number is missing (the usual step is kept) or occurs twice, or names differ in other characters.
    """
    like = {file: re.sub(r"\d+", "#", file.stem) for file in files}
    (usual_name, count), *others = Counter(like.values()).most_common()
    if others:
        odd = min(file for file in files if like[file] != usual_name)
        others_like = min(file for file in files if like[file] == usual_name).name
        problem = f"{odd.name} is not named like the other slices, {count} of them like {others_like}"
        raise refuse(folder, problem, "keep one stack per folder, with names that differ only in numbers")
    numbers = {file: [int(number) for number in re.findall(r"\d+", file.stem)] for file in files}
    files = sorted(files, key=lambda file: (numbers[file], file.name))
    columns = list(zip(*(numbers[file] for file in files), strict=False)) or [(0,) * len(files)]
    indices = next((column for column in columns if len(set(column)) > 1), columns[0])
    steps = [second - first for first, second in pairwise(indices)]
    usual = mode(sorted(step for step in steps if step > 0) or [1])
    for (first, second), index, step in zip(pairwise(files), indices, steps, strict=False):
        names = f"{first.name} and {second.name}"
        if step == 0:
            raise refuse(folder, f"slice {index} occurs twice: {names}", "remove one, or keep one stack per folder")
        if step > usual:
            raise refuse(folder, f"slice {index + usual} is missing between {names}", "restore it")
        if step < usual:
            raise refuse(folder, f"{names} differ by {step}, other slices by {usual}", "remove or rename slices")
    return files


@contextmanager
def _open_tiff(file: Path, **options: Any) -> Iterator[Any]:
    """Open a TIFF.  If a file is truncated, tifffile returns the rest and only logs the problem."""
    messages, logger = list[str](), logging.getLogger("tifffile")

    def listen(record: logging.LogRecord) -> bool:
        messages.append(record.getMessage())
        return False  # tifffile also logs harmless oddities

    logger.addFilter(listen)
    try:
        with import_module("tifffile").TiffFile(file, **options) as tiff:
            len(tiff.pages), tiff.series
            if cut := [text for text in messages if "page offset" in text or "corrupt" in text]:
                raise refuse(file, f"it is truncated or damaged: {cut[0]}", "copy it again")
            yield tiff
    finally:
        logger.removeFilter(listen)


def _check_page(page: Any) -> None:
    """Raise DataError if the file ends before the end of a page."""
    ends = map(sum, zip(page.dataoffsets, page.databytecounts, strict=True))
    check_length(Path(page.parent.filehandle.path), max(ends))


def _with_z(file: Path, names: str, shape: tuple[int, ...], is_gray: bool) -> tuple[str, tuple[int, ...]]:
    """Name one axis Z, if none is: the last one longer than 1, channels after others; colors never."""
    others = [axis for axis, name in enumerate(names) if name not in ("YX" if is_gray else "YXS")]
    if "Z" in names or not others:
        return (names, shape) if "Z" in names else (f"Z{names}", (1, *shape))
    chosen = max(others, key=lambda axis: (shape[axis] > 1, names[axis] not in "CS", axis))
    if names[chosen] not in "QI":
        log.warning("%s has no axis Z; its axis %s of %d is read as Z", file, names[chosen], shape[chosen])
    return f"{names[:chosen]}Z{names[chosen + 1 :]}", shape


def _tiff_header(file: Path) -> tuple[tuple[int, ...], np.dtype[Any], str]:
    with _open_tiff(file, is_ome=False) as tiff:  # otherwise each slice of a multi-file OME-TIFF opens all files
        if len(tiff.pages) != 1:
            raise refuse(file, f"it has {len(tiff.pages)} pages, not one slice", "import that stack alone")
        _check_page(tiff.pages[0])
        return tiff.pages[0].shape, tiff.pages[0].dtype, tiff.pages[0].axes


def _png_header(file: Path) -> tuple[tuple[int, ...], np.dtype[Any], str]:
    library: Any = import_module("PIL.Image")
    library.MAX_IMAGE_PIXELS = None  # slices are large
    with library.open(file) as image:
        form = image.tile[0][3]
        if form not in _PNG_DTYPES:
            raise refuse(file, f"its pixels are {form}, not gray of 1, 8 or 16 bits", "convert the slices to gray")
        return image.size[::-1], np.dtype(_PNG_DTYPES[form]), "YX"


def _voxel_size(file: Path, tiff: Any) -> Geometry:
    try:
        if tiff.is_ome:
            pixels = ElementTree.fromstring(tiff.ome_metadata).find(".//{*}Pixels")
            found = {} if pixels is None else pixels.attrib
            sizes = [found[f"PhysicalSize{axis}"] for axis in "ZYX" if f"PhysicalSize{axis}" in found]
            units = [found.get(f"PhysicalSize{axis}Unit", "um") for axis in "ZYX"]
            return geometry(sizes if len(sizes) == 3 else None, units)
        about, tags = tiff.imagej_metadata or {}, tiff.pages[0].tags
        if (unit := about.get("unit", "pixel")) == "pixel" or "XResolution" not in tags or "YResolution" not in tags:
            return VOXELS
        sizes = [tag[1] / tag[0] for tag in (tags["YResolution"].value, tags["XResolution"].value)]
        return geometry([about.get("spacing", 1), *sizes], [about.get("zunit", unit), about.get("yunit", unit), unit])
    except (ArithmeticError, LookupError, SyntaxError, TypeError, ValueError) as error:
        log.warning("the voxel size in %s cannot be used (%s); set it with --voxel-size-um", file, one_line(error))
        return VOXELS
