"""The bytes of chunks, fetched from remote stores before they are read."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

from zarr.abc.store import ByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype

from vesuvius.volumes.box import Box
from vesuvius.volumes.chunks import ChunkGrid, Request
from vesuvius.volumes.errors import ClosedError
from vesuvius.volumes.store.byte_range import ByteRange
from vesuvius.volumes.store.source import Source


class Staging:
    """`stage` fetches all chunks of a box at once, on the source's threads; `fetch` then finds them here.

    What was not staged is fetched when it is asked for: staging changes speed, never bytes.
    """

    def __init__(self, grid: ChunkGrid) -> None:
        self._grid = grid
        self._staged: dict[Request, tuple[Future[bytes | None], int]] = {}
        self._stagings: dict[Box, Future[list[Request]]] = {}
        self._lock = threading.Lock()
        self._stager = ThreadPoolExecutor(1, thread_name_prefix="stage")

    def stage(self, box: Box) -> None:
        """Start fetching the chunks of a box.  Does not wait, not even for the indices of shards."""
        if box not in self._stagings:
            self._stagings[box] = self._stager.submit(self._stage, box)

    def settle(self, box: Box) -> None:
        """Wait until all requests of a staged box have begun."""
        self._requests_of(box)

    def fetch(self, key: str, byte_range: ByteRange | None) -> bytes | None:
        """As `Source.get`; waits for what is being fetched.

        Raises:
            ClosedError: another thread has closed the source.
        """
        with self._lock:
            future, _ = self._staged.get((key, byte_range), (None, 0))
        if future is None:
            return self._grid.source.get(key, byte_range)
        try:
            return future.result()
        except CancelledError:
            raise ClosedError(self._grid.source.shown) from None

    def renew(self, key: str) -> None:
        """Fetch a whole shard again, if it is staged: where a part of it came damaged, others may have."""
        with self._lock:
            if self._grid.shard_zyx is not None and (key, None) in self._staged:
                self._staged[key, None] = self._grid.source.submit(key), self._staged[key, None][1]

    def release(self, box: Box) -> None:
        """Free the bytes of a staged box that no other box needs; called when it has been read."""
        requests = self._requests_of(box)
        self._stagings.pop(box, None)
        with self._lock:
            for request in requests:
                future, uses = self._staged.pop(request)
                if uses > 1:
                    self._staged[request] = (future, uses - 1)
                else:
                    future.cancel()

    def unstage(self) -> None:
        """Free everything that was staged."""
        for box in list(self._stagings):
            self.release(box)

    def _stage(self, box: Box) -> list[Request]:
        requests = self._grid.requests(box)
        with self._lock:
            for request in requests:
                future, uses = self._staged.get(request, (None, 0))
                self._staged[request] = (future or self._grid.source.submit(*request), uses + 1)
        return requests

    def _requests_of(self, box: Box) -> list[Request]:
        """The requests staged for a box; none where staging failed: the read meets the error again and reports it."""
        staging = self._stagings.get(box)
        return staging.result() if staging is not None and staging.exception() is None else []


class MetadataStore(Store):
    """A read-only zarr store of the metadata below an address, read with the policy of its source."""

    def __init__(self, source: Source) -> None:
        super().__init__(read_only=True)
        self.source = source

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """As zarr's Store."""
        assert byte_range is None, "metadata are read whole"
        data = await asyncio.wrap_future(self.source.submit(key))
        return None if data is None else prototype.buffer.from_bytes(data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> Any:
        """As zarr's Store."""
        return await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges))

    async def exists(self, key: str) -> bool:
        """As zarr's Store."""
        return await asyncio.to_thread(self.source.exists, key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MetadataStore) and self.source.address == other.source.address

    __hash__ = None  # type: ignore[assignment]

    supports_writes = supports_deletes = supports_listing = False

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise io.UnsupportedOperation("only metadata are read through zarr, and only keys asked for by name")

    set = delete = list = list_prefix = list_dir = _refuse
