"""Turns the stored voxels of a condition into network input."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vesuvius.diffusion.estimate import Condition
from vesuvius.loader.intensity import intensity_scales, normalised, signed_view
from vesuvius.stream.start.prepare import IntensityRange


class Conditioner:
    """Converts the stored condition voxels of a batch to network input on `device`.

    Args:
        labels: stored label value of each class; None: conditions are grey values.
        greys: grey range of each volume's condition; empty for labels and without conditions.
    """

    def __init__(self, labels: Sequence[int] | None, greys: Sequence[IntensityRange], device: torch.device) -> None:
        self._labels, self._scales, self._device = labels, intensity_scales(greys), device

    def __call__(self, raw: Tensor | None, volumes: Sequence[int]) -> Condition:
        """Condition channels of a batch, given its stored voxels [B, 1, Z, Y, X], if any, and the samples' volumes."""
        if raw is None:
            return None
        raw = raw.to(self._device)
        if self._labels:
            values = signed_view(raw)  # unsigned labels in the upper half of the range are negative here
            bits = 8 * raw.element_size() if values.dtype != raw.dtype else 64
            channels = [(values == (v - 2**bits if v >= 2 ** (bits - 1) else v)).float() for v in self._labels]
        else:
            channels = [normalised(raw, self._scales[list(volumes)])]
        return torch.cat([*channels, torch.ones_like(channels[0])], dim=1)
