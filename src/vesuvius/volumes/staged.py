"""The bytes of chunks, fetched from remote stores before they are read."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from vesuvius.volumes.box import Box
from vesuvius.volumes.chunks import ChunkGrid, Request
from vesuvius.volumes.errors import ClosedError
from vesuvius.volumes.store.objects import ByteRange


class Staging:
    """`stage` fetches all chunks of a box at once, on the source's threads; `fetch` then finds them here.

    What was not staged is fetched when it is asked for: staging changes speed, never bytes.
    """

    def __init__(self, grid: ChunkGrid) -> None:
        self._grid = grid
        self._staged: dict[Request, tuple[Future[bytes | None], int]] = {}  # with the number of boxes that need it
        self._stagings: dict[Box, Future[list[Request]]] = {}
        self._lock = threading.Lock()
        self._stager = ThreadPoolExecutor(1, thread_name_prefix="stage")

    def stage(self, box: Box) -> None:
        """Start fetching the chunks of a box.  Does not wait, not even for the indices of shards."""
        if box not in self._stagings:
            self._stagings[box] = self._stager.submit(self._stage, box)

    def settle(self, box: Box) -> list[Request]:
        """Wait until all requests of a staged box have begun; none where that failed: the read meets the error again
        and reports it."""
        staging = self._stagings.get(box)
        return staging.result() if staging is not None and staging.exception() is None else []

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

    def release(self, box: Box) -> None:
        """Free the bytes of a staged box that no other box needs; called when it has been read."""
        requests = self.settle(box)
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
