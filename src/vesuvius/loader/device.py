"""Last stop of a patch: from a batch in its stored dtype to model values on the device.

On a GPU batches are put together in a small ring of pinned buffers (`BatchRing`) and copied from there on a stream of
their own; on a CPU the same calls only cast.  Casting, normalising and mirroring happen on the device.  The noise of
the next batch is drawn on a thread while the device computes, and travels with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.diffusion.estimate import Condition
from vesuvius.diffusion.randomness import draw_noise
from vesuvius.errors import ConfigError, one_line
from vesuvius.loader.grey_values import grey_scales, normalised, signed_view
from vesuvius.monitor.clock import StepClock
from vesuvius.plan.plan import Augmentation
from vesuvius.stream.feeder import HELD, Batch
from vesuvius.stream.options import StreamChanges, StreamOptions, batches_ahead
from vesuvius.stream.reading.reader import ReaderJob
from vesuvius.stream.reading.resident import Resident
from vesuvius.stream.start.prepare import GreyRange
from vesuvius.stream.stream import PatchStream


@dataclass(frozen=True)
class DeviceBatch:
    """A batch where the model is."""

    indices: NDArray[np.int64]  # int64 [B], on the host
    x_0: Tensor  # float32 [B, 1, Z, Y, X], model values: low grey -1, high grey +1
    eps: Tensor  # its noise, like x_0; empty without
    condition: Condition  # what the network is shown beside, mirrored and turned with its patch
    stored: Batch  # the batch as it was read, in memory of its own on the host

    def part(self, of: slice) -> DeviceBatch:
        """Some of it, in the same memory."""
        condition = None if self.condition is None else self.condition[of]
        return DeviceBatch(self.indices[of], self.x_0[of], self.eps[of], condition, self.stored.part(of))


class DeviceFeed:
    """Opens a stream, takes batches from it and delivers model values on `device`; `greys` are the volumes'."""

    def __init__(
        self,
        device: torch.device,
        options: StreamOptions,
        job: ReaderJob,
        greys: Sequence[GreyRange],
        conditioner: Callable[[Tensor | None, Sequence[int]], Tensor | None],
        noise: bool = True,
    ) -> None:
        self._job, self._options = job, options
        self._stream: PatchStream | None = None
        self._device = device
        self._draw = partial(draw_noise, job.plan.seed, shape_czyx=(1, *job.plan.patch_zyx)) if noise else _no_noise
        self._batch_bytes = options.batch_size * job.patch_bytes
        self._scales = grey_scales(greys)
        self._conditioner = conditioner
        self._ring: BatchRing | None = None
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            allocate = partial(_pinned_slot, job.batch_layout(options.batch_size))
            self._ring = BatchRing(allocate, HELD + batches_ahead(options))

    @contextmanager
    def open(
        self,
        *,
        first: int = 0,
        stop: int | None = None,
        quarantined: Sequence[dict[str, Any]] = (),
        interrupted: Callable[[], bool] = lambda: False,
        resident: Resident | None = None,
    ) -> Iterator[PatchStream]:
        """The stream that `next` draws from, closed at the end; arguments and errors as of `PatchStream`."""
        with (
            ThreadPoolExecutor(1, "noise") as self._drawer,
            PatchStream(
                self._job,
                self._options,
                first=first,
                stop=stop,
                buffers=self._ring.buffers if self._ring else (),
                condition_buffers=self._ring.condition_buffers if self._ring else (),
                quarantined=quarantined,
                interrupted=interrupted,
                resident=resident,
            ) as self._stream,
        ):
            self._noise = self._drawn_ahead(first + self._job.rank)
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
    def memory_of_batch(self) -> int:
        """Bytes that one more batch ahead takes; torch rounds pinned buffers up to a power of two."""
        return self._ring.slot_bytes if self._ring else self._batch_bytes

    def reconfigure(self, **changes: Unpack[StreamChanges]) -> None:
        """Change the stream as `PatchStream.reconfigure` does, and the ring with it; between two batches.

        Raises:
            ConfigError: it cannot be done; stream and ring continue as they were.
        """
        if self._ring is None:
            self.stream.reconfigure(**changes)
            return
        options = replace(self.stream.options, **changes)
        before, count = len(self._ring), HELD + batches_ahead(options)
        self._ring = self._ring.exchanged(self.stream, count, **changes)
        if count < before:
            self._copies.synchronize()
            if hasattr(torch.accelerator, "empty_host_cache"):  # older versions keep it for the next buffers
                torch.accelerator.empty_host_cache()

    def next(self, clock: StepClock) -> DeviceBatch:
        """The next batch, on the device."""
        with clock.waiting():
            if self._ring:
                self._ring.wait()
            batch = next(self.stream)
            eps = self._noise.result()[: len(batch.indices)]
        self._noise = self._drawn_ahead(int(batch.indices[-1]) + self._job.world)
        if self._ring:
            *raw, eps = self._copy_to_device(self._ring, batch, eps, clock)
            # Its buffers are filled again two batches on; the device computes meanwhile.
            condition = None if batch.condition is None else batch.condition.copy()
            batch = Batch(batch.patches.copy(), batch.samples, condition)
        else:
            with clock.copying():
                raw = [torch.from_numpy(part) for part in (batch.patches, batch.condition) if part is not None]
        with clock.computing("forward"):
            return self._augmented(batch, eps, *raw)

    def to_device(self, batch: Batch) -> DeviceBatch:
        """A batch that `next` has delivered before (`DeviceBatch.stored`), again; waits for the copy."""
        parts = [part for part in (batch.patches, batch.condition) if part is not None]
        eps = self._draw(batch.indices).to(self._device)
        return self._augmented(batch, eps, *(torch.from_numpy(part).to(self._device) for part in parts))

    def _drawn_ahead(self, first: int) -> Future[Tensor]:
        """The noise of the batch that begins with this sample; the stream makes sure that it comes next."""
        indices = first + self._job.world * np.arange(self._options.batch_size)
        return self._drawer.submit(self._draw, indices, pinned=self._device.type == "cuda")

    def _copy_to_device(self, ring: BatchRing, batch: Batch, eps: Tensor, clock: StepClock) -> list[Tensor]:
        slot, count = ring.take(batch.patches), len(batch.indices)
        main = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._copies):
            with clock.copying():
                raw = [part[:count].to(self._device, non_blocking=True) for part in (*slot, eps)]
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        ring.copying(event)
        main.wait_event(event)
        for part in raw:
            part.record_stream(main)  # or the allocator could hand its memory out while the main stream still reads it
        return raw

    def _augmented(self, batch: Batch, eps: Tensor, raw: Tensor, raw_condition: Tensor | None = None) -> DeviceBatch:
        augmentations = [sample.augmentation for sample in batch.samples]
        volumes = [sample.volume for sample in batch.samples]
        x_0 = apply_symmetries(raw, augmentations).unsqueeze(1)
        if len(self._scales):
            x_0 = normalised(x_0, self._scales[volumes])
        if raw_condition is not None:
            raw_condition = apply_symmetries(raw_condition, augmentations).unsqueeze(1)
        return DeviceBatch(batch.indices, x_0, eps, self._conditioner(raw_condition, volumes), batch)


def _no_noise(indices: NDArray[np.int64], *, pinned: bool = False) -> Tensor:
    return torch.empty(0)


def _pinned_slot(layout: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[Tensor]:
    dtypes = [torch.from_numpy(np.empty(0, dtype)).dtype for _, dtype in layout]
    return [torch.empty(shape, dtype=dtype, pin_memory=True) for (shape, _), dtype in zip(layout, dtypes, strict=True)]


def model_values(raw: Tensor, augmentations: Sequence[Augmentation], scales: NDArray[np.float64]) -> Tensor:
    """From voxels [B, Z, Y, X] in the stored dtype to what the network learns, float32 [B, 1, Z, Y, X].

    `scales` are the `grey_scales` of each sample's volume, float64 [B, 2].
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
        target.copy_(torch.rot90(torch.flip(patch, axes), augmentation.turns, (1, 2)))
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
        self._held: deque[int] = deque(maxlen=HELD)

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
        if len(self._held) == HELD and (copied := self._copied[self._held[0]]) is not None:
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
