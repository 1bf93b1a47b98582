"""Changes the labels of a volume on disk: a box is read whole, changed in memory, and written as OME-Zarr.

OUT.zarr has the classes, OUT.instances.zarr the ids.  A killed process is resumed by computing both again.
"""

import logging
import math
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from vesuvius.config import ArrayConfig
from vesuvius.errors import ConfigError
from vesuvius.runlog.units import format_size, format_sizes
from vesuvius.volume_tools.measures import boundaries
from vesuvius.volume_tools.partial import PartialCopy, check_name, finished_record, is_finished
from vesuvius.volume_tools.pyramid import Pyramid, levels_to_one
from vesuvius.volume_tools.relabel import Changes, change_labels, check_changes
from vesuvius.volumes.alignment import ONES, ZEROS, align, describe_geometry
from vesuvius.volumes.box import Box, box_at, format_box, is_inside, shape_of, slices, triple
from vesuvius.volumes.format.metadata import metadata_hash
from vesuvius.volumes.geometry import VOXELS
from vesuvius.volumes.volume import Volume, open_volume

log = logging.getLogger(__name__)

BYTES_PER_VOXEL = 90  # of memory at the peak
_CHUNK = 128
RELABEL = "relabel"


def relabel_volume(
    labels: ArrayConfig,
    out: Path,
    changes: Changes,
    *,
    instances: ArrayConfig | None = None,
    boundary: bool = False,
    box: Box | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Write changed labels, or resume; finished ones are left unchanged.  Returns the counts, as `change_labels`.

    `labels` are classes, 0 = nothing; `instances` ids in the same voxels, 0 = none.  With `boundary` labels are ids,
    and the classes written are 1 at the boundaries and at id 0, 0 elsewhere.  `box` is the part that is read.

    Raises ConfigError: the arguments are wrong, memory does not suffice, or `out` is something else; DataError,
    StorageError: a volume cannot be read or written.  Finished chunks are kept.
    """
    check_name(out)
    if boundary and instances:
        raise ConfigError("--boundary makes classes from ids, and so does not go with --instances; remove one of them")
    check_changes(changes, boundary or instances is not None)
    given = {"labels": labels} | ({"instances": instances} if instances else {})
    with ExitStack() as opened:
        volumes = {name: opened.enter_context(open_volume(each, nan="keep")) for name, each in given.items()}
        box = _checked_box(box, volumes)
        asked = changes != Changes(deform_length=changes.deform_length, within=changes.within)
        if not asked and not boundary:
            raise ConfigError("no change is asked for, so this would be a copy; add e.g. --deform 4")
        about = {n: [v.name, metadata_hash(v.array), v.stored_stamp(box)] for n, v in volumes.items()}
        record = {"instances": None, **about, "boundary": boundary, "box": [list(end) for end in box], "seed": seed}
        record |= asdict(changes)
        outs = [out, out.with_suffix(".instances.zarr")][: 1 + (boundary or len(volumes) > 1)]
        if not (unfinished := [each for each in outs if not is_finished(each, record, RELABEL)]):
            report: dict[str, Any] = finished_record(out, RELABEL)["counts"]
            return report
        log.info(
            "changing %s voxels; about 2 s of a core per million, with --contact up to 40", format_sizes(shape_of(box))
        )
        first, second = [*(volume.read(box) for volume in volumes.values()), None][:2]
        old = (None, first) if boundary else (first, second)
        changed = change_labels(*old, changes, seed)
        same: Any = np.array_equal  # also of two None
        if asked and all(map(same, old, (changed.classes, changed.instances))):
            log.warning("no voxel of the labels has changed; ask for larger changes")
        new = [changed.classes, changed.instances]
        if boundary and changed.instances is not None:
            new[0] = boundaries(changed.instances)
        shape = shape_of(box)
        chunk, levels = triple(min(size, _CHUNK) for size in shape), levels_to_one(shape, _CHUNK)
        for path, voxels in list(zip(outs, new, strict=False))[::-1]:  # the name of the classes implies both
            if path in unfinished and voxels is not None:
                plan = Pyramid(shape, chunk, levels, voxels.itemsize)
                with PartialCopy(path, record, plan, voxels.dtype, 0, RELABEL, labels=True).locked() as target:
                    target.fill(0, lambda part, of=voxels: of[slices(part)])  # type: ignore[misc]
                    target.fill_coarser()
                    counted = replace(target, record=record | {"counts": changed.report})
                    counted.publish((volumes["labels"].geometry or VOXELS).starting_at(box[0]))
    return changed.report


def _checked_box(asked: Box | None, volumes: dict[str, Volume]) -> Box:
    labels = volumes["labels"]
    box = asked or box_at((0, 0, 0), labels.shape_zyx)
    if not is_inside(box, labels.shape_zyx):
        sizes = format_sizes(labels.shape_zyx)
        raise ConfigError(f"--box {format_box(box)} is not inside {labels.name} of {sizes} voxels; change it")
    for volume in volumes.values():
        if volume.dtype.kind not in "bui":
            raise ConfigError(f"{volume.name} is {volume.dtype}, not labels; give a volume of integers")
        same = volume.shape_zyx == labels.shape_zyx and align(labels, volume, "--instances")
        if not same or (same.factors, same.offsets) != (ONES, ZEROS):
            differ = f"{describe_geometry(volume)}, {labels.name} {describe_geometry(labels)}"
            raise ConfigError(f"{volume.name} has {differ}; give instances of the same voxels")
    needed, free = math.prod(shape_of(box)) * BYTES_PER_VOXEL, psutil.virtual_memory().available
    if needed > free:
        most = int((free / BYTES_PER_VOXEL) ** (1 / 3))
        raise ConfigError(
            f"{format_sizes(shape_of(box))} voxels need about {format_size(needed)} of memory, and "
            f"{format_size(free)} is free; change them in boxes of up to {most} voxels along each axis with --box"
        )
    return box
