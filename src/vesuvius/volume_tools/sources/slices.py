"""TIFF stacks, and folders of TIFF or PNG slices."""

from __future__ import annotations

import logging
import re
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

from vesuvius.runlog.progress import with_progress
from vesuvius.volume_tools.sources.files import Stored, check_length, contiguous, describe, geometry, paged, refuse
from vesuvius.volumes.geometry import VOXELS, Geometry

_ENDINGS = (".tif", ".tiff", ".png")
_PNG_DTYPES = {"1": "?", "L": "u1", "I;16B": "u2"}  # raw modes that Pillow neither scales nor truncates


def open_tiff(file: Path) -> Stored:
    """Open a stack, including OME-TIFF and ImageJ; without an axis Z, the first axis other than color becomes Z."""
    with _open_tiff(file) as tiff:
        if len(tiff.series) != 1:
            found = ", ".join(describe(one.shape, one.dtype) for one in tiff.series[:8])
            raise refuse(file, f"its slices differ in shape or dtype ({found})", "split the file")
        (series,), voxel = tiff.series, _voxel_size(tiff)
        names, shape, dtype = series.axes, series.shape, series.dtype
        if "Z" not in names:
            first = re.sub("[YXSC]", "", names)[:1]
            names, shape = (names.replace(first, "Z"), shape) if first else (f"Z{names}", (1, *shape))
        if series.dataoffset is not None:
            data = contiguous(file, names, shape, dtype.newbyteorder(tiff.byteorder), series.dataoffset, last=False)
            return replace(data, geometry=voxel)
        pages = list(series.pages)
        if None in pages:
            raise refuse(file, f"{pages.count(None)} of its slices are missing", "copy all files of the OME-TIFF")
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
    files = [file for file in folder.iterdir() if file.suffix.lower() in _ENDINGS and file.name[0] != "."]
    if len({file.suffix.lower() for file in files}) != 1:
        found = " and ".join(sorted({file.suffix for file in files})) or f"no {', '.join(_ENDINGS)}"
        raise refuse(folder, f"it has {found} files", "choose a folder with slices of one format")
    files = _in_order(files, folder)
    is_png = files[0].suffix.lower() == ".png"
    read = _png_header if is_png else _tiff_header
    shape, dtype = read(files[0])
    for file in with_progress(files, f"reading the headers in {folder}", len(files)):
        if (header := read(file)) != (shape, dtype):
            problem = f"it has {describe(*header)}, but {files[0].name} has {describe(shape, dtype)}"
            raise refuse(file, problem, "correct or remove the slice")

    def load(number: int) -> NDArray[Any]:
        library = import_module("PIL.Image" if is_png else "tifffile")
        read = library.open(files[number]) if is_png else library.imread(files[number], key=0)
        return np.asarray(read).astype(dtype, copy=False)  # old versions of Pillow return 16 bits as 32

    return paged(files, "ZYXS"[: 1 + len(shape)], (len(files), *shape), dtype, 1, load)


def _in_order(files: list[Path], folder: Path) -> list[Path]:
    """Sort slices by the first number in their names that varies.

    Raises DataError: a number is missing (the usual step is kept) or occurs twice, or names differ in other characters.
    """
    numbers = {file: [int(number) for number in re.findall(r"\d+", file.stem)] for file in files}
    files = sorted(files, key=lambda file: (numbers[file], file.name))
    columns = list(zip(*(numbers[file] for file in files), strict=False)) or [(0,) * len(files)]
    indices = next((column for column in columns if len(set(column)) > 1), columns[0])
    steps = [second - first for first, second in pairwise(indices)]
    usual = mode(sorted(step for step in steps if step > 0) or [1])
    for (first, second), index, step in zip(pairwise(files), indices, steps, strict=False):
        names = f"{first.name} and {second.name}"
        if re.sub(r"\d+", "", first.stem) != re.sub(r"\d+", "", second.stem):
            raise refuse(folder, f"{names} belong to different stacks", "keep one stack per folder")
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


def _tiff_header(file: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    with _open_tiff(file, is_ome=False) as tiff:  # otherwise each slice of a multi-file OME-TIFF opens all files
        if len(tiff.pages) != 1:
            raise refuse(file, f"it has {len(tiff.pages)} pages, not one slice", "import that stack alone")
        _check_page(tiff.pages[0])
        return tiff.pages[0].shape, tiff.pages[0].dtype


def _png_header(file: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    library: Any = import_module("PIL.Image")
    library.MAX_IMAGE_PIXELS = None  # slices are large
    with library.open(file) as image:
        form = image.tile[0][3]
        if form not in _PNG_DTYPES:
            raise refuse(file, f"its pixels are {form}, not grey of 1, 8 or 16 bits", "convert the slices to grey")
        return image.size[::-1], np.dtype(_PNG_DTYPES[form])


def _voxel_size(tiff: Any) -> Geometry:
    """The voxel size in OME-XML or ImageJ metadata."""
    if tiff.is_ome:
        pixels = ElementTree.fromstring(tiff.ome_metadata).find(".//{*}Pixels")
        found = {} if pixels is None else pixels.attrib
        sizes = [float(found.get(f"PhysicalSize{axis}", 0)) for axis in "ZYX"]
        return geometry(sizes, [found.get(f"PhysicalSize{axis}Unit", "um") for axis in "ZYX"])
    about, tags = tiff.imagej_metadata or {}, tiff.pages[0].tags
    if about.get("unit", "pixel") == "pixel" or "XResolution" not in tags or "YResolution" not in tags:
        return VOXELS
    (per_y, y), (per_x, x) = tags["YResolution"].value, tags["XResolution"].value
    return geometry([about.get("spacing", 1), y / per_y, x / per_x], [about["unit"]] * 3)
