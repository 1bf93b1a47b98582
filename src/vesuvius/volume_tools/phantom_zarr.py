"""Puts a phantom and its sheet labels on disk as two OME-Zarr groups, laid out like the published scrolls.  The voxels
come from `phantom`; a reader then meets a volume like any other.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from vesuvius.config import Triple
from vesuvius.errors import ConfigError
from vesuvius.volume_tools.partial import is_begun, is_finished, open_partial, partial_path
from vesuvius.volume_tools.phantom import Phantom, UInt8
from vesuvius.volume_tools.pyramid import Pyramid, multiscale
from vesuvius.volumes.box import Box, triple

VOXEL_UM = 7.91
MIN_SIZE_VOXELS = 16
LEVELS = 3
PHANTOM = "phantom"


def write_phantom(
    path: Path,
    shape_zyx: Triple,
    seed: int,
    *,
    chunk: int = 128,
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> dict[str, Any]:
    """Write a phantom and its sheet labels (OUT.labels.zarr) as two OME-Zarr 0.4 groups, or continue.

    Chunk by chunk: memory is the texture tables and about 40 chunks, whatever the shape.  Level k + 1 is made from
    level k as stored: grey values by the rounded mean of 2x2x2 voxels, labels by their majority (a tie is papyrus).

    Args:
        shape_zyx: at least `MIN_SIZE_VOXELS` along each axis.
        on_progress: called once per chunk of every level: what is counted, done, total.

    Returns:
        The paths of both groups, their shape and levels; and the bytes of the chunks that this process has written, and
        its seconds.

    Raises:
        ConfigError: the name or the chunk is wrong, or something else is at `path`.
        StorageError: the disk refuses.
    """
    started = time.monotonic()
    if path.suffix != ".zarr":
        raise ConfigError(f"the name of a volume must end in .zarr; got {path}; add the ending")
    if chunk < 8 or chunk % 2:
        raise ConfigError(
            f"chunk must be an even number of at least 8 voxels; got {chunk}; use 128 as the real scrolls do"
        )
    paths = (path, path.with_suffix(".labels.zarr"))
    record = {"seed": seed, "shape_zyx": list(shape_zyx), "chunk": chunk}
    plan, phantom = Pyramid(shape_zyx, (chunk, chunk, chunk), LEVELS, 1), Phantom(seed, shape_zyx)
    if is_begun(paths[1], PHANTOM) and not is_begun(path, PHANTOM) and not path.exists():
        shutil.rmtree(partial_path(paths[1]))  # else its chunks would be taken for pairs
    stored = done = 0
    with ExitStack() as held:
        unfinished = [each for each in paths if not is_finished(each, record, PHANTOM)]
        targets = [
            held.enter_context(open_partial(each, record, plan, np.dtype("u1"), 0, PHANTOM)) for each in unfinished
        ]

        def count(size: int) -> None:
            nonlocal stored, done
            stored, done = stored + size, done + 1
            on_progress("chunks", done, todo)

        def read(box: Box) -> UInt8:
            """The voxels of the last target; where it is labels, the grey values are written before."""
            voxels = dict(zip(paths, phantom.box(*box), strict=True))
            for other in targets[:-1]:
                count(other.write(0, triple(lo // chunk for lo in box[0]), voxels[other.out]))
            return voxels[targets[-1].out]

        coarser = sum(len(each.missing(level)) for each in targets for level in range(1, LEVELS))
        todo = len(targets) * len(targets[-1].missing(0)) + coarser if targets else 0
        for target in targets[-1:]:
            target.fill(0, read, count)
        for target in reversed(targets):  # where the grey values have their name, all is there
            target.fill_coarser(count)
            target.publish(multiscale(target.out.stem, LEVELS, [VOXEL_UM] * 3, ["micrometer"] * 3))
    return {
        "path": paths[0],
        "labels_path": paths[1],
        "shape_zyx": shape_zyx,
        "levels": LEVELS,
        "stored_bytes": stored,
        "seconds": time.monotonic() - started,
    }
