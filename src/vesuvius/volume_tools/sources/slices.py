"""TIFF stacks, and folders of TIFF or PNG slices."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from vesuvius.errors import DataError, one_line
from vesuvius.runlog.progress import with_progress
from vesuvius.volume_tools.sources.stored import Stored, check_length, flat, library, paged, refuse, sized

_PNG_FORMS = {"1": "1", "L": "L", "LA": "LA", "I;16": "I;16B", "RGB": "RGB", "RGBA": "RGBA"}
"""Modes of Pillow, and what each is read from as it is: other forms are scaled, or lose bits."""


class _Page(NamedTuple):
    """A slice, or a page of a stack."""

    names: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    load: Callable[[], NDArray[Any]]
    is_mapped: bool  # any part can be read by itself


def open_tiff(file: Path) -> Stored:
    """A stack, OME-TIFF and ImageJ's included; an axis without a meaning is z."""
    with _whole_tiff(file) as tiff:
        if len(tiff.series) != 1:
            got = f"{len(tiff.series)}: {', '.join(sized(one.shape, one.dtype) for one in tiff.series[:8])}"
            raise refuse("a TIFF stack must be one image, its slices of one shape and dtype", got, file, "split it")
        (series,), space = tiff.series, _voxel_size(tiff)
        dtype = series.dtype.newbyteorder(tiff.byteorder)
        names, shape = series.axes, series.shape
        unnamed = [letter for letter in names if letter not in "ZYXSTC"]
        if "Z" not in names and len(unnamed) == 1:
            names = names.replace(unnamed[0], "Z")
        elif set(names) <= set("YXS"):
            names, shape = f"Z{names}", (1, *shape)
        if series.dataoffset is not None:
            return flat(file, names, shape, dtype, series.dataoffset, **space)
        if missing := sum(page is None for page in series.pages):
            raise refuse("all slices of a stack must be there", f"{missing} missing", file, "copy all of its files")
        pages = [_tiff_page(page) for page in series.pages]
        files = sorted({Path(page.parent.filehandle.path) for page in series.pages})
    leads = [n for n in range(len(shape)) if math.prod(shape[:n]) == len(pages) and n > names.find("Z")]
    if not leads:
        raise refuse("a page of a TIFF must be one slice", f"{len(pages)} of axes {names}", file, "save it as slices")
    lead = leads[0]
    get = paged(shape, lead, lambda number: pages[number].load().reshape(shape[lead:]))
    unit = None if all(page.is_mapped for page in pages) else (*(1,) * lead, *shape[lead:])
    return Stored(files, names, shape, dtype, get, unit, **space)


def open_folder(folder: Path) -> Stored:
    """Slices in the order of their numbers."""
    openers = {".tif": _tiff_slice, ".tiff": _tiff_slice, ".png": _png_slice}
    files = [file for file in folder.iterdir() if file.suffix.lower() in openers and file.name[0] != "."]
    kinds = sorted({file.suffix.lower() for file in files})
    if len(kinds) != 1:
        got = ", ".join(kinds) or "none of .tif, .tiff, .png"
        raise refuse("slices must be TIFF or PNG files of one kind", got, folder, "name a folder that holds such")
    files = _in_order(files, folder)
    pages = [openers[kinds[0]](file) for file in with_progress(files, f"reading the headers in {folder}", len(files))]
    for file, page in zip(files, pages, strict=True):
        if page[:3] != pages[0][:3]:
            got = f"{sized(pages[0].shape, pages[0].dtype)} in {files[0].name}, {sized(page.shape, page.dtype)}"
            raise refuse("all slices must have one shape and dtype", got, file, "correct or remove it")
    names, shape, dtype, *_ = pages[0]
    unit = None if all(page.is_mapped for page in pages) else (1, *shape)
    shape = (len(files), *shape)
    return Stored(files, f"Z{names}", shape, dtype, paged(shape, 1, lambda number: pages[number].load()), unit)


def _in_order(files: list[Path], folder: Path) -> list[Path]:
    """By their numbers, of which the first that varies must rise evenly: else some are missing, or of another stack."""
    parts = {file: re.split(r"(\d+)", file.stem) for file in files}
    files = sorted(files, key=lambda file: [int(part) for part in parts[file][1::2]])
    rule, remedy = "slices must differ in a number that rises evenly", "restore what is missing; one folder a stack"
    for before, after in pairwise(files):
        if parts[before][::2] != parts[after][::2]:
            raise refuse(rule, f"{before.name} and {after.name}", folder, remedy)
    columns = [[int(parts[file][place]) for file in files] for place in range(1, len(parts[files[0]]), 2)]
    numbers = next((column for column in columns if len(set(column)) > 1), range(len(files)))
    steps = np.diff(numbers)
    if (odd := np.flatnonzero(steps != max(1, np.median(steps)))).size and len(files) > 1:
        at = int(odd[0])
        raise refuse(rule, f"{files[at].name} and then {files[at + 1].name}", folder, remedy)
    return files


# ---- TIFF


@contextmanager
def _whole_tiff(file: Path) -> Iterator[Any]:
    """An open TIFF.  Of one that is cut short tifffile gives what is left, and says so in its log alone."""
    tifffile, said, listener = library("tifffile"), list[str](), logging.Handler(logging.ERROR)
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tifffile")
    logger.addHandler(listener)
    logger.propagate = False
    try:
        with tifffile.TiffFile(file) as tiff:
            len(tiff.pages), tiff.series
            if cut := [text for text in said if "page offset" in text or "corrupt" in text]:
                raise DataError(f"The file is cut short: {file}: {one_line(cut[0])}; copy it again")
            yield tiff
    finally:
        logger.removeHandler(listener)
        logger.propagate = True


def _tiff_page(page: Any) -> _Page:
    handle = page.parent.filehandle
    path, offset, dtype, shape = Path(handle.path), page.dataoffsets[0], page.dtype, page.shape
    check_length(path, max(map(sum, zip(page.dataoffsets, page.databytecounts, strict=True))))
    if page.is_final:
        dtype = dtype.newbyteorder(page.parent.byteorder)
        return _Page(page.axes, shape, dtype, lambda: np.memmap(path, dtype, "r", offset, shape), True)

    def decode() -> NDArray[Any]:
        handle.open()  # an OME-TIFF may have many files
        try:
            return np.asarray(page.asarray())
        finally:
            handle.close()

    return _Page(page.axes, shape, dtype, decode, False)


def _tiff_slice(file: Path) -> _Page:
    with _whole_tiff(file) as tiff:
        if len(tiff.pages) != 1:
            raise refuse("a slice must be one page", f"{len(tiff.pages)} pages", file, "import that stack alone")
        page = _tiff_page(tiff.pages[0])
    if page.is_mapped:
        return page
    imread = library("tifffile").imread  # again from the name: open pages of many thousand slices fill the memory
    return page._replace(load=lambda: np.asarray(imread(file)).reshape(page.shape))


def _voxel_size(tiff: Any) -> dict[str, Any]:
    """As OME-XML or ImageJ say it."""
    if tiff.is_ome:
        tree = ElementTree.fromstring(tiff.ome_metadata)
        pixels = next((each.attrib for each in tree.iter() if each.tag.endswith("}Pixels")), {})
        sizes = [float(pixels.get(f"PhysicalSize{axis}", 0)) for axis in "ZYX"]
        return {"scale_zyx": sizes, "units_zyx": [pixels.get(f"PhysicalSize{axis}Unit", "um") for axis in "ZYX"]}
    about, tags = tiff.imagej_metadata or {}, tiff.pages[0].tags
    if about.get("unit", "pixel") == "pixel" or "XResolution" not in tags or "YResolution" not in tags:
        return {}
    (per_y, y), (per_x, x) = tags["YResolution"].value, tags["XResolution"].value
    return {"scale_zyx": [about.get("spacing", 1), y / per_y, x / per_x], "units_zyx": [about["unit"]] * 3}


# ---- PNG


def _png_slice(file: Path) -> _Page:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # slices are large

    def load() -> NDArray[Any]:
        with Image.open(file) as image:
            return np.asarray(image)

    with Image.open(file) as image:
        (width, height), mode, form = image.size, image.mode, image.tile[0][3]
    if _PNG_FORMS.get(mode) != form:
        rule = "a PNG must hold bits, grey of 8 or 16 bits, or colour of 8 bits"
        raise refuse(rule, f"{form} ({mode})", file, "convert the slices to TIFF")
    samples = {"LA": (2,), "RGB": (3,), "RGBA": (4,)}.get(mode, ())
    dtype = np.dtype({"1": "?", "I;16": "u2"}.get(mode, "u1"))
    return _Page("YXS"[: 2 + len(samples)], (height, width, *samples), dtype, load, False)
