"""TIFF stacks, and folders of TIFF or PNG slices."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from vesuvius.errors import DataError
from vesuvius.runlog.progress import with_progress
from vesuvius.volume_tools.sources.files import Stored, check_length, flat, geometry, paged, refuse, sized
from vesuvius.volumes.geometry import VOXELS, Geometry

_ENDINGS = (".tif", ".tiff", ".png")
_PNG_DTYPES = {"1": "?", "L": "u1", "I;16B": "u2"}  # of forms that Pillow neither scales nor cuts


def open_tiff(file: Path) -> Stored:
    """A stack, OME-TIFF and ImageJ's included; without an axis z the first one that is no colour is z."""
    with _whole_tiff(file) as tiff:
        if len(tiff.series) != 1:
            got = ", ".join(sized(one.shape, one.dtype) for one in tiff.series[:8])
            raise refuse("a TIFF stack must be one image, its slices of one shape and dtype", got, file, "split it")
        (series,), voxel = tiff.series, _voxel_size(tiff)
        names, shape, dtype = series.axes, series.shape, series.dtype
        if "Z" not in names:
            first = re.sub("[YXSC]", "", names)[:1]
            names, shape = (names.replace(first, "Z"), shape) if first else (f"Z{names}", (1, *shape))
        if series.dataoffset is not None:
            data = flat(file, names, shape, dtype.newbyteorder(tiff.byteorder), series.dataoffset)
            return replace(data, geometry=voxel)
        pages = list(series.pages)
        if None in pages:
            raise refuse("all slices must be there", f"{pages.count(None)} missing", file, "copy all of its files")
        for page in pages:
            _check_page(page)
    lead = len(shape) - len(pages[0].shape)

    def load(number: int) -> NDArray[Any]:
        with pages[number].parent.filehandle as handle:  # an OME-TIFF may have many files
            handle.open()
            return np.asarray(pages[number].asarray())

    files = sorted({Path(page.parent.filehandle.path) for page in pages})
    return replace(paged(files, names, shape, dtype, lead, load), geometry=voxel)


def open_folder(folder: Path) -> Stored:
    """Slices in the order of their numbers."""
    files = [file for file in folder.iterdir() if file.suffix.lower() in _ENDINGS and file.name[0] != "."]
    if len({file.suffix.lower() for file in files}) != 1:
        got = ", ".join(sorted({file.suffix for file in files})) or f"none of {', '.join(_ENDINGS)}"
        raise refuse("slices must be TIFF or PNG files of one kind", got, folder, "name a folder that holds such")
    files = _in_order(files, folder)
    is_png = files[0].suffix.lower() == ".png"
    first = None
    for file in with_progress(files, f"reading the headers in {folder}", len(files)):
        shape, dtype = (_png_header if is_png else _tiff_header)(file)
        first = first or (shape, dtype)
        if first != (shape, dtype):
            got = f"{sized(*first)} in {files[0].name}, {sized(shape, dtype)}"
            raise refuse("all slices must have one shape and dtype", got, file, "correct or remove it")

    def load(number: int) -> NDArray[Any]:
        if is_png:
            with import_module("PIL.Image").open(files[number]) as image:
                return np.asarray(image)
        return np.asarray(import_module("tifffile").imread(files[number], key=0))

    return paged(files, "ZYXS"[: 1 + len(shape)], (len(files), *shape), dtype, 1, load)


def _in_order(files: list[Path], folder: Path) -> list[Path]:
    """By their numbers, of which the first that varies must rise evenly: else some are missing, or of another stack."""
    parts = {file: re.split(r"(\d+)", file.stem) for file in files}
    files = sorted(files, key=lambda file: [int(part) for part in parts[file][1::2]])
    numbers = [[int(part) for part in parts[file][1::2]] for file in files]
    varying = next((column for column in zip(*numbers, strict=False) if len(set(column)) > 1), range(len(files)))
    steps = np.diff(varying)
    usual = max(1, np.median(steps)) if len(files) > 1 else 1
    for before, after, step in zip(files, files[1:], steps, strict=False):
        if parts[before][::2] != parts[after][::2] or step != usual:
            rule, got = "slices must differ in a number that rises evenly", f"{before.name} and then {after.name}"
            raise refuse(rule, got, folder, "restore what is missing; one folder a stack")
    return files


@contextmanager
def _whole_tiff(file: Path, **options: Any) -> Iterator[Any]:
    """An open TIFF.  Of one that is cut short tifffile gives what is left, and says so in its log alone."""
    said, logger = list[str](), logging.getLogger("tifffile")

    def listen(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return False

    logger.addFilter(listen)
    try:
        with import_module("tifffile").TiffFile(file, **options) as tiff:
            len(tiff.pages), tiff.series
            if cut := [text for text in said if "page offset" in text or "corrupt" in text]:
                raise DataError(f"The file is cut short: {file}: {cut[0]}; copy it again")
            yield tiff
    finally:
        logger.removeFilter(listen)


def _check_page(page: Any) -> None:
    """Raises DataError for one whose file ends before it."""
    ends = map(sum, zip(page.dataoffsets, page.databytecounts, strict=True))
    check_length(Path(page.parent.filehandle.path), max(ends))


def _tiff_header(file: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    with _whole_tiff(file, is_ome=False) as tiff:  # else each slice of an OME-TIFF of many files opens them all
        if len(tiff.pages) != 1:
            raise refuse("a slice must be one page", f"{len(tiff.pages)} pages", file, "import that stack alone")
        _check_page(tiff.pages[0])
        return tiff.pages[0].shape, tiff.pages[0].dtype


def _png_header(file: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    library: Any = import_module("PIL.Image")
    library.MAX_IMAGE_PIXELS = None  # slices are large
    with library.open(file) as image:
        form = image.tile[0][3]
        if form not in _PNG_DTYPES:
            raise refuse("a PNG slice must be grey, of 1, 8 or 16 bits", form, file, "convert the slices to grey")
        return image.size[::-1], np.dtype(_PNG_DTYPES[form])


def _voxel_size(tiff: Any) -> Geometry:
    """As OME-XML or ImageJ say it."""
    if tiff.is_ome:
        tree = ElementTree.fromstring(tiff.ome_metadata)
        pixels = next((each.attrib for each in tree.iter() if each.tag.endswith("}Pixels")), {})
        sizes = [float(pixels.get(f"PhysicalSize{axis}", 0)) for axis in "ZYX"]
        return geometry(sizes, [pixels.get(f"PhysicalSize{axis}Unit", "um") for axis in "ZYX"])
    about, tags = tiff.imagej_metadata or {}, tiff.pages[0].tags
    if about.get("unit", "pixel") == "pixel" or "XResolution" not in tags or "YResolution" not in tags:
        return VOXELS
    (per_y, y), (per_x, x) = tags["YResolution"].value, tags["XResolution"].value
    return geometry([about.get("spacing", 1), y / per_y, x / per_x], [about["unit"]] * 3)
