"""Turns batches in the stored dtype into normalized images and labels on the device.

Batches reach a GPU through pinned memory, on a separate stream; on a CPU nothing is copied.  Casting,
normalization and augmentation run on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.errors import DataError
from vesuvius.loader.intensity import intensity_scales, normalized, signed_view
from vesuvius.monitor.clock import StepClock
from vesuvius.plan.plan import Augmentation, Sample
from vesuvius.stream.feeder import Batch
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.reading.reader import ReaderJob
from vesuvius.stream.start.prepare import IntensityRange
from vesuvius.stream.stream import PatchStream


@dataclass(frozen=True)
class PatchBatch:
    """A batch of patches on the device."""

    # (B, C, Z, Y, X): float32, -1 and +1 at the ends of the intensity range, or as stored with `normalize=False`
    image: Tensor
    # (B, L, Z, Y, X), cropped and augmented like the image; None without labels
    label: Tensor | None
    samples: tuple[Sample, ...]  # index, volume, box and augmentation of each patch

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the batch on another device; called by frameworks that move batches themselves."""
        label = None if self.label is None else self.label.to(device, non_blocking=non_blocking)
        return replace(self, image=self.image.to(device, non_blocking=non_blocking), label=label)


@dataclass(eq=False)
class DeviceFeed:
    """Delivers a stream's batches on a device, normalized, or as stored without intensity ranges."""

    device: torch.device
    options: StreamOptions
    job: ReaderJob
    ranges: Sequence[IntensityRange]  # of each channel of each volume
    # dtypes on the device, which several labels or channels need; None = as they are
    label_dtype: torch.dtype | None = None
    image_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        self._stream: PatchStream | None = None
        self._scales = intensity_scales(self.ranges).reshape(-1, self.job.channels, 2)
        if self.device.type != "cpu":
            self._copies = torch.Stream(self.device)

    def open(self, **start: Any) -> PatchStream:
        """Open the stream that `next` draws from; arguments and errors are those of `PatchStream`."""
        self._stream = PatchStream(self.job, self.options, **start)
        return self._stream

    @property
    def stream(self) -> PatchStream:
        assert self._stream is not None, "open the feed first"
        return self._stream

    def next(self, clock: StepClock) -> tuple[PatchBatch, Batch]:
        """Return the next batch on the device, and as it was read."""
        with clock.waiting():
            batch = next(self.stream)
            if self.label_dtype is not None:
                for labels in batch.arrays[batch.channels :]:
                    check_cast(labels, self.label_dtype)
        raw = self.copy([torch.from_numpy(array) for array in batch.arrays], clock)
        with clock.computing("forward"):
            return self._augmented(batch, raw), batch

    def to_device(self, batch: Batch) -> PatchBatch:
        """Copy a batch that `next` delivered earlier to the device again; waits for the copy."""
        return self._augmented(batch, [torch.from_numpy(array).to(self.device) for array in batch.arrays])

    def copy(self, tensors: Sequence[Tensor], clock: StepClock) -> list[Tensor]:
        """Copy host tensors to a GPU while it computes; later kernels wait.  On a CPU nothing is copied."""
        if self.device.type == "cpu":
            with clock.copying():
                return list(tensors)
        main = torch.accelerator.current_stream(self.device)
        with self._copies, clock.copying():
            pinned = (tensor if tensor.is_pinned() else _pinned(tensor) for tensor in tensors)
            copies = [tensor.to(self.device, non_blocking=True) for tensor in pinned]
        main.wait_stream(self._copies)
        for copy in copies:
            copy.record_stream(main)  # otherwise the allocator could reuse its memory while `main` still reads it
        return copies

    def _augmented(self, batch: Batch, raw: Sequence[Tensor]) -> PatchBatch:
        augmentations = [sample.augmentation for sample in batch.samples]
        arrays = [apply_symmetries(each, augmentations).unsqueeze(1) for each in raw]
        images, labels = arrays[: batch.channels], arrays[batch.channels :]
        if len(self._scales):
            scales = self._scales[[sample.volume for sample in batch.samples]]
            images = [normalized(image, scales[:, channel]) for channel, image in enumerate(images)]
        label = joined(labels, self.label_dtype) if labels else None
        return PatchBatch(joined(images, self.image_dtype), label, batch.samples)


def check_cast(labels: NDArray[Any], dtype: torch.dtype) -> None:
    """Raise DataError if integers would change; compares them only if the stored dtype allows it."""
    if dtype.is_floating_point and (labels.dtype.kind == "f" or dtype is torch.bfloat16):  # numpy lacks the latter
        return
    if np.can_cast(labels.dtype, cast := torch.empty(0, dtype=dtype).numpy().dtype):
        return
    if (labels.astype(cast) != labels).any():
        raise DataError(f"Labels from {labels.min()} to {labels.max()} do not fit label_dtype {cast}; choose another")


def joined(channels: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
    """Return channels [B, 1, Z, Y, X] as one tensor of a dtype; None = as they are."""
    found = [channel.to(dtype or channel.dtype) for channel in channels]
    return torch.cat(found, 1) if len(found) > 1 else found[0]


def _pinned(tensor: Tensor) -> Tensor:
    """Return a copy in pinned memory, which torch reuses once its own copy to a GPU has ended."""
    copy = torch.empty_like(tensor, pin_memory=True)
    np.copyto(copy.numpy(), tensor.numpy())  # torch would wait for a thread on each core, which readers keep busy
    return copy


def apply_symmetries(patches: Tensor, augmentations: Sequence[Augmentation]) -> Tensor:
    """Mirror and rotate each patch [B, Z, Y, X], of any dtype, by its own augmentation; moves voxels, changes none."""
    if all(augmentation == Augmentation() for augmentation in augmentations):
        return patches
    out = torch.empty_like(patches)
    for target, patch, augmentation in zip(signed_view(out), signed_view(patches), augmentations, strict=True):
        axes = [axis for axis, flip in enumerate(augmentation.flip_zyx) if flip]
        target.copy_(torch.rot90(torch.flip(patch, axes), augmentation.num_rot90, (1, 2)))
    return out
