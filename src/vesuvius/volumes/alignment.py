"""How an array (a condition, labels, a mask, a coarser level) lies in a volume: the one place where two grids meet.

Where both have an OME scale, scale and translation decide; else the shapes do, which say less, and `caveat` says so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import DataError
from vesuvius.volumes.box import Box, box_along, format_box, intersects, shape_of, triple
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.geometry import MICROMETERS, VOXELS, Geometry
from vesuvius.volumes.volume import Volume

log = logging.getLogger(__name__)

Fractions = tuple[Fraction, Fraction, Fraction]
ONES: Fractions = (Fraction(1), Fraction(1), Fraction(1))
ZEROS: Fractions = (Fraction(0), Fraction(0), Fraction(0))

_POWERS = {2**n for n in range(16)}
_EQUAL = 1e-3  # voxels: rests of two readings of a translation that differ by less are the same
# Scales are rounded by whoever writes them: a factor is the first ratio of whole numbers with a denominator of at most
# this that moves no voxel by more than half of one.
_DENOMINATORS = range(1, 9)


@dataclass(frozen=True)
class Alignment:
    """An array in the voxels of a volume.  Pure.

    Along each axis voxel j of the array covers offset + factor * j to offset + factor * (j + 1).  A voxel of the volume
    is shown the one that holds its centre; of two that meet there the lower one.
    """

    volume_zyx: Triple
    array_zyx: Triple
    factors: Fractions = ONES  # voxels of the volume per voxel of the array; below 1 where the array is finer
    offsets: Fractions = ZEROS  # where the array begins, in voxels of the volume
    caveat: str | None = field(default=None, compare=False)  # why the metadata alone do not say so

    @property
    def covered(self) -> Box:
        """The part of the volume where both exist; its stop is not above its start where that is nowhere.

        A rest that is shorter than a voxel of the array, as pyramids that round down leave it, belongs to the last one.
        """
        ends = []
        for axis, (size, count) in enumerate(zip(self.volume_zyx, self.array_zyx, strict=True)):
            start, stop = max(self._first(axis, 0), 0), min(self._first(axis, count), size)
            ends.append((start, size if start < stop and size - stop < self.factors[axis] else stop))
        return box_along(ends)

    def array_box(self, box: Box) -> Box:
        """The array's voxels that a covered box of the volume is shown."""
        return box_along((int(row[0]), int(row[-1]) + 1) for row in self._rows(box))

    def volume_box(self, box: Box) -> Box:
        """All voxels of the volume that a box of the array is shown in; at least one."""
        ends = []
        for axis, (lo, hi, first, last) in enumerate(zip(*box, *self.covered, strict=True)):
            start = min(max(self._first(axis, lo), first), last - 1)
            stop = last if hi == self.array_zyx[axis] else min(self._first(axis, hi), last)
            ends.append((start, max(stop, start + 1)))
        return box_along(ends)

    def read(
        self, box: Box, read: Callable[[Box, NDArray[Any] | None], NDArray[Any]], out: NDArray[Any] | None = None
    ) -> NDArray[Any]:
        """A box of the volume as the array shows it: the array's dtype, the shape of the box.

        Args:
            read: reads voxels of the array, e.g. `Volume.read`.
            out: as in `Volume.read`.

        Raises:
            UnreadableChunkError: with boxes in voxels of the volume.
        """
        inner, plain = self.array_box(box), self.factors == ONES
        try:
            voxels = read(inner, out if plain else None)
        except UnreadableChunkError as error:
            damaged = self.volume_box(error.box)
            raise UnreadableChunkError(error.volume, box, error.chunk, damaged, error.cause) from error
        if plain:
            return voxels
        out = np.empty(shape_of(box), voxels.dtype) if out is None else out
        z, y, x = (row - start for row, start in zip(self._rows(box), inner[0], strict=True))
        for number, plane in enumerate(voxels):  # plane by plane, so that what is repeated stays in the cache
            lo, hi = np.searchsorted(z, (number, number + 1))
            if lo < hi:
                out[lo:hi] = plane.take(x, axis=1).take(y, axis=0)
        return out

    def indices(self, axis: int, lo: int, hi: int) -> NDArray[np.int64]:
        """The array's voxel that each of lo ... hi - 1 is shown.  In whole numbers: no centre is rounded."""
        (p, q), (a, b) = self.factors[axis].as_integer_ratio(), self.offsets[axis].as_integer_ratio()
        found: NDArray[np.int64] = (((2 * np.arange(lo, hi) + 1) * b - 2 * a) * q - 1) // (2 * b * p)
        return found.clip(0, self.array_zyx[axis] - 1)

    def shown(self, axis: int) -> tuple[int, int]:
        """First and stop of the places that the array's voxels are shown at, the last one as a whole: it may stick out
        of the volume."""
        size = self.volume_zyx[axis]
        return max(self._first(axis, 0), 0), self._first(axis, int(self.indices(axis, size - 1, size)[0]) + 1)

    def describe(self) -> str:
        """'each voxel on 2 x 2 x 2, the first at z 10, y 0, x 0; both exist in z 10:30, y 0:40, x 0:40'."""
        factors = " x ".join(map(str, self.factors))
        corner = ", ".join(f"{axis} {offset}" for axis, offset in zip("zyx", self.offsets, strict=True))
        return f"each voxel on {factors}, the first at {corner}; both exist in {format_box(self.covered)}"

    def _rows(self, box: Box) -> list[NDArray[np.int64]]:
        return [self.indices(axis, lo, hi) for axis, (lo, hi) in enumerate(zip(*box, strict=True))]

    def _first(self, axis: int, index: int) -> int:
        """The first voxel of the volume that is shown this voxel of the array, or a later one."""
        return math.floor(self.offsets[axis] + self.factors[axis] * index + Fraction(1, 2))


def align(volume: Volume, array: Volume, what: str) -> Alignment:
    """How an array lies in a volume, by their metadata or else their shapes.

    Args:
        what: the array's part in the message: "the condition".

    Raises:
        DataError: neither says it, they contradict each other, or the two share no voxel.
    """
    if array is volume:
        return Alignment(volume.shape_zyx, array.shape_zyx)
    try:
        found = _aligned(volume, array)
        if not intersects(found.covered, ((0, 0, 0), volume.shape_zyx)):
            raise _MisfitError("they share no voxel")
        if shape_of(found.array_box(found.covered)) == (1, 1, 1) != array.shape_zyx:
            raise _MisfitError("all of the volume would lie in one voxel of it")
    except _MisfitError as error:
        raise DataError(
            f"{what} {array.name} does not lie in the volume {volume.name}: {error}; it has "
            f"{describe_geometry(array)}, the volume {describe_geometry(volume)}; correct scale, unit and translation "
            "in the OME metadata (a path that points to the array of a level is opened without them, and placed by "
            "its shape), or name another level"
        ) from error
    return found


def fits(size: int, count: int, factor: Fraction) -> bool:
    """Whether so many voxels of an array are what a pyramid makes of so many of a volume, rounded down or up."""
    return bool(abs(count * factor - size) < max(factor, Fraction(1)))


def covered_shape(array_zyx: Triple, factors: Fractions) -> Triple:
    """Voxels of a volume that begins with an array and ends with it."""
    return triple(max(math.floor(count * factor), 1) for count, factor in zip(array_zyx, factors, strict=True))


def describe_geometry(volume: Volume) -> str:
    """'(40, 72, 88) voxels of 4 x 4 x 4 nanometer from 0, 0, 0'."""
    if (geometry := volume.geometry) is None:
        return f"{volume.shape_zyx} voxels and no OME scale"
    units = ", ".join(dict.fromkeys(unit or "of no unit" for unit in geometry.units_zyx))
    scale, corner = ([f"{v:.6g}" for v in values] for values in (geometry.scale_zyx, geometry.translation_zyx))
    begins = f"from {', '.join(corner)}" if geometry.translated else "without a translation"
    return f"{volume.shape_zyx} voxels of {' x '.join(scale)} {units} {begins}"


def log_alignment(volume: Volume, array: Volume, what: str) -> Alignment:
    """As `align`; logs what the metadata do not say, and where only a part of the volume is covered."""
    found = align(volume, array, what)
    partial = found.covered != ((0, 0, 0), volume.shape_zyx)
    if found.caveat or partial:
        doubtful = found.caveat and (partial or found.factors != ONES)
        level = logging.WARNING if doubtful else logging.INFO
        how = f" {found.caveat}" if found.caveat else ""
        drawn = ", and patches are drawn there" if partial else ""
        log.log(level, "%s %s lies in %s%s: %s%s", what, array.name, volume.name, how, found.describe(), drawn)
    return found


class _MisfitError(Exception):
    """Why two grids do not go together."""


def _aligned(volume: Volume, array: Volume) -> Alignment:
    """Decides whether metadata or shapes are believed.  Raises _MisfitError.

    Writers that know no scale say 1 without a unit.  Next to another such volume, or to one without metadata, that
    places a box whose translation is given; it does not tell a crop from a coarser level.
    """
    shapes, kinds = (volume.shape_zyx, array.shape_zyx), {_kind(volume), _kind(array)}
    same, there, here = shapes[0] == shapes[1], volume.geometry or VOXELS, array.geometry or VOXELS
    translated = there.translated, here.translated
    if kinds <= {"none", "default"} and not same and any(translated):
        raise _MisfitError("both have voxels of size 1 without a unit and begin at 0, but not one shape")
    if kinds <= {"none", "default"} or kinds == {"none", "scale"} or (same and kinds == {"default", "scale"}):
        return _by_shape(*shapes)
    found = _measured(there, here, *shapes)
    whole = all(map(fits, *shapes, found.factors))
    if "scale" in kinds and len(kinds) == 2 and not (whole and found.offsets == ZEROS):
        raise _MisfitError("one has voxels of size 1 without a unit")
    if not whole and volume.level and volume.source.address == array.source.address:
        raise _MisfitError("levels of one pyramid cover the same, and by their scales and shapes these do not")
    if whole and found.offsets != ZEROS and translated[0] != translated[1]:
        raise _MisfitError("their shapes cover each other, and only one has a translation")
    caveat = None if whole or translated[1] else "from its first voxel on, as it has no translation"
    return replace(found, caveat=caveat)


def _kind(volume: Volume) -> str:
    """What is known of a volume's place: 'none', a writer's 'default', a place in 'voxels', or a 'scale'."""
    if (geometry := volume.geometry) is None:
        return "none"
    if set(geometry.scale_zyx) != {1.0} or any(unit in MICROMETERS for unit in geometry.units_zyx):
        return "scale"
    return "voxels" if any(geometry.translation_zyx) else "default"


def _measured(there: Geometry, here: Geometry, volume_zyx: Triple, array_zyx: Triple) -> Alignment:
    """By scale and translation.  Raises _MisfitError."""
    factors, offsets = [], []
    for axis, units in enumerate(zip(there.units_zyx, here.units_zyx, strict=True)):
        size, count = volume_zyx[axis], array_zyx[axis]
        first, second = (MICROMETERS.get(unit or "") for unit in units)
        one, two = (1.0, 1.0) if first is None or second is None else (first, second)
        if None not in units and first is second is None and units[0] != units[1]:
            raise _MisfitError(f"how their units {units[0]} and {units[1]} compare is not known")
        voxel = there.scale_zyx[axis] * one
        ratio = here.scale_zyx[axis] * two / voxel
        factor = _factor(ratio, size, count)
        if factor is None:
            raise _MisfitError(f"a factor of {ratio:.6g} along {'zyx'[axis]} is no ratio of small whole numbers")
        offset = _offset(factor, (here.translation_zyx[axis] * two - there.translation_zyx[axis] * one) / voxel)
        if (first is None) != (second is None) and not -factor <= offset <= size - factor * (count - 1):
            raise _MisfitError(f"only one has a unit, {units[0] or units[1]}; in the same one they do not fit")
        factors.append(factor)
        offsets.append(offset)
    return Alignment(volume_zyx, array_zyx, triple(factors), triple(offsets))


def _factor(ratio: float, size: int, count: int) -> Fraction | None:
    """The ratio of two scales as a fraction; None where it is no simple one."""
    if ratio < 1:
        inverse = _factor(1 / ratio, count, size)
        return inverse and 1 / inverse
    for denominator in _DENOMINATORS:
        simple = Fraction(round(ratio * denominator), denominator)
        if abs(ratio - simple) * min(count, size / ratio) <= 0.5:
            return simple
    # Some writers divide the shapes of two levels.
    return Fraction(size, count) if abs(ratio * count - size) <= 0.5 else None


def _offset(factor: Fraction, shift: float) -> Fraction:
    """Where an array begins, in voxels of the volume, as a whole number of voxels of the finer of the two.

    `shift`, the difference of the translations in voxels of the volume, is that of corners or, by other writers, of the
    centres of first voxels: these differ by half the difference of the voxels.  The reading that leaves the smaller
    rest is taken; if both leave the same, that of corners, unless by centres both begin at one place.
    """
    if factor < 1:
        return -_offset(1 / factor, -shift / float(factor)) * factor
    centred = shift - (float(factor) - 1) / 2
    # the nearest whole numbers; of two the one nearer to 0
    corner, centre = (int(math.copysign(math.ceil(abs(v) - 0.5), v)) for v in (shift, centred))
    gain = abs(shift - corner) - abs(centred - centre)
    return Fraction(centre if gain > _EQUAL or (gain > -_EQUAL and centre == 0) else corner)


def _by_shape(volume_zyx: Triple, array_zyx: Triple) -> Alignment:
    """Both begin and end together, by one whole factor along all axes whose sizes differ.  Raises _MisfitError.

    Sizes are ambiguous: 100 voxels become 4 by any factor from 21 to 33.  A power of two is preferred, as pyramids
    halve.
    """
    sizes = list(zip(volume_zyx, array_zyx, strict=True))
    differing = [(size, count) for size, count in sizes if size != count]
    most = min((size // max(count - 1, 1) + 1 for size, count in differing), default=1)
    common = {f for f in range(1, most + 1) if all(abs(count * f - size) < f for size, count in differing)}
    if not common:
        raise _MisfitError("its shape is not that of the volume divided by one whole factor")
    if len(common) > 1 and not common & _POWERS:
        raise _MisfitError(f"its shape is that of the volume divided by any of {', '.join(map(str, sorted(common)))}")
    factor = Fraction(min(common & _POWERS or common))
    factors = triple(Fraction(1) if size == count else factor for size, count in sizes)
    return Alignment(volume_zyx, array_zyx, factors, caveat="by shape alone, as not both of them give a scale")
