"""A zarr store that answers from bytes that are already on their way."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from vesuvius.volumes.box import Box
from vesuvius.volumes.byte_range import ByteRange
from vesuvius.volumes.chunks import ChunkGrid, Request
from vesuvius.volumes.errors import ClosedError
from vesuvius.volumes.source import Source

_READS_ONLY = "a staged store only reads, and only keys that it is asked for by name"


class StagedStore(Store):
    """Read-only.  `stage` has all chunks of a box fetched at once, on the source's threads; zarr then finds them here.

    What was not staged is fetched when zarr asks for it: staging changes speed, never bytes.

    Attributes:
        grid: the chunks of the array that is read, once it is open; it looks at their bytes before they are decoded.
    """

    grid: ChunkGrid | None = None

    def __init__(self, source: Source) -> None:
        super().__init__(read_only=True)
        self.source = source
        self._staged: dict[Request, tuple[Future[bytes | None], int]] = {}
        self._stagings: dict[Box, Future[list[Request]]] = {}
        self._lock = threading.Lock()
        self._stager = ThreadPoolExecutor(1, thread_name_prefix="stage")

    def stage(self, grid: ChunkGrid, box: Box) -> None:
        """Start to fetch the chunks of a box.  Does not wait, not even for the indices of shards."""
        if box not in self._stagings:
            self._stagings[box] = self._stager.submit(self._stage, grid, box)

    def settle(self, box: Box) -> None:
        """Wait until all bytes of a staged box are here or have failed; to be called before the box is read.

        Raises:
            ClosedError: another thread has closed the source.
        """
        for request in self._requests_of(box):
            try:
                self._staged[request][0].exception()  # not futures.wait: it misses what a shutdown cancels
            except CancelledError:
                raise ClosedError(self.source.address) from None

    def release(self, box: Box) -> None:
        """Forget the bytes of a staged box that no other one needs; to be called when it has been read."""
        requests = self._requests_of(box)
        self._stagings.pop(box, None)
        with self._lock:
            for request in requests:
                future, uses = self._staged.pop(request)
                if uses > 1:
                    self._staged[request] = (future, uses - 1)
                else:
                    future.cancel()

    def found_absent(self, key: str, byte_range: ByteRange | None) -> bool | None:
        """Whether an object, or a part of it, that is staged turned out to be absent; None where it is not staged."""
        with self._lock:
            future, _ = self._staged.get((key, byte_range), (None, 0))
        return None if future is None else future.result() is None

    def unstage(self) -> None:
        """Forget all that was staged."""
        for box in list(self._stagings):
            self.release(box)

    def _stage(self, grid: ChunkGrid, box: Box) -> list[Request]:
        requests = grid.requests(box)
        with self._lock:
            for request in requests:
                future, uses = self._staged.get(request, (None, 0))
                self._staged[request] = (future or grid.submit(*request), uses + 1)
        return requests

    def _requests_of(self, box: Box) -> list[Request]:
        """What was staged for a box; nothing where that failed: the read meets the error again, and reports it."""
        staging = self._stagings.get(box)
        return staging.result() if staging is not None and staging.exception() is None else []

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """As zarr's Store; waits for what is on its way."""
        request = (key, _own(byte_range))
        with self._lock:
            future, _ = self._staged.get(request, (None, 0))
        data = await asyncio.wrap_future(future or self.source.submit(*request))
        if data is not None and self.grid is not None:
            self.grid.check_frame(request, data)
        return None if data is None else prototype.buffer.from_bytes(data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """As zarr's Store."""
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def exists(self, key: str) -> bool:
        """As zarr's Store."""
        return await asyncio.to_thread(self.source.exists, key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StagedStore) and self.source.address == other.source.address

    __hash__ = None  # type: ignore[assignment]

    @property
    def supports_writes(self) -> bool:
        return False

    @property
    def supports_deletes(self) -> bool:
        return False

    @property
    def supports_listing(self) -> bool:
        return False

    async def set(self, key: str, value: Buffer) -> None:
        raise io.UnsupportedOperation(_READS_ONLY)

    async def delete(self, key: str) -> None:
        raise io.UnsupportedOperation(_READS_ONLY)

    def list(self) -> AsyncIterator[str]:
        raise io.UnsupportedOperation(_READS_ONLY)

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        raise io.UnsupportedOperation(_READS_ONLY)

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        raise io.UnsupportedOperation(_READS_ONLY)


def _own(part: ByteRequest | None) -> ByteRange | None:
    match part:
        case None:
            return None
        case RangeByteRequest():
            return ByteRange(part.start, part.end)
        case SuffixByteRequest():
            return ByteRange(-part.suffix)
        case OffsetByteRequest():
            return ByteRange(part.offset)
