"""Whether tile faces show in a volume: differences of neighbouring voxels across them, against all others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.volumes.box import Box, chunk_box, grid_shape, triple

_BLOCK = 256
_MOST_BLOCKS = 256
_DRAWS, _LEAST_SIDES = 1999, 2

ReadBox = Callable[[Box], NDArray[Any]]


LEVEL = 0.05
"""How often faces of some axis are said to show where none does."""


@dataclass(frozen=True)
class Seam:
    """The statistic of one axis."""

    axis: str  # z, y or x
    value: float  # mean squared difference across faces of tiles over that across other planes; 1 = faces do not show
    p: float  # share of random planes near the faces that stand out as much; NaN = there are too few to tell
    faces: int  # planes in `value`
    shows: bool | None = None  # whether p is too small for chance, among all axes; None = not known

    @property
    def reading(self) -> str:
        """In words: of the table and of the summary alike."""
        return "unknown" if self.shows is None else "they show" if self.shows else "they do not show"


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
    blocks = math.prod(grid)
    for number in sorted(np.random.default_rng(0).choice(blocks, min(blocks, _MOST_BLOCKS), replace=False).tolist()):
        start, stop = chunk_box(triple(map(int, np.unravel_index(number, grid))), (_BLOCK,) * 3, shape_zyx)
        before = triple(max(0, lo - 1) for lo in start)  # the plane before is needed, too
        voxels = read((before, stop)).astype(np.float32)
        for axis, low in enumerate(before):
            own = tuple(slice(None) if a == axis else slice(start[a] - before[a], None) for a in range(3))
            squares = np.diff(voxels[own], axis=axis) ** 2
            planes = slice(low + 1, stop[axis])
            others = tuple(other for other in range(3) if other != axis)
            sums[axis][planes] += np.nansum(squares, others, dtype=np.float64)
            counts[axis][planes] += (~np.isnan(squares)).sum(others)
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
            found.append(_seam(axis, profile, inside))
    judged = sum(not math.isnan(seam.p) for seam in found)
    return [
        seam if math.isnan(seam.p) else replace(seam, shows=seam.p < 1 - (1 - LEVEL) ** (1 / judged)) for seam in found
    ]


def _seam(axis: str, profile: NDArray[np.float64], planes: Sequence[int]) -> Seam:
    """One axis.  Without seams, the faces of a window could as well be any other planes of it: a permutation test."""
    other = np.isfinite(profile)
    other[list(planes)] = False
    faces, rest = profile[list(planes)], profile[other]
    faces, usual = faces[np.isfinite(faces)], rest.mean() if len(rest) else math.nan
    value = float(faces.mean() / usual) if len(faces) and usual > 0 else math.nan
    windows = [np.array([profile[list(run)].mean() for run in window]) for window in _windows(planes, len(profile))]
    windows = [window[np.isfinite(window)] for window in windows if np.isfinite(window[0])]
    windows = [window / window.mean() - 1 for window in windows if window.any()]
    if math.prod(map(len, windows)) * LEVEL < _LEAST_SIDES * 3:  # no p could be small enough
        return Seam(axis, value, math.nan, len(planes))
    rng, drawn = np.random.default_rng(0), np.zeros(_DRAWS)
    for window in windows:
        drawn += rng.choice(window, _DRAWS)
    far = abs(sum(window[0] for window in windows))
    p = (1 + np.count_nonzero(abs(drawn) >= far * (1 - 1e-9))) / (1 + _DRAWS)
    return Seam(axis, value, float(p), len(planes))


def _windows(planes: Sequence[int], size: int) -> list[list[range]]:
    """Faces, a run of adjacent ones together, and the planes near them that they are compared with.

    A window has its faces first, then runs of equal length on both sides, as many on one as on the other where there is
    room.  No two runs share a voxel, within windows or between them: in noise they are independent.
    """
    runs: list[range] = []
    for plane in planes:
        if runs and runs[-1].stop == plane:
            runs[-1] = range(runs[-1].start, plane + 1)
        else:
            runs.append(range(plane, plane + 1))
    room = [[(runs[0].start - 1) // (len(runs[0]) + 1), 0]]  # how many runs fit before and after each
    for rank, (one, other) in enumerate(itertools.pairwise(runs)):
        gap = other.start - one.stop - 1  # planes between them that share no voxel with both
        first, second = (len(one) + 1, len(other) + 1) if rank % 2 else (len(other) + 1, len(one) + 1)
        more = max(0, min((gap + 2) // 2, gap)) // first
        fewer = max(0, gap - more * first) // second
        room[-1][1] = more if rank % 2 else fewer
        room.append([fewer if rank % 2 else more, 0])
    room[-1][1] = (size - runs[-1].stop) // (len(runs[-1]) + 1)
    found = []
    for run, (left, right) in zip(runs, room, strict=True):
        reach, step = min(left, right) or max(left, right), len(run) + 1
        shifts = [*range(-min(left, reach), 0), *range(1, min(right, reach) + 1)]
        found.append([run, *(range(run.start + k * step, run.stop + k * step) for k in shifts)])
    return found
