"""How the volumes that we write are stored, and how they get their names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numcodecs import Blosc
from numpy.typing import NDArray

from vesuvius.config import Triple


def codec_for(dtype: np.dtype[Any]) -> Blosc:
    """As the published scrolls are compressed."""
    return Blosc(cname="zstd", clevel=3, shuffle=Blosc.SHUFFLE if dtype.itemsize > 1 else Blosc.NOSHUFFLE)


def encoded(voxels: NDArray[Any], chunk_zyx: Triple, fill_value: np.generic) -> bytes:
    """A chunk as it is stored.

    Args:
        voxels: of the array's dtype; smaller than a chunk at the end of an axis.
    """
    padded = np.full(chunk_zyx, fill_value, voxels.dtype.newbyteorder("<"))
    padded[tuple(map(slice, voxels.shape))] = voxels
    return bytes(codec_for(voxels.dtype).encode(padded))


def new_array(
    root: Path,
    name: str,
    shape: Sequence[int],
    dtype: np.dtype[Any],
    chunks: tuple[int, ...],
    fill_value: Any = 0,
    write_empty_chunks: bool = False,
) -> zarr.Array[Any]:
    """An array without voxels yet in the OME-Zarr 0.4 group at `root`.  Raises OSError."""
    return zarr.create_array(
        str(root),
        name=name,
        shape=tuple(shape),
        dtype=dtype.newbyteorder("<"),
        chunks=chunks,
        compressors=codec_for(dtype),
        fill_value=fill_value,
        order="C",
        zarr_format=2,
        chunk_key_encoding={"name": "v2", "separator": "/"},
        config={"write_empty_chunks": write_empty_chunks},
    )


def move_into_place(staged: Sequence[Path], targets: Sequence[Path], scratch: Path) -> None:
    """Rename what was there into the scratch directory and the new into place; undo all of it if one step fails.

    The first one last: where its name is, all is there.  Raises OSError.
    """
    moves = [(target, scratch / f"old-{target.name}") for target in targets if os.path.lexists(target)]
    moves += zip(staged[::-1], targets[::-1], strict=True)
    try:
        for source, target in moves:
            source.rename(target)
    except BaseException:
        for source, target in reversed(moves):
            if not os.path.lexists(source):
                target.rename(source)
        raise
