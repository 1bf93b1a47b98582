"""Voxels of a state on disk: a file of raw voxels per block, which is mapped into memory when read.

A file is written under a temporary name and renamed, so one that exists is complete, and the files alone say what is
done.
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
from vesuvius.generate.volume.tiling import Tiling, shared_part
from vesuvius.runlog.files import flush_to_disk
from vesuvius.volumes.box import Box, shape_of


class Field:
    """One value per voxel, in the blocks of a tiling.  Raises OSError where the disk fails.

    Args:
        path: of the folder.
        dtype: of its voxels.
    """

    def __init__(self, path: Path, tiling: Tiling, dtype: np.dtype[Any] | str = "float32") -> None:
        self.path, self._tiling = path, tiling
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def create(self) -> None:
        """Make the folder, where it is missing."""
        self.path.mkdir(parents=True, exist_ok=True)

    def has(self, block: int) -> bool:
        """Whether a block is written."""
        return self._file(block).exists()

    def write(self, block: int, voxels: NDArray[Any]) -> None:
        """Write a block of the shape of its box, flushed to the disk: it survives a crash of the machine."""
        if voxels.shape != self._tiling.patch_zyx:
            padded = np.zeros(self._tiling.patch_zyx, self._dtype)
            padded[tuple(map(slice, voxels.shape))] = voxels
            voxels = padded
        write_renamed(self._file(block), np.ascontiguousarray(voxels, self._dtype), flush=True)

    def read(self, box: Box, used: Container[int] | None = None) -> NDArray[Any]:
        """The voxels of a box.  All blocks that it touches must be written, or all that are `used`; others are 0."""
        out = np.zeros(shape_of(box), self._dtype)
        for block in self._tiling.blocks_over(box):
            if used is None or block in used:
                _, there, here = shared_part(self._tiling.block_box(block), box)
                out[here] = mapped(self._file(block), self._dtype, self._tiling.patch_zyx)[there]
        return out

    def _file(self, block: int) -> Path:
        z, y, x = self._tiling.block_index(block)
        return self.path / f"{z}.{y}.{x}"


def write_renamed(file: Path, voxels: NDArray[Any], flush: bool = False) -> None:
    """Write under a temporary name and rename, so a file that exists is complete."""
    temporary = file.with_name(f".{file.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    voxels.tofile(temporary)
    if flush:
        flush_to_disk(temporary)
    temporary.replace(file)


def mapped(file: Path, dtype: np.dtype[Any], shape: Triple) -> NDArray[Any]:
    """A file as an array; only the pages that are used are read.  (`np.memmap` takes several times as long.)"""
    with file.open("rb", buffering=0) as opened:
        voxels: NDArray[Any] = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), dtype)
    return voxels.reshape(shape)
