"""Changes the labels of a volume on disk: a box is read whole, changed in memory, and written as OME-Zarr.

OUT.zarr has the classes, OUT.instances.zarr the ids.  A killed process is resumed by computing both again.
"""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from numpy.typing import NDArray

from vesuvius.config import ArrayConfig
from vesuvius.errors import ConfigError
from vesuvius.runlog.units import format_size, format_sizes
from vesuvius.volume_tools.copy import multiscale_of
from vesuvius.volume_tools.partial import check_name, finished_record, is_finished, open_partial
from vesuvius.volume_tools.pyramid import Pyramid, levels_to_one
from vesuvius.volume_tools.relabel import Changes, change_labels
from vesuvius.volume_tools.topology import boundaries
from vesuvius.volumes.box import Box, box_at, format_box, is_inside, shape_of, slices, triple
from vesuvius.volumes.format.metadata import metadata_hash
from vesuvius.volumes.volume import Volume, open_volume

log = logging.getLogger(__name__)

BYTES_PER_VOXEL = 90  # of memory at the peak
_CHUNK = 128
RELABEL = "relabel"


@dataclass(frozen=True)
class RelabelRequest:
    labels: ArrayConfig  # classes, 0 = nothing; or ids with `boundary`
    out: Path  # a name that ends in .zarr
    instances: ArrayConfig | None = None  # ids in the voxels of `labels`, 0 = none
    boundary: bool = False  # `labels` are ids; the classes written are 1 at their boundaries, 0 elsewhere
    box: Box | None = None  # None = all
    changes: Changes = field(default_factory=Changes)
    seed: int = 0


def relabel_volume(request: RelabelRequest) -> dict[str, Any]:
    """Write changed labels, or resume; finished ones are left unchanged.  Returns the counts, as `change_labels`.

    Raises ConfigError: the arguments are wrong, memory does not suffice, or `out` is something else; DataError,
    StorageError: a volume cannot be read or written.  Finished chunks are kept.
    """
    check_name(request.out)
    given = {"labels": request.labels} | ({"instances": request.instances} if request.instances else {})
    with ExitStack() as opened:
        volumes = {name: opened.enter_context(open_volume(each, nan="keep")) for name, each in given.items()}
        box = _checked_box(request, volumes)
        about = {name: [volume.name, metadata_hash(volume.array)] for name, volume in volumes.items()}
        record = {**about, "boundary": request.boundary, "box": [list(end) for end in box], "seed": request.seed}
        record |= asdict(request.changes)
        outs = [request.out, request.out.with_suffix(".instances.zarr")][: 1 + (request.boundary or len(volumes) > 1)]
        if not (unfinished := [out for out in outs if not is_finished(out, record, RELABEL)]):
            report: dict[str, Any] = finished_record(request.out, RELABEL)["counts"]
            return report
        log.info("changing %s voxels; about 2 s of a core per million", format_sizes(shape_of(box)))
        first, second = [*(volume.read(box) for volume in volumes.values()), None][:2]
        classes, ids = (None, first) if request.boundary else (first, second)
        changed = change_labels(classes, ids, request.changes, request.seed)
        new = [changed.classes, changed.instances]
        if request.boundary and changed.instances is not None:
            new[0] = boundaries(changed.instances)
        shape = shape_of(box)
        chunk, levels = triple(min(size, _CHUNK) for size in shape), levels_to_one(shape, _CHUNK)
        for out, voxels in list(zip(outs, new, strict=False))[::-1]:  # the name of the classes implies both
            if out in unfinished and voxels is not None:
                plan = Pyramid(shape, chunk, levels, voxels.itemsize)
                with open_partial(out, record, plan, voxels.dtype, 0, RELABEL, labels=True) as target:
                    target.fill(0, partial(_part, voxels))
                    target.fill_coarser()
                    counted = replace(target, record=record | {"counts": changed.report})
                    counted.publish(multiscale_of(volumes["labels"], plan, box, out))
    return changed.report


def _part(voxels: NDArray[Any], box: Box) -> NDArray[Any]:
    return voxels[slices(box)]


def _checked_box(request: RelabelRequest, volumes: dict[str, Volume]) -> Box:
    labels, box = volumes["labels"], request.box or box_at((0, 0, 0), volumes["labels"].shape_zyx)
    if request.boundary and request.instances:
        raise ConfigError("--boundary makes classes from ids, and so does not go with --instances; remove one of them")
    if not is_inside(box, labels.shape_zyx):
        sizes = format_sizes(labels.shape_zyx)
        raise ConfigError(f"--box {format_box(box)} is not inside {labels.name} of {sizes} voxels; change it")
    for volume in volumes.values():
        if volume.dtype.kind not in "bui":
            raise ConfigError(f"{volume.name} is {volume.dtype}, not labels; give a volume of integers")
        if volume.shape_zyx != labels.shape_zyx:
            sizes = f"{format_sizes(volume.shape_zyx)} voxels, {labels.name} {format_sizes(labels.shape_zyx)}"
            raise ConfigError(f"{volume.name} has {sizes}; give instances of the same voxels")
    needed, free = math.prod(shape_of(box)) * BYTES_PER_VOXEL, psutil.virtual_memory().available
    if needed > free:
        most = int((free / BYTES_PER_VOXEL) ** (1 / 3))
        raise ConfigError(
            f"{format_sizes(shape_of(box))} voxels need about {format_size(needed)} of memory, and "
            f"{format_size(free)} is free; change them in boxes of up to {most} voxels along each axis with --box"
        )
    return box
