"""Fixed features of patches and a classifier in closed form: a second AUC, independent of the CNN's.

The features are grey values and edges at each scale, without positions and without randomness, so a defect that a small
CNN misses may show here.  Pure.  Source: Hofmann et al. 2008 for kernel ridge regression.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]

_GREYS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
_EDGES = (0.1, 0.5, 0.9)
_BLOCK = 4  # voxels along each axis over which the structure tensor is averaged
_LEAST_SQUARE = 1e-6  # squared difference of model values below which a block counts as flat
_RIDGE = 0.1


def patch_features(patch: NDArray[np.float32]) -> Floats:
    """Return the features of a patch [Z, Y, X]: float64 [F], where F depends on the shape only.

    Quantiles of the grey values; then, for the patch and its copies halved again and again, the logarithms of the mean
    eigenvalues of the structure tensor (Foerstner 1986) and of quantiles of the largest one: strength and direction of
    edges.
    """
    scale, features = torch.from_numpy(patch)[None, None], [torch.from_numpy(np.quantile(patch, _GREYS))]
    while min(scale.shape[2:]) > 1:
        eigenvalues = _structure(scale[0, 0])
        strongest = eigenvalues[:, -1].quantile(torch.tensor(_EDGES, dtype=torch.float64))
        features.append((torch.cat([eigenvalues.mean(0), strongest]) + _LEAST_SQUARE).log())
        scale = F.avg_pool3d(scale, 2)
    return torch.cat(features).numpy()


def _structure(values: Tensor) -> Tensor:
    """Return the eigenvalues of the structure tensor of each block, ascending: float64 [blocks, 3]."""
    inner = [slice(size - 1) for size in values.shape]
    slopes = torch.stack([values.diff(dim=axis)[tuple(inner)] for axis in range(3)])
    block = [min(_BLOCK, size) for size in slopes.shape[1:]]
    tensor = F.avg_pool3d((slopes[:, None] * slopes).flatten(0, 1), block).reshape(3, 3, -1)
    eigenvalues: Tensor = torch.linalg.eigvalsh(tensor.permute(2, 0, 1).double())
    return eigenvalues.clamp(min=0)


def kernel_scores(train: tuple[Floats, Floats], tests: tuple[Floats, ...]) -> tuple[Floats, ...]:
    """Score how real each row of `tests` looks, by kernel ridge regression; a row is the features of a patch.

    The kernel is Gaussian in the distance of standardised features; its width is the median distance.

    Args:
        train: rows of real and of generated patches; both sets have the same total weight.
    """
    rows = np.concatenate(train)
    mean, std = rows.mean(0), rows.std(0) + 1e-9
    counts = [len(each) for each in train]
    signs = np.repeat([1.0, -1.0], counts)
    weights = np.repeat([len(rows) / (2 * count) for count in counts], counts)
    standardised = (rows - mean) / std
    distances = _squared_distances(standardised, standardised)
    width = float(np.median(distances)) or 1.0
    solved = np.linalg.solve(np.exp(-distances / width) + np.diag(_RIDGE / weights), signs)
    return tuple(np.exp(-_squared_distances((test - mean) / std, standardised) / width) @ solved for test in tests)


def _squared_distances(one: Floats, other: Floats) -> Floats:
    """Return the squared distances of all rows; an array of all differences would take gigabytes for 4,000 patches."""
    squares = np.square(one).sum(1)[:, None] + np.square(other).sum(1)
    distances: Floats = (squares - 2 * one @ other.T).clip(min=0)
    return distances
