"""Writes shards of zarr v3, and verifies written files."""

import errno
import os
from pathlib import Path
from typing import BinaryIO

import google_crc32c
import numpy as np

from vesuvius.runlog.held import refuse_moved

_ABSENT = 2**64 - 1
_READ_BYTES = 2**22


class ShardFile:
    """A shard, under a temporary name until finished: chunks as they come, each with a CRC-32C, then their index."""

    def __init__(self, path: Path, chunks: int) -> None:
        self._path, self._temporary = path, path.with_name(f".{path.name}.tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._temporary.open("w+b")
        self._index = np.full((chunks, 2), _ABSENT, "<u8")
        self._checksum = 0

    def add(self, position: int, chunk: bytes) -> None:
        """Append the chunk with this position in the index; air (b"") is skipped."""
        if chunk:
            offset = self._file.tell()
            self._index[position] = offset, self._write(chunk)

    def finish(self) -> None:
        """Write the index, verify the file and rename it; a shard of air is deleted.  May run on any thread."""
        with self._file as file:
            self._write(self._index.tobytes())
            file.flush()
            os.fsync(file.fileno())
            check_written(file, self._checksum)
        refuse_moved(self._path)
        if (self._index != _ABSENT).any():
            self._temporary.replace(self._path)
        else:
            self._temporary.unlink()

    def _write(self, data: bytes) -> int:
        data += int(google_crc32c.value(data)).to_bytes(4, "little")
        self._checksum = google_crc32c.extend(self._checksum, data)
        return self._file.write(data)


def check_written(file: BinaryIO, checksum: int) -> None:
    """Read a flushed file back from the disk.  Raises OSError if its CRC-32C differs."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that it is not read from the page cache
    there = 0
    file.seek(0)
    while data := file.read(_READ_BYTES):
        there = google_crc32c.extend(there, data)
    if there != checksum:
        raise OSError(errno.EIO, "The file reads back differently than written", file.name)
