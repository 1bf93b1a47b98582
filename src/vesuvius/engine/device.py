"""Last stop of a patch: from a batch in its stored dtype to model values on the device.

On a GPU batches are put together in a small ring of pinned buffers (`batch_ring.py`) and copied from there on a stream
of their own; on a CPU the same calls only cast.  Casting, normalising and mirroring happen on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.diffusion.condition import Condition
from vesuvius.engine.batch_ring import BatchRing, exchange
from vesuvius.engine.conditioning import Conditioner
from vesuvius.engine.greys import grey_scales, normalised, signed_view
from vesuvius.observe.clock import StepClock
from vesuvius.plan.plan import Augmentation
from vesuvius.stream.feeder import HELD, Batch
from vesuvius.stream.options import StreamChanges, StreamOptions, batches_ahead
from vesuvius.stream.prepare import GreyRange
from vesuvius.stream.reader import ReaderJob
from vesuvius.stream.stream import PatchStream


@dataclass(frozen=True)
class DeviceBatch:
    """A batch where the model is.

    Attributes:
        indices: int64 [B], on the host.
        x_0: float32 [B, 1, Z, Y, X], model values: low grey -1, high grey +1.
        condition: what the network is shown beside, mirrored and turned with its patch.
        stored: the batch as it was read, in memory of its own on the host: what a replay needs.
    """

    indices: NDArray[np.int64]
    x_0: Tensor
    condition: Condition
    stored: Batch


class DeviceFeed:
    """Takes batches from a stream and delivers model values.

    Args:
        device: where the model is.
        options, job: of the stream.
        greys: grey range of each volume of the plan.
        conditioner: makes the condition of a batch.

    `buffers` and `condition_buffers` are to be handed to the stream (empty on a CPU).
    """

    def __init__(
        self,
        device: torch.device,
        options: StreamOptions,
        job: ReaderJob,
        greys: Sequence[GreyRange],
        conditioner: Conditioner,
    ) -> None:
        self._device = device
        self._plan = job.plan
        self._patch_bytes = job.patch_bytes
        self._batch_bytes = options.batch_size * job.patch_bytes
        self._scales = grey_scales(greys)
        self._conditioner = conditioner
        self._ring: BatchRing | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            shape = (options.batch_size, *job.plan.patch_zyx)
            dtypes = [torch.from_numpy(np.empty(0, d)).dtype for d in (job.dtype, job.condition_dtype) if d]
            allocate = partial(_pinned_slot, shape, dtypes)
            self._ring = BatchRing(allocate, HELD + batches_ahead(job.patch_bytes, options))

    @property
    def buffers(self) -> list[NDArray[Any]]:
        return self._ring.buffers if self._ring else []

    @property
    def condition_buffers(self) -> list[NDArray[Any]]:
        return self._ring.condition_buffers if self._ring else []

    @property
    def memory_of_batch(self) -> int:
        """Bytes that one more batch ahead takes; torch rounds pinned buffers up to a power of two."""
        return self._ring.slot_bytes if self._ring else self._batch_bytes

    def reconfigure(self, stream: PatchStream, **changes: Unpack[StreamChanges]) -> None:
        """Have the stream changed as `PatchStream.reconfigure` does, and the ring with it; between two batches.

        Raises:
            ConfigError: it cannot be had; stream and ring go on as they were.
        """
        if self._ring is None:
            stream.reconfigure(**changes)
            return
        options = replace(stream.options, **changes)
        before, count = len(self._ring), HELD + batches_ahead(self._patch_bytes, options)
        self._ring = exchange(stream, self._ring, count, **changes)
        if count < before:
            self._copies.synchronize()
            _release_pinned()

    def next(self, stream: PatchStream, clock: StepClock) -> DeviceBatch:
        """The next batch, on the device."""
        with clock.waiting():
            if self._ring:
                self._ring.wait()
            batch = next(stream)
        if self._ring:
            raw = self._copy_to_device(self._ring, len(batch.indices), clock)
            batch = _copy_of(batch)  # its buffers are filled again two batches on; the device computes meanwhile
        else:
            with clock.copying():
                raw = [torch.from_numpy(part) for part in (batch.patches, batch.condition) if part is not None]
        with clock.computing("forward"):
            return self._augmented(batch, *raw)

    def _copy_to_device(self, ring: BatchRing, count: int, clock: StepClock) -> list[Tensor]:
        main = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._copies):
            with clock.copying():
                raw = [part[:count].to(self._device, non_blocking=True) for part in ring.slot]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        ring.advance(event)
        main.wait_event(event)
        for part in raw:
            part.record_stream(main)  # or the allocator could hand its memory out while the main stream still reads it
        return raw

    def _augmented(self, batch: Batch, raw: Tensor, raw_condition: Tensor | None = None) -> DeviceBatch:
        indices = [int(index) for index in batch.indices]
        augmentations = [self._plan.augmentation(index) for index in indices]
        volumes = [self._plan.volume_of(index) for index in indices]
        x_0 = model_values(raw, augmentations, self._scales[volumes])
        return DeviceBatch(
            batch.indices, x_0, make_condition(raw_condition, augmentations, volumes, self._conditioner), batch
        )


def _pinned_slot(shape: tuple[int, ...], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, pin_memory=True) for dtype in dtypes]


def _release_pinned() -> None:
    """Give the system what torch keeps of freed pinned memory.  Older versions keep it for the next buffers."""
    if hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()


def _copy_of(batch: Batch) -> Batch:
    return Batch(batch.patches.copy(), batch.indices, None if batch.condition is None else batch.condition.copy())


def model_values(raw: Tensor, augmentations: Sequence[Augmentation], scales: NDArray[np.float64]) -> Tensor:
    """From stored voxels to what the network learns.

    Args:
        raw: [B, Z, Y, X] in the stored dtype.
        augmentations: of each sample.
        scales: `grey_scales` of each sample's volume, float64 [B, 2].

    Returns:
        float32 [B, 1, Z, Y, X] on the device of `raw`.
    """
    gains, shifts = [a.gain for a in augmentations], [a.offset for a in augmentations]
    return normalised(apply_symmetries(raw, augmentations).unsqueeze(1), scales, gains, shifts)


def make_condition(
    raw: Tensor | None, augmentations: Sequence[Augmentation], volumes: Sequence[int], conditioner: Conditioner
) -> Condition:
    """The condition of a batch, mirrored and turned with its patches; `raw` as for `model_values`, None without one."""
    return conditioner(None if raw is None else apply_symmetries(raw, augmentations).unsqueeze(1), volumes)


def apply_symmetries(patches: Tensor, augmentations: Sequence[Augmentation]) -> Tensor:
    """Mirror and turn each patch [B, Z, Y, X] as its own augmentation says.

    Moves voxels, changes none: any dtype, any device.
    """
    out = torch.empty_like(patches)
    for target, patch, augmentation in zip(signed_view(out), signed_view(patches), augmentations, strict=True):
        axes = [axis for axis, flip in enumerate(augmentation.flip_zyx) if flip]
        target.copy_(torch.rot90(torch.flip(patch, axes), augmentation.turns, (1, 2)))
    return out
