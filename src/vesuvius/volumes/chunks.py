"""Finds the objects and byte ranges that hold the chunks of a box.

Knows the keys of chunks and the indices of shards (`shards.py`), so that all bytes of a region can be requested at once
and ahead of the read (`Staging`); zarr-python reads the chunks of a shard one after the other.
"""

import itertools
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.threads import Pool, renew_after_fork
from vesuvius.volumes.box import Box, chunk_box, chunk_ranges, grid_shape, triple
from vesuvius.volumes.errors import FetchError
from vesuvius.volumes.format.shards import Coords, Index, ShardForm
from vesuvius.volumes.geometry import Axes
from vesuvius.volumes.store.objects import ByteRange
from vesuvius.volumes.store.source import Source

Request = tuple[str, ByteRange | None]
Fetch = Callable[[str, ByteRange | None], bytes | None]
"""The bytes of a request; None if the object is absent.  Raises as `Source.get`."""
KeyForm = tuple[str, str]
"""Key encoding of chunks: its name ("default" puts a `c` in front, "v2" does not) and its separator."""

_INDEX_BYTES_KEPT = 32 * 2**20
_NO_SHARD: tuple[str, bytes | None, Index | None] = ("", None, None)  # its key, and its index: bytes and content


class ShardIndexError(ValueError):
    """The index of a shard is damaged, which makes all its chunks unreadable."""


def _key_form(metadata: Any) -> KeyForm:
    if metadata.zarr_format == 2:
        return "v2", str(metadata.dimension_separator)
    return str(metadata.chunk_key_encoding.name), str(getattr(metadata.chunk_key_encoding, "separator", None))


class ChunkGrid:
    """The chunks of one array and the location of their bytes.  Chunks and boxes are z, y, x; keys use stored order.

    The key encoding is that of the metadata unless `form` is given.  An object is a shard or, without shards, a chunk.
    """

    def __init__(self, array: zarr.Array[Any], axes: Axes, source: Source, form: KeyForm | None = None) -> None:
        self.array = array
        self.axes = axes
        self.source = source
        self.form = form or _key_form(array.metadata)
        outer = array.shards or array.chunks
        self.shape_zyx = axes.zyx_of(array.shape)
        self.chunk_zyx = axes.zyx_of(array.chunks)
        self.object_zyx = axes.zyx_of(outer)
        self.shard_zyx = self.object_zyx if array.shards else None
        self.counts_zyx = grid_shape(self.shape_zyx, self.chunk_zyx)
        self.object_counts_zyx = grid_shape(self.shape_zyx, self.object_zyx)
        self._shards = ShardForm(array) if array.shards else None
        self.index_range = self._shards.index_range if self._shards else None  # bytes of a shard that hold its index
        # Along each fixed axis, the chunk and the object that contain the selected index.
        self._other_chunks, self._other_objects = (
            [i // c for i, c in zip(axes.select, axes.others_of(sizes), strict=True)] for sizes in (array.chunks, outer)
        )
        self._indices: OrderedDict[str, Index | None] = OrderedDict()  # of shards that are read in parts
        self._last = _NO_SHARD  # the last shard that was read in full
        renew_after_fork(self)
        self._folder = f"{array.path}/" if array.path else ""
        name = re.escape(self._name("ZYX"))  # letters, which no key contains, stand for the numbers
        for axis in "zyx":
            name = name.replace(axis.upper(), rf"(?P<{axis}>0|[1-9]\d*)")  # zarr writes no leading zeros
        self._key_pattern = re.compile(re.escape(self._folder) + name)

    def renew(self) -> None:
        self._lock = threading.Lock()

    def chunks_of(self, box: Box) -> Iterator[Triple]:
        return itertools.product(*chunk_ranges(box, self.chunk_zyx))

    def box_of(self, chunk: Triple) -> Box:
        """The voxels of a chunk, clipped to the array."""
        return chunk_box(chunk, self.chunk_zyx, self.shape_zyx)

    def object_index(self, chunk: Triple) -> Triple:
        return triple(i * c // o for i, c, o in zip(chunk, self.chunk_zyx, self.object_zyx, strict=True))

    def random_objects(self, number: int) -> list[Triple]:
        """Indices of random objects, the same at each call; all of a small grid."""
        total = math.prod(self.object_counts_zyx)
        drawn = np.arange(total) if total <= number else np.random.default_rng(0).integers(total, size=number)
        return [triple(map(int, index)) for index in zip(*np.unravel_index(drawn, self.object_counts_zyx), strict=True)]

    def object_box(self, chunk: Triple) -> Box:
        """The voxels of the object that holds a chunk, clipped to the array."""
        return chunk_box(self.object_index(chunk), self.object_zyx, self.shape_zyx)

    def key_of(self, chunk: Triple) -> str:
        """The key of the object that holds a chunk."""
        return self.object_key(self.object_index(chunk))

    def object_key(self, index_zyx: Triple) -> str:
        return self._folder + self._name(index_zyx)

    def index_of_key(self, key: str) -> Triple | None:
        """The grid index of the object with this key; None if the key is not an object of this array."""
        if (match := self._key_pattern.fullmatch(key)) is None:
            return None
        index = (int(match["z"]), int(match["y"]), int(match["x"]))
        return index if all(i < n for i, n in zip(index, self.object_counts_zyx, strict=True)) else None

    def is_chunk_folder(self, key: str) -> bool:
        parts = self._key_pattern.pattern.split("/")
        depth = key.count("/") + 1
        return self._folder.count("/") < depth < len(parts) and bool(re.fullmatch("/".join(parts[:depth]), key))

    def requests(self, box: Box) -> list[Request]:
        """The requests for the chunks of a box: shards that it covers as a whole, other chunks as objects or ranges.

        Reads the indices of shards and caches them.  Chunks with a damaged index entry are left out; `fetch` reports
        them.  Raises OutageError, RefusedError: an index cannot be fetched.
        """
        if self.shard_zyx is None:
            return [(self.key_of(chunk), None) for chunk in self.chunks_of(box)]
        whole = self.whole_shards(box)
        found: list[Request] = [(key, None) for key in sorted(whole)]
        parts = {key: chunks for key, chunks in self._by_object(box).items() if key not in whole}
        self._load_indices(parts)
        for key, chunks in parts.items():
            with self._read_again_if_damaged(key):
                index = self.shard_index(key)
                for chunk in chunks:
                    with suppress(ValueError):
                        byte_range = self._range_in(index, chunk)
                        found += [(key, byte_range)] if byte_range else []
        return found

    def whole_shards(self, box: Box) -> set[str]:
        if self._shards is None:
            return set()
        return {key for key, chunks in self._by_object(box).items() if len(chunks) == self._shards.chunks}

    def count_requests(self, box: Box) -> tuple[int, int, float]:
        """Numbers of chunks of a box, of the requests for them, and of those for indices of shards.  Pure.

        Counts absent chunks too.  Indices that a reader of the whole array keeps, on average, are left out.
        """
        ranges = chunk_ranges(box, self.chunk_zyx)
        chunks = math.prod(map(len, ranges))
        if self._shards is None:
            return chunks, chunks, 0.0
        touched = chunk_ranges(box, self.object_zyx)
        sides = [s // c for s, c in zip(self.object_zyx, self.chunk_zyx, strict=True)]
        whole = int(math.prod(sides) == self._shards.chunks)
        for covered, shards, n in zip(ranges, touched, sides, strict=True):
            whole *= sum(covered.start <= i * n and (i + 1) * n <= covered.stop for i in shards)
        missed = max(1 - self._indices_kept / math.prod(self.object_counts_zyx), 0)
        return chunks, chunks - whole * (self._shards.chunks - 1), (math.prod(map(len, touched)) - whole) * missed

    def fetch(self, chunk: Triple, fetch: Fetch, whole: bool = False) -> bytes | None:
        """The bytes of a chunk, by `fetch` (e.g. `Source.get`) or cut out of the `whole` object; None if it is absent.

        Raises ShardIndexError, ValueError for an invalid index entry, FetchError if the range is outside the object or
        the object is not a file, OutageError and RefusedError.
        """
        key = self.key_of(chunk)
        if self.shard_zyx is None:
            return fetch(key, None)
        if whole:
            shard = fetch(key, None)
            byte_range = self._range_in(self._index_in(key, shard), chunk)
            return None if shard is None or byte_range is None else byte_range.cut(shard)
        if self._last[0] == key:
            self._last = _NO_SHARD
        byte_range = self._range_in(self.shard_index(key), chunk)
        return None if byte_range is None else fetch(key, byte_range)

    def is_object_absent(self, chunk: Triple) -> bool:
        """Whether a chunk that `fetch` did not find is absent because its object is.  Raises as `shard_index`."""
        key, (last, _, index) = self.key_of(chunk), self._last
        return self.shard_zyx is None or (index if last == key else self.shard_index(key)) is None

    def forget(self, box: Box) -> None:
        """Drop the chunks of a box and the indices that lead to them from all caches, because some are damaged."""
        for key, chunks in self._by_object(box).items():
            with self._lock:
                found = self._indices.pop(key, None)
            self.source.forget(key)
            if self.shard_zyx is not None:
                self.source.forget(key, self.index_range)
            for chunk in chunks if found is not None else ():
                with suppress(ValueError):
                    self.source.forget(key, self._range_in(found, chunk))

    def forget_indices(self) -> None:
        """Drop all cached shard indices: shards on a disk may be rewritten at any time."""
        with self._lock:
            self._indices.clear()

    def absent(self, box: Box) -> list[Triple]:
        """The chunks of a box that are not stored.  One request per chunk or shard.  Raises as `shard_index`."""
        shards = self._by_object(box)
        if self.shard_zyx is None:
            return [shards[key][0] for key in self.source.absent(list(shards))]
        self._load_indices(shards)
        indices = {key: self.shard_index(key) for key in shards}
        return [c for key, chunks in shards.items() for c in chunks if self._range_in(indices[key], c) is None]

    def present_in_shard(self, chunk: Triple) -> NDArray[np.bool_]:
        """Which chunks of the shard that begins with `chunk` are stored: bool (z, y, x).  Raises as `shard_index`."""
        assert self._shards is not None
        index = self.shard_index(self.key_of(chunk))
        if index is None:
            return np.zeros(self.axes.zyx_of(self._shards.counts), bool)
        return self.axes.slab(self._shards.present(index), self.axes.others_of(self._within_shard(chunk)))

    def shard_index(self, key: str) -> Index | None:
        """The index of a shard, cached; None if the shard is absent.

        Raises ShardIndexError if it is damaged, or the shard is shorter or not a file, OutageError and RefusedError.
        """
        assert self._shards is not None
        with self._lock:
            if key in self._indices:
                self._indices.move_to_end(key)
                return self._indices[key]
        try:
            stored = self.source.get_stamped(key, self.index_range)
            found = None if stored is None else self._shards.parse(*stored)
        except (FetchError, ValueError) as error:
            raise ShardIndexError(f"{error} in {key}") from error
        with self._lock:
            self._indices[key] = found
            while len(self._indices) > self._indices_kept:
                self._indices.popitem(last=False)
        return found

    def _load_indices(self, keys: Iterable[str]) -> None:
        """Read the indices of shards, concurrently from a remote store.  Raises OutageError, RefusedError."""
        if not self.source.remote:
            return
        with self._lock:
            missing = [key for key in keys if key not in self._indices]
        for key, reading in [(key, self.source.start(self.shard_index, key)) for key in missing]:
            with self._read_again_if_damaged(key):
                reading.result()

    @contextmanager
    def _read_again_if_damaged(self, key: str) -> Iterator[None]:
        """Suppresses ShardIndexError of a shard whose index is read again later, and counts that as a retry."""
        try:
            yield
        except ShardIndexError:
            self.source.forget(key, self.index_range)
            self.source.count(retries=1)

    @property
    def _indices_kept(self) -> int:
        return max(_INDEX_BYTES_KEPT // self._shards.index_bytes, 8) if self._shards else 0

    def _index_in(self, key: str, shard: bytes | None) -> Index | None:
        """The index of a whole shard, maybe newer than the cached one; None if absent.  Raises ShardIndexError."""
        assert self._shards is not None
        where = self._shards.index_range
        data = None if shard is None else shard[where.start : where.stop]
        if self._last[:2] == (key, data):
            return self._last[2]
        try:
            index = None if data is None else self._shards.parse(data)
        except ValueError as error:
            raise ShardIndexError(f"{error} in {key}") from error
        self._last = key, data, index
        with self._lock:
            cached = self._indices.get(key)
            if cached and (index is None or not np.array_equal(cached.entries, index.entries)):
                del self._indices[key]
        return index

    def _name(self, index_zyx: Sequence[Any]) -> str:
        encoding, separator = self.form
        parts = map(str, self.axes.stored(index_zyx, self._other_objects))
        return separator.join(("c", *parts) if encoding == "default" else parts)

    def _range_in(self, index: Index | None, chunk: Triple) -> ByteRange | None:
        """The bytes of a shard that hold a chunk; None if it is absent.  Raises ValueError as `ShardForm`."""
        assert self._shards is not None
        return None if index is None else self._shards.range_in(index, self._within_shard(chunk))

    def _by_object(self, box: Box) -> dict[str, list[Triple]]:
        grouped: dict[str, list[Triple]] = {}
        for chunk in self.chunks_of(box):
            grouped.setdefault(self.key_of(chunk), []).append(chunk)
        return grouped

    def _within_shard(self, chunk: Triple) -> Coords:
        """Position of a chunk in its shard's index."""
        assert self._shards is not None
        stored = self.axes.stored(chunk, self._other_chunks)
        return tuple(i % n for i, n in zip(stored, self._shards.counts, strict=True))


class Staging:
    """`stage` fetches all chunks of a box in advance, on the source's threads; `fetch` then returns them.

    Anything that was not staged is fetched on demand: staging changes the speed, never the bytes.
    """

    def __init__(self, grid: ChunkGrid) -> None:
        self._grid = grid
        self._stager = Pool(1, "stage")
        renew_after_fork(self)

    def renew(self) -> None:
        self._staged: dict[Request, tuple[Future[bytes | None], int]] = {}  # with the number of boxes that use it
        self._stagings: dict[Box, Future[list[Request]]] = {}
        self._lock = threading.Lock()

    def stage(self, box: Box) -> None:
        """Start fetching the chunks of a box from a remote store.  Never blocks, not even for the indices of shards."""
        if self._grid.source.remote:
            with self._lock:  # several threads may read one box
                if box not in self._stagings:
                    self._stagings[box] = self._stager.submit(self._stage, box)

    def wait_for(self, box: Box) -> None:
        """Wait until all requests of a staged box have started, or that failed: the read raises the error."""
        if staging := self._stagings.get(box):
            with suppress(CancelledError):
                staging.exception()

    def fetch(self, key: str, byte_range: ByteRange | None) -> bytes | None:
        """As `Source.get`; waits for a staged request.  Raises CancelledError if another thread closes the source."""
        with self._lock:
            future, _ = self._staged.get((key, byte_range), (None, 0))
        return self._grid.source.get(key, byte_range) if future is None else future.result()

    def release(self, box: Box) -> None:
        """Free the bytes of a staged box, except those that other staged boxes need; call it after the read."""
        if staging := self._stagings.pop(box, None):
            self._stager.submit(self._release, staging)  # after the boxes staged so far have counted their uses

    def unstage(self) -> None:
        for box in list(self._stagings):
            self.release(box)

    def _stage(self, box: Box) -> list[Request]:
        requests = self._grid.requests(box)
        with self._lock:
            for request in requests:
                future, uses = self._staged.get(request, (None, 0))
                self._staged[request] = (future or self._grid.source.submit(*request), uses + 1)
        return requests

    def _release(self, staging: Future[list[Request]]) -> None:
        if staging.exception() is not None:
            return
        with self._lock:
            for request in staging.result():
                future, uses = self._staged.pop(request)
                if uses > 1:
                    self._staged[request] = (future, uses - 1)
                else:
                    future.cancel()
