"""A shard of zarr v3 on its way to a disk; and the look at what has been written, shard or chunk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import google_crc32c
import numpy as np
from numcodecs import Blosc

_ABSENT = 2**64 - 1


class EncodedChunk(NamedTuple):
    """A chunk as it is stored."""

    data: bytes  # b"" for air
    checksum: int  # CRC-32C of its voxels


class ShardFile:
    """Chunks in the order in which they come, a CRC-32C behind each, and their index at the end.

    Args:
        path: of the whole shard.  Until it is whole it lies beside it, under a temporary name.
        chunks: how many it has room for.
    """

    def __init__(self, path: Path, chunks: int) -> None:
        self._path, self._beside = path, path.with_name(f".{path.name}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._beside.open("w+b")
        self._index = np.full((chunks, 2), _ABSENT, "<u8")
        self._stored = list[tuple[int, int, int]]()  # offset, length and checksum of each chunk

    def add(self, place: int, chunk: EncodedChunk) -> None:
        """Append the chunk that stands at this place in the index; air is left out."""
        if chunk.data:
            offset = self._file.tell()
            self._index[place] = offset, self._file.write(_with_checksum(chunk.data))
            self._stored.append((offset, len(chunk.data), chunk.checksum))

    def finish(self) -> None:
        """Write the index, read all back, and give the shard its name; of air alone none is left.  Any thread."""
        with self._file as file:
            file.write(_with_checksum(self._index.tobytes()))
            file.flush()
            os.fsync(file.fileno())
            check_written(file, self._stored)
        if self._stored:
            self._beside.replace(self._path)
        else:
            self._beside.unlink()


def _with_checksum(data: bytes) -> bytes:
    return data + int(google_crc32c.value(data)).to_bytes(4, "little")


def check_written(file: BinaryIO, chunks: Iterable[tuple[int, int, int]]) -> None:
    """Read a flushed file back from the disk.

    Args:
        chunks: offset, length and checksum of each chunk.

    Raises:
        OSError: a chunk does not decode to its voxels.
    """
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else it is read from memory
    for offset, size, checksum in chunks:
        try:
            voxels = bytes(Blosc().decode(os.pread(file.fileno(), size, offset)))
        except (RuntimeError, ValueError):
            voxels = b""
        if google_crc32c.value(voxels) != checksum:
            raise OSError(errno.EIO, f"What was written reads back differently, from byte {offset} on", file.name)
