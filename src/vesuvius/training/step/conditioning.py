"""From a condition's stored voxels and the numbers of volumes to what the network is shown of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.config import Config
from vesuvius.diffusion.condition import Condition
from vesuvius.errors import DataError
from vesuvius.stream.start.prepare import GreyRange, PreparedData
from vesuvius.training.step.grey_values import grey_scales, normalised, signed_view, to_device
from vesuvius.volumes.geometry import FloatTriple
from vesuvius.volumes.volume import Volume


class Conditioner:
    """Makes the `Condition` of a batch.

    Args:
        labels: the stored label of each class; None: conditions are grey values.
        greys: grey range of each volume's condition; empty with labels, and without conditions.
        scalars: float32 [volumes, n] from `volume_scalars`.
        device: where the model is.
    """

    def __init__(
        self,
        labels: Sequence[int] | None,
        greys: Sequence[GreyRange],
        scalars: NDArray[np.float32],
        device: torch.device,
    ) -> None:
        self._labels = labels
        self._scales = grey_scales(greys)
        self._scalars = scalars
        self._device = device

    def __call__(self, raw: Tensor | None, volumes: Sequence[int]) -> Condition:
        """The condition of a batch: `raw` [B, 1, Z, Y, X] in the stored dtype, or None, of the samples' volumes."""
        return Condition(
            None if raw is None else self._channels(raw, volumes),
            self._scalars_of(volumes) if self._scalars.shape[1] else None,
        )

    def _channels(self, raw: Tensor, volumes: Sequence[int]) -> Tensor:
        raw = raw.to(self._device)
        if self._labels:
            values = signed_view(raw)  # unsigned labels of its upper half are negative there
            bits = 8 * raw.element_size() if values.dtype != raw.dtype else 64
            channels = [(values == (v - 2**bits if v >= 2 ** (bits - 1) else v)).float() for v in self._labels]
        else:
            channels = [normalised(raw, self._scales[list(volumes)])]
        return torch.cat([*channels, torch.ones_like(channels[0])], dim=1)

    def _scalars_of(self, volumes: Sequence[int]) -> Tensor:
        rows = self._scalars[list(volumes)]
        return to_device(torch.from_numpy(np.hstack([rows, np.ones((len(rows), 1), np.float32)])), self._device)


def volume_scalars(config: Config, data: PreparedData) -> NDArray[np.float32]:
    """What the network is told of each volume: float32 [volumes, len(model.scalars)].

    voxel_size is the binary logarithm of the edge in micrometres (geometric mean of z, y, x), level the pyramid level.

    Raises:
        DataError: the voxel size is wanted and a volume does not say it.
    """
    rows = np.zeros((len(data.volumes), len(config.model.scalars)), np.float32)
    for row, volume, spec in zip(rows, data.volumes, config.data.volumes, strict=True):
        for column, scalar in enumerate(config.model.scalars):
            match scalar:
                case "voxel_size":
                    row[column] = np.log2(_voxel_size_um(volume)).mean()
                case "level":
                    row[column] = spec.level
    return rows


def _voxel_size_um(volume: Volume) -> FloatTriple:
    size_um = volume.voxel_size_um
    if size_um is None or not all(0 < edge < math.inf for edge in size_um):
        raise DataError(
            "model.scalars: voxel_size needs volumes whose OME-Zarr metadata give a scale in micrometres; got "
            f"{size_um or 'none'} in {volume.name}; correct the metadata or remove voxel_size"
        )
    return size_um
