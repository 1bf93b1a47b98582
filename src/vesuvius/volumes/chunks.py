"""Which objects, and which bytes of them, hold the chunks of a box.

Knows how zarr names chunks and where a shard's index is (`shards.py`), so that all bytes of a region can be asked for
at once, and ahead of the read (`Staging`); zarr-python itself reads the chunks of a shard one after the other.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.volumes.box import Box, chunk_box, chunk_ranges, grid_shape, triple
from vesuvius.volumes.errors import ClosedError, FetchError
from vesuvius.volumes.format.shards import Coords, Index, ShardForm
from vesuvius.volumes.geometry import Axes
from vesuvius.volumes.store.objects import ByteRange
from vesuvius.volumes.store.source import Source

Request = tuple[str, ByteRange | None]
Fetch = Callable[[str, ByteRange | None], bytes | None]
"""The bytes of a request; None where the object is absent.  Raises as `Source.get`."""
KeyForm = tuple[str, str]
"""How the keys of chunks are formed: name of an encoding ("default" puts a `c` in front, "v2" does not), separator."""

_INDEX_BYTES_KEPT = 32 * 2**20
_NO_SHARD: tuple[str, bytes | None, Index | None] = ("", None, None)  # its key, and its index: bytes and content


class ShardIndexError(ValueError):
    """The index of a shard is damaged, and with it all chunks of the shard."""


def key_form(array: zarr.Array[Any]) -> KeyForm:
    """The form of key that an array's metadata name."""
    if array.metadata.zarr_format == 2:
        return "v2", str(array.metadata.dimension_separator)
    encoding = array.metadata.chunk_key_encoding
    return str(encoding.name), str(getattr(encoding, "separator", None))


class ChunkGrid:
    """The chunks of one array and where their bytes are.  Chunks and boxes are z, y, x; keys are in stored order.

    Args:
        axes: which axes of the array are z, y, x.
        source: where its objects are.
        form: of their keys; by default as the metadata say.

    Attributes:
        shape_zyx, chunk_zyx: voxels of the array, and of a chunk.
        shard_zyx: voxels of a shard; None where chunks are objects of their own.
        object_zyx: voxels of an object: a shard, or a chunk.
        counts_zyx, object_counts_zyx: chunks, and objects, along each axis.
        index_range: the bytes of a shard that hold its index; None without shards.
    """

    def __init__(self, array: zarr.Array[Any], axes: Axes, source: Source, form: KeyForm | None = None) -> None:
        self.array = array
        self.axes = axes
        self.source = source
        self.form = form or key_form(array)
        outer = array.shards or array.chunks
        self.shape_zyx = axes.zyx_of(array.shape)
        self.chunk_zyx = axes.zyx_of(array.chunks)
        self.object_zyx = axes.zyx_of(outer)
        self.shard_zyx = self.object_zyx if array.shards else None
        self.counts_zyx = grid_shape(self.shape_zyx, self.chunk_zyx)
        self.object_counts_zyx = grid_shape(self.shape_zyx, self.object_zyx)
        self._shards = ShardForm(array) if array.shards else None
        self.index_range = self._shards.index_range if self._shards else None
        # Chunk and object that hold the index at which each other axis is fixed.
        self._other_chunks, self._other_objects = (
            [i // c for i, c in zip(axes.select, axes.others_of(sizes), strict=True)] for sizes in (array.chunks, outer)
        )
        self._indices: OrderedDict[str, Index | None] = OrderedDict()  # of shards that are read in parts
        self._last = _NO_SHARD  # the last shard that was read whole
        self._lock = threading.Lock()
        self._folder = f"{array.path}/" if array.path else ""
        name = re.escape(self._name("ZYX"))  # letters, which no name holds, in place of the numbers
        for axis in "zyx":
            name = name.replace(axis.upper(), rf"(?P<{axis}>0|[1-9]\d*)")  # zarr finds no 007
        self._key_pattern = re.compile(re.escape(self._folder) + name)

    def chunks_of(self, box: Box) -> Iterator[Triple]:
        """Coordinates of the chunks that a box touches."""
        return itertools.product(*chunk_ranges(box, self.chunk_zyx))

    def box_of(self, chunk: Triple) -> Box:
        """The voxels of a chunk, cut at the end of the array."""
        return chunk_box(chunk, self.chunk_zyx, self.shape_zyx)

    def object_index(self, chunk: Triple) -> Triple:
        """The index of the object that holds a chunk."""
        return triple(i * c // o for i, c, o in zip(chunk, self.chunk_zyx, self.object_zyx, strict=True))

    def object_box(self, chunk: Triple) -> Box:
        """The voxels of the object that holds a chunk, cut at the end of the array."""
        return chunk_box(self.object_index(chunk), self.object_zyx, self.shape_zyx)

    def key_of(self, chunk: Triple) -> str:
        """The key of the object that holds a chunk."""
        return self.object_key(self.object_index(chunk))

    def object_key(self, index_zyx: Triple) -> str:
        """The key of the chunk, or shard, with an index."""
        return self._folder + self._name(index_zyx)

    def place_of(self, key: str) -> Triple | None:
        """Where the object with this key stands among the chunks, or shards; None where it is none of the array's."""
        if (match := self._key_pattern.fullmatch(key)) is None:
            return None
        place = (int(match["z"]), int(match["y"]), int(match["x"]))
        return place if all(i < n for i, n in zip(place, self.object_counts_zyx, strict=True)) else None

    def leads_to_chunks(self, key: str) -> bool:
        """Whether chunks, or shards, lie below this key, which must then be a folder."""
        parts = self._key_pattern.pattern.split("/")
        depth = key.count("/") + 1
        return self._folder.count("/") < depth < len(parts) and bool(re.fullmatch("/".join(parts[:depth]), key))

    def requests(self, box: Box) -> list[Request]:
        """What holds the chunks of a box: a shard that the box covers whole, any other chunk as an object or a range of
        one.  Reads the indices of shards (kept for later).

        Chunks that the index of their shard does not lead to are left out: `fetch` says what is wrong with them.

        Raises:
            OutageError, RefusedError: the store does not deliver an index.
        """
        if self.shard_zyx is None:
            return [(self.key_of(chunk), None) for chunk in self.chunks_of(box)]
        whole = self.whole_shards(box)
        found: list[Request] = [(key, None) for key in sorted(whole)]
        parts = {key: chunks for key, chunks in self._by_object(box).items() if key not in whole}
        self._load_indices(parts)
        for key, chunks in parts.items():
            with suppress(ShardIndexError):
                index = self.shard_index(key)
                for chunk in chunks:
                    with suppress(ValueError):
                        byte_range = self._range_in(index, chunk)
                        found += [(key, byte_range)] if byte_range else []
        return found

    def whole_shards(self, box: Box) -> set[str]:
        """The keys of the shards that a box covers."""
        if self._shards is None:
            return set()
        return {key for key, chunks in self._by_object(box).items() if len(chunks) == self._shards.chunks}

    def fetch(self, chunk: Triple, fetch: Fetch, whole: bool = False) -> bytes | None:
        """The bytes of a chunk; None where it is absent.

        Args:
            fetch: what gets them, e.g. `Source.get`.
            whole: take them from the whole object.

        Raises:
            ShardIndexError: as `shard_index`.
            ValueError: the entry of the index leads to no bytes.
            FetchError: these lie outside of the object, or what is there is no file.
            OutageError, RefusedError: the store does not deliver them.
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

    def is_absent_with_its_object(self, chunk: Triple) -> bool:
        """Whether a chunk that `fetch` did not find is absent because its whole object is.  Errors as `shard_index`."""
        key, (last, _, index) = self.key_of(chunk), self._last
        return self.shard_zyx is None or (index if last == key else self.shard_index(key)) is None

    def forget(self, box: Box) -> None:
        """Have the chunks of a box, and the indices that lead to them, fetched again next time: some are damaged."""
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
        """Have the indices of shards read again: shards on a disk may be rewritten at any time."""
        with self._lock:
            self._indices.clear()

    def absent(self, box: Box) -> list[Triple]:
        """The chunks of a box that are not stored.  Asks the store once per chunk or shard.

        Raises Exception: as `shard_index`.
        """
        shards = self._by_object(box)
        if self.shard_zyx is None:
            return [shards[key][0] for key in self.source.absent(list(shards))]
        self._load_indices(shards)
        indices = {key: self.shard_index(key) for key in shards}
        return [c for key, chunks in shards.items() for c in chunks if self._range_in(indices[key], c) is None]

    def present_in_shard(self, chunk: Triple) -> NDArray[np.bool_]:
        """Which chunks of the shard that starts at a chunk are stored: bool over its (z, y, x).  Errors as below."""
        assert self._shards is not None
        index = self.shard_index(self.key_of(chunk))
        if index is None:
            return np.zeros(self.axes.zyx_of(self._shards.counts), bool)
        others = self.axes.others_of(self._within_shard(chunk))
        everywhere: Any = self.axes.stored((slice(None),) * 3, others)
        return self.axes.to_zyx(self._shards.present(index)[everywhere])

    def shard_index(self, key: str) -> Index | None:
        """The index of a shard, kept for later; None for an absent shard.

        Raises:
            ShardIndexError: the index is not of the form that the metadata promise, the shard is shorter than its
                index, or no file.
            OutageError, RefusedError: the store does not deliver it.
        """
        assert self._shards is not None
        with self._lock:
            if key in self._indices:
                self._indices.move_to_end(key)
                return self._indices[key]
        try:
            data = self.source.get(key, self.index_range)
            found = None if data is None else self._shards.parse(data)
        except (FetchError, ValueError) as error:
            raise ShardIndexError(f"{error} in {key}") from error
        with self._lock:
            self._indices[key] = found
            while len(self._indices) > max(_INDEX_BYTES_KEPT // self._shards.index_bytes, 8):
                self._indices.popitem(last=False)
        return found

    def _load_indices(self, keys: Iterable[str]) -> None:
        """Read the indices of shards, from a remote store all at once.  Raises OutageError, RefusedError."""
        if not self.source.remote:
            return
        with self._lock:
            missing = [key for key in keys if key not in self._indices]
        for reading in [self.source.start(self.shard_index, key) for key in missing]:
            with suppress(ShardIndexError):  # whoever reads the chunks asks again
                reading.result()

    def _index_in(self, key: str, shard: bytes | None) -> Index | None:
        """The index in a whole shard, which may be of another version than the kept one; None in an absent one.

        Raises ShardIndexError.
        """
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
            known = self._indices.get(key)
            if known is None or (index is not None and np.array_equal(known, index)):
                return index
            del self._indices[key]
        self.source.forget(key)
        return index

    def _name(self, index_zyx: Sequence[Any]) -> str:
        encoding, separator = self.form
        parts = map(str, self.axes.stored(index_zyx, self._other_objects))
        return separator.join(("c", *parts) if encoding == "default" else parts)

    def _range_in(self, index: Index | None, chunk: Triple) -> ByteRange | None:
        """The bytes of a shard that hold a chunk; None where it is absent.  Raises ValueError as `ShardForm`."""
        assert self._shards is not None
        return None if index is None else self._shards.range_in(index, self._within_shard(chunk))

    def _by_object(self, box: Box) -> dict[str, list[Triple]]:
        """The chunks of a box, by the key of the object that holds them."""
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

        Raises ClosedError: another thread has closed the source.
        """
        with self._lock:
            future, _ = self._staged.get((key, byte_range), (None, 0))
        if future is None:
            return self._grid.source.get(key, byte_range)
        try:
            return future.result()
        except CancelledError:
            raise ClosedError(f"{self._grid.source.shown} was closed; open it again") from None

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
