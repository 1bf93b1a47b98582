"""Features of two sets of patches -> kernel distance (KID) and Frechet distance of the sets.  Pure.

Both compare the sets as a whole, in the principal components of real patches, scaled to variance 1.  Sources: Binkowski
et al. 2018 (KID); Heusel et al. 2017 (Frechet distance); both with fixed 3D features instead of a trained network's.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_COMPONENTS = 16
_DRAWS = 499
_FARTHEST = 3.0
_LEAST_GROUPS = 8
_LEAST_SPREAD = 1e-6  # of a component, relative to the widest


def whitened(features: Sequence[Floats], reference: Floats) -> list[Floats]:
    """Return features [N, F] in at most 16 principal components of `reference` [R, F], each of variance 1 there.

    Clipped at 3 standard deviations: a few patches without texture, whose logarithms are extreme, would outweigh the
    others.  No components are left if the rows of `reference` are equal.
    """
    mean, std = reference.mean(0), reference.std(0) + 1e-9
    _, lengths, axes = np.linalg.svd((reference - mean) / std, full_matrices=False)
    count = min(_COMPONENTS, len(reference) // 2, int((lengths > max(_LEAST_SPREAD * lengths[0], 1e-3)).sum()))
    scaled = axes[:count].T / lengths[:count] * math.sqrt(len(reference))
    return [((each - mean) / std @ scaled).clip(-_FARTHEST, _FARTHEST) for each in features]


class KernelDistance:
    """Squared maximum mean discrepancy of rows of `pooled` [N, D] and all rows of `others` [M, D].

    The kernel is (x y / D + 1)^3.  Pairs of `pooled`, of `others`, and of both that depend on each other, because their
    patches share voxels, are left out: they are as similar as equal patches, and would bias the mean.  So it is
    unbiased if all others are independent; patches close by in one small volume are not, and for equal sets it is above
    0 on average, as is the floor.
    """

    def __init__(self, pooled: Floats, others: Floats, dependent: tuple[NDArray[np.bool_], ...]) -> None:
        """`dependent` has the pairs [N, N], [M, M] and [N, M]; those of a row with itself need not be in it."""
        pairs = (pooled, pooled), (others, others), (pooled, others)
        self._counted = [~each for each in dependent]
        for square in self._counted[:2]:
            np.fill_diagonal(square, False)
        self._kernels = [
            (one @ other.T / (one.shape[1] or math.nan) + 1) ** 3 * counted
            for (one, other), counted in zip(pairs, self._counted, strict=True)
        ]

    def __call__(self, rows: NDArray[Any], others: Floats | None = None) -> Floats:
        """Return the distance for weights of `pooled` [T, N] and of `others` [T, M] (None = 1).

        NaN without pairs or components.
        """
        weights = np.ones((1, len(self._counted[1]))) if others is None else others
        sides = (rows, rows), (weights, weights), (rows, weights)
        means = []
        with np.errstate(invalid="ignore", divide="ignore"):
            for (left, right), kernel, counted in zip(sides, self._kernels, self._counted, strict=True):
                means.append(((left @ kernel) * right).sum(1) / ((left @ counted) * right).sum(1))
        distance: Floats = means[0] + means[1] - 2 * means[2]
        return distance

    def interval(self, groups: Ints, other_groups: Ints) -> tuple[float, float]:
        """Return the 95 % interval of the distance of the first rows of `pooled`, whose groups these are.

        Bootstrap over groups of patches, 499 times; too wide rather than too narrow if the sets are equal.  NaN if the
        distance is, or with fewer than 8 groups on either side, which would make it too narrow.
        """
        if min(groups.max(), other_groups.max()) + 1 < _LEAST_GROUPS:
            return math.nan, math.nan
        rng = np.random.default_rng(0)
        first, others = (
            rng.multinomial(count, np.full(count, 1 / count), _DRAWS)[:, group].astype(np.float64)
            for group, count in ((each, int(each.max()) + 1) for each in (groups, other_groups))
        )
        rows = np.pad(first, ((0, 0), (0, len(self._kernels[0]) - len(groups))))
        distances = self(rows, others)
        known = distances[np.isfinite(distances)]
        low, high = np.quantile(known, [0.025, 0.975]) if len(known) else (math.nan, math.nan)
        return float(low), float(high)


def frechet_distances(pooled: Floats, sides: NDArray[np.bool_], others: Floats) -> Floats:
    """Return the Frechet distance of the normal fits of rows of `pooled` [N, D] (sides [T, N]) and `others` [M, D].

    Biased: equal sets have a distance above 0 that falls with their number, so only sets of one size compare.  NaN if
    there are fewer than twice as many rows as components.
    """
    found = np.full(len(sides), math.nan)
    known = (sides.sum(1) >= 2 * others.shape[1]) & (len(others) >= 2 * others.shape[1] > 0)
    if not known[0]:
        return found
    values, axes = np.linalg.eigh(_covariance(others))
    root = axes * np.sqrt(values.clip(min=0)) @ axes.T
    means = np.stack([pooled[side].mean(0) for side in sides[known]])
    covariances = np.stack([_covariance(pooled[side]) for side in sides[known]])
    shared = np.sqrt(np.linalg.eigvalsh(root @ covariances @ root).clip(min=0)).sum(1)
    spread = covariances.trace(axis1=1, axis2=2) + values.sum() - 2 * shared
    found[known] = np.square(means - others.mean(0)).sum(1) + spread
    return found


def _covariance(rows: Floats) -> Floats:
    return np.atleast_2d(np.cov(rows, rowvar=False))  # which has no matrix for one column
