"""An array on disk: one file of raw voxels per block, memory-mapped when read.

Files are written under a temporary name and renamed, so an existing file is complete, and the files alone record the
progress.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Container
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.generate.volume.tiling import Tiling, overlap_slices
from vesuvius.runlog.files import flush_to_disk
from vesuvius.volumes.box import Box, shape_of


class BlockArray:
    """One value per voxel, in the blocks of a tiling, whose files are in the folder `path`.  Raises OSError."""

    def __init__(self, path: Path, tiling: Tiling, dtype: np.dtype[Any] | str = "float32") -> None:
        self.path, self._tiling = path, tiling
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def create(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def has(self, block: int) -> bool:
        return self._file(block).exists()

    def write(self, block: int, voxels: NDArray[Any]) -> None:
        """Write a block, in the shape of its box, and flush it: it survives a crash of the machine."""
        if voxels.shape != self._tiling.patch_zyx:
            padded = np.zeros(self._tiling.patch_zyx, self._dtype)
            padded[tuple(map(slice, voxels.shape))] = voxels
            voxels = padded
        write_atomic(self._file(block), np.ascontiguousarray(voxels, self._dtype), flush=True)

    def read(self, box: Box, used: Container[int] | None = None) -> NDArray[Any]:
        """Return the voxels of a box.  Its blocks must exist; with `used`, blocks outside it read as 0."""
        out = np.zeros(shape_of(box), self._dtype)
        for block in self._tiling.blocks_over(box):
            if used is None or block in used:
                _, there, here = overlap_slices(self._tiling.block_box(block), box)
                out[here] = map_file(self._file(block), self._dtype, self._tiling.patch_zyx)[there]
        return out

    def _file(self, block: int) -> Path:
        z, y, x = self._tiling.block_index(block)
        return self.path / f"{z}.{y}.{x}"


def write_atomic(file: Path, voxels: NDArray[Any], flush: bool = False) -> None:
    """Write under a temporary name and rename, so an existing file is complete."""
    temporary = file.with_name(f".{file.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    voxels.tofile(temporary)
    if flush:
        flush_to_disk(temporary)
    temporary.replace(file)


def map_file(file: Path, dtype: np.dtype[Any], shape: Triple) -> NDArray[Any]:
    """Map a file as an array; only pages that are accessed are read.  (`np.memmap` is several times slower.)"""
    with file.open("rb", buffering=0) as opened:
        voxels: NDArray[Any] = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), dtype)
    return voxels.reshape(shape)
