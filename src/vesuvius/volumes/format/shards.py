"""The form of a shard (zarr v3, sharding codec 1.0): the index that says where each of its chunks lies.  Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray
from zarr.codecs import BytesCodec, Crc32cCodec, Endian, ShardingCodec

from vesuvius.volumes.store.byte_range import ByteRange

Coords = tuple[int, ...]
Index = NDArray[np.uint64]
"""Offset and length of each chunk of a shard, (..., 2), 2^64 - 1 where absent."""

_ABSENT = 2**64 - 1


@dataclass(frozen=True)
class ShardForm:
    """How the shards of an array are written."""

    codec: ShardingCodec
    counts: Coords  # chunks of a shard along each axis, in stored order

    @cached_property
    def index_bytes(self) -> int:
        return self.codec._shard_index_size(self.counts)  # zarr has no public function for it

    @cached_property
    def index_range(self) -> ByteRange:
        """The bytes of a shard that hold its index."""
        return ByteRange(0, self.index_bytes) if self._index_is_first else ByteRange(-self.index_bytes)

    def index_of(self, shard: bytes) -> bytes:
        """The bytes of a whole shard that hold its index."""
        return shard[: self.index_bytes] if self._index_is_first else shard[-self.index_bytes :]

    def parse(self, data: bytes) -> Index:
        """The index in these bytes of a shard.

        Raises:
            ValueError: it is not of the form that the metadata promise, or does not match its checksum.
        """
        if len(data) != self.index_bytes:
            raise ValueError(f"a shard's index has {self.index_bytes} bytes; got {len(data)}")
        codecs: Any = self.codec.index_codecs  # as `is_supported` says; zarr takes 100 times as long
        endian, *checked = codecs
        if checked and google_crc32c.value(data[:-4]) != int.from_bytes(data[-4:], "little"):
            raise ValueError("the index of a shard does not match its checksum")
        dtype = "<u8" if endian.endian is Endian.little else ">u8"
        return np.frombuffer(data, dtype, len(data) // 8).reshape(*self.counts, 2)

    def range_in(self, index: Index, place: Coords) -> ByteRange | None:
        """The bytes of a shard that hold the chunk at a place; None where it is absent.

        Raises:
            ValueError: the entry leads to no bytes, or into the index.
        """
        offset, size = (int(v) for v in index[place])
        if offset == size == _ABSENT:
            return None
        first = self.index_bytes if self._index_is_first else 0
        if size == 0 or offset < first or offset + size >= _ABSENT:
            raise ValueError(f"the index of the shard says that the chunk has {size} bytes from byte {offset}")
        return ByteRange(offset, offset + size, reserved=0 if self._index_is_first else self.index_bytes)

    def present(self, index: Index) -> NDArray[np.bool_]:
        """Which chunks are stored."""
        found: NDArray[np.bool_] = (index != np.uint64(_ABSENT)).any(-1)
        return found

    @property
    def chunks(self) -> int:
        """Chunks of a shard."""
        return math.prod(self.counts)

    @property
    def _index_is_first(self) -> bool:
        return str(self.codec.index_location.value) == "start"


def is_supported(codecs: Sequence[Any]) -> bool:
    """Whether of an array's codecs a sharding codec is the only one, holds no other, and has an index of plain numbers,
    with a CRC-32C or none."""
    sharding = [codec for codec in codecs if isinstance(codec, ShardingCodec)]
    inner = [codec for shard in sharding for codec in shard.codecs]
    indices = [list(map(type, shard.index_codecs)) for shard in sharding]
    return (
        (not sharding or len(codecs) == 1)
        and all(index in ([BytesCodec], [BytesCodec, Crc32cCodec]) for index in indices)
        and not any(isinstance(codec, ShardingCodec) for codec in inner)
    )
