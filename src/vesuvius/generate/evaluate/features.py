"""Fixed features of patches, and a classifier of them that is solved, not trained: a second opinion on the AUC.

What fools a small CNN need not fool it: it sees grey values and edges by scale, knows no position and draws nothing at
random.  Pure.  Source: Hofmann et al. 2008 for kernel ridge regression.
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
_BLOCK = 4  # voxels of a scale, in which edges have one direction
_LEAST_SQUARE = 1e-6  # of model values: what differs less is flat
_RIDGE = 0.1


def patch_features(patch: NDArray[np.float32]) -> Floats:
    """Quantiles of the grey values of one patch [Z, Y, X]; of it and its halved, quartered, ... copies how strong edges
    are, and how much they have one direction: float64 [F], as many for each patch of a shape.

    Of the structure tensor of each block (Foerstner 1986): the logarithms of the mean eigenvalues, and of quantiles of
    the largest one.
    """
    scale, found = torch.from_numpy(patch)[None, None], [torch.from_numpy(np.quantile(patch, _GREYS))]
    while min(scale.shape[2:]) > 1:
        eigenvalues = _structure(scale[0, 0])
        strongest = eigenvalues[:, -1].quantile(torch.tensor(_EDGES, dtype=torch.float64))
        found.append((torch.cat([eigenvalues.mean(0), strongest]) + _LEAST_SQUARE).log())
        scale = F.avg_pool3d(scale, 2)
    return torch.cat(found).numpy()


def _structure(values: Tensor) -> Tensor:
    """Eigenvalues of the structure tensor of each block, rising: float64 [blocks, 3]."""
    inner = [slice(size - 1) for size in values.shape]
    slopes = torch.stack([values.diff(dim=axis)[tuple(inner)] for axis in range(3)])
    block = [min(_BLOCK, size) for size in slopes.shape[1:]]
    tensor = F.avg_pool3d((slopes[:, None] * slopes).flatten(0, 1), block).reshape(3, 3, -1)
    eigenvalues: Tensor = torch.linalg.eigvalsh(tensor.permute(2, 0, 1).double())
    return eigenvalues.clamp(min=0)


def kernel_scores(train: tuple[Floats, Floats], tests: tuple[Floats, ...]) -> tuple[Floats, ...]:
    """How real each row of `tests` looks, by kernel ridge regression: the features of a patch make a row.

    The kernel is Gaussian in the distance of standardised features, as wide as the median of the distances.

    Args:
        train: real and generated ones; each kind counts the same.
    """
    rows = np.concatenate(train)
    mean, std = rows.mean(0), rows.std(0) + 1e-9
    counts = [len(each) for each in train]
    signs = np.repeat([1.0, -1.0], counts)
    weights = np.repeat([len(rows) / (2 * count) for count in counts], counts)
    standardised = (rows - mean) / std

    def squares(others: Floats) -> Floats:
        distances: Floats = np.square(others[:, None] - standardised).sum(2)
        return distances

    apart = squares(standardised)
    width = float(np.median(apart)) or 1.0
    solved = np.linalg.solve(np.exp(-apart / width) + np.diag(_RIDGE / weights), signs)
    return tuple(np.exp(-squares((test - mean) / std) / width) @ solved for test in tests)
