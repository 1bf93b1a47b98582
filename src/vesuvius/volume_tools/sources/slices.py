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

from vesuvius.runlog.progress import with_progress
from vesuvius.volume_tools.sources.files import Stored, check_length, flat, geometry, paged, refuse, sized
from vesuvius.volumes.geometry import VOXELS, Geometry

_ENDINGS = (".tif", ".tiff", ".png")
_PNG_DTYPES = {"1": "?", "L": "u1", "I;16B": "u2"}  # of raw forms that Pillow neither scales nor cuts


def open_tiff(file: Path) -> Stored:
    """A stack, OME-TIFF and ImageJ's included; without an axis z the first one that is no colour is z."""
    with _whole_tiff(file) as tiff:
        if len(tiff.series) != 1:
            found = ", ".join(sized(one.shape, one.dtype) for one in tiff.series[:8])
            raise refuse(file, f"its slices differ in shape or dtype ({found})", "split it")
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
            raise refuse(file, f"{pages.count(None)} of its slices are missing", "copy all files of the OME-TIFF")
        for page in pages:
            _check_page(page)

    def load(number: int) -> NDArray[Any]:
        with pages[number].parent.filehandle as handle:  # an OME-TIFF may have many files
            handle.open()
            return np.asarray(pages[number].asarray())

    files = sorted({Path(page.parent.filehandle.path) for page in pages})
    return replace(paged(files, names, shape, dtype, len(shape) - pages[0].ndim, load), geometry=voxel)


def open_folder(folder: Path) -> Stored:
    """Slices in the order of their numbers."""
    files = [file for file in folder.iterdir() if file.suffix.lower() in _ENDINGS and file.name[0] != "."]
    if len({file.suffix.lower() for file in files}) != 1:
        found = " and ".join(sorted({file.suffix for file in files})) or f"no {', '.join(_ENDINGS)}"
        raise refuse(folder, f"it has {found} files", "name a folder of slices of one kind")
    files = _in_order(files, folder)
    is_png = files[0].suffix.lower() == ".png"
    read = _png_header if is_png else _tiff_header
    shape, dtype = read(files[0])
    for file in with_progress(files, f"reading the headers in {folder}", len(files)):
        if (header := read(file)) != (shape, dtype):
            problem = f"it has {sized(*header)}, and {files[0].name} has {sized(shape, dtype)}"
            raise refuse(file, problem, "correct or remove it")

    def load(number: int) -> NDArray[Any]:
        library = import_module("PIL.Image" if is_png else "tifffile")
        read = library.open(files[number]) if is_png else library.imread(files[number], key=0)
        return np.asarray(read).astype(dtype, copy=False)  # early Pillows open 16 bits as 32

    return paged(files, "ZYXS"[: 1 + len(shape)], (len(files), *shape), dtype, 1, load)


def _in_order(files: list[Path], folder: Path) -> list[Path]:
    """By their numbers, of which the first that varies must rise evenly: else some are missing, or of another stack."""
    numbers = {file: [int(number) for number in re.findall(r"\d+", file.stem)] for file in files}
    files = sorted(files, key=lambda file: numbers[file])
    columns = zip(*(numbers[file] for file in files), strict=False)
    varying = next((each for each in columns if len(set(each)) > 1), range(len(files)))
    steps, words = np.diff(varying).tolist(), [re.sub(r"\d+", "", file.stem) for file in files]
    usual = sorted(steps or [1])[len(steps) // 2]
    for i, step in enumerate(steps):
        if step != usual or words[i] != words[i + 1]:
            problem = f"the numbers of its slices do not rise evenly: {files[i].name} and then {files[i + 1].name}"
            raise refuse(folder, problem, "restore what is missing; one folder a stack")
    return files


@contextmanager
def _whole_tiff(file: Path, **options: Any) -> Iterator[Any]:
    """An open TIFF.  Of one that is cut short tifffile gives what is left, and says so in its log alone."""
    said, logger = list[str](), logging.getLogger("tifffile")

    def listen(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return False  # it also reports tags that are strange and do no harm

    logger.addFilter(listen)
    try:
        with import_module("tifffile").TiffFile(file, **options) as tiff:
            len(tiff.pages), tiff.series
            if cut := [text for text in said if "page offset" in text or "corrupt" in text]:
                raise refuse(file, f"it is cut short or damaged: {cut[0]}", "copy it again")
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
            raise refuse(file, f"a slice must be one page, and it has {len(tiff.pages)}", "import that stack alone")
        _check_page(tiff.pages[0])
        return tiff.pages[0].shape, tiff.pages[0].dtype


def _png_header(file: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    library: Any = import_module("PIL.Image")
    library.MAX_IMAGE_PIXELS = None  # slices are large
    with library.open(file) as image:
        form = image.tile[0][3]
        if form not in _PNG_DTYPES:
            raise refuse(file, f"it is {form}, not grey of 1, 8 or 16 bits", "convert the slices to grey")
        return image.size[::-1], np.dtype(_PNG_DTYPES[form])


def _voxel_size(tiff: Any) -> Geometry:
    """As OME-XML or ImageJ say it."""
    if tiff.is_ome:
        pixels = ElementTree.fromstring(tiff.ome_metadata).find(".//{*}Pixels")
        said = {} if pixels is None else pixels.attrib
        sizes = [float(said.get(f"PhysicalSize{axis}", 0)) for axis in "ZYX"]
        return geometry(sizes, [said.get(f"PhysicalSize{axis}Unit", "um") for axis in "ZYX"])
    about, tags = tiff.imagej_metadata or {}, tiff.pages[0].tags
    if about.get("unit", "pixel") == "pixel" or "XResolution" not in tags or "YResolution" not in tags:
        return VOXELS
    (per_y, y), (per_x, x) = tags["YResolution"].value, tags["XResolution"].value
    return geometry([about.get("spacing", 1), y / per_y, x / per_x], [about["unit"]] * 3)
