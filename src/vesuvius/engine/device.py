"""Last stop of a patch: from a batch in its stored dtype to model values on the device.

On a GPU batches are copied out of the object store into a small ring of pinned buffers and from there on a stream of
their own; on a CPU the same calls only cast.  Casting, normalising and mirroring happen on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vesuvius.config import Triple
from vesuvius.data.plan import Plan, Symmetry
from vesuvius.data.prepare import GreyRange
from vesuvius.data.stream import Batch, PatchStream
from vesuvius.observe.clock import StepClock

_RING = 3


class DeviceFeed:
    """Takes batches from a stream and delivers model values.

    Args:
        device: where the model is.
        batch_size, patch_zyx, dtype: of the batches.
        greys: grey range of each volume of the plan.

    `buffers` are to be handed to the stream (empty on a CPU).
    """

    def __init__(
        self,
        device: torch.device,
        batch_size: int,
        patch_zyx: Triple,
        dtype: str,
        plan: Plan,
        greys: Sequence[GreyRange],
    ) -> None:
        self._device = device
        self._plan = plan
        self._scales = np.array(
            [[2 / (g.high - g.low), -(g.high + g.low) / (g.high - g.low)] for g in greys], np.float32
        )
        self._slot = 0
        self._pinned: list[Tensor] = []
        if device.type == "cuda":
            self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
            shape = (batch_size, *patch_zyx)
            self._pinned = [torch.empty(shape, dtype=torch_dtype, pin_memory=True) for _ in range(_RING)]
            self._copied: list[torch.cuda.Event | None] = [None] * _RING
        self.buffers = [buffer.numpy() for buffer in self._pinned]

    def next(self, stream: PatchStream, clock: StepClock) -> tuple[Batch, Tensor]:
        """The next batch, and its patches on the device: float32 [B, 1, Z, Y, X], low grey -1, high grey +1."""
        with clock.waiting():
            self._wait_for_slot()
            batch = next(stream)
        if self._pinned:
            raw = self._copy_to_device(len(batch.indices), clock)
        else:
            with clock.copying():
                raw = torch.from_numpy(batch.patches)
        with clock.computing():
            return batch, self._model_values(raw, batch)

    def _wait_for_slot(self) -> None:
        """The stream is about to overwrite a pinned buffer: its copy to the device must be over (it long is)."""
        if self._pinned and (event := self._copied[self._slot]) is not None:
            event.synchronize()

    def _copy_to_device(self, count: int, clock: StepClock) -> Tensor:
        main = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._copies):
            with clock.copying():
                raw = self._pinned[self._slot][:count].to(self._device, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._copied[self._slot] = event
        self._slot = (self._slot + 1) % _RING
        main.wait_event(event)
        raw.record_stream(main)  # or the allocator could hand its memory out while the main stream still reads it
        return raw

    def _model_values(self, raw: Tensor, batch: Batch) -> Tensor:
        samples = [self._plan.sample(int(index)) for index in batch.indices]
        scales = to_device(torch.from_numpy(self._scales[[sample.volume for sample in samples]]), self._device)
        scale, offset = scales.view(-1, 2, 1, 1, 1, 1).unbind(1)
        turned = apply_symmetries(raw, [sample.symmetry for sample in samples])
        return turned.unsqueeze(1).float() * scale + offset


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy small host values to the device.  From pinned memory: an ordinary copy makes the host wait for the GPU."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def apply_symmetries(patches: Tensor, symmetries: Sequence[Symmetry]) -> Tensor:
    """Mirror and turn each patch [B, Z, Y, X] by its own symmetry.

    Moves voxels, changes none: any dtype, any device.
    """
    if patches.dtype == torch.uint16:  # torch cannot flip uint16; the bits are moved as int16
        return apply_symmetries(patches.view(torch.int16), symmetries).view(torch.uint16)
    out = torch.empty_like(patches)
    for target, patch, symmetry in zip(out, patches, symmetries, strict=True):
        axes = [axis for axis, flip in enumerate(symmetry.flip_zyx) if flip]
        target.copy_(torch.rot90(torch.flip(patch, axes), symmetry.turns, (1, 2)))
    return out
