"""Input of a training step: images from the loader, their noise and their conditions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.diffusion.estimate import Condition
from vesuvius.diffusion.randomness import sample_noise
from vesuvius.loader.device import DeviceFeed, PatchBatch
from vesuvius.loader.intensity import intensity_scales, normalized, signed_view
from vesuvius.monitor.clock import StepClock
from vesuvius.stream.feeder import Batch
from vesuvius.stream.start.prepare import IntensityRange
from vesuvius.stream.stream import PatchStream


class Conditioner:
    """Converts the stored condition voxels of a batch to network input on `device`.

    Args:
        labels: stored label value of each class; None: conditions are intensities.
        intensities: intensity range of each volume's condition; empty for labels and without conditions.
    """

    def __init__(
        self, labels: Sequence[int] | None, intensities: Sequence[IntensityRange], device: torch.device
    ) -> None:
        self._labels, self._scales, self._device = labels, intensity_scales(intensities), device

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
            channels = [normalized(raw, self._scales[list(volumes)])]
        return torch.cat([*channels, torch.ones_like(channels[0])], dim=1)


@dataclass(frozen=True)
class TrainingBatch:
    """A batch on the model's device."""

    indices: NDArray[np.int64]  # int64 [B], on the host
    x_0: Tensor  # float32 [B, 1, Z, Y, X], model values: low intensity -1, high intensity +1
    eps: Tensor  # noise, same shape as x_0
    condition: Condition  # condition input of the network, augmented with its patch
    stored: Batch  # the batch as it was read

    def rows(self, of: slice) -> TrainingBatch:
        condition = None if self.condition is None else self.condition[of]
        return TrainingBatch(self.indices[of], self.x_0[of], self.eps[of], condition, self.stored.rows(of))


class TrainingFeed:
    """Adds noise and conditions to the batches of a `DeviceFeed`.

    The noise of the next batch is drawn on a thread while the device computes, and copied like the patches.
    """

    def __init__(self, feed: DeviceFeed, conditioner: Conditioner) -> None:
        self._feed, self._conditioner = feed, conditioner
        plan = feed.job.plan
        self._draw = partial(sample_noise, plan.seed, shape_czyx=(1, *plan.patch_zyx))

    @contextmanager
    def open(self, **start: Any) -> Iterator[PatchStream]:
        """Open the stream; arguments and errors as in `DeviceFeed.open`."""
        with ThreadPoolExecutor(1, "noise") as self._drawer, self._feed.open(**start) as stream:
            self._noise = self._prefetch_noise(start.get("first", 0) + self._feed.job.rank)
            yield stream

    def next(self, clock: StepClock) -> TrainingBatch:
        batch, stored = self._feed.next(clock)
        with clock.waiting():
            eps = self._noise.result()[: len(stored.samples)]
        self._noise = self._prefetch_noise(int(stored.indices[-1]) + self._feed.job.world_size)
        (eps,) = self._feed.copy([eps], clock)
        with clock.computing("forward"):
            return self._assemble(batch, stored, eps)

    def to_device(self, stored: Batch) -> TrainingBatch:
        """Rebuild a batch from the host copy that `next` delivered (`TrainingBatch.stored`); waits for the transfer."""
        return self._assemble(self._feed.to_device(stored), stored, self._draw(stored.indices).to(self._feed.device))

    def _prefetch_noise(self, first: int) -> Future[Tensor]:
        """Draw the noise of the batch that starts at sample `first`; the stream guarantees that it comes next."""
        indices = first + self._feed.job.world_size * np.arange(self._feed.options.batch_size)
        return self._drawer.submit(self._draw, indices, pinned=self._feed.device.type != "cpu")

    def _assemble(self, batch: PatchBatch, stored: Batch, eps: Tensor) -> TrainingBatch:
        condition = self._conditioner(batch.label, [sample.volume for sample in batch.samples])
        return TrainingBatch(stored.indices, batch.image, eps, condition, stored)
