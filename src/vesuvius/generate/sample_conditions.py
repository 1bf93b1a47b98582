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
from vesuvius.training.step.grey_values import grey_scales, normalised
from vesuvius.volumes.box import Box, box_at, format_box, is_inside, shape_of, times, triple
from vesuvius.volumes.coarser import Upsampling
from vesuvius.volumes.geometry import FloatTriple
from vesuvius.volumes.volume import open_volume


class ConditionPatches(AbstractContextManager["ConditionPatches"]):
    """Cuts the condition of each sample out of a condition volume; the data volume itself need not exist.

    Attributes:
        volume: the opened condition volume.
    """

    def __init__(
        self,
        config: DataConfig,
        number: int,
        seed: int,
        greys: Sequence[GreyRange],
        given: ArrayConfig | None = None,
        box: Box | None = None,
        shape_zyx: Triple | None = None,
        factors: Triple = (1, 1, 1),
    ) -> None:
        """Reads metadata.  Raises DataError where the condition volume cannot be used.

        Args:
            number: which of `data.volumes`.
            greys: grey range of each volume's condition; empty with labels.
            given: a condition volume in place of the run's.
            box: the place in it, of the size of a patch, that all samples are shown; None = all of it.
            shape_zyx: of the volume itself; None = as the condition says.
            factors: voxels of a sample, and of `box`, per voxel of the condition, along each axis.
        """
        spec = given or config.volumes[number].condition
        assert spec is not None
        self.volume = open_volume(spec, config.store, config.missing_chunk)
        self._patch_zyx, self._seed = config.patch_size, seed
        shape = (None if given else shape_zyx) or times(self.volume.shape_zyx, factors)
        self._upsampling = Upsampling(shape, self.volume.shape_zyx, factors)
        if given is None:
            split = split_volume(self.volume.name, shape, config.patch_size, config.validation)
            self._box = split.validation or split.train
        else:
            self._box = _checked(box or ((0, 0, 0), shape), shape, self.volume.name, config.patch_size)
        labels = config.condition_classes
        self._grey = GreyRange(0, max(1, labels - 1)) if labels else greys[number]

    def __exit__(self, *_: object) -> None:
        self.volume.close()

    def start_zyx(self, sample: int) -> Triple:
        """Where the condition of a sample begins, from (seed, sample) alone.  Pure."""
        return random_start(self._box, self._patch_zyx, self._seed, sample)

    @property
    def voxel_size_um(self) -> FloatTriple | None:
        """Edge lengths (z, y, x) of what is shown, where the condition's metadata say them."""
        if (size_um := self.volume.voxel_size_um) is None:
            return None
        return triple(size / factor for size, factor in zip(size_um, self._upsampling.factors, strict=True))

    def read(self, samples: Sequence[int]) -> NDArray[Any]:
        """The conditions of these samples: [len(samples), Z, Y, X] in the stored dtype.  Raises DataError."""
        return np.stack([self._read(self.start_zyx(sample)) for sample in samples])

    def to_model_values(self, stored: NDArray[Any]) -> NDArray[np.float32]:
        """For a picture: low grey, or label 0, becomes -1, high grey, or the last label, +1.  Pure."""
        values: NDArray[np.float32] = normalised(torch.from_numpy(stored), grey_scales([self._grey])).numpy()
        return values

    def _read(self, start_zyx: Triple) -> NDArray[Any]:
        return self._upsampling.read(box_at(start_zyx, self._patch_zyx), self.volume.read)


def _checked(box: Box, shape_zyx: Triple, name: str, patch_zyx: Triple) -> Box:
    """The box, which leaves one place for a patch.  Raises ConfigError where it does not."""
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
