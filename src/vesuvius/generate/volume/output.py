"""From the last state to a multiscale OME-Zarr in grey values, chunk by chunk; known voxels as they were stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.diffusion.schedule import Schedule
from vesuvius.generate.sample_zarr import to_greys
from vesuvius.generate.volume.field import Field
from vesuvius.generate.volume.inputs import Inputs
from vesuvius.generate.volume.work import BlockSet
from vesuvius.generate.watch import Watch
from vesuvius.stream.start.prepare import GreyRange
from vesuvius.volume_tools.partial import Kind, PartialCopy
from vesuvius.volume_tools.pyramid import Pyramid
from vesuvius.volumes.box import Box, triple

DRAWING = Kind("drawing", "vesuvius sample")

_CHUNK, _LEVELS = 128, 6


@dataclass(frozen=True)
class Greys:
    """How the last state becomes voxels of the volume."""

    dtype: np.dtype[Any]
    grey: GreyRange  # what -1 and +1 are
    schedule: Schedule  # what the state is standardised with

    def of(self, x: NDArray[np.float32]) -> NDArray[Any]:
        """Voxels of a state."""
        return to_greys(np.asarray(self.schedule.model_values(x)), self.grey, self.dtype)  # type: ignore[arg-type]


def output_plan(shape_zyx: Triple, voxel_bytes: int) -> Pyramid:
    """Chunks of at most 128 voxels along each axis, and levels down to one chunk, at most six."""
    levels = min(_LEVELS, max(1, (-(-max(shape_zyx) // _CHUNK) - 1).bit_length() + 1))
    return Pyramid(shape_zyx, triple(min(size, _CHUNK) for size in shape_zyx), levels, voxel_bytes)


def write_volume(
    target: PartialCopy,
    plan: Pyramid,
    x: Field,
    used: BlockSet,
    greys: Greys,
    inputs: Inputs,
    multiscale: dict[str, Any],
    watch: Watch,
) -> None:
    """Write all levels that are missing and give the volume its name.

    Args:
        used: the blocks that `x` has; the voxels of others are known.

    Raises:
        DataError: a given volume cannot be read any more.
        StorageError: the disk refuses.
    """
    todo = sum(len(target.missing(level)) for level in range(plan.levels))
    done = plan.chunk_count - todo

    def read(box: Box) -> NDArray[Any]:
        watch.check()
        voxels = greys.of(x.read(box, used))
        if inputs.inpaint is None:
            return voxels
        return np.where(inputs.gaps(box), voxels, inputs.read(inputs.inpaint, box))

    def count(size: int) -> None:
        nonlocal done
        done += 1
        watch.tell("chunks written", done, plan.chunk_count)
        watch.check()

    target.fill(0, read, count)
    target.fill_coarser(count)
    target.publish(multiscale)
