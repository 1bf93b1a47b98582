"""Puts a phantom and its sheet labels on disk as two OME-Zarr groups, laid out like the published scrolls, whole or not
at all.  The voxels come from `phantom`; a reader then meets a volume like any other.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from vesuvius.config import Triple
from vesuvius.errors import ConfigError, DataError
from vesuvius.volume_tools.ome_writer import encoded, move_into_place, new_array
from vesuvius.volume_tools.phantom import Phantom, UInt8
from vesuvius.volume_tools.pyramid import Pyramid, halve, multiscale
from vesuvius.volumes.box import Box, doubled, slices, triple

VOXEL_UM = 7.91
MIN_SIZE_VOXELS = 16
LEVELS = 3


@dataclass(frozen=True)
class PhantomReport:
    """What was written."""

    # path, labels_path: the two OME-Zarr groups
    path: Path
    labels_path: Path
    shape_zyx: Triple
    stored_bytes: int  # chunks of both, all levels
    seconds: float


def labels_path_of(path: Path) -> Path:
    """`OUT.labels.zarr` for `OUT.zarr`."""
    return path.with_suffix(".labels.zarr")


def write_phantom(
    path: Path,
    shape_zyx: Triple,
    seed: int,
    *,
    chunk: int = 128,
    overwrite: bool = False,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> PhantomReport:
    """Write a phantom and its sheet labels as two OME-Zarr 0.4 groups laid out like the published scrolls.

    Chunk by chunk: memory is the texture tables and about 40 chunks, whatever the shape.  Level k + 1 is made from
    level k as stored: grey values by the rounded mean of 2x2x2 voxels, labels by their majority (a tie is papyrus).
    Both groups are written under a hidden name beside `path` and renamed when whole.

    Args:
        on_progress: called once per chunk of every level, grey and label together: what is counted, done, total.

    Raises:
        ConfigError: the arguments are wrong, or something is at `path` and `overwrite` is not set.
        DataError: the disk refuses.
    """
    started = time.monotonic()
    targets = (path, labels_path_of(path))
    _check_arguments(shape_zyx, seed, chunk)
    _check_targets(targets, overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # After Ctrl-C zarr's thread may still create metadata in it: that is not the error to report.
        with tempfile.TemporaryDirectory(
            prefix=f".{path.name}.", suffix=".partial", dir=path.parent, ignore_cleanup_errors=True
        ) as scratch:
            staged = tuple(Path(scratch) / target.name for target in targets)
            levels = Pyramid(shape_zyx, (chunk, chunk, chunk), LEVELS, 1)
            stored_bytes = _write_groups(staged, Phantom(seed, shape_zyx), levels, on_progress)
            move_into_place(staged, targets, Path(scratch))
    except OSError as error:
        raise DataError(
            f"a phantom needs a writable place with enough space; got {error} while writing {path}; free space or "
            "choose another path"
        ) from error
    return PhantomReport(*targets, shape_zyx, stored_bytes, time.monotonic() - started)


def _check_arguments(shape_zyx: Triple, seed: int, chunk: int) -> None:
    if min(shape_zyx) < MIN_SIZE_VOXELS:
        raise ConfigError(
            f"a phantom's sizes z, y, x must be at least {MIN_SIZE_VOXELS} voxels; got {shape_zyx}; enlarge the shape"
        )
    if chunk < 8 or chunk % 2:
        raise ConfigError(
            f"chunk must be an even number of at least 8 voxels; got {chunk}; use 128 as the real scrolls do"
        )
    if seed < 0:
        raise ConfigError(f"seed must be at least 0; got {seed}; change it")


def _check_targets(targets: tuple[Path, Path], overwrite: bool) -> None:
    if targets[0].suffix != ".zarr":
        raise ConfigError(f"the name of a volume must end in .zarr; got {targets[0]}; add the ending")
    for target in filter(os.path.lexists, targets):
        if not overwrite:
            raise ConfigError(
                f"a phantom does not replace files; got {target}, which exists; choose another path or add --overwrite"
            )
        if not any((target / name).is_file() for name in (".zgroup", ".zarray", "zarr.json")):
            raise ConfigError(f"--overwrite replaces zarr groups and arrays only; got {target}; choose another path")


def _write_groups(
    roots: tuple[Path, ...], phantom: Phantom, levels: Pyramid, on_progress: Callable[[str, int, int], None]
) -> int:
    """Write all levels of the grey and the label group; the bytes of their chunks.

    zarr would write chunks on a thread of its own, which goes on after Ctrl-C, while the folder is being removed.
    """
    groups = [_create_group(root, levels) for root in roots]
    places = ((level, triple(index)) for level, grid in enumerate(levels.counts) for index in np.ndindex(grid))
    stored_bytes = 0
    for number, (level, index) in enumerate(places, 1):
        box = levels.box_of(level, index)
        blocks = [halve(_read(arrays[level - 1], box)) for arrays in groups] if level else phantom.box(*box)
        for root, block in zip(roots, blocks, strict=True):
            if block.any():  # else air, and absent
                data = encoded(block, levels.chunk_zyx, np.uint8(0))
                file = root.joinpath(str(level), *map(str, index))
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
                stored_bytes += len(data)
        on_progress("chunks", number, levels.chunk_count)
    return stored_bytes


def _create_group(root: Path, levels: Pyramid) -> list[zarr.Array[Any]]:
    """An OME-Zarr 0.4 group without voxels yet; its arrays, finest first."""
    metadata = multiscale(root.name.removesuffix(".zarr"), levels.levels, [VOXEL_UM] * 3, ["micrometer"] * 3)
    zarr.create_group(root, zarr_format=2, attributes={"multiscales": [metadata]})
    return [new_array(root, str(k), shape, np.dtype("u1"), levels.chunk_zyx) for k, shape in enumerate(levels.shapes)]


def _read(array: zarr.Array[Any], box: Box) -> UInt8:
    """What a box of the next level covers in this one: twice the coordinates, cut at the end of the array."""
    return np.asarray(array[slices(doubled(box))], np.uint8)
