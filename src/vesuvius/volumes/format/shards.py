"""The format of a shard (zarr v3, sharding codec 1.0) and its index, which locates each chunk.  Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec

from vesuvius.volumes.store.objects import ByteRange

Coords = tuple[int, ...]
_ABSENT = 2**64 - 1


@dataclass(frozen=True, eq=False)
class Index:
    entries: NDArray[np.uint64]  # offset and length of each chunk, (..., 2), 2^64 - 1 for an absent one
    version: str | None = None  # stamp of the shard, whose later versions have other entries; None if unknown


class ShardForm:
    def __init__(self, array: zarr.Array[Any]) -> None:
        metadata: Any = array.metadata
        (codec,) = metadata.codecs  # `is_supported` has checked this
        assert array.shards is not None
        # Chunks of a shard along each axis, in stored order.
        self.counts: Coords = tuple(s // c for s, c in zip(array.shards, array.chunks, strict=True))
        self.chunks = math.prod(self.counts)
        written = codec.to_dict()["configuration"]  # the types of the codec's attributes differ between zarr releases
        numbers, *self._checked = written["index_codecs"]
        self._dtype = ">u8" if numbers.get("configuration", {}).get("endian") == "big" else "<u8"
        self.index_bytes = 16 * self.chunks + (4 if self._checked else 0)
        self._is_first = written["index_location"] == "start"
        self.index_range = ByteRange(0, self.index_bytes) if self._is_first else ByteRange(-self.index_bytes)

    def parse(self, data: bytes, version: str | None = None) -> Index:
        """Parse an index, 100 times faster than zarr.  Raises ValueError: its length or checksum is wrong."""
        if len(data) != self.index_bytes:
            raise ValueError(f"the index of a shard has {len(data)} bytes instead of {self.index_bytes}")
        if self._checked and google_crc32c.value(data[:-4]) != int.from_bytes(data[-4:], "little"):
            raise ValueError("the index of a shard does not match its checksum")
        return Index(np.frombuffer(data, self._dtype, 2 * self.chunks).reshape(*self.counts, 2), version)

    def range_in(self, index: Index, position: Coords) -> ByteRange | None:
        """The bytes of a shard with the chunk at a position; None if it is absent.  Raises ValueError: wrong entry."""
        offset, size = (int(v) for v in index.entries[position])
        if offset == size == _ABSENT:
            return None
        if size == 0 or offset + size >= _ABSENT or (self._is_first and offset < self.index_bytes):
            raise ValueError(f"the index of the shard has an invalid entry: {size} bytes from byte {offset}")
        return ByteRange(offset, offset + size, 0 if self._is_first else self.index_bytes, index.version)

    def present(self, index: Index) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (index.entries != np.uint64(_ABSENT)).any(-1)
        return found


def is_supported(codecs: Sequence[Any]) -> bool:
    """Whether the codecs contain no sharding codec, or only one, without nested shards and with a plain index."""
    sharding = [codec for codec in codecs if isinstance(codec, ShardingCodec)]
    inner = [codec for shard in sharding for codec in shard.codecs]
    indices = [list(map(type, shard.index_codecs)) for shard in sharding]
    return (
        (not sharding or len(codecs) == 1)
        and all(index in ([BytesCodec], [BytesCodec, Crc32cCodec]) for index in indices)
        and not any(isinstance(codec, ShardingCodec) for codec in inner)
    )
