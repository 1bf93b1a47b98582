"""The conditions of samples: boxes of the held-out part of the training's condition volume."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vesuvius.config import DataConfig, Triple
from vesuvius.diffusion.randomness import Purpose
from vesuvius.plan.split import split_volume
from vesuvius.stream.start.prepare import GreyRange
from vesuvius.training.checkpoint.data_facts import DataFacts
from vesuvius.training.step.grey_values import grey_scales, normalised
from vesuvius.volumes.alignment import Alignment, shape_on
from vesuvius.volumes.box import box_at, triple
from vesuvius.volumes.geometry import FloatTriple
from vesuvius.volumes.volume import open_volume
from vesuvius.volumes.voxels import check_labels


class ConditionPatches(AbstractContextManager["ConditionPatches"]):
    """Cuts the condition of each sample out of a condition volume; the data volume itself need not exist.

    Attributes:
        volume: the opened condition volume.
    """

    def __init__(self, config: DataConfig, facts: DataFacts, number: int, seed: int) -> None:
        """Reads metadata.  Raises DataError where the condition volume cannot be used.

        Args:
            facts: the grey ranges of conditions, and the shapes and factors of volumes.
            number: which of `data.volumes`.
        """
        spec = config.volumes[number].condition
        assert spec is not None
        self.volume = open_volume(spec, config.store, config.missing_chunk, config.condition_nan)
        self._patch_zyx, self._seed = config.patch_size, seed
        volume = facts.volumes[number]
        shape = volume.shape_zyx or shape_on(self.volume.shape_zyx, volume.condition_factors)
        self._alignment = Alignment(shape, self.volume.shape_zyx, volume.condition_factors, volume.condition_offsets)
        split = split_volume(self.volume.name, shape, config.patch_size, config.validation, volume.within)
        self._box = split.validation or split.train
        self._labels = config.labels
        low, high = (min(self._labels), max(self._labels)) if self._labels else (0, 0)
        self._grey = GreyRange(low, max(low + 1, high)) if self._labels else facts.greys.conditions[number]

    def __exit__(self, *_: object) -> None:
        self.volume.close()

    def start_zyx(self, sample: int) -> Triple:
        """Where the condition of a sample begins, from (seed, sample) alone: every place is equally likely.  Pure."""
        rng = np.random.default_rng((self._seed, int(Purpose.CONDITION_PLACE), sample))
        last = [stop - size for stop, size in zip(self._box[1], self._patch_zyx, strict=True)]
        return triple(rng.integers(self._box[0], last, endpoint=True).tolist())

    @property
    def voxel_size_um(self) -> FloatTriple | None:
        """Edge lengths (z, y, x) of what is shown, if the condition's metadata say them."""
        if (size_um := self.volume.voxel_size_um) is None:
            return None
        return triple(size / float(factor) for size, factor in zip(size_um, self._alignment.factors, strict=True))

    def read(self, samples: Sequence[int]) -> NDArray[Any]:
        """The conditions of these samples: [len(samples), Z, Y, X] in the stored dtype.  Raises DataError."""
        boxes = [box_at(self.start_zyx(sample), self._patch_zyx) for sample in samples]
        stored = [self._alignment.read(box, self.volume.read) for box in boxes]
        for box, voxels in zip(boxes, stored, strict=True):
            if self._labels:
                check_labels(voxels, self._labels, self.volume.name, box)
        return np.stack(stored)

    def to_model_values(self, stored: NDArray[Any]) -> NDArray[np.float32]:
        """For a picture: low grey, or label 0, becomes -1, high grey, or the last label, +1.  Pure."""
        values: NDArray[np.float32] = normalised(torch.from_numpy(stored), grey_scales([self._grey])).numpy()
        return values
