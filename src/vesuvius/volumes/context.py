"""The surroundings of a patch in a coarser array: a window of as many voxels as the patch, around its center.  Pure."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, ConditionConfig, Triple
from vesuvius.errors import DataError
from vesuvius.runlog.units import format_sizes
from vesuvius.volumes.affine import ReadBox
from vesuvius.volumes.alignment import Alignment, AnyAlignment
from vesuvius.volumes.box import Box, box_along, box_at, intersection, triple
from vesuvius.volumes.errors import damage_seen


@dataclass(frozen=True)
class ContextAlignment(Alignment):
    """An alignment that reads windows instead of voxels of the volume.

    The window of a patch has as many array voxels as the patch has voxels, so it is `factors` times as long.  Its
    center is within half an array voxel of the patch's.  Beyond the array the nearest voxel is repeated.
    """

    patch_zyx: Triple = (1, 1, 1)

    def window(self, start_zyx: Triple) -> Box:
        """The window, in array voxels, of the patch at this start; it may reach outside the array."""
        return box_at(triple(self._start(axis, start) for axis, start in enumerate(start_zyx)), self.patch_zyx)

    def cover(self, box: Box) -> Box:
        """A box around the windows of all patches that touch a box of the volume."""
        return box_along(
            (self._start(axis, lo - size + 1), self._start(axis, hi - 1) + size)
            for axis, (lo, hi, size) in enumerate(zip(*box, self.patch_zyx, strict=True))
        )

    def cover_voxels_max(self, shape_zyx: Triple) -> int:
        """Largest number of voxels in the `cover` of a box of this shape."""
        ends = zip(shape_zyx, self.patch_zyx, self.factors, strict=True)
        return math.prod(math.ceil((size + patch - 2) / factor) + patch for size, patch, factor in ends)

    def rows(
        self, start_zyx: Triple, flip_zyx: tuple[bool, bool, bool] = (False,) * 3, num_rot90: int = 0
    ) -> list[NDArray[np.int64]]:
        """The window voxel of each voxel of a patch, along z, y and x, after the symmetries of an augmentation."""
        ends = zip(start_zyx, self.window(start_zyx)[0], self.patch_zyx, flip_zyx, strict=True)
        found = []
        for axis, (start, first, size, flip) in enumerate(ends):
            row = self.indices(axis, start, start + size) - first
            found.append(size - 1 - row[::-1] if flip else row)
        for _ in range(num_rot90):  # of the y-x plane, as `torch.rot90`
            found[1:] = self.patch_zyx[2] - 1 - found[2][::-1], found[1]
        return found

    def array_box(self, box: Box) -> Box:
        """The array voxels in the windows of all patches that touch a box; at least one."""
        return box_along((int(row[0]), int(row[-1]) + 1) for row in self._clipped(self.cover(box)))

    def volume_box(self, box: Box) -> Box:
        """The voxels of all patches whose windows touch a box of the array."""
        ends = []
        for factor, offset, size, lo, hi in zip(self.factors, self.offsets, self.patch_zyx, *box, strict=True):
            middle, half = Fraction(size - 1, 2), Fraction(size, 2)
            first = math.ceil((lo - middle) * factor + offset - half)
            ends.append((first, math.ceil((hi + middle) * factor + offset - half) - 1 + size))
        return intersection(box_along(ends), ((0, 0, 0), self.volume_zyx))

    def read(self, box: Box, read: ReadBox, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Read the voxels of `cover(box)`; arguments and errors as in `Alignment.read`."""
        with damage_seen(box, self.volume_box):
            return self.read_array(self.cover(box), read, out)

    def read_array(self, box: Box, read: ReadBox, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Read a box of the array, which may reach outside: there the nearest voxel is repeated."""
        rows = self._clipped(box)
        inner = box_along((int(row[0]), int(row[-1]) + 1) for row in rows)
        if inner == box:
            return read(box, out)
        voxels = read(inner, None)[np.ix_(*(row - row[0] for row in rows))]
        if out is None:
            return voxels
        out[...] = voxels
        return out

    def _clipped(self, box: Box) -> list[NDArray[np.int64]]:
        return [np.arange(lo, hi).clip(0, size - 1) for lo, hi, size in zip(*box, self.array_zyx, strict=True)]

    def _start(self, axis: int, start: int) -> int:
        """Start of the window of a patch along an axis, in array voxels."""
        size = Fraction(self.patch_zyx[axis])
        return math.floor((start + size / 2 - self.offsets[axis]) / self.factors[axis] - (size - 1) / 2)


def with_context(found: AnyAlignment, spec: ArrayConfig, patch_zyx: Triple) -> AnyAlignment:
    """Return the alignment of a condition, with context if it has one.  Raises DataError: it has another factor."""
    if not isinstance(spec, ConditionConfig) or spec.context is None:
        return found
    if found.factors != (Fraction(spec.context),) * 3 or not isinstance(found, Alignment):
        raise DataError(
            f"The context {spec.context} of the condition {spec.path} does not fit: one of its voxels is "
            f"{format_sizes(found.factors)} voxels of the volume; choose a level that is {spec.context} times coarser "
            "along each axis, or change data.volumes[].condition.context"
        )
    return ContextAlignment(found.volume_zyx, found.array_zyx, found.factors, found.offsets, found.caveat, patch_zyx)
