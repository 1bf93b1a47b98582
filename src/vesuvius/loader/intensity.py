"""From voxels of any stored dtype to model values, where the model is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:  # else a training step alone (`tools/gpu_check.py`) would need what reads volumes
    from vesuvius.stream.start.prepare import IntensityRange

# float32 holds all of their values.
_EXACT = (torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.float16, torch.float32)
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""torch moves and adds no unsigned integers but uint8; their bits can be looked at as these."""


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy small host values to the device.  From pinned memory: an ordinary copy makes the host wait for the GPU."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def intensity_scales(greys: Sequence[IntensityRange]) -> NDArray[np.float64]:
    """Low grey, which becomes -1, and half of the range up to high, which becomes +1: float64 [volumes, 2]."""
    return np.array([(grey.low, grey.high / 2 - grey.low / 2) for grey in greys], np.float64).reshape(-1, 2)


def normalised(raw: Tensor, scales: NDArray[np.float64]) -> Tensor:
    """(raw - low) / half - 1, each sample with its own figures.

    Low is subtracted before anything is rounded, so a small range far from 0 keeps its steps.  Dtypes that float32 does
    not hold are computed in float64, and near differences of 8-byte integers, which float64 does not hold, as integers.

    Args:
        raw: [B, ...] in any stored dtype.
        scales: `intensity_scales` of each sample's volume, float64 [B, 2].

    Returns:
        float32 of the shape of `raw`, on its device; within a few roundings of float32.
    """
    low, half = scales.T
    exact, long = raw.dtype in _EXACT, raw.dtype in (torch.int64, torch.uint64)
    dtype, origin = (torch.float32, low.astype(np.float32).astype(np.float64)) if exact else (torch.float64, low)
    origin = np.floor(low) if long else origin
    # In place: first touch of fresh memory takes longer than the sums.
    values = raw.to(dtype, copy=True).sub_(_per_sample(origin, dtype, raw))
    if long:
        bits = np.array([int(value) % 2**64 for value in origin], np.uint64).view(np.int64)
        near = signed_view(raw) - _per_sample(bits, torch.int64, raw)  # modulo 2^64
        values = torch.where(values.abs() < 2**62, near.double(), values)
    divisors, summands = (_per_sample(figures, dtype, raw) for figures in (half, (origin - low) / half - 1))
    return values.div_(divisors).add_(summands).float()


def signed_view(voxels: Tensor) -> Tensor:
    """The same bits in a dtype that torch can move about."""
    return voxels.view(_SIGNED[voxels.dtype]) if voxels.dtype in _SIGNED else voxels


def _per_sample(figures: NDArray[Any], dtype: torch.dtype, raw: Tensor) -> Tensor:
    """[B, 1, 1, ...] or, of one figure for all, [1, 1, 1, ...] on the device of `raw`."""
    column = torch.from_numpy(np.ascontiguousarray(figures)).to(dtype).view(-1, *[1] * (raw.ndim - 1))
    return to_device(column, raw.device)
