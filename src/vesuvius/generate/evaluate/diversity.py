"""How alike two patches are: multi-scale structural similarity.  Pure.

Source: Wang, Simoncelli & Bovik 2003; means of cubic windows in place of Gaussian ones.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from numpy.typing import NDArray
from torch import Tensor

_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
_WINDOW = 7
_RANGE = 2.0  # of model values, -1 to 1
_C1, _C2 = (0.01 * _RANGE) ** 2, (0.03 * _RANGE) ** 2
_PLACES = 32  # windows along an axis, about
_LARGE = 2**18  # voxels


def ms_ssim(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Similarity of two patches [Z, Y, X] in model values: 1 for equal ones, about 0 for those of nothing in common.

    An axis is halved from scale to scale as long as two windows fit in; there are as many scales as the longest axis
    has, up to five, whose weights are scaled to a sum of 1.  The first scale of a large patch is half its size.
    """
    a, b = (torch.from_numpy(np.ascontiguousarray(patch)).clamp(-3, 3)[None, None] for patch in (one, other))
    if a.numel() > _LARGE:
        a, b = F.avg_pool3d(a, 2), F.avg_pool3d(b, 2)
    terms = []
    for _ in _WEIGHTS:
        luminance, structure = _similarity(a, b)
        terms.append(structure)
        factors = [2 if size >= 2 * _WINDOW else 1 for size in a.shape[2:]]
        if max(factors) == 1:
            break
        a, b = (F.avg_pool3d(patch, factors) for patch in (a, b))
    terms[-1] *= luminance
    weights = np.array(_WEIGHTS[: len(terms)]) / sum(_WEIGHTS[: len(terms)])
    return float(np.prod([max(term, 0.0) ** weight for term, weight in zip(terms, weights, strict=True)]))


def _similarity(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Means over windows: of their brightness, and of their contrast and structure."""
    windows = [min(_WINDOW, size) for size in a.shape[2:]]
    strides = [max(1, size // _PLACES) for size in a.shape[2:]]

    def mean(values: Tensor) -> Tensor:
        return F.avg_pool3d(values, windows, strides)

    mean_a, mean_b = mean(a), mean(b)
    var_a, var_b = mean(a * a) - mean_a**2, mean(b * b) - mean_b**2
    covariance = mean(a * b) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + _C1) / (mean_a**2 + mean_b**2 + _C1)
    return float(luminance.mean()), float(((2 * covariance + _C2) / (var_a + var_b + _C2)).mean())
