"""Whether tile faces show in a volume: differences of neighbouring voxels across them, against all others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.volumes.box import Box, chunk_box, grid_shape, triple

_BLOCK = 256
_MOST_BLOCKS = 256

ReadBox = Callable[[Box], NDArray[Any]]


@dataclass(frozen=True)
class Seam:
    """The statistic of one axis."""

    axis: str  # z, y or x
    value: float  # mean squared difference across faces of tiles over that across other planes; 1 = faces do not show
    # the least and the most of the same statistic with all faces shifted by 1, 2, 3, ... voxels.
    elsewhere: tuple[float, float]
    faces: int  # planes in `value`

    @property
    def shows(self) -> bool:
        """Whether faces differ from planes by more than these differ from each other."""
        return not self.elsewhere[0] <= self.value <= self.elsewhere[1]


def face_planes(starts: Sequence[int], patch: int) -> tuple[int, ...]:
    """The planes in front of which a tile begins, or after which one ends; the ends of the volume are none.  Pure."""
    size = max(starts) + patch
    return tuple(sorted({plane for start in starts for plane in (start, start + patch)} - {0, size}))


def plane_differences(read: ReadBox, shape_zyx: Triple) -> list[NDArray[np.float64]]:
    """Along each axis, the mean squared difference of voxels i - 1 and i, for i = 1, 2, ...; entry 0 is NaN.

    Reads blocks of 256 voxels one after another; of a volume of more than 256 blocks, so many at random.
    """
    sums, counts = ([np.zeros(size) for size in shape_zyx] for _ in range(2))
    grid = grid_shape(shape_zyx, (_BLOCK,) * 3)
    indices = list(itertools.product(*map(range, grid)))
    for number in sorted(np.random.default_rng(0).permutation(len(indices))[:_MOST_BLOCKS].tolist()):
        start, stop = chunk_box(triple(indices[number]), (_BLOCK,) * 3, shape_zyx)
        before = triple(max(0, lo - 1) for lo in start)  # the plane before is needed, too
        voxels = read((before, stop)).astype(np.float32)
        for axis, low in enumerate(before):
            own = tuple(slice(None) if a == axis else slice(start[a] - before[a], None) for a in range(3))
            squares = np.diff(voxels[own], axis=axis) ** 2
            planes = slice(low + 1, stop[axis])
            others = tuple(other for other in range(3) if other != axis)
            sums[axis][planes] += squares.sum(others, dtype=np.float64)
            counts[axis][planes] += squares.size / squares.shape[axis]
    with np.errstate(invalid="ignore"):
        return [total / count for total, count in zip(sums, counts, strict=True)]


def seam_statistics(differences: Sequence[NDArray[np.float64]], faces: Sequence[Sequence[int]]) -> list[Seam]:
    """The statistic along each axis that has faces.  Pure.

    Args:
        differences: from `plane_differences`.
        faces: `face_planes` of each axis; those beyond the array are left out.
    """
    found = []
    for axis, profile, planes in zip("zyx", differences, faces, strict=True):
        inside = [plane for plane in planes if plane < len(profile)]
        if inside:
            found.append(_seam(axis, profile, np.array(inside)))
    return found


def _seam(axis: str, profile: NDArray[np.float64], planes: NDArray[np.int64]) -> Seam:
    known = np.isfinite(profile)
    other = known.copy()
    other[planes] = False
    usual = profile[other].mean() if other.any() else np.nan

    def of(chosen: NDArray[np.int64]) -> float:
        chosen = chosen[known[chosen]]
        return float(profile[chosen].mean() / usual) if len(chosen) and usual > 0 else float("nan")

    spacing = int(np.diff(planes).min()) if len(planes) > 1 else len(profile) // 2
    shifted = []
    for shift in range(1 - spacing, spacing):
        moved = planes + shift
        moved = moved[(moved > 0) & (moved < len(profile))]
        moved = moved[other[moved]]
        if shift and 2 * len(moved) >= len(planes):
            shifted.append(of(moved))
    return Seam(axis, of(planes), (min(shifted), max(shifted)) if shifted else (float("nan"),) * 2, len(planes))
