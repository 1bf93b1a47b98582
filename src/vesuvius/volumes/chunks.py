"""Which objects, and which bytes of them, hold the chunks of a box.

Knows how zarr names chunks and how a shard's index is written (zarr v3, sharding codec 1.0), so that all bytes of a
region can be asked for at once; zarr-python itself reads the chunks of a shard one after the other.
"""

from __future__ import annotations

import itertools
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import google_crc32c
import numcodecs
import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.abc.codec import ArrayArrayCodec, BytesBytesCodec
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, Endian, ShardingCodec
from zarr.core.buffer import default_buffer_prototype

from vesuvius.config import Triple
from vesuvius.errors import one_line
from vesuvius.volumes.axes import Axes
from vesuvius.volumes.box import Box, chunk_box, chunk_ranges, grid_shape, triple
from vesuvius.volumes.store.byte_range import ByteRange
from vesuvius.volumes.store.source import Source

Coords = tuple[int, ...]
Request = tuple[str, ByteRange | None]
Index = NDArray[np.uint64]
"""Offset and length of each chunk of a shard, (..., 2), 2^64 - 1 where absent."""

_ABSENT = 2**64 - 1
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
    # bytes and content of the indices of shards
    _indices: OrderedDict[str, tuple[bytes, Index] | None] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def chunk_zyx(self) -> Triple:
        return self.axes.zyx_of(self.array.chunks)

    @property
    def shape_zyx(self) -> Triple:
        return self.axes.zyx_of(self.array.shape)

    @property
    def counts_zyx(self) -> Triple:
        """Chunks along each axis."""
        return grid_shape(self.shape_zyx, self.chunk_zyx)

    @property
    def shard_zyx(self) -> Triple | None:
        """Voxels of a shard; None where chunks are objects of their own."""
        return None if self.array.shards is None else self.axes.zyx_of(self.array.shards)

    def chunks_of(self, box: Box) -> Iterator[Triple]:
        """Coordinates of the chunks that a box touches."""
        return itertools.product(*chunk_ranges(box, self.chunk_zyx))

    def box_of(self, chunk: Triple) -> Box:
        """The voxels of a chunk, cut at the end of the array."""
        return chunk_box(chunk, self.chunk_zyx, self.shape_zyx)

    @property
    def object_zyx(self) -> Triple:
        """Voxels of an object: a chunk, or a shard."""
        return self.shard_zyx or self.chunk_zyx

    @property
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
        """Read the indices of shards (kept for later), from a remote store all at once.  Raises as `shard_index`."""
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
            raise error

    def requests(self, box: Box) -> list[Request]:
        """What zarr will ask the store for when it reads a box, in the same form.

        A shard that the box covers is one object; of any other, its index and its chunks are byte ranges.  Reads the
        indices of those shards (kept for later).

        Raises:
            Exception: as `shard_index`.
        """
        if self.shard_zyx is None:
            return [(self.key_of(chunk), None) for chunk in self.chunks_of(box)]
        found: list[Request] = []
        shards, whole = self._by_shard(box), math.prod(self._chunks_per_shard)
        self.load_indices(key for key, chunks in shards.items() if len(chunks) < whole)
        for key, chunks in shards.items():
            if len(chunks) == whole:
                found.append((key, None))
                continue
            index = self.shard_index(key)
            found.append((key, self.index_range))
            ranges = [self._range_in(index, chunk) for chunk in chunks] if index is not None else []
            found += [(key, byte_range) for byte_range in ranges if byte_range]
        return found

    def submit(self, key: str, byte_range: ByteRange | None) -> Future[bytes | None]:
        """`Source.submit`, answered at once where it asks for the index of a shard that is known already."""
        if byte_range is not None and byte_range == self.index_range:
            with self._lock:
                if key in self._indices:
                    found, known = self._indices[key], Future[bytes | None]()
                    known.set_result(found[0] if found else None)
                    return known
        return self.source.submit(key, byte_range)

    def check_frame(self, request: Request, data: bytes) -> None:
        """Raises ValueError for a chunk that is shorter than its blosc header says.

        numcodecs does not check that: it decodes what lies behind the bytes in memory.
        """
        key, byte_range = request
        holds_one_chunk = byte_range is None if self.shard_zyx is None else byte_range not in (None, self.index_range)
        if self._is_blosc and holds_one_chunk and self.place_of(key) is not None:
            promised = int.from_bytes(data[12:16], "little")
            if len(data) < max(promised, 16):
                raise ValueError(f"a chunk of {len(data)} bytes that says it has {promised}")

    def forget(self, box: Box) -> None:
        """Have the chunks of a box, and the indices that lead to them, fetched again next time: some are damaged."""
        for key, chunks in self._by_shard(box).items():
            with self._lock:
                found = self._indices.pop(key, None)
            self.source.forget(key)
            if found is not None:
                for chunk in chunks:
                    self.source.forget(key, self._range_in(found[1], chunk))
            if self.shard_zyx is not None:
                self.source.forget(key, self.index_range)

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
            return np.zeros(self.axes.zyx_of(self._chunks_per_shard), bool)
        others = self.axes.others_of(self._within_shard(chunk))
        everywhere: Any = self.axes.stored((slice(None),) * 3, others)
        present: NDArray[np.bool_] = index[everywhere][..., 0] != np.uint64(_ABSENT)
        return self.axes.to_zyx(present)

    def shard_index(self, key: str) -> Index | None:
        """The index of a shard; None for an absent shard.

        Raises:
            FetchError: the shard is shorter than its index, or no file.
            ShardIndexError: the index is not of the form that the metadata promise.
            OutageError, RefusedError: the store does not deliver it.
        """
        with self._lock:
            known = key in self._indices
            found = self._indices.get(key)
        if not known:
            data = self.source.get(key, self.index_range)
            found = None if data is None else (data, self._parse_index(key, data))
        with self._lock:
            self._indices[key] = found
            self._indices.move_to_end(key)
            while len(self._indices) > max(_INDEX_BYTES_KEPT // self._index_bytes, 8):
                self._indices.popitem(last=False)
        return found[1] if found else None

    @cached_property
    def index_range(self) -> ByteRange | None:
        """The bytes of a shard that hold its index; None without shards."""
        if self.array.shards is None:
            return None
        if str(self._codec.index_location.value) == "start":
            return ByteRange(0, self._index_bytes)
        return ByteRange(-self._index_bytes)

    @cached_property
    def _is_blosc(self) -> bool:
        """Whether blosc is the last step of encoding a chunk."""
        last = self.array.compressors[-1] if self.array.compressors else None
        return isinstance(last, (BloscCodec, numcodecs.Blosc))

    @property
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
    def _codec(self) -> ShardingCodec:
        codecs: tuple[Any, ...] = getattr(self.array.metadata, "codecs", ())
        (codec,) = (codec for codec in codecs if isinstance(codec, ShardingCodec))
        return codec

    @cached_property
    def _chunks_per_shard(self) -> Coords:
        assert self.array.shards is not None
        return tuple(s // c for s, c in zip(self.array.shards, self.array.chunks, strict=True))

    @cached_property
    def _index_bytes(self) -> int:
        return self._codec._shard_index_size(self._chunks_per_shard)  # zarr has no public function for it

    @cached_property
    def _index_metadata(self) -> dict[str, Any]:
        """The store of an array whose one chunk is encoded as the shards' indices are: zarr has no public function to
        read those."""
        codecs = self._codec.index_codecs
        shape, store = (*self._chunks_per_shard, 2), dict[str, Any]()
        zarr.create_array(
            store,
            shape=shape,
            chunks=shape,
            dtype="uint64",
            filters=[codec for codec in codecs if isinstance(codec, ArrayArrayCodec)],
            serializer=next(codec for codec in codecs if not isinstance(codec, ArrayArrayCodec | BytesBytesCodec)),
            compressors=[codec for codec in codecs if isinstance(codec, BytesBytesCodec)],
            fill_value=0,
        )
        return store

    def _parse_index(self, key: str, data: bytes) -> Index:
        if len(data) != self._index_bytes:
            raise ShardIndexError(f"a shard's index has {self._index_bytes} bytes; got {len(data)} of {key}")
        match self._codec.index_codecs:  # the usual forms; zarr takes 100 times as long
            case (BytesCodec(endian=Endian.little),):
                return np.frombuffer(data, "<u8").reshape(*self._chunks_per_shard, 2)
            case (BytesCodec(endian=Endian.little), Crc32cCodec()):
                if google_crc32c.value(data[:-4]) != int.from_bytes(data[-4:], "little"):
                    raise ShardIndexError(f"a shard's index must match its checksum; got another one in {key}")
                return np.frombuffer(data, "<u8", len(data) // 8).reshape(*self._chunks_per_shard, 2)
        chunk = {"c" + "/0" * (len(self._chunks_per_shard) + 1): default_buffer_prototype().buffer.from_bytes(data)}
        try:
            array = zarr.open_array(self._index_metadata | chunk, mode="r")
            return np.asarray(array[...], np.uint64)
        except Exception as error:  # codecs raise whatever they like
            raise ShardIndexError(f"a shard's index must be readable; got {one_line(error)} in {key}") from error

    def _range_in(self, index: NDArray[np.uint64], chunk: Triple) -> ByteRange | None:
        """The bytes of a shard that hold a chunk; None where it is absent."""
        offset, size = (int(v) for v in index[self._within_shard(chunk)])
        return None if offset == _ABSENT else ByteRange(offset, offset + size)

    def _by_shard(self, box: Box) -> dict[str, list[Triple]]:
        grouped: dict[str, list[Triple]] = {}
        for chunk in self.chunks_of(box):
            grouped.setdefault(self.key_of(chunk), []).append(chunk)
        return grouped

    def _within_shard(self, chunk: Triple) -> Coords:
        """Position of a chunk in its shard's index."""
        others = [i // c for i, c in zip(self.axes.select, self.axes.others_of(self.array.chunks), strict=True)]
        return tuple(i % n for i, n in zip(self.axes.stored(chunk, others), self._chunks_per_shard, strict=True))
