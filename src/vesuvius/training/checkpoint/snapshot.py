"""A copy of the training state on the host, which a thread writes to disk while training changes the original."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from vesuvius.errors import StorageError, one_line
from vesuvius.training.checkpoint.files import tensors_in


class Snapshot:
    """Host copies of all tensors of a state, in buffers that are used again from one time to the next.

    The first touch of fresh memory is several times slower than a copy: 2.8 against 15 GB/s, on 2 cores of
    an AMD EPYC.  Buffers for tensors of a GPU are pinned; torch rounds each up to a power of two.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._state: dict[str, Any] = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, state: dict[str, Any]) -> None:
        """Copy a state: nested dicts, lists and tuples of tensors and plain data.

        What is in the tensors of a GPU at this point of the current stream is copied when the device gets there: the
        host does not wait, and updates that are queued later come after the copies.  The previous copy is overwritten.

        Raises:
            StorageError: the host's memory has no room for it.
        """
        tensors = tensors_in(state)
        if [_layout(buffer) for buffer in self._buffers] != [_layout(tensor) for tensor in tensors]:
            self._buffers, self._state = [], {}  # before others take their place
            self._buffers = [_allocate(tensor) for tensor in tensors]
        buffers, self._copied = iter(self._buffers), None
        with torch.no_grad():  # dicts and lists are new ones: nothing is shared
            self._state = tree_map_only(
                Tensor, lambda tensor: next(buffers).copy_(tensor, non_blocking=tensor.is_cuda), state
            )
        if any(tensor.is_cuda for tensor in tensors):
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps, does not spin
            self._copied.record()

    def state(self) -> dict[str, Any]:
        """The state as it was at `take`; waits for the device.  Its tensors are the buffers: until the next `take`."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._state


def _layout(tensor: Tensor) -> tuple[torch.Size, torch.dtype, tuple[int, ...]]:
    """As torch lays out a copy: in the memory order of the original, without its gaps."""
    return tensor.shape, tensor.dtype, torch.empty_like(tensor, device="meta").stride()


def _allocate(tensor: Tensor) -> Tensor:
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
    except (RuntimeError, MemoryError) as error:  # torch raises the former, whichever kind of memory it is
        raise StorageError(
            f"a copy of the training state must fit the host's memory; got {one_line(error)} for a tensor of "
            f"{tuple(tensor.shape)}, {tensor.dtype}{', pinned' if tensor.is_cuda else ''}; give the run more memory, "
            "or lower training.workers or training.prefetch_factor"
        ) from error
