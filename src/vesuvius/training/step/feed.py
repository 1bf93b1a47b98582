"""Input of a training step: images from the loader, their noise and their conditions."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.diffusion.estimate import Condition
from vesuvius.diffusion.randomness import condition_noise_std, sample_noise
from vesuvius.loader.device import DeviceFeed, PatchBatch
from vesuvius.loader.intensity import intensity_scales, normalized, signed_view, to_device
from vesuvius.monitor.clock import StepClock
from vesuvius.stream.feeder import Batch
from vesuvius.stream.start.prepare import IntensityRange
from vesuvius.stream.stream import PatchStream


@dataclass(frozen=True)
class Windows:
    """The windows of a condition with context: places of patches in their windows, and noise for these."""

    rows: Sequence[Sequence[NDArray[np.int64]]]  # of each sample, as `ContextAlignment.rows`
    noise: Tensor | None = None  # standard normal, [B, 1, Z, Y, X]; None = no noise
    std: Sequence[float] = ()  # of the noise of each sample, in model values


@dataclass(frozen=True)
class StoredCondition:
    """Condition of a batch as it is read: the voxels of patches or, with `windows`, of their windows."""

    voxels: NDArray[Any]  # [B, 1, Z, Y, X] in the stored dtype
    windows: Windows | None = None


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
        self.channels = len(labels or (0,))  # of the condition alone, the first ones

    def __call__(self, raw: Tensor | None, volumes: Sequence[int], windows: Windows | None = None) -> Condition:
        """Condition channels of a batch, given its stored voxels [B, 1, Z, Y, X], if any, and the samples' volumes.

        With `windows`: the noisy condition at the patches, 1, standard deviation of the noise, the noisy windows.
        """
        if raw is None:
            return None
        raw = raw.to(self._device)
        condition = torch.cat(self._channels(raw, volumes), dim=1)
        there = torch.ones_like(condition[:, :1])
        if windows is None:
            return torch.cat([condition, there], dim=1)
        level = torch.zeros_like(there)
        if windows.noise is not None:
            std = to_device(torch.tensor(windows.std, dtype=torch.float32), self._device).view(-1, 1, 1, 1, 1)
            condition, level = condition + std * windows.noise.to(self._device), level + std
        z, y, x = (to_device(torch.from_numpy(np.stack(row)), self._device) for row in zip(*windows.rows, strict=True))
        sample = torch.arange(len(raw), device=self._device).view(-1, 1, 1, 1)
        here = condition.movedim(1, -1)[sample, z[:, :, None, None], y[:, None, :, None], x[:, None, None, :]]
        return torch.cat([here.movedim(-1, 1), there, level, condition], dim=1)

    def _channels(self, raw: Tensor, volumes: Sequence[int]) -> list[Tensor]:
        if self._labels:
            values = signed_view(raw)  # unsigned labels in the upper half of the range are negative here
            bits = 8 * raw.element_size() if values.dtype != raw.dtype else 64
            return [(values == (v - 2**bits if v >= 2 ** (bits - 1) else v)).float() for v in self._labels]
        return [normalized(raw, self._scales[list(volumes)])]


@dataclass(frozen=True)
class TrainingBatch:
    """A batch on the model's device."""

    indices: NDArray[np.int64]  # int64 [B], on the host
    x_0: Tensor  # float32 [B, 1, Z, Y, X], model values: low intensity -1, high intensity +1
    eps: Tensor  # noise, same shape as x_0
    condition: Condition  # condition input of the network, augmented with its patch
    stored: Batch  # the batch as it was read

    def rows(self, of: slice) -> Self:
        condition = None if self.condition is None else self.condition[of]
        return type(self)(self.indices[of], self.x_0[of], self.eps[of], condition, self.stored.rows(of))


class TrainingFeed:
    """Adds noise and conditions to the batches of a `DeviceFeed`.

    The noise of the next batch is drawn on a thread while the device computes, and copied like the patches.
    """

    def __init__(self, feed: DeviceFeed, conditioner: Conditioner, condition_noise: float = 0.0) -> None:
        """`condition_noise` is the largest standard deviation of the noise on conditions with context."""
        self._feed, self._conditioner, self._condition_noise = feed, conditioner, condition_noise
        plan = feed.job.plan
        # the second channel is for the condition
        self._draw = partial(sample_noise, plan.seed, shape_czyx=(1 + (condition_noise > 0), *plan.patch_zyx))

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

    def _assemble(self, batch: PatchBatch, stored: Batch, drawn: Tensor) -> TrainingBatch:
        job, windows = self._feed.job, None
        if job.contexts:
            rows = [
                job.contexts[each.volume].rows(each.start_zyx, each.augmentation.flip_zyx, each.augmentation.num_rot90)
                for each in batch.samples
            ]
            std = condition_noise_std(job.plan.seed, stored.indices, self._condition_noise)
            windows = Windows(rows, drawn[:, 1:] if self._condition_noise else None, std)
        condition = self._conditioner(batch.label, [sample.volume for sample in batch.samples], windows)
        return TrainingBatch(stored.indices, batch.image, drawn[:, :1], condition, stored)
