"""The fixed patches as model values: what validation measures on and previews stand beside; and the data's spectrum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.config import DataConfig
from vesuvius.diffusion.preconditioning import Condition
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.plan.plan import Augmentation
from vesuvius.stream.start.fixed_patches import FixedPatches, read_training_patches
from vesuvius.stream.start.prepare import GreyRanges, PreparedData
from vesuvius.training.step.device import model_values
from vesuvius.training.step.grey_values import Conditioner, grey_scales, to_device

_LEAST, _MOST, _VOXELS = 16, 64, 2**25  # of patches that the spectrum is measured of, and about how much they hold


class Reference:
    """Real patches that stay the same for a whole run; host memory holds them in their stored dtype.

    Rows are patch numbers 0 ... len - 1, in any order, repeated or not.  `device` is that of the conditioner.
    `held_out` says whether training never sees the patches.
    """

    def __init__(self, fixed: FixedPatches, greys: GreyRanges, conditioner: Conditioner, device: torch.device) -> None:
        self.held_out = fixed.held_out
        self._fixed = fixed
        self._scales = grey_scales(greys.volumes)
        self._conditioner = conditioner
        self._device = device

    def __len__(self) -> int:
        return len(self._fixed.patches)

    def x_0(self, rows: Sequence[int]) -> Tensor:
        """Model values of these patches: float32 [len(rows), 1, Z, Y, X] on the device.  Not clipped."""
        patches = self._raw(self._fixed.patches, rows)
        return model_values(patches, [Augmentation()] * len(rows), self._scales[self._volumes(rows)])

    def condition(self, rows: Sequence[int]) -> Condition:
        """What the network is shown beside these patches, on the device."""
        stored = self._fixed.conditions
        raw = None if stored is None else self._raw(stored, rows).unsqueeze(1)
        return self._conditioner(raw, self._volumes(rows))

    def condition_greys(self, row: int) -> NDArray[np.float32] | None:
        """The condition of a patch as a picture, [Z, Y, X] from -1 to 1: its greys, or its labels; None without one."""
        channels = self.condition([row])
        if channels is None:
            return None
        shown = channels[0, :-1]  # the last says that it is there
        greys = shown[0] if len(shown) == 1 else shown.argmax(0) * (2 / (len(shown) - 1)) - 1
        return greys.float().cpu().numpy()

    def _volumes(self, rows: Sequence[int]) -> list[int]:
        return [self._fixed.volumes[row] for row in rows]

    def _raw(self, stored: NDArray[np.generic], rows: Sequence[int]) -> Tensor:
        """[len(rows), Z, Y, X] in the stored dtype, on the device."""
        return to_device(torch.from_numpy(stored[list(rows)]), self._device)


def measure_spectrum(data: PreparedData, config: DataConfig, greys: GreyRanges) -> Spectrum:
    """The spectrum that training sees: of 16 to 64 patches, always the same for the same data, in every augmentation.

    Raises DataError where hardly any patch can be read.
    """
    count = min(max(_LEAST, _VOXELS // math.prod(config.patch_size)), _MOST)
    found = read_training_patches(data, config, count)
    scales = grey_scales(greys.volumes)[list(found.volumes)]
    values = model_values(torch.from_numpy(found.patches), [Augmentation()] * len(found.patches), scales)
    return Spectrum.of(values[:, 0]).augmented(**dict(config.augment))
