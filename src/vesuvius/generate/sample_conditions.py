"""The conditions of samples: boxes of a condition volume, by default of its held-out part."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, DataConfig, Triple
from vesuvius.diffusion.randomness import Purpose
from vesuvius.errors import ConfigError
from vesuvius.plan.split import split_volume
from vesuvius.runlog.units import format_sizes
from vesuvius.stream.start.prepare import GreyRange
from vesuvius.training.checkpoint.data_facts import DataFacts
from vesuvius.training.step.grey_values import grey_scales, normalised
from vesuvius.volumes.alignment import ZEROS, Alignment, shape_on
from vesuvius.volumes.box import Box, box_at, format_box, is_inside, moved, shape_of, triple
from vesuvius.volumes.geometry import FloatTriple
from vesuvius.volumes.labels import check_labels
from vesuvius.volumes.volume import open_volume


class ConditionPatches(AbstractContextManager["ConditionPatches"]):
    """Cuts the condition of each sample out of a condition volume; the data volume itself need not exist.

    Attributes:
        volume: the opened condition volume.
    """

    def __init__(
        self,
        config: DataConfig,
        facts: DataFacts,
        number: int,
        seed: int,
        given: ArrayConfig | None = None,
        box: Box | None = None,
    ) -> None:
        """Reads metadata.  Raises DataError where the condition volume cannot be used.

        Args:
            facts: the grey ranges of conditions, and the shapes and factors of volumes.
            number: which of `data.volumes`.
            given: a condition volume in place of the run's.
            box: its part that all samples are shown, of the size of a patch, in voxels of a sample; None = all of it.
        """
        spec = given or config.volumes[number].condition
        assert spec is not None
        self.volume = open_volume(spec, config.store, config.missing_chunk, config.condition_nan)
        self._patch_zyx, self._seed = config.patch_size, seed
        volume = facts.volumes[number]
        factors, offsets = volume.condition_factors, ZEROS if given else volume.condition_offsets
        shape = (None if given else volume.shape_zyx) or shape_on(self.volume.shape_zyx, factors)
        self._alignment = Alignment(shape, self.volume.shape_zyx, factors, offsets)
        # A given volume is its own grid: where that begins in the training volume is known if it is the run's.
        self._origin = triple(map(int, volume.condition_offsets)) if given else (0, 0, 0)
        if given is None:
            split = split_volume(self.volume.name, shape, config.patch_size, config.validation, volume.within)
            self._box = split.validation or split.train
        else:
            self._box = _checked(box or ((0, 0, 0), shape), shape, self.volume.name, config.patch_size)
        self._labels = config.labels
        low, high = (min(self._labels), max(self._labels)) if self._labels else (0, 0)
        self._grey = GreyRange(low, max(low + 1, high)) if self._labels else facts.greys.conditions[number]

    def __exit__(self, *_: object) -> None:
        self.volume.close()

    def start_zyx(self, sample: int) -> Triple:
        """Where the condition of a sample begins, from (seed, sample) alone.  Pure."""
        return random_start(self._box, self._patch_zyx, self._seed, sample)

    def place_zyx(self, sample: int) -> Triple:
        """The same in the volume of the training, if the condition is that of the training."""
        return moved(self.start_zyx(sample), self._origin)

    @property
    def voxel_size_um(self) -> FloatTriple | None:
        """Edge lengths (z, y, x) of what is shown, where the condition's metadata say them."""
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


def _checked(box: Box, shape_zyx: Triple, name: str, patch_zyx: Triple) -> Box:
    """The box, which holds exactly one patch.  Raises ConfigError where it does not."""
    if not is_inside(box, shape_zyx) or shape_of(box) != patch_zyx:
        raise ConfigError(
            f"samples are shown a box of the size of a patch, {format_sizes(patch_zyx)}, inside the condition; "
            f"got {format_box(box)} of {name}; change --box, or name an --out that ends in .zarr "
            "for a whole volume"
        )
    return box


def random_start(box: Box, patch_zyx: Triple, seed: int, sample: int) -> Triple:
    """A place for a patch, every one inside the box equally likely.  Pure."""
    rng = np.random.default_rng((seed, int(Purpose.CONDITION_PLACE), sample))
    last = [stop - size for stop, size in zip(box[1], patch_zyx, strict=True)]
    return triple(rng.integers(box[0], last, endpoint=True).tolist())
