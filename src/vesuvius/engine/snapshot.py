"""A copy of the training state on the host, which a thread writes to disk while training changes the original."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vesuvius.errors import StorageError, one_line

Place = tuple[object, ...]
"""Keys and positions that lead to a tensor in a nested state."""


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
        self._buffers: dict[Place, tuple[Layout, Tensor]] = {}
        self._state: Any = None
        self._copied: torch.cuda.Event | None = None

    def prepare(self, layouts: Mapping[Place, Layout]) -> None:
        """Allocate buffers and touch their memory, so that the first `take` is as fast as the others.

        For another thread than that of the training: it reads no tensor of the state.  Raises as `take`.
        """
        self._buffers = {place: (layout, _allocate(layout)) for place, layout in layouts.items()}
        for _, buffer in self._buffers.values():
            # Without torch, whose own way would wake a second team of threads beside those of the training.
            ctypes.memset(buffer.data_ptr(), 0, buffer.untyped_storage().nbytes())

    def take(self, state: dict[str, Any]) -> None:
        """Copy a state: nested dicts, lists and tuples of tensors and plain data.

        What is in the tensors of a GPU at this point of the current stream is copied when the device gets there: the
        host does not wait, and updates that are queued later come behind the copies.  The previous copy is overwritten.

        Raises:
            StorageError: the host's memory has no room for it.
        """
        fresh: dict[Place, tuple[Layout, Tensor]] = {}

        def copied(place: Place, tensor: Tensor) -> Tensor:
            layout = _layout(tensor)
            held = self._buffers.get(place)
            fresh[place] = held if held and held[0] == layout else (layout, _allocate(layout))
            return fresh[place][1].copy_(tensor, non_blocking=layout.pinned)

        with torch.no_grad():
            self._state = _mapped(state, copied)
        self._buffers, self._copied = fresh, None
        if any(layout.pinned for layout, _ in fresh.values()):
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps, does not spin
            self._copied.record()

    def state(self) -> dict[str, Any]:
        """The state as it was at `take`; waits for the device.  Its tensors are the buffers: until the next `take`."""
        if self._copied is not None:
            self._copied.synchronize()
        state: dict[str, Any] = self._state
        return state


def layouts_of(state: dict[str, Any]) -> dict[Place, Layout]:
    """The layout of each tensor of a state, for `Snapshot.prepare`.  Pure; a few microseconds each."""
    found: dict[Place, Layout] = {}

    def note(place: Place, tensor: Tensor) -> None:
        found[place] = _layout(tensor)

    _mapped(state, note)
    return found


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


def _mapped(tree: Any, change: Callable[[Place, Tensor], Any], place: Place = ()) -> Any:
    """The tree with each tensor changed; dicts, lists and tuples are new ones, so that nothing is shared."""
    if isinstance(tree, Tensor):
        return change(place, tree)
    if isinstance(tree, Mapping):
        return {key: _mapped(value, change, (*place, key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        values = [_mapped(value, change, (*place, number)) for number, value in enumerate(tree)]
        return values if isinstance(tree, list) else tuple(values)
    return tree
