"""Patches -> the structure of material and pores: porosity, chords, Euler number, sheets; and of patch borders.  Pure.

Material is what is brighter than a threshold, the same for all sets.  Each patch gives sums, so that the figures of a
set, and of any part of it, are ratios of sums.  Sources: Torquato 2002, Random Heterogeneous Materials (porosity and
chords); Ohser & Muecklich 2000 (Euler number and surface of voxels).
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vesuvius.training.validation.texture import AIR_BELOW, blurred
from vesuvius.volumes.voxels import euler_sum

Floats = NDArray[np.float64]

FIELDS = {
    "porosity": "porosity",
    "chord_material": "mean chord of material",
    "chord_pores": "mean chord of pores",
    "euler": "Euler number",
    "sheet_thickness": "sheet thickness",
    "sheet_spacing": "sheet spacing",
    "border": "change at patch borders",
}
_SUMS = 7
_LEAST_INSIDE = 4  # pairs of planes of an axis


def otsu_threshold(values: NDArray[np.float32]) -> float:
    """Return the value that separates two classes best: largest variance between them (Otsu 1979); NaN if constant.

    Masked air, far below the range of the material, is left out: it would be one class, and gaps and sheets the other.
    """
    values = values[values >= AIR_BELOW]
    low, high = float(values.min(initial=math.inf)), float(values.max(initial=-math.inf))
    if not low < high:
        return math.nan
    counts, edges = np.histogram(values, 256, (low, high))
    below, total = np.cumsum(counts)[:-1], values.size
    sums = np.cumsum(counts * (edges[:-1] + edges[1:]) / 2)
    between = (sums[-1] * below / total - sums[:-1]) ** 2 / (below * (total - below))
    best = np.flatnonzero(between >= between.max() * (1 - 1e-9))
    return float(edges[1:-1][best].mean())


def measure_field(patch: NDArray[np.float32], threshold: float) -> Floats:
    """Return the sums of a patch [Z, Y, X]: float64 [13 + 2 (Z + Y + X + 3)]; 0 if voxels are not finite.

    Those of `figures`, the squared differences of neighboring planes at the border and inside along each axis, and the
    number of chords of each length, 0 to that of the axis, for each axis in pores and in material.
    """
    shape = patch.shape
    found, chords = np.zeros(_SUMS + 6), [np.zeros((2, size + 1)) for size in shape]
    if np.isfinite(patch).all() and math.isfinite(threshold):
        material, smooth = patch > threshold, blurred(patch)
        inside = smooth > threshold
        slopes = [np.gradient(smooth, axis=axis) if size > 1 else 0 * smooth for axis, size in enumerate(shape)]
        found[:2] = patch.size, np.count_nonzero(material)
        found[2:4] = np.prod(np.subtract(shape, 1)), euler_sum(material)
        found[6] = np.count_nonzero(inside)
        for axis, size in enumerate(shape):
            chords[axis] = _chords(material, axis)
            # material's chords begin and end at faces between the phases, or at the border
            found[4] += (chords[axis].sum() - patch.size / size) * size / max(size - 1, 1)
            found[5] += _area(inside, slopes, axis) * size / max(size - 1, 1)
            squares = np.square(np.diff(patch, axis=axis)).mean(tuple({0, 1, 2} - {axis}))
            if size > _LEAST_INSIDE:
                found[_SUMS + 2 * axis :][:2] = (squares[0] + squares[-1]) / 2, squares[1:-1].mean()
    return np.concatenate([found, *(each.ravel() for each in chords)])


def _chords(material: NDArray[np.bool_], axis: int) -> Floats:
    """Return the number of chords of each length along an axis, also cut ones, in pores and material: [2, size + 1]."""
    lines = np.moveaxis(material, axis, 2).reshape(-1, material.shape[axis])
    size = lines.shape[1]
    ends = np.ones((len(lines), size + 1), np.bool_)
    np.not_equal(lines[:, 1:], lines[:, :-1], out=ends[:, 1:-1])
    at = np.flatnonzero(ends)
    begins = at[:-1] % (size + 1) != size
    phases = lines.ravel()[(at - at // (size + 1))[:-1][begins]]
    lengths = np.diff(at)[begins]
    return np.stack([np.bincount(lengths[phases == phase], minlength=size + 1) for phase in (False, True)], dtype=float)


def _area(inside: NDArray[np.bool_], slopes: Sequence[NDArray[np.float32]], axis: int) -> float:
    """Return the area of surface that faces across an axis stand for: the sum of |n| of the normal along the axis.

    A plane of area A with the normal n has A |n_z| faces across z, and so on; weighted by |n_z| and summed over the
    axes they are A.  The normal is the direction of the slope at the face.
    """
    one, other = ([slice(None)] * 3 for _ in range(2))
    one[axis], other[axis] = slice(-1), slice(1, None)
    at = inside[tuple(one)] != inside[tuple(other)]
    normals = np.stack([slope[tuple(one)][at] + slope[tuple(other)][at] for slope in slopes])
    lengths = np.sqrt(np.square(normals).sum(0))
    return float((np.abs(normals[axis]) / np.maximum(lengths, 1e-12)).sum())


def figures(sums: Floats) -> dict[str, Floats]:
    """Return the figures of sets of patches, each [T], from the sums of their patches [T, S]; NaN = unknown.

    Mean chords: 2 x share of the phase / faces between the phases per voxel along an axis, so patch borders do not
    shorten them.  Sheet thickness: twice the volume of the material over the area of its surface; spacing: twice the
    volume over it; both of slightly smoothed patches.  All but porosity are unknown if there is one phase only.
    """
    voxels, material, windows, euler, faces, area, smooth = sums[:, :_SUMS].T
    planes = sums[:, _SUMS : _SUMS + 6].reshape(-1, 3, 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        two_phases = np.where((material > 0) & (material < voxels), 1.0, math.nan)
        sheets = np.where(area > 0, 2 / area, math.nan)
        ratios = np.log(planes[..., 0] / planes[..., 1])
        measured = planes[..., 1] > 0
        found = {
            "porosity": 1 - material / voxels,
            "chord_material": two_phases * 6 * material / faces,
            "chord_pores": two_phases * 6 * (voxels - material) / faces,
            "euler": two_phases * 1e6 * euler / windows,
            "sheet_thickness": sheets * smooth,
            "sheet_spacing": sheets * voxels,
            "border": np.exp(np.where(measured, ratios, 0).sum(1) / measured.sum(1)),
        }
    return {key: np.where(np.isfinite(values), values, math.nan) for key, values in found.items()}


def chord_distances(sums: Floats, real: Floats, shape_zyx: Sequence[int]) -> Floats:
    """Return how far the chord lengths of sets [T, S] are from those of another [S], in voxels: [T].

    Wasserstein-1 distance of the shares of voxels in chords up to each length; mean over axes and phases.
    """
    far, at = [], _SUMS + 6
    for size in shape_zyx:
        ends = at + 2 * (size + 1)
        counts = np.vstack([sums, real])[:, at:ends].reshape(-1, 2, size + 1) * np.arange(size + 1)
        with np.errstate(invalid="ignore"):
            shares = np.cumsum(counts, axis=2) / counts.sum(2, keepdims=True)
        far.append(np.abs(shares[:-1] - shares[-1]).sum(2))
        at = ends
    distances: Floats = np.concatenate(far, axis=1).mean(1)
    return distances
