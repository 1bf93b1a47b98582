"""Normalizes voxels of any stored dtype to model values, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:  # otherwise a training step alone (`tools/gpu_check.py`) would need the volume readers
    from vesuvius.stream.start.prepare import IntensityRange

# Dtypes that float32 represents exactly.
_EXACT = (torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.float16, torch.float32)
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Dtypes to view unsigned integers as: torch supports few operations on those other than uint8."""


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy small host values to the device, from pinned memory: a pageable copy makes the host wait for the GPU."""
    return values.pin_memory().to(device, non_blocking=True) if device.type != "cpu" else values


def intensity_scales(ranges: Sequence[IntensityRange]) -> NDArray[np.float64]:
    """Return low and half the width of each range, which map to -1 and to the distance 1: float64 [volumes, 2]."""
    return np.array([(each.low, each.high / 2 - each.low / 2) for each in ranges], np.float64).reshape(-1, 2)


def normalized(raw: Tensor, scales: NDArray[np.float64]) -> Tensor:
    """Return (raw - low) / half - 1 in float32, within a few roundings of float32.

    Subtracts low before any rounding, so that a narrow range far from 0 keeps its resolution.  Dtypes that float32
    cannot represent are computed in float64, to which integers beyond 2^53 are rounded.  `raw` is [B, ...] in any
    stored dtype, `scales` the `intensity_scales` of each sample's volume, float64 [B, 2].
    """
    low, half = scales.T
    exact = raw.dtype in _EXACT
    dtype, origin = (torch.float32, low.astype(np.float32).astype(np.float64)) if exact else (torch.float64, low)
    # In place: allocating fresh memory takes longer than the arithmetic.
    values = raw.to(dtype, copy=True).sub_(_per_sample(origin, dtype, raw))
    divisors, summands = (_per_sample(each, dtype, raw) for each in (half, (origin - low) / half - 1))
    return values.div_(divisors).add_(summands).float()


def signed_view(voxels: Tensor) -> Tensor:
    """Return the same bits in a dtype that torch can index and copy."""
    return voxels.view(_SIGNED[voxels.dtype]) if voxels.dtype in _SIGNED else voxels


def _per_sample(values: NDArray[Any], dtype: torch.dtype, raw: Tensor) -> Tensor:
    """Reshape values to [B, 1, 1, ...], or a single one to [1, 1, 1, ...], on the device of `raw`."""
    column = torch.from_numpy(np.ascontiguousarray(values)).to(dtype).view(-1, *[1] * (raw.ndim - 1))
    return to_device(column, raw.device)
