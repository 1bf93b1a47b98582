"""Aligns an array (a condition, labels, a mask, a coarser level) with a volume.

If both have an OME scale, scale and translation decide.  Otherwise the shapes do, and `caveat` says so.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from pathlib import PurePath
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.config.patterns import name_of
from vesuvius.errors import DataError
from vesuvius.volumes.affine import AffineAlignment, Floats, ReadBox, as_rows
from vesuvius.volumes.box import Box, box_along, format_box, intersects, shape_of, triple
from vesuvius.volumes.errors import damage_seen
from vesuvius.volumes.geometry import MICROMETERS, VOXELS, Geometry, space_of
from vesuvius.volumes.store.objects import display_address
from vesuvius.volumes.volume import Volume

log = logging.getLogger(__name__)

Fractions = tuple[Fraction, Fraction, Fraction]
ONES: Fractions = (Fraction(1), Fraction(1), Fraction(1))
ZEROS: Fractions = (Fraction(0), Fraction(0), Fraction(0))

_POWERS = {2**n for n in range(16)}
_PLAUSIBLE = 1.5  # ratio of two ratios of voxel sizes
_EQUAL = 1e-3  # voxels: remainders that differ by less count as equal
# Writers round scales: a factor is the first ratio of integers with a denominator in this range that moves no voxel by
# more than half a voxel.
_DENOMINATORS = range(1, 9)


@dataclass(frozen=True)
class Alignment:
    """The position and voxel size of an array relative to a volume.  Pure.

    Along each axis voxel j of the array covers offset + factor * j to offset + factor * (j + 1).  A voxel of the volume
    maps to the array voxel that contains its center; a center on a boundary maps to the lower one.
    """

    volume_zyx: Triple
    array_zyx: Triple
    factors: Fractions = ONES  # voxels of the volume per voxel of the array; below 1 if the array is finer
    offsets: Fractions = ZEROS  # start of the array in voxels of the volume
    caveat: str | None = field(default=None, compare=False)  # set if the metadata alone do not determine the alignment
    transform: ClassVar[None] = None

    @cached_property  # each patch whose foreground is counted asks for it
    def covered(self) -> Box:
        """The part of the volume that the array covers; empty (stop <= start) if there is none.

        A remainder shorter than one array voxel, left by pyramids that round down, counts as covered.
        """
        ends = []
        for axis, (size, count) in enumerate(zip(self.volume_zyx, self.array_zyx, strict=True)):
            start, stop = max(self._first(axis, 0), 0), min(self._first(axis, count), size)
            ends.append((start, size if start < stop and size - stop < self.factors[axis] else stop))
        return box_along(ends)

    def array_box(self, box: Box) -> Box:
        """The array voxels to which a covered box of the volume maps."""
        return box_along((self._at(n, a), self._at(n, b - 1) + 1) for n, (a, b) in enumerate(zip(*box, strict=True)))

    def volume_box(self, box: Box) -> Box:
        """All voxels of the volume that map to a box of the array; at least one."""
        ends = []
        for axis, (lo, hi, first, last) in enumerate(zip(*box, *self.covered, strict=True)):
            start = min(max(self._first(axis, lo), first), last - 1)
            stop = last if hi == self.array_zyx[axis] else min(self._first(axis, hi), last)
            ends.append((start, max(stop, start + 1)))
        return box_along(ends)

    def read(self, box: Box, read: ReadBox, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Read the array on the grid of the volume; raises as `read`, UnreadableChunkError in voxels of the volume."""
        inner, plain = self.array_box(box), self.factors == ONES
        with damage_seen(box, self.volume_box):
            voxels = read(inner, out if plain else None)
        if plain:
            return voxels
        out = np.empty(shape_of(box), voxels.dtype) if out is None else out
        z, y, x = map(np.subtract, map(self.indices, range(3), *box), inner[0])
        for number, plane in enumerate(voxels):  # plane by plane, so that repeated voxels stay in the CPU cache
            lo, hi = np.searchsorted(z, (number, number + 1))
            if lo < hi:
                out[lo:hi] = plane.take(x, axis=1).take(y, axis=0)
        return out

    def indices(self, axis: int, lo: int, hi: int) -> NDArray[np.int64]:
        """Array voxel along an axis for each of the volume's voxels lo ... hi - 1, in exact integer arithmetic."""
        return np.asarray(self._unclipped(axis, np.arange(lo, hi)).clip(0, self.array_zyx[axis] - 1))

    def extent(self, axis: int) -> tuple[int, int]:
        """Start and stop, in voxels of the volume, of the array voxels in use; the last may reach past the volume."""
        return max(self._first(axis, 0), 0), self._first(axis, self._at(axis, self.volume_zyx[axis] - 1) + 1)

    def describe(self) -> str:
        """'1 voxel = 2 x 2 x 2 voxels of the volume, from z 10, y 0, x 0; they share z 10:30, y 0:40, x 0:40'."""
        factors = " x ".join(map(str, self.factors))
        corner = ", ".join(f"{axis} {offset}" for axis, offset in zip("zyx", self.offsets, strict=True))
        return f"1 voxel = {factors} voxels of the volume, from {corner}; they share {format_box(self.covered)}"

    def _at(self, axis: int, voxel: int) -> int:
        return min(max(int(self._unclipped(axis, voxel)), 0), self.array_zyx[axis] - 1)

    def _unclipped(self, axis: int, voxels: Any) -> Any:
        (p, q), (a, b) = self.factors[axis].as_integer_ratio(), self.offsets[axis].as_integer_ratio()
        return (((2 * voxels + 1) * b - 2 * a) * q - 1) // (2 * b * p)

    def _first(self, axis: int, index: int) -> int:
        return math.floor(self.offsets[axis] + self.factors[axis] * index + Fraction(1, 2))


AnyAlignment = Alignment | AffineAlignment


def align(volume: Volume, array: Volume, what: str) -> AnyAlignment:
    """Align an array, `what` in messages, with a volume.  Raises DataError: it is unknown how, or they are apart."""
    if array is volume:
        return Alignment(volume.shape_zyx, array.shape_zyx)
    found: AnyAlignment
    try:
        found = _aligned(volume, array) if array.transform is None else _transformed(volume, array, *array.transform)
        if not intersects(found.covered, ((0, 0, 0), volume.shape_zyx)):
            raise _AlignmentError("they do not overlap")
        if shape_of(found.array_box(found.covered)) == (1, 1, 1) != array.shape_zyx:
            raise _AlignmentError("the volume would lie in a single voxel of it")
    except _AlignmentError as error:
        remedy = (
            f"correct {display_address(array.spec.transform)}"
            if array.spec.transform
            else "correct scale, unit and translation in the OME metadata (they are not read if the path points to the "
            "array of a level), or choose another level"
        )
        raise DataError(
            f"Cannot align {what} {array.name} with the volume {volume.name}: {error}; it has "
            f"{describe_geometry(array)}, the volume {describe_geometry(volume)}; {remedy}"
        ) from error
    return found


def fits(size: int, count: int, factor: Fraction) -> bool:
    """Whether `count` voxels are what a pyramid makes of `size` voxels, rounded down or up."""
    return bool(abs(count * factor - size) < max(factor, Fraction(1)))


def covered_shape(array_zyx: Triple, factors: Fractions) -> Triple:
    """Shape of a volume that an array covers from its first to its last voxel."""
    return triple(max(math.floor(count * factor), 1) for count, factor in zip(array_zyx, factors, strict=True))


def describe_geometry(volume: Volume) -> str:
    """'(40, 72, 88) voxels of 4 x 4 x 4 nanometer from 0, 0, 0'."""
    if (geometry := volume.geometry) is None:
        return f"{volume.shape_zyx} voxels and no OME scale"
    units = ", ".join(dict.fromkeys(unit or "without a unit" for unit in geometry.units_zyx))
    scale, corner = ([f"{v:.6g}" for v in values] for values in (geometry.scale_zyx, geometry.translation_zyx))
    begins = f"from {', '.join(corner)}" if geometry.translated else "without a translation"
    return f"{volume.shape_zyx} voxels of {' x '.join(scale)} {units} {begins}"


def log_alignment(volume: Volume, array: Volume, what: str) -> AnyAlignment:
    """Call `align` and log its caveat, or that the array covers only part of the volume."""
    found = align(volume, array, what)
    partial = found.covered != ((0, 0, 0), volume.shape_zyx)
    if found.caveat or partial:
        doubtful = found.caveat and (partial or found.factors != ONES)
        level = logging.WARNING if doubtful else logging.INFO
        how = f" {found.caveat}" if found.caveat else ""
        drawn = "; patches come from the shared part" if partial else ""
        log.log(level, "Aligned %s %s with %s%s: %s%s", what, array.name, volume.name, how, found.describe(), drawn)
    return found


class _AlignmentError(Exception):
    """The reason why two grids cannot be aligned."""


def _transformed(volume: Volume, array: Volume, matrix: Floats, fixed: str) -> AnyAlignment:
    """Align by a transform between their levels 0, into the one of the two named `fixed`.  Raises _AlignmentError."""
    parts = PurePath(volume.source.display_address.removesuffix("?***")).parts
    if name_of(PurePath(fixed).name) in map(name_of, parts):  # else the array is, as in the data sets of villa
        matrix = np.linalg.inv(matrix)
    matrix = _level_matrix(array) @ matrix @ np.linalg.inv(_level_matrix(volume))
    if (here := volume.voxel_size_um) and (there := array.voxel_size_um):
        found, by_size = np.cbrt(abs(np.linalg.det(matrix))), np.cbrt(math.prod(here) / math.prod(there))
        if not 1 / _PLAUSIBLE < found / by_size < _PLAUSIBLE:
            raise _AlignmentError(
                f"a voxel of the volume is {found:.3g} times as long as its voxels by the transform, but {by_size:.3g} "
                f"times by the scales; fixed_volume ({fixed}) must name the volume if the transform leads into it"
            )
    factors, offsets = [], []
    for scale, shift, *sizes in zip(np.diag(matrix)[:3], matrix[:3, 3], volume.shape_zyx, array.shape_zyx, strict=True):
        if scale > 0 and (factor := _factor(1 / scale, *sizes)):
            factors.append(factor)
            offsets.append(_offset(factor, 0.5 - (shift + 0.5) / scale))
    if len(factors) == 3 and (abs(matrix - _matrix(factors, offsets)) @ [*volume.shape_zyx, 1] < _EQUAL).all():
        return Alignment(volume.shape_zyx, array.shape_zyx, triple(factors), triple(offsets))
    linear = (array.spec.interpolation or ("linear" if array.dtype.kind == "f" else "nearest")) == "linear"
    return AffineAlignment(volume.shape_zyx, array.shape_zyx, as_rows(matrix), linear, array.fill_value)


def _level_matrix(volume: Volume) -> Floats:
    """[4, 4] from voxels of a level 0 that begins at the origin to those of a level.  Raises _AlignmentError."""
    if volume.level is None:
        return np.eye(4)
    entry, path = volume.level.entry, volume.level.path
    first = space_of(entry, entry["datasets"][0], volume.array.ndim, volume.name).geometry(volume.axes.zyx)
    if problem := volume.contradictions.get(path):
        raise _AlignmentError(problem)
    if first is None or volume.geometry is None:
        if path != volume.level.paths[0]:
            raise _AlignmentError(f"the levels of {volume.name} have no scales, and a transform is that of level 0")
        return np.eye(4)
    origin = replace(first, translation_zyx=(0.0, 0.0, 0.0))
    steps = [origin.of(volume.geometry, axis) for axis in range(3)]
    return _matrix([ratio for ratio, _ in steps], [_offset(Fraction(ratio), shift) for ratio, shift in steps])


def _matrix(factors: Sequence[float | Fraction], offsets: Sequence[float | Fraction]) -> Floats:
    """[4, 4] from the centers of a volume's voxels to those of an array's, as an `Alignment` has them."""
    matrix, scales = np.eye(4), 1 / np.array(factors, np.float64)
    matrix[:3, :3] = np.diag(scales)
    matrix[:3, 3] = (0.5 - np.array(offsets, np.float64)) * scales - 0.5
    return matrix


def _aligned(volume: Volume, array: Volume) -> Alignment:
    """Align by metadata or by shape.  Raises _AlignmentError.

    Writers that do not know the scale write 1 without a unit.  Together with another such volume, or one without
    metadata, that locates a box that has a translation, but cannot tell a crop from a coarser level.
    """
    shapes = volume.shape_zyx, array.shape_zyx
    same, there, here = shapes[0] == shapes[1], volume.geometry or VOXELS, array.geometry or VOXELS
    translated, scaled = (there.translated, here.translated), (there.is_scaled, here.is_scaled)
    located = any(any(each.translation_zyx) for each in (there, here) if not each.is_scaled)
    if not any(scaled) and not located and not same and any(translated):
        raise _AlignmentError("both have voxels of size 1 without a unit and start at 0, but their shapes differ")
    bare = None in (volume.geometry, array.geometry)
    if (not any(scaled) and not located) or (scaled[0] != scaled[1] and (bare or (same and not located))):
        return _by_shape(*shapes)
    found = _measured(there, here, *shapes)
    if not same or (found.factors, found.offsets) != (ONES, ZEROS):  # else both decide alike, right or wrong
        for each in (volume, array):
            if each.level and (problem := each.contradictions.get(each.level.path)):
                raise _AlignmentError(problem)
    full = all(map(fits, *shapes, found.factors))
    if scaled[0] != scaled[1] and not (full and found.offsets == ZEROS):
        raise _AlignmentError("one has voxels of size 1 without a unit")
    if not full and volume.level and volume.source.address == array.source.address:
        raise _AlignmentError("levels of one pyramid cover the same region, but these scales and shapes do not")
    if full and found.offsets != ZEROS and translated[0] != translated[1]:
        raise _AlignmentError("they have the same extent, but only one has a translation")
    caveat = None if full or translated[1] else "as if both started at the same voxel, because it has no translation"
    return replace(found, caveat=caveat)


def _measured(there: Geometry, here: Geometry, volume_zyx: Triple, array_zyx: Triple) -> Alignment:
    """Align by scale and translation.  Raises _AlignmentError."""
    factors, offsets = [], []
    for axis, units in enumerate(zip(there.units_zyx, here.units_zyx, strict=True)):
        size, count = volume_zyx[axis], array_zyx[axis]
        first, second = (MICROMETERS.get(unit or "") for unit in units)
        if None not in units and first is second is None and units[0] != units[1]:
            raise _AlignmentError(f"their units {units[0]} and {units[1]} cannot be compared")
        ratio, shift = there.of(here, axis)
        factor = _factor(ratio, size, count)
        if factor is None:
            raise _AlignmentError(f"the factor {ratio:.6g} along {'zyx'[axis]} is not a ratio of small integers")
        offset = _offset(factor, shift)
        if (first is None) != (second is None) and not -factor <= offset <= size - factor * (count - 1):
            raise _AlignmentError(f"only one has a unit ({units[0] or units[1]}), and in that unit they do not fit")
        factors.append(factor)
        offsets.append(offset)
    return Alignment(volume_zyx, array_zyx, triple(factors), triple(offsets))


def _factor(ratio: float, size: int, count: int) -> Fraction | None:
    """The ratio of two scales as a fraction; None if it is not a simple one."""
    if ratio < 1:
        inverse = _factor(1 / ratio, count, size)
        return inverse and 1 / inverse
    for denominator in _DENOMINATORS:
        simple = Fraction(round(ratio * denominator), denominator)
        if abs(ratio - simple) * min(count, size / ratio) <= 0.5:
            return simple
    # Some writers compute scales from the shapes of two levels.
    return Fraction(size, count) if abs(ratio * count - size) <= 0.5 else None


def _offset(factor: Fraction, shift: float) -> Fraction:
    """Start of an array in voxels of the volume, rounded to whole voxels of the finer grid.

    `shift` is the difference of the translations in voxels of the volume.  Some writers translate corners, others the
    centers of the first voxels; the two differ by half the difference in voxel size.  The interpretation with the
    smaller remainder wins; if they are equal, corners win, unless the centers coincide.
    """
    if factor < 1:
        return -_offset(1 / factor, -shift / float(factor)) * factor
    centered = shift - (float(factor) - 1) / 2
    # nearest integers; ties go toward 0
    corner, center = (int(math.copysign(math.ceil(abs(v) - 0.5), v)) for v in (shift, centered))
    gain = abs(shift - corner) - abs(centered - center)
    return Fraction(center if gain > _EQUAL or (gain > -_EQUAL and center == 0) else corner)


def _by_shape(volume_zyx: Triple, array_zyx: Triple) -> Alignment:
    """Align from end to end, by one integer factor along all axes whose sizes differ.  Raises _AlignmentError.

    Sizes are ambiguous: any factor from 21 to 33 reduces 100 voxels to 4.  Powers of two are preferred, since pyramids
    halve.
    """
    sizes = list(zip(volume_zyx, array_zyx, strict=True))
    differing = [(size, count) for size, count in sizes if size != count]
    most = min((size // max(count - 1, 1) + 1 for size, count in differing), default=1)
    common = {f for f in range(1, most + 1) if all(abs(count * f - size) < f for size, count in differing)}
    if not common:
        raise _AlignmentError("its shape is not the volume's shape divided by an integer")
    if len(common) > 1 and not common & _POWERS:
        raise _AlignmentError(f"its shape fits any of the factors {', '.join(map(str, sorted(common)))}")
    factor = Fraction(min(common & _POWERS or common))
    factors = triple(Fraction(1) if size == count else factor for size, count in sizes)
    return Alignment(volume_zyx, array_zyx, factors, caveat="by shape alone, because at least one has no scale")
