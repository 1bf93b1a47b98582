"""Opens NIfTI and NRRD, and places scans in space (also those of dicom.py).

Volumes are written in the orientation of DICOM, LPS: x increases to the left of the patient, y to the back, z to the
head.  Axes are permuted and reversed accordingly, so that files of one patient align, however each one is stored.
"""

import gzip
import logging
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.volume_tools.sources.files import Stored, axis_letters, contiguous, geometry, refuse
from vesuvius.volumes.box import triple
from vesuvius.volumes.geometry import unit_name

log = logging.getLogger(__name__)

_ALIGNED = 1e-4  # cosines that differ by less come from rounding
_SPACES = {"lps": (1, 1, 1), "ras": (-1, -1, 1), "las": (1, -1, 1)}  # of patients in NRRD: signs that make them LPS
_C_TYPES = {  # NRRD names that numpy does not know, or with another size
    "char": "i1", "uchar": "u1", "int": "i4", "uint": "u4", "float": "f4", "longlong": "i8", "ulonglong": "u8",
}  # fmt: skip


def open_nifti(file: Path) -> Stored:
    """Open NIfTI 1 or 2, in one file or a pair (.hdr, .img), stored (X, Y, Z), x fastest."""
    head_file, data = _pair(file, ".hdr"), _pair(file, ".img")
    with gzip.open(head_file) if _is_gzip(head_file) else head_file.open("rb") as stream:
        head = stream.read(540)
    magic = {head[344:347]: "Nifti1Header", head[4:7]: "Nifti2Header"}
    if not (found := {b"n+1", b"ni1", b"n+2", b"ni2"} & magic.keys()):
        raise refuse(head_file, "it is no NIfTI file", "copy it again if it is damaged, or convert it to NIfTI")
    form = getattr(import_module("nibabel"), magic[word := found.pop()])
    header = form(head[: form.template_dtype.itemsize], check=False)
    single = word[1:2] == b"+"
    start = max(int(header["vox_offset"]), single * form.single_vox_offset)
    if not single and data == head_file:
        raise refuse(file, "there is no .img file with its voxels", "copy it to the same folder")
    shape, dtype, data = header.get_data_shape(), header.get_data_dtype(), head_file if single else data
    names = ("XYZT" + "C" * len(shape))[: len(shape)]
    if dtype.names:  # colors
        names, shape, dtype = f"S{names}", (len(dtype.names), *shape), dtype[0]
    stored = contiguous(data, names[::-1], shape[::-1], dtype, start, 0 if _is_gzip(data) else None)
    slope, inter = header.get_slope_inter()
    stored = rescaled(replace(stored, files=sorted({head_file, data})), slope or 1, inter or 0)
    units = header.get_xyzt_units()[0]
    with suppress(ValueError):  # a quaternion that is none
        affine = np.diag([-1, -1, 1]) @ header.get_best_affine()[:3]
        if (header["sform_code"] or header["qform_code"]) and is_affine(affine):
            return oriented(stored, affine, units)
    log.warning("%s has no usable orientation (sform, qform); its voxels are kept in stored order", file)
    return replace(stored, geometry=geometry(header["pixdim"][3:0:-1].tolist(), units))


def _pair(file: Path, ending: str) -> Path:
    """The file with this ending of a pair .hdr and .img, each gzip or not; any other file itself."""
    stem = re.sub(r"\.(hdr|img)(\.gz)?$", "", file.name, flags=re.IGNORECASE)
    names = (f"{stem}{ending}".lower(), f"{stem}{ending}.gz".lower())
    pairs = [] if stem == file.name else [each for each in file.parent.iterdir() if each.name.lower() in names]
    return pairs[0] if pairs else file


def _is_gzip(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(2) == b"\x1f\x8b"


# ---- NRRD


def open_nrrd(file: Path) -> Stored:
    """Open NRRD, raw or gzip, in one file or with a detached header; axes are stored fastest first."""
    header, start = _nrrd_header(file)
    detached = header.get("datafile")
    data, encoding = file.parent / (detached or file.name), header["encoding"].lower()
    if encoding not in ("raw", "gzip", "gz") or not data.is_file():
        problem = f"its encoding is {encoding} and its voxels are in {data.name}, not raw or gzip data in one file"
        raise refuse(file, problem, "convert it: unu save -f nrrd -e gzip")
    word = header["type"].lower().replace("unsigned ", "u").replace("signed ", "")
    word = word.removesuffix("_t").removesuffix(" int").replace(" ", "")
    dtype = np.dtype(_C_TYPES.get(word, word)).newbyteorder(">" if header.get("endian", "").lower() == "big" else "<")
    shape = [int(size) for size in header["sizes"].split()]
    with data.open("rb") as stream:
        stream.seek(0 if detached else start)
        for _ in range(int(header.get("lineskip", 0))):
            stream.readline()
        start, skip = stream.tell(), int(header.get("byteskip", 0))
    if skip < 0:  # the voxels are at the end
        start, skip = data.stat().st_size - math.prod(shape) * dtype.itemsize, 0
    names, affine = _nrrd_axes(file, header, shape[::-1])
    begin, packed = (start + skip, None) if encoding == "raw" else (skip, start)
    stored = contiguous(data, names, shape[::-1], dtype, begin, packed, last=not skip)
    stored = replace(stored, files=sorted({file, data}))
    if affine is not None:
        return oriented(stored, affine, _quoted(header, "spaceunits")[:3], _space(header) in _SPACES)
    voxel = geometry(header.get("spacings", "").split(), _quoted(header, "units"), names[::-1])
    return replace(stored, geometry=voxel)


def _nrrd_header(file: Path) -> tuple[dict[str, str], int]:
    """The fields, by name in lower case without spaces, and where the header ends."""
    fields = dict[str, str]()
    with file.open("rb") as stream:
        if stream.read(4) != b"NRRD":
            raise refuse(file, "it does not begin with NRRD", "copy it again")
        for line in iter(stream.readline, b""):
            if not (text := line.decode(errors="replace").strip()):
                break
            if found := re.match(r"([^#:]+):(?!=)\s*(.*)", text):
                fields[found[1].lower().replace(" ", "")] = found[2]
        return fields, stream.tell()


def _quoted(header: dict[str, str], field: str) -> list[str]:
    return re.findall(r'"([^"]*)"', header.get(field, ""))


def _space(header: dict[str, str]) -> str:
    """lps for LPS, left-posterior-superior and left-posterior-superior-time."""
    words = header.get("space", "").lower().split("-")
    return ("".join(word[:1] for word in words) if len(words) > 1 else words[0])[:3]


def _vectors(header: dict[str, str], field: str) -> list[list[float]]:
    """Vectors such as (0.5,0,0), of space without time; one that is none is empty."""
    found = re.findall(r"\([^)]*\)|none", header.get(field, ""))
    return [[float(number) for number in each.strip("()").split(",")[:3]] if each != "none" else [] for each in found]


def _nrrd_axes(file: Path, header: dict[str, str], shape: Sequence[int]) -> tuple[str, NDArray[Any] | None]:
    """Axis letters, slowest first, by space directions, labels or kinds; with the affine of directions, if any."""
    with suppress(ValueError):
        vectors, origins = _vectors(header, "spacedirections"), _vectors(header, "spaceorigin")
        steps = [vector for vector in vectors if any(vector)]
        signs = np.reshape(_SPACES.get(_space(header), (1, 1, 1)), (3, 1))
        affine = np.array([*steps, *(origins or [[0.0] * 3])]).T * signs
        if len(vectors) == len(shape) and affine.shape == (3, 4) and is_affine(affine):
            return _letters(map(any, vectors))[::-1], affine
    if directions := header.get("spacedirections"):
        words = "the space directions %s (origin %s) of %s cannot be used; its voxels are kept in stored order"
        log.warning(words, directions, header.get("spaceorigin"), file)
    labels, kinds = _quoted(header, "labels"), header.get("kinds", "").lower().split()
    in_space = [kind in ("domain", "space") for kind in kinds]
    if sum(in_space) == 2:  # slices
        in_space = [kind in ("domain", "space", "list", "time") for kind in kinds]
    if len(kinds) == len(shape) and any(in_space) and not {"x", "y", "z"} <= {label.lower() for label in labels}:
        return _letters(in_space)[::-1], None
    return axis_letters([labels[::-1]], shape), None


def _letters(in_space: Iterable[bool]) -> str:
    """X, Y, Z for the first three axes in space, C for others."""
    left = list("ZYX")
    return "".join(left.pop() if inside and left else "C" for inside in in_space)


# ---- values and orientation


def rescaled(stored: Stored, slope: float, inter: float) -> Stored:
    """An array of slope * voxel + inter."""
    if (slope, inter) == (1, 0):
        return stored
    get, dtype = stored.get, value_dtype(stored.dtype, [(slope, inter)])
    return replace(stored, dtype=dtype, get=lambda index: values_of(get(index), slope, inter, dtype))


def value_dtype(
    stored: np.dtype[Any], rules: Iterable[tuple[float, float]], limits: tuple[int, int] | None = None
) -> np.dtype[Any]:
    """The dtype that holds slope * voxel + inter for all of these (slope, inter).

    Integers stay integers if slopes and intercepts are; `limits`: of the stored values.  Otherwise float32, or float64
    for voxels of 4 bytes or more.
    """
    if stored.kind not in "iuf" or (rules := set(rules)) <= {(1, 0)}:
        return stored
    if stored.kind == "f":
        return np.dtype(f"f{max(4, stored.itemsize)}")
    if all(float(number).is_integer() for rule in rules for number in rule):
        low, high = limits or (np.iinfo(stored).min, np.iinfo(stored).max)
        ends = [int(slope) * end + int(inter) for slope, inter in rules for end in (int(low), int(high))]
        for dtype in map(np.dtype, ("u1", "i1", "u2", "i2", "u4", "i4", "i8")):
            about = np.iinfo(dtype)
            if dtype.itemsize >= stored.itemsize and about.min <= min(ends) and max(ends) <= about.max:
                return dtype
    return np.dtype("f4" if stored.itemsize < 4 else "f8")


def values_of(voxels: NDArray[Any], slope: float, inter: float, dtype: np.dtype[Any]) -> NDArray[Any]:
    """slope * voxel + inter; labels that were scaled to fill the stored range come out as integers."""
    if dtype.kind != "f":
        return (voxels.astype(np.int64) * int(slope) + int(inter)).astype(dtype)
    values = voxels * np.float64(slope) + inter
    if voxels.dtype.kind != "f" and dtype == np.float32:
        whole = np.rint(values)  # a slope has 24 bits in NIfTI
        values = np.where(np.abs(values - whole) <= 2.0**-23 * np.abs(values), whole, values)
    return values.astype(dtype)


def is_affine(affine: NDArray[Any]) -> bool:
    """Whether an affine (3, 4) gives each voxel a position of its own."""
    return bool(np.isfinite(affine).all() and np.linalg.matrix_rank(affine[:, :3]) == 3)


def oriented(stored: Stored, affine: NDArray[Any], units_xyz: str | list[str], of_patient: bool = True) -> Stored:
    """Permute and reverse the axes X, Y, Z of an array so that they increase along those of space, or nearly.

    Rotations are dropped with a WARNING, the same for all scans on one grid, so that these align.  Reads nothing.

    Args:
        affine: (3, 4), steps of the stored axes X, Y, Z and the position of the first voxel; x, y, z of space.
        of_patient: whether space is LPS; then lengths without a unit are millimeters, as in other programs.

    Raises DataError: the axes are not at right angles.
    """
    file, lengths = stored.files[0], np.linalg.norm(affine[:, :3], axis=0)
    if any(stored.names.count(letter) != 1 for letter in "XYZ"):
        return stored
    if of_patient and not any(map(unit_name, np.ravel(units_xyz))):
        log.info("%s gives no unit of length; millimeters are assumed", file)
        units_xyz = "mm"
    cosines = affine[:, :3] / lengths
    if np.abs(cosines.T @ cosines - np.eye(3)).max() > 1e-2:
        raise refuse(file, "its axes are not at right angles (a tilted gantry?)", "resample it")
    order = list(max(permutations(range(3)), key=lambda axes: np.abs(cosines[range(3), axes]).sum()))
    signs, scale = np.sign(cosines[range(3), order]), lengths[order]
    frame = cosines[:, order] * signs
    if np.abs(frame - np.eye(3)).max() > _ALIGNED:
        angle = np.degrees(np.arccos(np.clip((np.trace(frame) - 1) / 2, -1, 1)))
        words = "%s is rotated by %.2f degrees in space, which is dropped; it aligns with scans rotated alike"
        log.warning(words, file, angle)
    names = stored.names.translate({ord("XYZ"[axis]): "XYZ"[space] for space, axis in enumerate(order)})
    sizes = [stored.shape[names.index(letter)] for letter in "XYZ"]
    corner = frame.T @ affine[:, 3] - (signs < 0) * np.subtract(sizes, 1) * scale
    turned = {letter: size for letter, size, sign in zip("XYZ", sizes, signs, strict=True) if sign < 0}
    flips = tuple(slice(None, None, -1 if letter in turned else None) for letter in names if letter in "XYZ")

    def get(index: tuple[Any, ...]) -> NDArray[Any]:
        parts = (
            slice(turned[letter] - part.stop, turned[letter] - part.start) if letter in turned else part
            for letter, part in zip(names, index, strict=True)
        )
        return stored.get(tuple(parts))[flips]

    placed = replace(
        geometry(scale.tolist(), units_xyz, "XYZ"), translation_zyx=triple(corner[::-1].tolist()), translated=True
    )
    backwards = min("XYZ", key=names.find) in turned
    return replace(stored, names=names, get=get, geometry=placed, backwards=backwards)
