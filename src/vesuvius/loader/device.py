"""Turns batches in the stored dtype into normalised images and labels on the device.

For a GPU, batches are assembled in a small ring of pinned buffers (`BatchRing`) and copied on a separate CUDA stream;
on a CPU nothing is copied.  Casting, normalisation and augmentation run on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.errors import ConfigError, one_line
from vesuvius.loader.intensity import intensity_scales, normalised, signed_view
from vesuvius.monitor.clock import StepClock
from vesuvius.plan.plan import Augmentation, Sample
from vesuvius.stream.feeder import BUFFERS_IN_USE, Batch
from vesuvius.stream.options import StreamChanges, StreamOptions, StreamStart, batches_ahead
from vesuvius.stream.reading.reader import ReaderJob
from vesuvius.stream.start.prepare import IntensityRange
from vesuvius.stream.stream import PatchStream


@dataclass(frozen=True)
class PatchBatch:
    """A batch of patches on the device."""

    # (B, 1, Z, Y, X): float32, -1 and +1 at the ends of the intensity range, or as stored with `normalize=False`
    image: Tensor
    # (B, 1, Z, Y, X) in the stored dtype, cropped and augmented like the image; None without labels
    label: Tensor | None
    samples: tuple[Sample, ...]  # index, volume, box and augmentation of each patch

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PatchBatch:
        """Return the batch on another device; called by frameworks that move batches themselves."""
        label = None if self.label is None else self.label.to(device, non_blocking=non_blocking)
        return replace(self, image=self.image.to(device, non_blocking=non_blocking), label=label)


class DeviceFeed:
    """Delivers a stream's batches on `device`, normalised by `ranges` (one per volume), or as stored without any."""

    def __init__(
        self, device: torch.device, options: StreamOptions, job: ReaderJob, ranges: Sequence[IntensityRange]
    ) -> None:
        self.device, self.job, self.options = device, job, options
        self._stream: PatchStream | None = None
        self._scales = intensity_scales(ranges)
        self._ring: BatchRing | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            allocate = partial(_pinned_slot, job.batch_layout(options.batch_size))
            self._ring = BatchRing(allocate, BUFFERS_IN_USE + batches_ahead(options))

    @contextmanager
    def open(self, **start: Unpack[StreamStart]) -> Iterator[PatchStream]:
        """Open the stream that `next` draws from, for the context; arguments and errors are those of `PatchStream`."""
        ring = self._ring
        buffers = {"buffers": ring.buffers, "condition_buffers": ring.condition_buffers} if ring else {}
        with PatchStream(self.job, self.options, **buffers, **start) as self._stream:
            try:
                yield self._stream
            finally:
                self._stream = None  # it references its last batches

    @property
    def stream(self) -> PatchStream:
        """The open stream."""
        assert self._stream is not None, "open the feed first"
        return self._stream

    @property
    def batch_bytes(self) -> int:
        """Bytes that one more prefetched batch takes; torch rounds pinned buffers up to a power of two."""
        return self._ring.slot_bytes if self._ring else self.options.batch_size * self.job.patch_bytes

    def reconfigure(self, **changes: Unpack[StreamChanges]) -> None:
        """Reconfigure the stream (see `PatchStream.reconfigure`) and the ring, between two batches.

        Raises ConfigError: not possible; stream and ring are unchanged.
        """
        if self._ring is None:
            self.stream.reconfigure(**changes)
            return
        options = replace(self.stream.options, **changes)
        before, count = len(self._ring), BUFFERS_IN_USE + batches_ahead(options)
        self._ring = self._ring.resized(self.stream, count, **changes)
        if count < before:
            self._copies.synchronize()
            if hasattr(torch.accelerator, "empty_host_cache"):  # older versions keep it for the next buffers
                torch.accelerator.empty_host_cache()

    def next(self, clock: StepClock) -> tuple[PatchBatch, Batch]:
        """Return the next batch on the device, and as it was read.

        With a GPU the latter lies in a buffer that is reused two batches later; on a CPU the caller owns it.
        """
        ring = self._ring
        with clock.waiting():
            if ring:
                ring.wait()
            batch = next(self.stream)
        tensors = ring.take(batch.patches) if ring else _tensors(batch)
        raw = self.copy([tensor[: len(batch.samples)] for tensor in tensors], clock)
        if ring:
            ring.set_copied(self._copies.record_event())
        with clock.computing("forward"):
            return self._augmented(batch, *raw), batch

    def to_device(self, batch: Batch) -> PatchBatch:
        """Copy a batch that `next` delivered earlier to the device again; waits for the copy."""
        return self._augmented(batch, *(tensor.to(self.device) for tensor in _tensors(batch)))

    def copy(self, tensors: Sequence[Tensor], clock: StepClock) -> list[Tensor]:
        """Copy pinned host tensors to a GPU while it computes; later kernels wait.  On a CPU nothing is copied."""
        if self.device.type != "cuda":
            with clock.copying():
                return list(tensors)
        main = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copies), clock.copying():
            copies = [tensor.to(self.device, non_blocking=True) for tensor in tensors]
        main.wait_stream(self._copies)
        for copy in copies:
            copy.record_stream(main)  # otherwise the allocator could reuse its memory while `main` still reads it
        return copies

    def _augmented(self, batch: Batch, raw: Tensor, raw_label: Tensor | None = None) -> PatchBatch:
        augmentations = [sample.augmentation for sample in batch.samples]
        image = apply_symmetries(raw, augmentations).unsqueeze(1)
        if len(self._scales):
            image = normalised(image, self._scales[[sample.volume for sample in batch.samples]])
        label = None if raw_label is None else apply_symmetries(raw_label, augmentations).unsqueeze(1)
        return PatchBatch(image, label, batch.samples)


def _tensors(batch: Batch) -> list[Tensor]:
    return [torch.from_numpy(array) for array in (batch.patches, batch.condition) if array is not None]


def _pinned_slot(layout: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[Tensor]:
    dtypes = [torch.from_numpy(np.empty(0, dtype)).dtype for _, dtype in layout]
    return [torch.empty(shape, dtype=dtype, pin_memory=True) for (shape, _), dtype in zip(layout, dtypes, strict=True)]


def model_values(raw: Tensor, augmentations: Sequence[Augmentation], scales: NDArray[np.float64]) -> Tensor:
    """Augment and normalise voxels [B, Z, Y, X] in the stored dtype: float32 [B, 1, Z, Y, X].

    `scales` are the `intensity_scales` of each sample's volume, float64 [B, 2].
    """
    return normalised(apply_symmetries(raw, augmentations).unsqueeze(1), scales)


def apply_symmetries(patches: Tensor, augmentations: Sequence[Augmentation]) -> Tensor:
    """Mirror and rotate each patch [B, Z, Y, X], of any dtype, by its own augmentation; moves voxels, changes none."""
    if all(augmentation == Augmentation() for augmentation in augmentations):
        return patches
    out = torch.empty_like(patches)
    for target, patch, augmentation in zip(signed_view(out), signed_view(patches), augmentations, strict=True):
        axes = [axis for axis, flip in enumerate(augmentation.flip_zyx) if flip]
        target.copy_(torch.rot90(torch.flip(patch, axes), augmentation.num_rot90, (1, 2)))
    return out


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class BatchRing:
    """Ring of pinned slots that batches are assembled in and copied from.

    Call `wait` before each batch, `take` with the batch, and `set_copied` once its copy has been queued.

    Args:
        allocate: allocates a slot: a tensor [B, Z, Y, X] for patches and, if any, one for conditions.
        count: number of slots; at least 3.
        kept: slots of another ring to reuse.
    """

    def __init__(self, allocate: Callable[[], list[Tensor]], count: int, kept: Sequence[list[Tensor]] = ()) -> None:
        self._allocate = allocate
        self._slots = [*kept, *(allocate() for _ in range(count - len(kept)))]
        self._copied: list[Any] = [None] * count  # the `torch.cuda.Event` of each slot's last copy
        self._slot_of = {buffer.ctypes.data: index for index, buffer in enumerate(self.buffers)}
        self._in_use: deque[int] = deque(maxlen=BUFFERS_IN_USE)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def buffers(self) -> list[NDArray[Any]]:
        """The stream's buffers for patches."""
        return [slot[0].numpy() for slot in self._slots]

    @property
    def condition_buffers(self) -> list[NDArray[Any]]:
        """The stream's buffers for conditions; empty without conditions."""
        return [slot[1].numpy() for slot in self._slots if len(slot) > 1]

    @property
    def slot_bytes(self) -> int:
        """Bytes of a pinned slot."""
        return sum(pinned_bytes(tensor.nbytes) for tensor in self._slots[0])

    def wait(self) -> None:
        """Wait for the copy from the slot that the stream fills next (usually long done)."""
        if len(self._in_use) == BUFFERS_IN_USE and (copied := self._copied[self._in_use[0]]) is not None:
            copied.synchronize()

    def take(self, patches: NDArray[Any]) -> list[Tensor]:
        """Return the slot in which the stream has delivered a batch."""
        index = self._slot_of[patches.ctypes.data]
        self._in_use.append(index)
        return self._slots[index]

    def set_copied(self, copied: Any) -> None:
        """Set the `torch.cuda.Event` that marks the end of the copy from the slot taken last."""
        self._copied[self._in_use[-1]] = copied

    def resized(self, stream: PatchStream, count: int, **changes: Unpack[StreamChanges]) -> BatchRing:
        """Reconfigure the stream, and return the new ring that it fills, which reuses slots.  Waits for all copies.

        Raises ConfigError: not possible; the stream continues with this ring.
        """
        for copied in self._copied:
            if copied is not None:
                copied.synchronize()
        try:
            other = BatchRing(self._allocate, count, self._slots[:count])
        except RuntimeError as error:  # CUDA cannot allocate pinned memory
            raise ConfigError(
                f"Cannot allocate pinned memory for {count} prefetched batches instead of {len(self)}: "
                f"{one_line(error)}; lower training.prefetch_factor"
            ) from error
        stream.reconfigure(**changes, buffers=other.buffers, condition_buffers=other.condition_buffers)
        return other


def pinned_bytes(size: int) -> int:
    """Bytes of a pinned buffer: torch rounds up to a power of two.  Pure."""
    return 1 << (size - 1).bit_length() if size else 0
