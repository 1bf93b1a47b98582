"""From the voxels of a condition to what the network is shown."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vesuvius.diffusion.estimate import Condition
from vesuvius.loader.intensity import intensity_scales, normalised, signed_view
from vesuvius.stream.start.prepare import IntensityRange


class Conditioner:
    """Makes the condition of a batch, which the network is shown, of its stored voxels.

    Args:
        labels: the stored label of each class; None: conditions are grey values.
        greys: grey range of each volume's condition; empty with labels, and without conditions.
        device: where the model is.
    """

    def __init__(self, labels: Sequence[int] | None, greys: Sequence[IntensityRange], device: torch.device) -> None:
        self._labels, self._scales, self._device = labels, intensity_scales(greys), device

    def __call__(self, raw: Tensor | None, volumes: Sequence[int]) -> Condition:
        """The condition of a batch: `raw` [B, 1, Z, Y, X] in the stored dtype, or None, of the samples' volumes."""
        if raw is None:
            return None
        raw = raw.to(self._device)
        if self._labels:
            values = signed_view(raw)  # unsigned labels of its upper half are negative there
            bits = 8 * raw.element_size() if values.dtype != raw.dtype else 64
            channels = [(values == (v - 2**bits if v >= 2 ** (bits - 1) else v)).float() for v in self._labels]
        else:
            channels = [normalised(raw, self._scales[list(volumes)])]
        return torch.cat([*channels, torch.ones_like(channels[0])], dim=1)
