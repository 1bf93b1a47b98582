"""The spectrum of the data, measured once at the start of a run: noise levels and validation are made from it."""

from __future__ import annotations

import math

import torch

from vesuvius.config import DataConfig
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.plan.plan import Augmentation
from vesuvius.stream.start.fixed_patches import read_training_patches
from vesuvius.stream.start.prepare import GreyRanges, PreparedData
from vesuvius.training.step.device import model_values
from vesuvius.training.step.grey_values import grey_scales

_LEAST, _MOST, _VOXELS = 16, 64, 2**25


def measure_spectrum(data: PreparedData, config: DataConfig, greys: GreyRanges) -> Spectrum:
    """The spectrum that training sees: of 16 to 64 patches, always the same for the same data, in every augmentation.

    Raises DataError where hardly any patch can be read.
    """
    count = min(max(_LEAST, _VOXELS // math.prod(config.patch_size)), _MOST)
    found = read_training_patches(data, config, count)
    scales = grey_scales(greys.volumes)[list(found.volumes)]
    values = model_values(torch.from_numpy(found.patches), [Augmentation()] * len(found.patches), scales)
    return Spectrum.of(values[:, 0]).augmented(**dict(config.augment))
