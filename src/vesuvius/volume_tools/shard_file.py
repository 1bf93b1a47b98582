"""A shard of zarr v3 on its way to a disk; and the look at what has been written, shard or chunk."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

import google_crc32c
import numpy as np

_ABSENT = 2**64 - 1
_READ_BYTES = 2**22


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
        self._checksum = 0

    def add(self, place: int, chunk: bytes) -> None:
        """Append the chunk that stands at this place in the index; air, b"", is left out."""
        if chunk:
            offset = self._file.tell()
            self._index[place] = offset, self._write(chunk)

    def finish(self) -> None:
        """Write the index, read all back, and give the shard its name; of air alone none is left.  Any thread."""
        with self._file as file:
            self._write(self._index.tobytes())
            file.flush()
            os.fsync(file.fileno())
            check_written(file, self._checksum)
        if (self._index != _ABSENT).any():
            self._beside.replace(self._path)
        else:
            self._beside.unlink()

    def _write(self, data: bytes) -> int:
        data += int(google_crc32c.value(data)).to_bytes(4, "little")
        self._checksum = google_crc32c.extend(self._checksum, data)
        return self._file.write(data)


def check_written(file: BinaryIO, checksum: int) -> None:
    """Read a flushed file back from the disk.  Raises OSError where its CRC-32C differs."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # else it is read from memory
    there = 0
    file.seek(0)
    while data := file.read(_READ_BYTES):
        there = google_crc32c.extend(there, data)
    if there != checksum:
        raise OSError(errno.EIO, "What was written reads back differently", file.name)
