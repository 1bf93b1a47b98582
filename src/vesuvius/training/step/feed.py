"""What a step is computed from: images of the loader, the noise of their samples, and their conditions."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Unpack

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.diffusion.estimate import Condition
from vesuvius.diffusion.randomness import draw_noise
from vesuvius.loader.device import DeviceFeed, PatchBatch
from vesuvius.monitor.clock import StepClock
from vesuvius.stream.feeder import Batch
from vesuvius.stream.options import StreamStart
from vesuvius.stream.stream import PatchStream
from vesuvius.training.step.conditioner import Conditioner


@dataclass(frozen=True)
class TrainingBatch:
    """A batch where the model is."""

    indices: NDArray[np.int64]  # int64 [B], on the host
    x_0: Tensor  # float32 [B, 1, Z, Y, X], model values: low grey -1, high grey +1
    eps: Tensor  # its noise, like x_0
    condition: Condition  # what the network is shown beside, mirrored and turned with its patch
    stored: Batch  # the batch as it was read, in memory of its own on the host

    def rows(self, of: slice) -> TrainingBatch:
        """Some of it, in the same memory."""
        condition = None if self.condition is None else self.condition[of]
        return TrainingBatch(self.indices[of], self.x_0[of], self.eps[of], condition, self.stored.rows(of))


class TrainingFeed:
    """Batches of a `DeviceFeed` with what training adds.

    The noise of the next batch is drawn on a thread while the device computes, and copied as the patches are.
    """

    def __init__(self, feed: DeviceFeed, conditioner: Conditioner) -> None:
        self._feed, self._conditioner = feed, conditioner
        plan = feed.job.plan
        self._draw = partial(draw_noise, plan.seed, shape_czyx=(1, *plan.patch_zyx))

    @contextmanager
    def open(self, **start: Unpack[StreamStart]) -> Iterator[PatchStream]:
        """As `DeviceFeed.open`."""
        with ThreadPoolExecutor(1, "noise") as self._drawer, self._feed.open(**start) as stream:
            self._noise = self._drawn_ahead(start.get("first", 0) + self._feed.job.rank)
            yield stream

    def next(self, clock: StepClock) -> TrainingBatch:
        """The next batch, on the device."""
        batch, stored = self._feed.next(clock)
        with clock.waiting():
            eps = self._noise.result()[: len(stored.samples)]
        self._noise = self._drawn_ahead(int(stored.indices[-1]) + self._feed.job.world)
        (eps,) = self._feed.copy([eps], clock)
        # On a GPU its buffers are filled again two batches on.
        stored = stored.copy() if self._pinned else stored
        with clock.computing("forward"):
            return self._assembled(batch, stored, eps)

    def to_device(self, stored: Batch) -> TrainingBatch:
        """A batch that `next` has delivered before (`TrainingBatch.stored`), again; waits for the copy."""
        return self._assembled(self._feed.to_device(stored), stored, self._draw(stored.indices).to(self._feed.device))

    @property
    def _pinned(self) -> bool:
        return self._feed.device.type == "cuda"

    def _drawn_ahead(self, first: int) -> Future[Tensor]:
        """The noise of the batch that begins with this sample; the stream makes sure that it comes next."""
        indices = first + self._feed.job.world * np.arange(self._feed.options.batch_size)
        return self._drawer.submit(self._draw, indices, pinned=self._pinned)

    def _assembled(self, batch: PatchBatch, stored: Batch, eps: Tensor) -> TrainingBatch:
        condition = self._conditioner(batch.label, [sample.volume for sample in batch.samples])
        return TrainingBatch(stored.indices, batch.image, eps, condition, stored)
