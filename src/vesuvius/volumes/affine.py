"""Reads an array that an affine transform places relative to a volume: rotated, sheared, or scaled by any factor.

Coordinates are those of voxel centers: voxel i along an axis is at i.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import StoreConfig, Triple
from vesuvius.errors import DataError
from vesuvius.volumes.box import Box, box_along, format_box, intersects, shape_of, triple
from vesuvius.volumes.errors import FetchError, damage_seen
from vesuvius.volumes.format.metadata import parse_object
from vesuvius.volumes.store.objects import display_address
from vesuvius.volumes.store.source import open_object

Floats = NDArray[np.floating[Any]]
Rows = tuple[tuple[float, ...], ...]
"""An affine matrix [3, 4] for a voxel (z, y, x, 1)."""
ReadBox = Callable[[Box, NDArray[Any] | None], NDArray[Any]]
"""Reads a box of an array, as `Volume.read`, into an array if one is given."""

_EDGE = 1e-6  # voxels: a center this close to a boundary is on it, and in the lower voxel
_CONDITION_MAX = 1e6
_READ_VOXELS_MAX = 2**26  # of the array at once; a box that needs more is read in parts
_BITS = 32  # coordinates are fixed-point integers, so that a voxel does not depend on the box it is read with
_HALF = round((0.5 - _EDGE) * 2**_BITS)


@dataclass(frozen=True)
class AffineAlignment:
    """The position of an array relative to a volume, as an `Alignment`; the array is resampled on the volume's grid.

    A voxel of the volume has the value of the array voxel that contains its center, on a boundary of the lower one; or,
    if `linear`, the value interpolated there.
    """

    volume_zyx: Triple
    array_zyx: Triple
    rows: Rows  # from voxels of the volume to voxels of the array
    linear: bool = False
    fill: float = 0.0  # value outside of the array

    # of the resampled array
    caveat: ClassVar[None] = None
    factors: ClassVar[tuple[Fraction, Fraction, Fraction]] = (Fraction(1), Fraction(1), Fraction(1))
    offsets: ClassVar[tuple[Fraction, Fraction, Fraction]] = (Fraction(0), Fraction(0), Fraction(0))

    @property
    def transform(self) -> tuple[Rows, bool]:
        return self.rows, self.linear

    @property
    def covered(self) -> Box:
        """A large box of the volume that the array covers entirely; empty if there is none."""
        return _inner_box(self.rows, ((0, 0, 0), self.volume_zyx), ((0, 0, 0), self.array_zyx))

    def array_box(self, box: Box) -> Box:
        """The array voxels that are read for a box of the volume; at least one."""
        (low, high), most = _reach(self.rows, box), np.array(self.array_zyx) - 1
        below, above = (0.0, 1.0) if self.linear else (0.5, 0.5)
        first = np.floor(low + below - 2 * _EDGE).clip(0, most).astype(int)
        last = np.floor(high + above + _EDGE).clip(first, most).astype(int)
        return box_along(zip(first.tolist(), (last + 1).tolist(), strict=True))

    def volume_box(self, box: Box) -> Box:
        """A box around the covered voxels that map into a box of the array; at least one."""
        inverse = np.linalg.inv([*self.rows, (0, 0, 0, 1)])
        low, high = _reach(as_rows(inverse), (triple(lo - 1 for lo in box[0]), triple(hi + 1 for hi in box[1])))
        start, stop = np.array(self.covered)
        first = np.floor(low).clip(start, stop - 1).astype(int)
        last = np.ceil(high).clip(first, stop - 1).astype(int)
        return box_along(zip(first.tolist(), (last + 1).tolist(), strict=True))

    def read(self, box: Box, read: ReadBox, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Read the array on the grid of the volume; arguments and errors as `Alignment.read`.

        The box of an UnreadableChunkError is inside the damaged voxels, and may be empty: regions that touch it are not
        read again, and of the others around the chunk, some readers would read those that others replace.
        """
        for part in self._parts(box):
            inner = self.array_box(part)
            with damage_seen(box, partial(_inner_box, self.rows, self.covered)):
                voxels = read(inner, None)
            out = np.empty(shape_of(box), voxels.dtype) if out is None else out
            self._resample(voxels, inner[0], part, out[part[0][0] - box[0][0] : part[1][0] - box[0][0]])
        assert out is not None
        return out

    def coarsened(self) -> tuple[Self, tuple[Fraction, Fraction, Fraction]]:
        """The same with voxels of the volume about as coarse as those of the array, and their edges in voxels."""
        matrix = np.array(self.rows)
        steps = np.maximum(1 // np.linalg.norm(matrix[:, :3], axis=0), 1)
        matrix[:, 3] += matrix[:, :3] @ (steps - 1) / 2
        matrix[:, :3] *= steps
        shape = triple(-(-size // int(step)) for size, step in zip(self.volume_zyx, steps, strict=True))
        return replace(self, volume_zyx=shape, rows=as_rows(matrix)), triple(map(Fraction, steps.tolist()))

    def describe(self) -> str:
        """'by a transform, voxel (0, 0, 0) of the volume is its voxel (3, -1.5, 0), ...; they share ... (80%)'."""
        corner = ", ".join(f"{row[3]:.6g}" for row in self.rows)
        share = math.prod(shape_of(self.covered)) / math.prod(self.volume_zyx)
        return (
            f"by a transform, voxel (0, 0, 0) of the volume is its voxel ({corner}), resampled "
            f"{'linearly' if self.linear else 'to the nearest'}; they share {format_box(self.covered)} ({share:.0%})"
        )

    def _parts(self, box: Box) -> Iterator[Box]:
        """Cut a box across z, so that each part needs a bounded box of the array."""
        (z, *start), (stop, *end) = box
        while z < stop:
            part = (z, start[0], start[1]), (stop, end[0], end[1])
            while part[1][0] - z > 1 and math.prod(shape_of(self.array_box(part))) > _READ_VOXELS_MAX:
                part = part[0], ((z + part[1][0]) // 2, end[0], end[1])
            yield part
            z = part[1][0]

    def _resample(self, voxels: NDArray[Any], start_zyx: Triple, part: Box, out: NDArray[Any]) -> None:
        """Resample a box of the array, from `start_zyx`, into a part of the volume; by planes, which caches hold."""
        terms = []
        for row, start in zip(np.array(self.rows), start_zyx, strict=True):
            z, y, x = (_fixed(row[axis] * np.arange(part[0][axis], part[1][axis])) for axis in range(3))
            terms.append((z + _fixed(row[3:]) - (start << _BITS) + _HALF, y[:, None], x))
        bounds = [(-lo << _BITS, size - lo << _BITS) for lo, size in zip(start_zyx, self.array_zyx, strict=True)]
        inside, shape = _inner_box(self.rows, part, ((0, 0, 0), self.array_zyx)) == part, voxels.shape
        if self.linear:
            voxels = np.pad(voxels, 1, "edge").astype(np.result_type(voxels.dtype, np.float32))
        for number, plane in enumerate(out):
            places = found = [(y + z[number]) + x for z, y, x in terms]
            if not inside:
                found = [place.clip(0, (size << _BITS) - 1) for place, size in zip(places, shape, strict=True)]
            values = _linear(voxels, found) if self.linear else _nearest(voxels, found)
            plane[...] = np.rint(values) if self.linear and out.dtype.kind != "f" else values
            if not inside:
                for place, (low, high) in zip(places, bounds, strict=True):
                    plane[(place < low) | (place >= high)] = self.fill


def _fixed(coordinates: Floats) -> NDArray[np.int64]:
    found: NDArray[np.int64] = np.rint(coordinates * 2**_BITS).astype(np.int64)
    return found


def _nearest(voxels: NDArray[Any], places: Sequence[NDArray[np.int64]]) -> NDArray[Any]:
    """The voxels at fixed-point coordinates, which are half a voxel too high."""
    z, y, x = (place >> _BITS for place in places)
    found: NDArray[Any] = voxels.reshape(-1).take((z * voxels.shape[1] + y) * voxels.shape[2] + x)
    return found


def _linear(voxels: NDArray[Any], places: Sequence[NDArray[np.int64]]) -> NDArray[Any]:
    """Trilinear interpolation at such coordinates, of voxels with a margin of one."""
    flat, weights, corners = np.zeros_like(places[0]), [], [0]
    for place, stride in zip(places, (voxels.shape[1] * voxels.shape[2], voxels.shape[2], 1), strict=True):
        place = place + (2**_BITS - _HALF)
        flat += (place >> _BITS) * stride
        weights.append((place & 2**_BITS - 1).astype(voxels.dtype) * voxels.dtype.type(2.0**-_BITS))
        corners = [corner + step for corner in corners for step in (0, stride)]
    values = [voxels.reshape(-1)[corner:].take(flat) for corner in corners]
    for weight in reversed(weights):
        values = [low + (high - low) * weight for low, high in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def as_rows(matrix: Floats) -> Rows:
    return tuple(map(tuple, matrix[:3].tolist()))


def _reach(rows: Rows, box: Box) -> tuple[Floats, Floats]:
    """The lowest and highest coordinates in the array of a box of the volume."""
    matrix, (start, stop) = np.array(rows), np.array(box)
    ends = matrix[:, :3] * start, matrix[:, :3] * (stop - 1)
    return np.minimum(*ends).sum(1) + matrix[:, 3], np.maximum(*ends).sum(1) + matrix[:, 3]


@lru_cache(maxsize=256)
def _inner_box(rows: Rows, box: Box, within: Box) -> Box:
    """A large box of voxels, in a box of the volume, that map into a box of the array; empty if none do.

    What lies beyond a face of the array's box is cut off, in those directions that leave the largest box.
    """
    lo, hi = np.array(box, np.float64)
    for row, first, stop in zip(np.array(rows), *within, strict=True):
        for sign, limit in ((1, stop - 0.5 + _EDGE / 2), (-1, 0.5 - first - 2 * _EDGE)):
            side = sign * row[:3]
            excess = (side * np.where(side > 0, hi - 1, lo)).sum() + sign * row[3] - limit
            if excess > 0:
                spans = np.abs(side) * (hi - lo)
                ordered, left = np.sort(spans), spans.sum() - excess
                level = max((left - ordered[:n].sum()) / (3 - n) for n in range(3))  # sum(min(spans, level)) is left
                cut = (spans - np.minimum(spans, level)) / np.where(side == 0, 1, np.abs(side))
                lo, hi = lo + cut * (side < 0), hi - cut * (side > 0)
    found = triple(np.ceil(lo).astype(int).tolist()), triple(np.floor(hi).astype(int).tolist())
    return found if intersects(found, box) else (box[0], box[0])


def read_transform(address: str, config: StoreConfig) -> tuple[Floats, str]:
    """Read a `transform.json` of villa: its matrix [4, 4], from voxels (z, y, x) of the level 0 of one volume to those
    of another, and the name of the latter.

    Raises DataError: there is none, or its matrix cannot be used.
    """
    source, key = open_object(address, config)
    with closing(source):
        try:
            data = source.get(key, cached=False)
        except FetchError as error:
            raise DataError(f"Cannot read the transform {display_address(address)}: {error}; restore it") from error
        if data is None:
            raise DataError(f"The transform {display_address(address)} does not exist; correct data.volumes")
        document = parse_object(source, key, data)
    matrix = np.eye(4)
    try:
        matrix[:3] = [[float(value) for value in row] for row in document["transformation_matrix"]]
        usable = np.isfinite(matrix).all() and np.linalg.cond(matrix[:3, :3]) < _CONDITION_MAX
    except (KeyError, TypeError, ValueError):
        usable = False
    if not usable or document.get("schema_version", "1.0.0") != "1.0.0":
        raise DataError(
            f"The transform {display_address(address)} is not usable: it needs schema_version 1.0.0 and a "
            f"transformation_matrix of 3 x 4 finite numbers that can be inverted; register the volumes anew"
        )
    swapped = matrix[[2, 1, 0, 3]][:, [2, 1, 0, 3]]  # from x, y, z
    return swapped, str(document.get("fixed_volume", ""))
