"""Patches -> distributions of their intensities and texture, which previews compare in addition to pictures.

Model values throughout; float64 inside.  Pure.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

# Wider than -1 ... 1, the range of material: masked air lies below, and a network may exceed both ends.
HISTOGRAM_EDGES: Float64 = np.linspace(-3, 3, 97)
AIR_BELOW = -1.5
_FIRST_SHELL = 2
_CORNER = 24  # voxels


@dataclass(frozen=True, eq=False)
class Texture:
    """Means over patches; NaN if no patch could be measured."""

    histogram: Float64  # float64 [96], shares of voxels between `HISTOGRAM_EDGES`; their sum is 1
    air: float  # share of voxels below -1.5: a quarter of the material's range below its darkest value
    frequency: Float64  # float64 [S], cycles per voxel, rising to 0.5
    power: Float64  # float64 [S], radial power spectrum there; white noise of variance s^2 has s^2 at every frequency
    # two-point correlations along z, y and x at distances 0, 1, 2, ..., each float64 [half the axis + 1], 1 at 0.
    # Patches that differ in brightness stay correlated over their full length.
    correlation: tuple[Float64, ...]
    means_std: float  # standard deviation of the patch means: contrast above the patch scale
    planarity: float  # from 0 (no preferred direction) to 1 (parallel sheets); NaN for constant patches
    nonfinite: int  # NaN or infinite voxels; excluded from the histogram, their patches from the rest


@dataclass(frozen=True, eq=False)
class PatchTexture:
    """Contribution of one patch to a `Texture`; from `power` on invalid if voxels are not finite."""

    counts: Float64
    nonfinite: int
    frequency: Float64
    power: Float64
    mean: float
    products: list[Float64]
    structure: Float64


def measure_texture(patches: Iterable[NDArray[np.float32]]) -> Texture:
    """Measure patches of one shape, each [Z, Y, X]."""
    return combine_textures([measure_patch(patch) for patch in patches])


def measure_patch(patch: NDArray[np.float32]) -> PatchTexture:
    finite, frequency = np.isfinite(patch), shell_frequencies(patch.shape)
    clipped = np.clip(patch[finite], HISTOGRAM_EDGES[0], HISTOGRAM_EDGES[-1])
    counts = np.histogram(clipped, HISTOGRAM_EDGES)[0].astype(np.float64)
    if nonfinite := int((~finite).sum()):
        return PatchTexture(counts, nonfinite, frequency, frequency, math.nan, [], np.zeros(2))
    values = patch.astype(np.float64)
    products = [_mean_products(values, axis) for axis in range(3)]
    return PatchTexture(counts, 0, frequency, radial_power(patch), float(values.mean()), products, _structure(values))


def combine_textures(patches: Sequence[PatchTexture]) -> Texture:
    """Texture of several patches of one shape; repetitions are allowed."""
    finite = [patch for patch in patches if not patch.nonfinite]
    counts, means = np.sum([patch.counts for patch in patches], axis=0), [patch.mean for patch in finite]
    sheets, total = np.sum([np.zeros(2), *(patch.structure for patch in finite)], axis=0)
    frequency = patches[0].frequency
    # Over all patches, along each axis; omitted without variance.
    along = zip(*(patch.products for patch in finite), strict=True)
    covariances = [np.mean(products, axis=0) - np.mean(means) ** 2 for products in along]
    return Texture(
        histogram=counts / counts.sum() if counts.any() else np.full_like(counts, math.nan),
        air=float(counts[HISTOGRAM_EDGES[:-1] < AIR_BELOW].sum() / counts.sum()) if counts.any() else math.nan,
        frequency=frequency,
        power=np.mean([patch.power for patch in finite], axis=0) if finite else np.full_like(frequency, math.nan),
        correlation=tuple(covariance / covariance[0] for covariance in covariances if covariance[0] > 0),
        means_std=float(np.std(means)) if means else math.nan,
        planarity=float(sheets / total) if total > 0 else math.nan,
        nonfinite=sum(patch.nonfinite for patch in patches),
    )


def _structure(values: Float64) -> Float64:
    """Sums over a finite patch of l1 - l2 and of l1; their quotient is its planarity.

    l1 >= l2 >= l3 are eigenvalues of the local structure tensor at every second voxel of each axis.  Sheets change in
    one direction, so l2 is small; fibers in two; noise yields about 0.5, as few voxels are never isotropic.  Of a large
    patch only boxes at its corners are measured.  Sources: Westin et al. 2002; Foerstner 1986 for the tensor.
    """
    ends = [[slice(None)] if size <= 2 * _CORNER else [slice(_CORNER), slice(-_CORNER, None)] for size in values.shape]
    sums = np.zeros(2)
    for corner in itertools.product(*ends):
        smooth = blurred(values[corner])
        slopes = [np.gradient(smooth, axis=axis) if size > 1 else 0 * smooth for axis, size in enumerate(smooth.shape)]
        tensor = np.zeros((*smooth[::2, ::2, ::2].shape, 3, 3))
        for i, j in zip(*np.tril_indices(3), strict=True):  # the triangle that eigvalsh reads
            tensor[..., i, j] = blurred(blurred(slopes[i] * slopes[j]))[::2, ::2, ::2]
        _, middle, largest = np.moveaxis(np.linalg.eigvalsh(tensor), -1, 0)
        sums += (largest - middle).sum(), largest.sum()
    return sums


def blurred(values: NDArray[Any]) -> NDArray[Any]:
    """Smooth along each axis with the binomial (1, 4, 6, 4, 1) / 16 (deviation 1 voxel); edges are repeated."""
    for axis in range(3):
        padded = np.moveaxis(
            np.pad(values, [(2, 2) if other == axis else (0, 0) for other in range(3)], "edge"), axis, 0
        )
        smooth = 6 * padded[2:-2] + 4 * (padded[1:-3] + padded[3:-1]) + (padded[:-4] + padded[4:])
        values = np.moveaxis(smooth / 16, 0, axis)
    return values


def _mean_products(values: Float64, axis: int) -> Float64:
    """Mean product of voxels 0, 1, ... half the axis apart along an axis of a finite patch."""
    along = np.moveaxis(values, axis, 0)
    pairs = ((along[apart:], along[: len(along) - apart]) for apart in range(len(along) // 2 + 1))
    return np.array([np.einsum("ijk,ijk->", one, other) / one.size for one, other in pairs])


def shell_frequencies(shape_zyx: Sequence[int]) -> Float64:
    """Radial frequencies at which a patch of this shape is measured: float64 [S], cycles per voxel.

    All frequencies of the longest axis except the two lowest.  See `radial_power`.
    """
    longest = max(shape_zyx)
    return np.arange(_FIRST_SHELL, longest // 2 + 1) / longest


def radial_power(patch: NDArray[np.floating]) -> Float64:
    """Power spectrum of a finite patch [Z, Y, X], averaged in shells around `shell_frequencies`: float64 [S].

    The mean is subtracted, each axis gets a Hann window w, and |FFT|^2 is divided by sum(w^2): white noise then has its
    variance at every frequency in expectation (up to 3 % less at the lowest, lost with the mean).  An axis has the
    frequencies k / n of its own length n.
    """
    values = patch.astype(np.float64)
    # Sampled at voxel centres: no weight is 0, and the window is symmetric.
    axes = [np.sin(np.pi * (np.arange(size) + 0.5) / size) ** 2 for size in patch.shape]
    window = reduce(np.multiply.outer, axes)
    spectrum = np.fft.fftn((values - values.mean()) * window)
    power = (spectrum.real**2 + spectrum.imag**2) / (window**2).sum()
    radius = np.sqrt(reduce(np.add.outer, [np.fft.fftfreq(size) ** 2 for size in patch.shape]))
    shells = np.rint(radius * max(patch.shape)).astype(np.int64).ravel()
    seen = slice(_FIRST_SHELL, max(patch.shape) // 2 + 1)
    mean: Float64 = np.bincount(shells, power.ravel())[seen] / np.bincount(shells)[seen]
    return mean


def histogram_distance(one: Texture, other: Texture) -> float:
    """Wasserstein-1 distance of two histograms, in model values: the area between their cumulative sums."""
    widths = np.diff(HISTOGRAM_EDGES)
    return float(np.abs(np.cumsum(one.histogram - other.histogram)) @ widths)


def spectrum_distance_db(one: Texture, other: Texture) -> float:
    """Root mean square over frequencies of 10 log10(power / other power); not finite for zero power."""
    with np.errstate(divide="ignore", invalid="ignore"):
        decibels = 10 * np.log10(one.power / other.power)
    return math.sqrt(np.mean(decibels**2))


def correlation_distance(one: Texture, other: Texture) -> float:
    """Root mean square difference of the two-point correlations over all distances; NaN if undefined."""
    pairs = list(zip(one.correlation, other.correlation, strict=False))
    if not pairs:
        return math.nan
    return math.sqrt(np.mean(np.concatenate([a[1:] - b[1:] for a, b in pairs]) ** 2))
