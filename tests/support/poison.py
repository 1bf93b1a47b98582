"""Volumes that end the process that reads them: sharded, without checksums of the index, one length of 2^60 bytes."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import BytesCodec, ShardingCodec, ZstdCodec

CHUNK, SHARD = 32, 64


def write_sharded(path: Path, voxels: NDArray[Any]) -> Path:
    """A zarr v3 array of shards of 64^3 with chunks of 32^3; nothing would notice a damaged index."""
    sharding = ShardingCodec(chunk_shape=(CHUNK,) * 3, codecs=[BytesCodec(), ZstdCodec()], index_codecs=[BytesCodec()])
    array = zarr.create(
        store=path, shape=voxels.shape, dtype=voxels.dtype, chunks=(SHARD,) * 3, codecs=[sharding], zarr_format=3
    )
    array[...] = voxels
    return path


def poison(path: Path, chunk: tuple[int, int, int]) -> None:
    """Give a chunk a length that no allocation can serve: zarrs aborts the process, zarr-python raises an error."""
    per_axis = SHARD // CHUNK
    shard = path / "c" / "/".join(str(i // per_axis) for i in chunk)
    content = bytearray(shard.read_bytes())
    inner = int(np.ravel_multi_index([i % per_axis for i in chunk], (per_axis,) * 3))
    length = len(content) - 16 * per_axis**3 + 16 * inner + 8  # the index is (offset, length) of each chunk
    content[length : length + 8] = struct.pack("<Q", 2**60)
    shard.write_bytes(content)
