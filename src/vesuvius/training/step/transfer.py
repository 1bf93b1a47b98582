"""Small host values on their way to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy small host values to the device.  From pinned memory: an ordinary copy makes the host wait for the GPU."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
