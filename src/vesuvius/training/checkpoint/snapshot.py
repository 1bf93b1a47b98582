"""A copy of the training state on the host, which a thread writes to disk while training changes the original."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from vesuvius.errors import StorageError, one_line
from vesuvius.training.checkpoint.files import tensors_in


@dataclass(frozen=True)
class Layout:
    """What a buffer must be like to take in a tensor; says nothing of its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    pinned: bool


class Snapshot:
    """Host copies of all tensors of a state, in buffers that are used again from one time to the next.

    The first touch of fresh memory is several times slower than a copy: 2.8 against 15 GB/s, on 2 cores of
    an AMD EPYC.  Buffers for tensors of a GPU are pinned; torch rounds each up to a power of two.
    """

    def __init__(self) -> None:
        self._buffers: list[tuple[Layout, Tensor]] = []
        self._state: Any = None
        self._copied: torch.cuda.Event | None = None

    def prepare(self, layouts: Iterable[Layout]) -> None:
        """Allocate buffers and touch their memory, so that the first `take` is as fast as the others.

        For another thread than that of the training: it reads no tensor of the state.  Raises as `take`.
        """
        self._buffers = [(layout, _allocate(layout)) for layout in layouts]
        for _, buffer in self._buffers:
            # Without torch, whose own way would wake a second team of threads beside those of the training.
            ctypes.memset(buffer.data_ptr(), 0, buffer.untyped_storage().nbytes())

    def take(self, state: dict[str, Any]) -> None:
        """Copy a state: nested dicts, lists and tuples of tensors and plain data.

        What is in the tensors of a GPU at this point of the current stream is copied when the device gets there: the
        host does not wait, and updates that are queued later come after the copies.  The previous copy is overwritten.

        Raises:
            StorageError: the host's memory has no room for it.
        """
        free: dict[Layout, list[Tensor]] = defaultdict(list)
        for layout, buffer in self._buffers:
            free[layout].append(buffer)
        layouts = layouts_of(state)
        used = [(layout, free[layout].pop(0) if free[layout] else _allocate(layout)) for layout in layouts]
        buffers = iter(used)

        def copied(tensor: Tensor) -> Tensor:
            layout, buffer = next(buffers)
            return buffer.copy_(tensor, non_blocking=layout.pinned)

        with torch.no_grad():
            self._state = tree_map_only(Tensor, copied, state)  # dicts and lists are new ones: nothing is shared
        self._buffers, self._copied = used, None
        if any(layout.pinned for layout, _ in used):
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps, does not spin
            self._copied.record()

    def state(self) -> dict[str, Any]:
        """The state as it was at `take`; waits for the device.  Its tensors are the buffers: until the next `take`."""
        if self._copied is not None:
            self._copied.synchronize()
        state: dict[str, Any] = self._state
        return state


def layouts_of(state: dict[str, Any]) -> list[Layout]:
    """The layout of each tensor of a state, for `Snapshot.prepare`.  Pure; a few microseconds each."""
    return [_layout(tensor) for tensor in tensors_in(state)]


def _layout(tensor: Tensor) -> Layout:
    # As torch lays out a copy: in the memory order of the original, without its gaps.
    stride = torch.empty_like(tensor, device="meta").stride()
    return Layout(tensor.shape, stride, tensor.dtype, pinned=tensor.is_cuda)


def _allocate(layout: Layout) -> Tensor:
    try:
        return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, pin_memory=layout.pinned)
    except (RuntimeError, MemoryError) as error:  # torch raises the former, whichever kind of memory it is
        raise StorageError(
            f"a copy of the training state must fit the host's memory; got {one_line(error)} for a tensor of "
            f"{tuple(layout.shape)}, {layout.dtype}{', pinned' if layout.pinned else ''}; give the run more memory, or "
            "lower training.workers or training.prefetch_factor"
        ) from error
