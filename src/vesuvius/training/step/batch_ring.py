"""The ring of buffers between a stream, which fills them in turn, and the device, which copies from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from numpy.typing import NDArray
from torch import Tensor

from vesuvius.errors import ConfigError, one_line
from vesuvius.stream.feeder import HELD
from vesuvius.stream.options import StreamChanges
from vesuvius.stream.stream import PatchStream


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

    def resized(self, count: int) -> BatchRing:
        """Another ring, with as many slots of this one as it has and needs, and new ones.  Waits for all copies."""
        for copied in self._copied:
            if copied is not None:
                copied.synchronize()
        try:
            return BatchRing(self._allocate, count, self._slots[:count])
        except RuntimeError as error:  # what torch raises where CUDA gives no pinned memory
            raise ConfigError(
                f"the batches ahead must fit into pinned memory; got {one_line(error)} for {count} buffers instead of "
                f"{len(self)}; lower training.prefetch_factor"
            ) from error


def pinned_bytes(size: int) -> int:
    """Memory of a pinned buffer, which torch rounds up to a power of two.  Pure."""
    return 1 << (size - 1).bit_length() if size else 0


def exchange(stream: PatchStream, ring: BatchRing, count: int, **changes: Unpack[StreamChanges]) -> BatchRing:
    """Change a stream that fills a ring, and the ring with it; return the ring that is filled from now on.

    Raises ConfigError where it cannot be had: then the stream continues with the ring that it has.
    """
    other = ring.resized(count)
    stream.reconfigure(**changes, buffers=other.buffers, condition_buffers=other.condition_buffers)
    return other
