"""The similarity of two patches: multi-scale structural similarity (MS-SSIM).  Pure.

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


Scales = list[tuple[Tensor, Tensor, Tensor]]
"""A patch at the scales that are compared: its voxels, and the means and variances of their windows."""


def scales_of(patch: NDArray[np.float32]) -> Scales:
    """The scales of a patch [Z, Y, X] in model values.

    An axis is halved from scale to scale as long as two windows fit in; there are as many scales as the longest axis
    has, up to five.  The first scale of a large patch is half its size.
    """
    found: Scales = []
    voxels = torch.from_numpy(np.ascontiguousarray(patch)).clamp(-3, 3)[None, None]
    if voxels.numel() > _LARGE:
        voxels = F.avg_pool3d(voxels, 2)
    for _ in _WEIGHTS:
        mean = _means(voxels)
        found.append((voxels, mean, _means(voxels * voxels) - mean**2))
        factors = [2 if size >= 2 * _WINDOW else 1 for size in voxels.shape[2:]]
        if max(factors) == 1:
            break
        voxels = F.avg_pool3d(voxels, factors)
    return found


def ms_ssim(one: Scales, other: Scales) -> float:
    """Similarity of two patches: 1 for equal ones, about 0 for ones with nothing in common.

    The weights of the scales are scaled to a sum of 1.
    """
    terms: list[float] = []
    for (a, mean_a, var_a), (b, mean_b, var_b) in zip(one, other, strict=True):
        covariance = _means(a * b) - mean_a * mean_b
        terms.append(float(((2 * covariance + _C2) / (var_a + var_b + _C2)).mean()))
    terms[-1] *= float(((2 * mean_a * mean_b + _C1) / (mean_a**2 + mean_b**2 + _C1)).mean())
    weights = np.array(_WEIGHTS[: len(terms)]) / sum(_WEIGHTS[: len(terms)])
    return float(np.prod([max(term, 0.0) ** weight for term, weight in zip(terms, weights, strict=True)]))


def _means(voxels: Tensor) -> Tensor:
    """Return the means of windows that cover the patch."""
    windows = [min(_WINDOW, size) for size in voxels.shape[2:]]
    return F.avg_pool3d(voxels, windows, [max(1, size // _PLACES) for size in voxels.shape[2:]])
