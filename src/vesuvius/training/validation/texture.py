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
    structure: tuple[float, float]


def measure_texture(patches: Iterable[NDArray[np.float32]]) -> Texture:
    """Measure patches of one shape, each [Z, Y, X], one after another."""
    return joint_texture([measure_patch(patch) for patch in patches])


def measure_patch(patch: NDArray[np.float32]) -> PatchTexture:
    """Measure one patch [Z, Y, X]."""
    finite = np.isfinite(patch)
    counts = np.histogram(np.clip(patch[finite], HISTOGRAM_EDGES[0], HISTOGRAM_EDGES[-1]), HISTOGRAM_EDGES)[0]
    frequency, nonfinite = shell_frequencies(patch.shape), int((~finite).sum())
    if nonfinite:
        return PatchTexture(counts.astype(np.float64), nonfinite, frequency, frequency, math.nan, [], (0.0, 0.0))
    mean = float(patch.mean(dtype=np.float64))
    power, products = radial_power(patch), _mean_products(patch)
    return PatchTexture(counts.astype(np.float64), 0, frequency, power, mean, products, _structure(patch))


def joint_texture(patches: Sequence[PatchTexture]) -> Texture:
    """The texture of several patches of one shape; a patch may be there several times."""
    finite = [patch for patch in patches if not patch.nonfinite]
    counts = np.sum([patch.counts for patch in patches], axis=0)
    means = [patch.mean for patch in finite]
    differences = np.sum([patch.structure for patch in finite], axis=0) if finite else np.zeros(2)
    frequency = patches[0].frequency
    return Texture(
        histogram=counts / counts.sum() if counts.any() else np.full_like(counts, math.nan),
        air=float(counts[HISTOGRAM_EDGES[:-1] < _AIR_BELOW].sum() / counts.sum()) if counts.any() else math.nan,
        frequency=frequency,
        power=np.mean([patch.power for patch in finite], axis=0) if finite else np.full_like(frequency, math.nan),
        correlation=_correlation([patch.products for patch in finite], means),
        means_std=float(np.std(means)) if means else math.nan,
        planarity=float(differences[0] / differences[1]) if differences[1] > 0 else math.nan,
        nonfinite=sum(patch.nonfinite for patch in patches),
    )


def _structure(patch: NDArray[np.floating]) -> tuple[float, float]:
    """Sums over a finite patch of l1 - l2 and of l1; their quotient is its planarity.

    l1 >= l2 >= l3 are the eigenvalues of the structure tensor of a few voxels, at every second voxel of each axis: each
    place counts by how much the greys change there.  Sheets change in one direction, so that l2 is small; fibres in
    two; noise has about 0.5, as its few voxels never look alike in all directions.  Of a large patch, the boxes at its
    corners are measured: all of it takes seconds.  Source: Westin et al. 2002 for the measure; Foerstner 1986 for the
    tensor.
    """
    ends = [[slice(None)] if size <= 2 * _CORNER else [slice(_CORNER), slice(-_CORNER, None)] for size in patch.shape]
    flatter, all_of_it = np.sum([_box_structure(patch[corner]) for corner in itertools.product(*ends)], axis=0)
    return float(flatter), float(all_of_it)


def _box_structure(patch: NDArray[np.floating]) -> tuple[float, float]:
    smooth = _blurred(patch.astype(np.float64))
    slopes = [np.gradient(smooth, axis=axis) for axis in range(3)]
    # Neighbours say almost the same, and a product is smoothed once, not as [i, j] and [j, i].
    rows, columns = np.triu_indices(3)
    tensor = np.empty((*smooth[::2, ::2, ::2].shape, 3, 3))
    for i, j in zip(rows, columns, strict=True):
        tensor[..., i, j] = tensor[..., j, i] = _blurred(slopes[i] * slopes[j], twice=True)[::2, ::2, ::2]
    _, middle, largest = np.moveaxis(np.linalg.eigvalsh(tensor), -1, 0)
    return float((largest - middle).sum()), float(largest.sum())


def _blurred(values: Float64, *, twice: bool = False) -> Float64:
    """Smoothed along each axis by the binomial (1, 4, 6, 4, 1) / 16, of deviation 1 voxel; edges are repeated."""
    for axis in range(values.ndim):
        padded = np.pad(values, [(2, 2) if other == axis else (0, 0) for other in range(values.ndim)], "edge")
        size = values.shape[axis]
        along = np.moveaxis(padded, axis, 0)
        values = np.moveaxis(sum(w * along[k : k + size] for k, w in enumerate(_BINOMIAL)), 0, axis)
    return _blurred(values) if twice else values


def _mean_products(patch: NDArray[np.floating]) -> list[Float64]:
    """Of a finite patch [Z, Y, X], along each axis, the mean product of voxels 0, 1, ... half the axis apart."""
    values = patch.astype(np.float64)
    found = []
    for axis, size in enumerate(patch.shape):
        along = np.moveaxis(values, axis, 0)
        pairs = ((along[apart:], along[: size - apart]) for apart in range(size // 2 + 1))
        found.append(np.array([np.einsum("ijk,ijk->", one, other) / one.size for one, other in pairs]))
    return found


def _correlation(products: Sequence[list[Float64]], means: Sequence[float]) -> tuple[Float64, ...]:
    """Of all patches together: their covariance over their variance; nothing where there is none to measure."""
    of_axes = [np.mean(along, axis=0) - np.mean(means) ** 2 for along in zip(*products, strict=True)]
    return tuple(covariance / covariance[0] for covariance in of_axes if covariance[0] > 0)


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
    window = reduce(np.multiply.outer, [_hann(size) for size in patch.shape])
    spectrum = np.fft.rfftn((values - values.mean()) * window)
    power = (spectrum.real**2 + spectrum.imag**2) / (window**2).sum()
    shells, weights = _shells(patch.shape)
    sums = np.bincount(shells, (weights * power).ravel())
    counts = np.bincount(shells, weights.ravel())
    end = _FIRST_SHELL + len(shell_frequencies(patch.shape))
    mean: Float64 = sums[_FIRST_SHELL:end] / counts[_FIRST_SHELL:end]
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


def _hann(size: int) -> Float64:
    """Taken at the middles of `size` voxels, so that none has weight 0 and none counts more than its mirror image."""
    return np.sin(np.pi * (np.arange(size) + 0.5) / size) ** 2


def _shells(shape_zyx: Sequence[int]) -> tuple[NDArray[np.int64], Float64]:
    """Of each frequency of `rfftn`: the number of its shell, flat, and how often it counts, in the shape of rfftn.

    Twice where it stands for itself and for its conjugate, which rfftn does not compute.
    """
    *outer, last = shape_zyx
    axes = [np.fft.fftfreq(size) for size in outer] + [np.fft.rfftfreq(last)]
    squares = reduce(np.add.outer, [frequencies**2 for frequencies in axes])
    shells = np.rint(np.sqrt(squares) * max(shape_zyx)).astype(np.int64)
    alone = (np.arange(len(axes[-1])) * 2) % last == 0
    return shells.ravel(), np.broadcast_to(np.where(alone, 1.0, 2.0), squares.shape)
