"""Figures of voxels of any stored dtype.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def percentiles(voxels: NDArray[Any], at: Sequence[float]) -> tuple[float, ...]:
    """Percentiles of any number of voxels above 0, as float64.

    numpy interpolates in the dtype of the voxels: differences of signed integers overflow, float16 rounds, and bool has
    none.
    """
    if voxels.dtype.kind == "i" or voxels.dtype in (np.bool_, np.float16):
        voxels = voxels.astype(np.float32 if voxels.itemsize <= 2 else np.float64)
    return tuple(float(value) for value in np.percentile(voxels, at))
