"""Checks and statistics of voxels of any stored dtype: non-finite values, labels, percentiles, Euler number."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vesuvius.errors import DataError, warn_once
from vesuvius.volumes.box import Box, format_box

_NAMED = 5

Nan = Literal["air", "error", "keep"] | float
"""The replacement for NaN and infinity: `data.nan`, or 'keep' for none."""


@dataclass(frozen=True)
class Nonfinite:
    """NaN and infinite values of a volume.  Picklable."""

    volume: str  # its name
    share: float  # of the voxels read
    read_as: float  # their replacement

    def warn(self) -> None:
        text = (
            "%s contains NaN or infinity (%.2g %% of the voxels read so far), read as %g; set data.nan to another "
            "number, or to error to treat them as damage"
        )
        warn_once(text, self.volume, 100 * self.share, self.read_as)


def check_finite(voxels: NDArray[Any]) -> None:
    """Raise ValueError if a voxel is NaN or infinite."""
    if voxels.dtype.kind == "f" and (bad := np.count_nonzero(~np.isfinite(voxels))):
        raise ValueError(
            f"{bad} of {voxels.size} voxels are NaN or infinite, and data.nan=error; set data.nan to air or to a "
            "number that replaces them"
        )


def check_labels(voxels: NDArray[Any], classes: Sequence[int], name: str, box: Box) -> None:
    """Raise DataError if labels belong to none of the classes, because the network would see them without a class.

    `classes` has the stored label of each class; `name` and `box` are those of the labels, in voxels of the volume.
    """
    in_order = tuple(classes) == tuple(range(len(classes)))
    if in_order and voxels.dtype.kind in "bui" and voxels.max() < len(classes) and voxels.min() >= 0:
        return  # the fast path, at memory bandwidth
    outside = voxels[np.logical_and.reduce([voxels != label for label in classes])]
    if outside.size == 0:
        return
    labels, counts = np.unique(outside, return_counts=True)
    common = [f"{label:g}" if voxels.dtype.kind == "f" else str(int(label)) for label in labels[np.argsort(-counts)]]
    more = f" and {len(common) - _NAMED} more" if len(common) > _NAMED else ""
    expected = f"0 to {len(classes) - 1}" if in_order and len(classes) > 2 else ", ".join(map(str, classes))
    raise DataError(
        f"labels {', '.join(common[:_NAMED])}{more} in {name} are not among the {len(classes)} classes {expected}: "
        f"{100 * outside.size / voxels.size:.3g} % of the voxels in {format_box(box)}; raise data.condition_classes, "
        "list the stored label of each class there (including an ignore value), rewrite the labels, or set "
        "data.condition_classes=null if these are intensities"
    )


def percentiles(voxels: NDArray[Any], at: Sequence[float]) -> tuple[float, ...]:
    """Percentiles of a non-empty array, as float64.

    numpy interpolates in the dtype of the voxels: differences of signed integers overflow, float16 rounds, and bool has
    no differences.
    """
    if voxels.dtype.kind == "i" or voxels.dtype in (np.bool_, np.float16):
        voxels = voxels.astype(np.float32 if voxels.itemsize <= 2 else np.float64)
    return tuple(float(value) for value in np.percentile(voxels, at))


def pair_slices(axis: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Indices of the first and the second of all pairs of neighbors along an axis."""
    ends = slice(None, -1), slice(1, None)
    before, after = (tuple(end if each == axis else slice(None) for each in range(3)) for end in ends)
    return before, after


def euler_sum(material: NDArray[np.bool_], axis: int = 0) -> int:
    """Return vertices - edges + faces - cubes of material voxels, with their neighbors towards higher indices.

    The Euler number if all voxels at the border are pores: the number of connected parts (also by corners), minus
    tunnels, plus cavities.  Within a larger structure it is an unbiased share of that structure's Euler number.
    """
    if axis == 3:
        return int(np.count_nonzero(material))
    low, high = pair_slices(axis)
    return euler_sum(material[low] | material[high], axis + 1) - euler_sum(material[low], axis + 1)
