"""The coarser levels of a pyramid: their shapes and voxels.  Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple

# What eight voxels are summed in.
_SUM_DTYPE = {"uint8": np.uint16, "uint16": np.uint32, "float32": np.float32}


def level_shapes(shape_zyx: Triple, levels: int) -> list[Triple]:
    """The shapes of all levels from the finest; each half of the one above, rounded up."""
    z, y, x = shape_zyx
    return [(-(-z // 2**k), -(-y // 2**k), -(-x // 2**k)) for k in range(levels)]


def halve(voxels: NDArray[Any]) -> NDArray[Any]:
    """Mean of 2x2x2 voxels, or of as many as exist at an odd end; of whole numbers rounded half up.

    Args:
        voxels: (Z, Y, X) of uint8, uint16 or float32.

    Returns:
        The same dtype, each axis half as long, rounded up.  Of labels 0 and 1 that is the majority.
    """
    sum_dtype = _SUM_DTYPE[voxels.dtype.name]
    total: NDArray[Any] = voxels.astype(sum_dtype)
    count: NDArray[Any] = np.ones((1, 1, 1), sum_dtype)
    for axis in range(3):
        pairs = np.moveaxis(total, axis, 0)
        folded = pairs[::2].copy()
        folded[: len(pairs) // 2] += pairs[1::2]
        total = np.moveaxis(folded, 0, axis)
        ones: NDArray[Any] = np.full(len(folded), 2, sum_dtype)
        ones[len(pairs) // 2 :] = 1
        count = count * ones.reshape([-1 if a == axis else 1 for a in range(3)])
    mean: NDArray[Any] = total / count if voxels.dtype.kind == "f" else (total + count // 2) // count
    return mean.astype(voxels.dtype, copy=False)
