"""Which objects, and which bytes of them, hold the chunks of a box.

Knows how zarr names chunks and where a shard's index is (`shards.py`), so that all bytes of a region can be asked for
at once; zarr-python itself reads the chunks of a shard one after the other.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import ShardingCodec

from vesuvius.config import Triple
from vesuvius.volumes.box import Box, chunk_box, chunk_ranges, grid_shape, triple
from vesuvius.volumes.errors import FetchError
from vesuvius.volumes.format.axes import Axes
from vesuvius.volumes.format.shards import Coords, Index, ShardForm
from vesuvius.volumes.store.byte_range import ByteRange, cut
from vesuvius.volumes.store.source import Source

Request = tuple[str, ByteRange | None]
Fetch = Callable[[str, ByteRange | None], bytes | None]
"""The bytes of a request; None where the object is absent.  Raises as `Source.get`."""

_INDEX_BYTES_KEPT = 32 * 2**20


class ShardIndexError(ValueError):
    """The index of a shard is damaged, and with it all chunks of the shard."""


@dataclass
class ChunkGrid:
    """The chunks of one array and where their bytes are."""

    array: zarr.Array[Any]  # the array; sharded or not
    # which of its axes are z, y, x.  Chunks and boxes are z, y, x; keys and indices of shards are in stored order.
    axes: Axes
    source: Source  # where its objects are
    _indices: OrderedDict[str, Index | None] = field(default_factory=OrderedDict)  # of shards that are read in parts
    _last: tuple[bytes, Index] | None = None  # bytes and content of that of the last whole shard
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def chunk_zyx(self) -> Triple:
        return self.axes.zyx_of(self.array.chunks)

    @cached_property
    def shape_zyx(self) -> Triple:
        return self.axes.zyx_of(self.array.shape)

    @cached_property
    def counts_zyx(self) -> Triple:
        """Chunks along each axis."""
        return grid_shape(self.shape_zyx, self.chunk_zyx)

    @cached_property
    def shard_zyx(self) -> Triple | None:
        """Voxels of a shard; None where chunks are objects of their own."""
        return None if self.array.shards is None else self.axes.zyx_of(self.array.shards)

    def chunks_of(self, box: Box) -> Iterator[Triple]:
        """Coordinates of the chunks that a box touches."""
        return itertools.product(*chunk_ranges(box, self.chunk_zyx))

    def box_of(self, chunk: Triple) -> Box:
        """The voxels of a chunk, cut at the end of the array."""
        return chunk_box(chunk, self.chunk_zyx, self.shape_zyx)

    @cached_property
    def object_zyx(self) -> Triple:
        """Voxels of an object: a chunk, or a shard."""
        return self.shard_zyx or self.chunk_zyx

    @cached_property
    def object_counts_zyx(self) -> Triple:
        """Objects along each axis."""
        return grid_shape(self.shape_zyx, self.object_zyx)

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
        """Where the object with this key stands among the chunks, or shards; None where it is none of them."""
        match = self._key_pattern.fullmatch(key)
        return (int(match["z"]), int(match["y"]), int(match["x"])) if match else None

    def leads_to_chunks(self, key: str) -> bool:
        """Whether chunks, or shards, lie below this key, which must then be a folder."""
        return any(pattern.fullmatch(key) for pattern in self._folder_patterns)

    def load_indices(self, keys: Iterable[str]) -> None:
        """Read the indices of shards (kept for later), from a remote store all at once.

        Raises:
            OutageError, RefusedError: the store does not deliver one.
        """
        if self.shard_zyx is None or not self.source.remote:
            return
        with self._lock:
            missing = [key for key in keys if key not in self._indices]
        readings = [self.source.start(self.shard_index, key) for key in missing]
        errors = {key: error for key, reading in zip(missing, readings, strict=True) if (error := reading.exception())}
        for key in errors:  # whoever reads the chunks asks again
            self.source.forget(key, self.index_range)
            self.source.count(retries=1)
        for error in errors.values():
            if not isinstance(error, ShardIndexError):
                raise error

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
        self.load_indices(key for key in self._by_shard(box) if key not in whole)
        found: list[Request] = [(key, None) for key in sorted(whole)]
        for chunk in self.chunks_of(box):
            key = self.key_of(chunk)
            with suppress(ValueError):
                if key not in whole and (index := self.shard_index(key)) is not None:
                    byte_range = self._range_in(index, chunk)
                    found += [(key, byte_range)] if byte_range else []
        return found

    def whole_shards(self, box: Box) -> set[str]:
        """The keys of the shards that a box covers."""
        if self.shard_zyx is None:
            return set()
        return {key for key, chunks in self._by_shard(box).items() if len(chunks) == self._form.chunks}

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
            byte_range = None if shard is None else self._range_in(self._index_in(key, shard), chunk)
            return None if shard is None or byte_range is None else cut(shard, byte_range)
        index = self.shard_index(key)
        byte_range = None if index is None else self._range_in(index, chunk)
        return None if byte_range is None else fetch(key, byte_range)

    def forget(self, box: Box) -> None:
        """Have the chunks of a box, and the indices that lead to them, fetched again next time: some are damaged."""
        for key, chunks in self._by_shard(box).items():
            with self._lock:
                found = self._indices.pop(key, None)
            self.source.forget(key)
            if found is not None:
                for chunk in chunks:
                    with suppress(ValueError):
                        self.source.forget(key, self._range_in(found, chunk))
            if self.shard_zyx is not None:
                self.source.forget(key, self.index_range)

    def forget_indices(self) -> None:
        """Have the indices of shards read again: shards on a disk may be rewritten at any time."""
        with self._lock:
            self._indices.clear()

    def absent(self, box: Box) -> list[Triple]:
        """The chunks of a box that are not stored.  Asks the store once per chunk or shard.

        Raises:
            Exception: as `shard_index`.
        """
        if self.shard_zyx is None:
            chunk_of = {self.key_of(chunk): chunk for chunk in self.chunks_of(box)}
            return [chunk_of[key] for key in self.source.absent(list(chunk_of))]
        missing, shards = [], self._by_shard(box)
        self.load_indices(shards)
        for key, chunks in shards.items():
            index = self.shard_index(key)
            missing += [c for c in chunks if index is None or self._range_in(index, c) is None]
        return missing

    def present_in_shard(self, chunk: Triple) -> NDArray[np.bool_]:
        """Which chunks of the shard that starts at a chunk are stored: bool over its (z, y, x).  Errors as below."""
        index = self.shard_index(self.key_of(chunk))
        if index is None:
            return np.zeros(self.axes.zyx_of(self._form.counts), bool)
        others = self.axes.others_of(self._within_shard(chunk))
        everywhere: Any = self.axes.stored((slice(None),) * 3, others)
        return self.axes.to_zyx(self._form.present(index)[everywhere])

    def shard_index(self, key: str) -> Index | None:
        """The index of a shard; None for an absent shard.

        Raises:
            ShardIndexError: the index is not of the form that the metadata promise, the shard is shorter than its
                index, or no file.
            OutageError, RefusedError: the store does not deliver it.
        """
        with self._lock:
            if key in self._indices:
                self._indices.move_to_end(key)
                return self._indices[key]
        try:
            data = self.source.get(key, self.index_range)
            found = None if data is None else self._form.parse(data)
        except (FetchError, ValueError) as error:
            raise ShardIndexError(f"{error} in {key}") from error
        with self._lock:
            self._indices[key] = found
            while len(self._indices) > max(_INDEX_BYTES_KEPT // self._form.index_bytes, 8):
                self._indices.popitem(last=False)
        return found

    def _index_in(self, key: str, shard: bytes) -> Index:
        """The index in a whole shard, which may be of another version than the kept one.  Raises ShardIndexError."""
        data, kept = self._form.index_of(shard), self._last
        if kept is not None and kept[0] == data:
            return kept[1]
        try:
            index = self._form.parse(data)
        except ValueError as error:
            raise ShardIndexError(f"{error} in {key}") from error
        self._last = data, index
        with self._lock:
            known = self._indices.get(key)
            replaced = known is not None and not np.array_equal(known, index)
            if replaced:
                del self._indices[key]
        if replaced:
            self.source.forget(key)
        return index

    @cached_property
    def index_range(self) -> ByteRange | None:
        """The bytes of a shard that hold its index; None without shards."""
        return None if self.array.shards is None else self._form.index_range

    @cached_property
    def _folder(self) -> str:
        return f"{self.array.path}/" if self.array.path else ""

    def _name(self, place: Sequence[Any]) -> str:
        outer = self.array.shards or self.array.chunks
        others = [i // o for i, o in zip(self.axes.select, self.axes.others_of(outer), strict=True)]
        return self._encode(self.axes.stored(place, others))

    def _encode(self, index: Sequence[Any]) -> str:
        name: str = self.array.metadata.encode_chunk_key(tuple(index))
        return name

    @cached_property
    def _key_pattern(self) -> re.Pattern[str]:
        return re.compile(re.escape(self._folder) + self._name_pattern)

    @cached_property
    def _folder_patterns(self) -> list[re.Pattern[str]]:
        parts = self._name_pattern.split("/")
        return [re.compile(re.escape(self._folder) + "/".join(parts[:depth])) for depth in range(1, len(parts))]

    @property
    def _name_pattern(self) -> str:
        pattern = re.escape(self._name("ZYX"))  # letters, which no name holds, in place of the numbers
        for axis in "zyx":
            pattern = pattern.replace(axis.upper(), rf"(?P<{axis}>0|[1-9]\d*)")  # zarr finds no 007
        return pattern

    @cached_property
    def _form(self) -> ShardForm:
        metadata: Any = self.array.metadata
        (codec,) = (codec for codec in metadata.codecs if isinstance(codec, ShardingCodec))
        assert self.array.shards is not None
        return ShardForm(codec, tuple(s // c for s, c in zip(self.array.shards, self.array.chunks, strict=True)))

    def _range_in(self, index: Index, chunk: Triple) -> ByteRange | None:
        """The bytes of a shard that hold a chunk; None where it is absent.  Raises ValueError as `ShardForm`."""
        return self._form.range_in(index, self._within_shard(chunk))

    def _by_shard(self, box: Box) -> dict[str, list[Triple]]:
        grouped: dict[str, list[Triple]] = {}
        for chunk in self.chunks_of(box):
            grouped.setdefault(self.key_of(chunk), []).append(chunk)
        return grouped

    def _within_shard(self, chunk: Triple) -> Coords:
        """Position of a chunk in its shard's index."""
        others = [i // c for i, c in zip(self.axes.select, self.axes.others_of(self.array.chunks), strict=True)]
        return tuple(i % n for i, n in zip(self.axes.stored(chunk, others), self._form.counts, strict=True))
