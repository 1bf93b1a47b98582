"""Opens a series of DICOM: a folder, with a DICOMDIR or not, or one file of many frames.

Slices are ordered by their positions in space, not by their names or numbers.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.runlog.progress import with_progress
from vesuvius.volume_tools.sources.files import Stored, geometry, library_errors, paged, refuse
from vesuvius.volume_tools.sources.medical import is_affine, oriented, value_dtype, values_of

log = logging.getLogger(__name__)

_MOST_OTHERS = 1000  # files looked at before a folder is taken as something else
_SAME = 0.1  # of a step: distances between slices that differ by less are rounded


@dataclass(frozen=True)
class _Slice:
    """A frame of a file."""

    file: Path
    frame: int
    places: tuple[Any, ...]  # datasets with its attributes, the most specific first

    def get(self, name: str, default: Any = None) -> Any:
        found = (place.get(name) for place in self.places)
        return next((value for value in found if value not in (None, "")), default)

    def vector(self, name: str, count: int) -> list[float]:
        """Numbers; empty unless there are `count`."""
        with suppress(TypeError, ValueError):
            numbers = [float(number) for number in self.get(name, ())]
            return numbers if len(numbers) == count else []
        return []

    @cached_property
    def name(self) -> str:
        return f"{self.file.name}, frame {self.frame + 1}" if self.get("NumberOfFrames", 1) > 1 else self.file.name

    @cached_property
    def position(self) -> list[float]:
        is_shared = self.get("NumberOfFrames", 1) > 1 and len(self.places) == 1
        return [] if is_shared else self.vector("ImagePositionPatient", 3)

    @cached_property
    def number(self) -> int:
        return int(self.get("InstanceNumber", 0)) + self.frame

    @cached_property
    def rule(self) -> tuple[float, float]:
        return float(self.get("RescaleSlope", 1)), float(self.get("RescaleIntercept", 0))

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        kind = {None: "f", 0: "u", 1: "i"}[self.get("PixelRepresentation")]
        return np.dtype(f"{kind}{max(1, self.get('BitsAllocated') // 8)}")

    @cached_property
    def form(self) -> tuple[Any, ...]:
        """Values that all slices of a volume share."""
        names = "Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation"
        return (*map(self.get, names), self.dtype.name)

    @cached_property
    def plane(self) -> list[float]:
        """Row and column directions and pixel spacing, which they share up to rounding."""
        return self.vector("ImageOrientationPatient", 6) + self.vector("PixelSpacing", 2)


def is_dicom(path: Path) -> bool:
    """Whether a file is DICOM or named so, or a folder has such a file."""
    if path.is_dir():
        return any(map(is_dicom, islice(_files_below(path), _MOST_OTHERS)))
    if path.suffix.lower() in (".dcm", ".ima"):
        return True
    with path.open("rb") as stream:
        return stream.read(132)[128:] == b"DICM"


def _files_below(folder: Path) -> Iterator[Path]:
    """The files of a folder, but not those of a zarr in it, such as the one that is being written."""
    for above, folders, files in os.walk(folder):
        folders[:] = [each for each in folders if not each.endswith((".zarr", ".zarr.partial"))]
        yield from (file for name in files if (file := Path(above, name)).is_file())


def open_dicom(path: Path, inside: str = "") -> Stored:
    """Open the only series, or the one with the SeriesInstanceUID `inside`, as (Z, Y, X); values are rescaled."""
    slices = _in_order(path, _of_one_series(path, _read(path), inside.strip("/")))
    first = slices[0]
    for each in slices:
        if each.form != first.form or not np.allclose([*each.plane, 0], [*first.plane, 0], atol=1e-3, equal_nan=True):
            problem = f"{each.name} has {each.form} {each.plane}, but {first.name} has {first.form} {first.plane}"
            raise refuse(path, problem, "keep images of one size, kind and orientation per folder")
    rows, columns, samples, kind, _ = first.form
    if kind not in ("MONOCHROME1", "MONOCHROME2", "RGB") and "YBR" not in str(kind):
        raise refuse(path, f"its pixels are {kind}, not gray or RGB", "convert it to MONOCHROME2")
    if kind == "MONOCHROME1":
        log.warning("%s: low values mean bright (MONOCHROME1); they are kept as they are", path)
    bits = max(int(each.get("BitsStored", 8 * each.dtype.itemsize)) for each in slices)
    low = -(1 << bits - 1) if first.dtype.kind == "i" else 0
    limits = low, low + (1 << bits) - 1
    dtype = value_dtype(first.dtype, [each.rule for each in slices], limits)
    read, pixel_array = import_module("pydicom").dcmread, import_module("pydicom.pixels").pixel_array

    def load(number: int) -> NDArray[Any]:
        each = slices[number]
        with library_errors(str(each.file)):
            whole = each.get("NumberOfFrames", 1) == 1  # one frame of a file is read without the others
            voxels: NDArray[Any] = pixel_array(read(each.file) if whole else each.file, index=each.frame)
        if dtype == first.dtype:
            return voxels
        if dtype.kind != "f" and not limits[0] <= voxels.min() <= voxels.max() <= limits[1]:
            raise refuse(each.file, f"its voxels exceed the {bits} bits of BitsStored", "correct BitsStored")
        return values_of(voxels, *each.rule, dtype)

    color = [int(samples)] if samples and samples > 1 else []
    shape = [len(slices), int(rows), int(columns), *color]
    stored = paged([each.file for each in slices], "ZYXS"[: len(shape)], shape, dtype, 1, load)
    between = first.get("SpacingBetweenSlices") or first.get("SliceThickness") or 0
    per_row, per_column = first.vector("PixelSpacing", 2) or (0, 0)
    plane = np.reshape(first.vector("ImageOrientationPatient", 6) or [0.0] * 6, (2, 3))
    if first.position and slices[-1].position:
        step = np.cross(*plane) * float(between)
        if len(slices) > 1:
            step = np.subtract(slices[-1].position, first.position) / (len(slices) - 1)
        affine = np.column_stack([plane[0] * per_column, plane[1] * per_row, step, first.position])
        if is_affine(affine):
            return oriented(stored, affine, "mm")
    return replace(stored, geometry=geometry([between, per_row, per_column], "mm"))


def _read(path: Path) -> list[_Slice]:
    """All frames of all images in a folder, or of a file; other files are left out with a WARNING."""
    library = import_module("pydicom")
    path = path.parent if path.name.upper() == "DICOMDIR" else path
    files = sorted(_files_below(path)) if path.is_dir() else [path]
    files = [file for file in files if file.name[0] != "." and file.name.upper() != "DICOMDIR"]
    slices, others = list[_Slice](), list[Path]()
    for file in with_progress(files, f"reading the headers in {path}", len(files)):
        with library_errors(str(file)):
            if not file.stat().st_size:
                raise refuse(file, "it is empty", "copy it again, or remove it")
            if is_dicom(file):
                about = library.dcmread(file, stop_before_pixels=True)
                if about.get("Rows") and about.get("Columns"):
                    slices += _frames(file, about)
                    continue
                if "Image Storage" in about.file_meta.MediaStorageSOPClassUID.name:
                    raise refuse(file, "its header is cut", "copy it again")
        others.append(file)
    if not slices:
        raise refuse(path, "it has no DICOM images", "choose a folder with images")
    if others:
        log.warning("%d files in %s are no DICOM images and are left out, e.g. %s", len(others), path, others[0].name)
    return slices


def _frames(file: Path, about: Any) -> Iterator[_Slice]:
    shared = about.get("SharedFunctionalGroupsSequence") or []
    own = about.get("PerFrameFunctionalGroupsSequence") or []
    for frame in range(int(about.get("NumberOfFrames") or 1)):
        groups = [*own[frame : frame + 1], *shared]
        items = (item for group in groups for element in group if element.VR == "SQ" for item in element.value)
        yield _Slice(file, frame, (*items, about))


def _of_one_series(path: Path, slices: list[_Slice], uid: str) -> list[_Slice]:
    images = [each for each in slices if "LOCALIZER" not in each.get("ImageType", ())] or slices
    if len(images) < len(slices):
        log.warning("%d localizers in %s are left out", len(slices) - len(images), path)
    series = dict[str, list[_Slice]]()
    for each in images:
        series.setdefault(str(each.get("SeriesInstanceUID", "")), []).append(each)
    if uid in series or (len(series) == 1 and not uid):
        return series[uid or next(iter(series))]
    found = (
        f"{path}:/{key} ({each[0].get('SeriesDescription', '-')}, {len(each)} slices)" for key, each in series.items()
    )
    raise refuse(
        path, f"it has {len(series)} series" + f", none of them {uid}" * bool(uid), f"choose one: {', '.join(found)}"
    )


def _in_order(path: Path, slices: Sequence[_Slice]) -> list[_Slice]:
    """Sort slices by position; without positions by number.  Raises DataError: one is missing, moved or there twice."""
    plane = slices[0].vector("ImageOrientationPatient", 6)
    if not plane or not all(each.position for each in slices):
        log.warning("%s does not give the positions of its slices; they are sorted by number", path)
        ordered = sorted(slices, key=lambda each: each.number)
        positions = np.array([[0, 0, each.number] for each in ordered])
    else:
        normal = np.cross(plane[:3], plane[3:])
        ordered = sorted(slices, key=lambda each: float(np.dot(each.position, normal)))
        positions = np.array([each.position for each in ordered])
    steps = np.diff(positions, axis=0)
    usual = np.median(steps, axis=0) if len(steps) else np.zeros(3)
    for (one, other), step in zip(pairwise(ordered), steps, strict=True):
        if not step.any():
            raise refuse(path, f"{one.name} and {other.name} are at the same position", "keep one volume per folder")
        if np.linalg.norm(step - usual) > _SAME * np.linalg.norm(usual):
            far, near = np.linalg.norm([step, usual], axis=1)
            problem = f"the step from {one.name} to {other.name} is {far:.4g}, but {near:.4g} between most slices"
            raise refuse(path, problem, "restore missing slices, or keep one stack of equal steps per folder")
    return ordered
