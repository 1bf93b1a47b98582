"""From the last state to a multiscale OME-Zarr in grey values, chunk by chunk; known voxels as they were stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import StorageError
from vesuvius.generate.sample_zarr import to_greys
from vesuvius.generate.volume.field import Field
from vesuvius.generate.volume.inputs import Inputs
from vesuvius.stream.start.prepare import GreyRange
from vesuvius.volume_tools.copy_plan import CopyPlan
from vesuvius.volume_tools.partial import Kind, PartialCopy
from vesuvius.volume_tools.pyramid import multiscale
from vesuvius.volumes.box import Box, format_box, slices
from vesuvius.volumes.geometry import FloatTriple

DRAWING = Kind("drawing", "vesuvius sample")

_CHUNK, _LEVELS = 128, 6


@dataclass(frozen=True)
class Greys:
    """How the last state becomes voxels of the volume.

    Attributes:
        grey: what -1 and +1 are.
        schedule: what the state is standardised with.
    """

    dtype: np.dtype[Any]
    grey: GreyRange
    schedule: Schedule

    def of(self, x: NDArray[np.float32]) -> NDArray[Any]:
        """Voxels of a state."""
        return to_greys(np.asarray(self.schedule.model_values(x)), self.grey, self.dtype)  # type: ignore[arg-type]


def output_plan(shape_zyx: Triple, voxel_bytes: int) -> CopyPlan:
    """Chunks of at most 128 voxels along each axis, and levels down to one chunk, at most six."""
    z, y, x = (min(size, _CHUNK) for size in shape_zyx)
    levels = min(_LEVELS, max(1, (-(-max(shape_zyx) // _CHUNK) - 1).bit_length() + 1))
    return CopyPlan(((0, 0, 0), shape_zyx), (z, y, x), levels, voxel_bytes, 1)


def write_volume(
    target: PartialCopy,
    plan: CopyPlan,
    x: Field,
    greys: Greys,
    inputs: Inputs,
    name: str,
    voxel_size_um: FloatTriple | None,
    check_stop: Callable[[], None],
) -> int:
    """Write all levels that are missing and give the volume its name.  Returns how many voxels are known ones.

    Raises:
        DataError: a given volume cannot be read any more.
        StorageError: the disk refuses, or a known voxel is not what it was.
    """
    for chunk in _missing(target, 0):
        box = plan.box_of(0, chunk)
        voxels = greys.of(x.read(box))
        if inputs.inpaint is not None:
            voxels = np.where(inputs.gaps(box), voxels, inputs.read(inputs.inpaint, box))
        target.write(0, chunk, voxels)
        check_stop()
    finer = target.finish_level(0)
    known = _checked_known(plan, finer, inputs) if inputs.inpaint is not None else 0
    for level in range(1, plan.levels):
        for chunk in _missing(target, level):
            target.write(level, chunk, target.halved(level, chunk, finer))
            check_stop()
        finer = target.finish_level(level)
    unit = ["micrometer" if voxel_size_um else None] * 3
    target.publish(multiscale(name, plan.levels, voxel_size_um or (1.0, 1.0, 1.0), unit))
    return known


def _missing(target: PartialCopy, level: int) -> list[Triple]:
    return [(int(z), int(y), int(x)) for z, y, x in np.argwhere(~target.done[level])]


def _checked_known(plan: CopyPlan, written: zarr.Array[Any], inputs: Inputs) -> int:
    """Compare what is on the disk with the given volume, voxel by voxel; how many are known."""
    count = 0
    for index in np.ndindex(plan.counts[0]):
        box: Box = plan.box_of(0, (index[0], index[1], index[2]))
        known = ~inputs.gaps(box)
        assert inputs.inpaint is not None
        stored = np.asarray(written[slices(box)])
        if not np.array_equal(stored[known], inputs.read(inputs.inpaint, box)[known]):
            raise StorageError(
                f"known voxels must be kept; got others in the box {format_box(box)} of what was written: the given "
                "volume has changed, or the disk fails; remove the unfinished drawing and start again"
            )
        count += int(known.sum())
    return count
