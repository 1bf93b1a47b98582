"""Voxels of a state on disk: a zarr v2 array without compression, whose chunks are mapped into memory when read.

A chunk is written under a temporary name and renamed, so a file that exists is complete, and the files alone say what
is done.  Any zarr reader can open a field, also while it is being filled.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import socket
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.generate.volume.tiling import Tiling, shared_part
from vesuvius.runlog.files import flush_to_disk, write_whole
from vesuvius.volumes.box import Box, shape_of


class Field:
    """One value per voxel, in the blocks of a tiling.  Raises OSError where the disk fails.

    Args:
        path: of the array's folder.
        dtype: of its voxels.
    """

    def __init__(self, path: Path, tiling: Tiling, dtype: np.dtype[Any] | str = "float32") -> None:
        self.path, self._tiling = path, tiling
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def create(self) -> None:
        """Write the metadata, where they are missing."""
        self.path.mkdir(parents=True, exist_ok=True)
        metadata = {
            "zarr_format": 2,
            "shape": self._tiling.shape_zyx,
            "chunks": self._tiling.patch_zyx,
            "dtype": self._dtype.str,
            "compressor": None,
            "fill_value": 0,
            "order": "C",
            "filters": None,
            "dimension_separator": ".",
        }
        if not (self.path / ".zarray").exists():
            write_whole(self.path / ".zarray", json.dumps(metadata).encode())

    def has(self, block: int) -> bool:
        """Whether a block is written."""
        return self._file(block).exists()

    def whole(self, blocks: Iterable[int]) -> bool:
        """Whether all of these blocks are written."""
        return all(map(self.has, blocks))

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
            if used is not None and block not in used:
                continue
            _, there, here = shared_part(self._tiling.block_box(block), box)
            out[here] = mapped(self._file(block), self._dtype, self._tiling.patch_zyx)[there]
        return out

    @property
    def block_bytes(self) -> int:
        """Size of a block."""
        return math.prod(self._tiling.patch_zyx) * self._dtype.itemsize

    def _file(self, block: int) -> Path:
        z, y, x = self._tiling.block_index(block)
        return self.path / f"{z}.{y}.{x}"


class Predictions:
    """The estimates of x_0 in one pass: a file per tile, kept as long as a block needs it."""

    def __init__(self, path: Path, tiling: Tiling) -> None:
        self.path, self._tiling = path, tiling

    def create(self) -> None:
        """Make the folder."""
        self.path.mkdir(parents=True, exist_ok=True)

    def has(self, tile: int) -> bool:
        """Whether a tile is there."""
        return self._file(tile).exists()

    def write(self, tile: int, x_0: NDArray[np.float32]) -> None:
        """Write a tile, which may be lost in a crash of the machine (`forget_unflushed`)."""
        write_renamed(self._file(tile), x_0.astype("<f4", copy=False))

    def delete(self, tile: int) -> None:
        """Delete a tile that no block needs any more."""
        self._file(tile).unlink(missing_ok=True)

    def blended(self, box: Box) -> NDArray[np.float32]:
        """The weighted mean of all tiles over a box, summed in the order of their numbers: float32 [Z, Y, X]."""
        out = np.zeros(shape_of(box), np.float32)
        for tile in self._tiling.tiles_over(box):
            shared, there, here = shared_part(self._tiling.tile_box(tile), box)
            x_0 = mapped(self._file(tile), np.dtype("<f4"), self._tiling.patch_zyx)
            out[here] += self._tiling.weight(tile, shared) * x_0[there]
        return out

    def _file(self, tile: int) -> Path:
        return self.path / str(tile)


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
