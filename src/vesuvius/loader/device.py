"""Last stop of a patch: from a batch in its stored dtype to normalised images and labels on the device.

On a GPU batches are put together in a small ring of pinned buffers (`BatchRing`) and copied from there on a stream of
their own; on a CPU the same calls only cast.  Casting, normalising and mirroring happen on the device.
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
    """Patches on the device."""

    # (B, 1, Z, Y, X): float32, -1 and +1 at the ends of the grey range, or as stored with `normalize=False`
    image: Tensor
    # (B, 1, Z, Y, X) in the dtype stored, cut, mirrored and turned as the image; None without labels
    label: Tensor | None
    samples: tuple[Sample, ...]  # index, volume, box and symmetry of each patch

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PatchBatch:
        """The same on another device; what frameworks that move batches themselves call."""
        label = None if self.label is None else self.label.to(device, non_blocking=non_blocking)
        return replace(self, image=self.image.to(device, non_blocking=non_blocking), label=label)


class DeviceFeed:
    """Opens a stream, takes batches from it and delivers them on `device`, normalised by `greys`, those of the volumes,
    or as stored without any."""

    def __init__(
        self, device: torch.device, options: StreamOptions, job: ReaderJob, greys: Sequence[IntensityRange]
    ) -> None:
        self.device, self.job, self.options = device, job, options
        self._stream: PatchStream | None = None
        self._scales = intensity_scales(greys)
        self._ring: BatchRing | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            allocate = partial(_pinned_slot, job.batch_layout(options.batch_size))
            self._ring = BatchRing(allocate, BUFFERS_IN_USE + batches_ahead(options))

    @contextmanager
    def open(self, **start: Unpack[StreamStart]) -> Iterator[PatchStream]:
        """The stream that `next` draws from, closed at the end; arguments and errors as of `PatchStream`."""
        ring = self._ring
        buffers = {"buffers": ring.buffers, "condition_buffers": ring.condition_buffers} if ring else {}
        with PatchStream(self.job, self.options, **buffers, **start) as self._stream:
            try:
                yield self._stream
            finally:
                self._stream = None  # it holds the batches that it delivered last

    @property
    def stream(self) -> PatchStream:
        """The stream that is open."""
        assert self._stream is not None, "open the feed first"
        return self._stream

    @property
    def batch_bytes(self) -> int:
        """Bytes that one more batch ahead takes; torch rounds pinned buffers up to a power of two."""
        return self._ring.slot_bytes if self._ring else self.options.batch_size * self.job.patch_bytes

    def reconfigure(self, **changes: Unpack[StreamChanges]) -> None:
        """Change the stream as `PatchStream.reconfigure` does, and the ring with it; between two batches.

        Raises:
            ConfigError: it cannot be done; stream and ring continue as they were.
        """
        if self._ring is None:
            self.stream.reconfigure(**changes)
            return
        options = replace(self.stream.options, **changes)
        before, count = len(self._ring), BUFFERS_IN_USE + batches_ahead(options)
        self._ring = self._ring.exchanged(self.stream, count, **changes)
        if count < before:
            self._copies.synchronize()
            if hasattr(torch.accelerator, "empty_host_cache"):  # older versions keep it for the next buffers
                torch.accelerator.empty_host_cache()

    def next(self, clock: StepClock) -> tuple[PatchBatch, Batch]:
        """The next batch on the device, and as it was read.

        On a GPU that lies in a buffer which is filled again two batches on; on a CPU it is the caller's.
        """
        ring = self._ring
        with clock.waiting():
            if ring:
                ring.wait()
            batch = next(self.stream)
        parts = ring.take(batch.patches) if ring else _tensors(batch)
        raw = self.copy([part[: len(batch.samples)] for part in parts], clock)
        if ring:
            ring.copying(self._copies.record_event())
        with clock.computing("forward"):
            return self._augmented(batch, *raw), batch

    def to_device(self, batch: Batch) -> PatchBatch:
        """A batch that `next` has delivered before, again; waits for the copy."""
        return self._augmented(batch, *(part.to(self.device) for part in _tensors(batch)))

    def copy(self, parts: Sequence[Tensor], clock: StepClock) -> list[Tensor]:
        """Host tensors on the device.  To a GPU they are copied, from pinned memory, while it computes; what it is
        given to compute from now on waits for them."""
        if self.device.type != "cuda":
            with clock.copying():
                return list(parts)
        main = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copies), clock.copying():
            copies = [part.to(self.device, non_blocking=True) for part in parts]
        main.wait_stream(self._copies)
        for part in copies:
            part.record_stream(main)  # or the allocator could hand its memory out while the main stream still reads it
        return copies

    def _augmented(self, batch: Batch, raw: Tensor, raw_label: Tensor | None = None) -> PatchBatch:
        augmentations = [sample.augmentation for sample in batch.samples]
        image = apply_symmetries(raw, augmentations).unsqueeze(1)
        if len(self._scales):
            image = normalised(image, self._scales[[sample.volume for sample in batch.samples]])
        label = None if raw_label is None else apply_symmetries(raw_label, augmentations).unsqueeze(1)
        return PatchBatch(image, label, batch.samples)


def _tensors(batch: Batch) -> list[Tensor]:
    return [torch.from_numpy(part) for part in (batch.patches, batch.condition) if part is not None]


def _pinned_slot(layout: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[Tensor]:
    dtypes = [torch.from_numpy(np.empty(0, dtype)).dtype for _, dtype in layout]
    return [torch.empty(shape, dtype=dtype, pin_memory=True) for (shape, _), dtype in zip(layout, dtypes, strict=True)]


def model_values(raw: Tensor, augmentations: Sequence[Augmentation], scales: NDArray[np.float64]) -> Tensor:
    """From voxels [B, Z, Y, X] in the stored dtype to what the network learns, float32 [B, 1, Z, Y, X].

    `scales` are the `intensity_scales` of each sample's volume, float64 [B, 2].
    """
    return normalised(apply_symmetries(raw, augmentations).unsqueeze(1), scales)


def apply_symmetries(patches: Tensor, augmentations: Sequence[Augmentation]) -> Tensor:
    """Mirror and turn each patch [B, Z, Y, X] as its own augmentation says.

    Moves voxels, changes none: any dtype, any device.
    """
    if all(augmentation == Augmentation() for augmentation in augmentations):
        return patches
    out = torch.empty_like(patches)
    for target, patch, augmentation in zip(signed_view(out), signed_view(patches), augmentations, strict=True):
        axes = [axis for axis, flip in enumerate(augmentation.flip_zyx) if flip]
        target.copy_(torch.rot90(torch.flip(patch, axes), augmentation.num_rot90, (1, 2)))
    return out


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class BatchRing:
    """Slots that are filled and copied from in turn.

    Before each batch call `wait`, with the batch `take`, and when its copy is under way `copying`.

    Args:
        allocate: makes a slot: a tensor [B, Z, Y, X] for patches and, where there are conditions, one for those.
        count: slots; at least 3.
        kept: the first of them, of another ring.
    """

    def __init__(self, allocate: Callable[[], list[Tensor]], count: int, kept: Sequence[list[Tensor]] = ()) -> None:
        self._allocate = allocate
        self._slots = [*kept, *(allocate() for _ in range(count - len(kept)))]
        self._copied: list[Any] = [None] * count  # a `torch.cuda.Event` each, once it has been copied
        self._places = {buffer.ctypes.data: place for place, buffer in enumerate(self.buffers)}
        self._held: deque[int] = deque(maxlen=BUFFERS_IN_USE)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def buffers(self) -> list[NDArray[Any]]:
        """For the stream: those of patches."""
        return [slot[0].numpy() for slot in self._slots]

    @property
    def condition_buffers(self) -> list[NDArray[Any]]:
        """For the stream; empty without conditions."""
        return [slot[1].numpy() for slot in self._slots if len(slot) > 1]

    @property
    def slot_bytes(self) -> int:
        """Memory of a slot where it is pinned."""
        return sum(pinned_bytes(part.nbytes) for part in self._slots[0])

    def wait(self) -> None:
        """The stream is about to fill the buffer of two batches ago: its copy must be over (it long is)."""
        if len(self._held) == BUFFERS_IN_USE and (copied := self._copied[self._held[0]]) is not None:
            copied.synchronize()

    def take(self, patches: NDArray[Any]) -> list[Tensor]:
        """The slot in which the stream has delivered a batch, whose place in the ring the stream alone decides."""
        place = self._places[patches.ctypes.data]
        self._held.append(place)
        return self._slots[place]

    def copying(self, copied: Any) -> None:
        """The slot that was taken last is being copied, until `copied`, a `torch.cuda.Event`."""
        self._copied[self._held[-1]] = copied

    def exchanged(self, stream: PatchStream, count: int, **changes: Unpack[StreamChanges]) -> BatchRing:
        """Change the stream that fills it, and return the ring that is filled from now on, of slots of this one and new
        ones.  Waits for all copies.

        Raises ConfigError where it cannot be had: then the stream continues with this one.
        """
        for copied in self._copied:
            if copied is not None:
                copied.synchronize()
        try:
            other = BatchRing(self._allocate, count, self._slots[:count])
        except RuntimeError as error:  # what torch raises where CUDA gives no pinned memory
            raise ConfigError(
                f"the batches ahead must fit into pinned memory; got {one_line(error)} for {count} buffers instead of "
                f"{len(self)}; lower training.prefetch_factor"
            ) from error
        stream.reconfigure(**changes, buffers=other.buffers, condition_buffers=other.condition_buffers)
        return other


def pinned_bytes(size: int) -> int:
    """Memory of a pinned buffer, which torch rounds up to a power of two.  Pure."""
    return 1 << (size - 1).bit_length() if size else 0
