"""Patches -> how their grey values and their detail are distributed: what a preview compares beside the pictures.

Model values throughout; float64 inside.  Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

# Wider than -1 ... 1, the material of training: masked air lies below, and a network may miss both.
HISTOGRAM_EDGES: Float64 = np.linspace(-3, 3, 97)
_AIR_BELOW = -1.5
_FIRST_SHELL = 2
_CORNER = 24  # voxels
_BINOMIAL = np.array([1, 4, 6, 4, 1]) / 16


@dataclass(frozen=True, eq=False)
class Texture:
    """Means over patches; NaN where no patch could be measured."""

    histogram: Float64  # float64 [96], shares of voxels between `HISTOGRAM_EDGES`; their sum is 1
    air: float  # share of voxels below -1.5: by a quarter of the material's greys darker than the darkest of it
    frequency: Float64  # float64 [S], cycles per voxel, rising to 0.5
    power: Float64  # float64 [S], radial power spectrum there; white noise of variance s^2 has s^2 at every frequency
    # two-point correlations along z, y and x, each float64 [half the axis + 1]: of voxels that lie 0, 1, 2, ...
    # voxels apart, 1 at 0.  Patches that differ in brightness stay correlated over their whole length.
    correlation: tuple[Float64, ...]
    means_std: float  # standard deviation of the patches' means: the contrast at a scale above the patch
    planarity: float  # how much of the texture is parallel sheets, from 0 (no direction) to 1; NaN where all is equal
    nonfinite: int  # voxels that are NaN or infinite.  They are not in the histogram, nor their patches in the rest.


@dataclass(frozen=True, eq=False)
class PatchTexture:
    """What one patch adds to a `Texture`; `power` and what follows are of no use where voxels are not finite."""

    counts: Float64
    nonfinite: int
    frequency: Float64
    power: Float64
    mean: float
    products: list[Float64]
    structure: Float64


def measure_texture(patches: Iterable[NDArray[np.float32]]) -> Texture:
    """Measure patches of one shape, each [Z, Y, X], one after another."""
    return combine_textures([measure_patch(patch) for patch in patches])


def measure_patch(patch: NDArray[np.float32]) -> PatchTexture:
    """Measure one patch [Z, Y, X]."""
    finite, frequency = np.isfinite(patch), shell_frequencies(patch.shape)
    clipped = np.clip(patch[finite], HISTOGRAM_EDGES[0], HISTOGRAM_EDGES[-1])
    counts = np.histogram(clipped, HISTOGRAM_EDGES)[0].astype(np.float64)
    if nonfinite := int((~finite).sum()):
        return PatchTexture(counts, nonfinite, frequency, frequency, math.nan, [], np.zeros(2))
    values = patch.astype(np.float64)
    products = [_mean_products(values, axis) for axis in range(3)]
    return PatchTexture(counts, 0, frequency, radial_power(patch), float(values.mean()), products, _structure(values))


def combine_textures(patches: Sequence[PatchTexture]) -> Texture:
    """The texture of several patches of one shape; a patch may be there several times."""
    finite = [patch for patch in patches if not patch.nonfinite]
    counts, means = np.sum([patch.counts for patch in patches], axis=0), [patch.mean for patch in finite]
    sheets, all_of_it = np.sum([np.zeros(2), *(patch.structure for patch in finite)], axis=0)
    frequency = patches[0].frequency
    # Of all patches together, along each axis; nothing where there is no variance.
    along = zip(*(patch.products for patch in finite), strict=True)
    covariances = [np.mean(products, axis=0) - np.mean(means) ** 2 for products in along]
    return Texture(
        histogram=counts / counts.sum() if counts.any() else np.full_like(counts, math.nan),
        air=float(counts[HISTOGRAM_EDGES[:-1] < _AIR_BELOW].sum() / counts.sum()) if counts.any() else math.nan,
        frequency=frequency,
        power=np.mean([patch.power for patch in finite], axis=0) if finite else np.full_like(frequency, math.nan),
        correlation=tuple(covariance / covariance[0] for covariance in covariances if covariance[0] > 0),
        means_std=float(np.std(means)) if means else math.nan,
        planarity=float(sheets / all_of_it) if all_of_it > 0 else math.nan,
        nonfinite=sum(patch.nonfinite for patch in patches),
    )


def _structure(values: Float64) -> Float64:
    """Sums over a finite patch of l1 - l2 and of l1; their quotient is its planarity.

    l1 >= l2 >= l3 are the eigenvalues of the structure tensor of a few voxels, at every second voxel of each axis: each
    place counts by how much the greys change there.  Sheets change in one direction, so that l2 is small; fibres in
    two; noise has about 0.5, as its few voxels never look alike in all directions.  Of a large patch, the boxes at its
    corners are measured: all of it takes seconds.  Source: Westin et al. 2002 for the measure; Foerstner 1986 for the
    tensor.
    """
    ends = [[slice(None)] if size <= 2 * _CORNER else [slice(_CORNER), slice(-_CORNER, None)] for size in values.shape]
    sums = np.zeros(2)
    for corner in itertools.product(*ends):
        smooth = _blurred(values[corner])
        slopes = [np.gradient(smooth, axis=axis) if size > 1 else 0 * smooth for axis, size in enumerate(smooth.shape)]
        tensor = np.zeros((*smooth[::2, ::2, ::2].shape, 3, 3))
        for i, j in zip(*np.tril_indices(3), strict=True):  # the triangle that eigvalsh reads
            tensor[..., i, j] = _blurred(_blurred(slopes[i] * slopes[j]))[::2, ::2, ::2]
        _, middle, largest = np.moveaxis(np.linalg.eigvalsh(tensor), -1, 0)
        sums += (largest - middle).sum(), largest.sum()
    return sums


def _blurred(values: Float64) -> Float64:
    """Smoothed along each axis by the binomial (1, 4, 6, 4, 1) / 16, of deviation 1 voxel; edges are repeated."""
    for axis in range(3):
        padded = np.pad(values, [(2, 2) if other == axis else (0, 0) for other in range(3)], "edge")
        values = np.lib.stride_tricks.sliding_window_view(padded, len(_BINOMIAL), axis) @ _BINOMIAL
    return values


def _mean_products(values: Float64, axis: int) -> Float64:
    """Of a finite patch, along an axis, the mean product of voxels 0, 1, ... half the axis apart."""
    along = np.moveaxis(values, axis, 0)
    pairs = ((along[apart:], along[: len(along) - apart]) for apart in range(len(along) // 2 + 1))
    return np.array([np.einsum("ijk,ijk->", one, other) / one.size for one, other in pairs])


def shell_frequencies(shape_zyx: Sequence[int]) -> Float64:
    """The radial frequencies that a patch of this shape is measured at: float64 [S], cycles per voxel.

    One for each frequency of the longest axis but the two lowest.  See `radial_power`.
    """
    longest = max(shape_zyx)
    return np.arange(_FIRST_SHELL, longest // 2 + 1) / longest


def radial_power(patch: NDArray[np.floating]) -> Float64:
    """Power spectrum of a finite patch [Z, Y, X], averaged in shells around `shell_frequencies`: float64 [S].

    The mean is taken off, each axis has a Hann window w, and |FFT|^2 is divided by sum(w^2): the expectation for white
    noise is then its variance at every frequency (at the lowest up to 3 % less, which go with the mean).  An axis has
    the frequencies k / n of its own length n.
    """
    values = patch.astype(np.float64)
    # Taken at the middles of voxels, so that none has weight 0 and none counts more than its mirror image.
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
    """Wasserstein-1 distance of the two histograms, in model values: the area between their cumulative sums."""
    widths = np.diff(HISTOGRAM_EDGES)
    return float(np.abs(np.cumsum(one.histogram - other.histogram)) @ widths)


def spectrum_distance_db(one: Texture, other: Texture) -> float:
    """Root mean square over frequencies of 10 log10(power / other power); not finite where one has no power."""
    with np.errstate(divide="ignore", invalid="ignore"):
        decibels = 10 * np.log10(one.power / other.power)
    return math.sqrt(np.mean(decibels**2))


def correlation_distance(one: Texture, other: Texture) -> float:
    """Root mean square difference of the two-point correlations, over all distances; NaN where one has none."""
    pairs = list(zip(one.correlation, other.correlation, strict=False))
    if not pairs:
        return math.nan
    return math.sqrt(np.mean(np.concatenate([a[1:] - b[1:] for a, b in pairs]) ** 2))
