"""Splits a volume into training voxels and a held-out slab, with a gap between them.  Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vesuvius.config import Triple, ValidationConfig
from vesuvius.errors import DataError
from vesuvius.volumes.box import Box, format_box, shape_of, triple


@dataclass(frozen=True)
class Split:
    """Training and validation boxes of one volume; the guard lies between them."""

    train: Box
    validation: Box | None


def split_volume(
    name: str, shape_zyx: Triple, patch_zyx: Triple, config: ValidationConfig, within: Box | None = None
) -> Split:
    """Hold out the end of the axis that is longest in patches.

    The slab is `fraction` of that axis, at least one patch; the guard before it is `guard` patches.

    Args:
        within: the part that is split, e.g. that of its labels; None = all.

    Raises:
        DataError: the volume is smaller than a patch, or too small for patch + guard + validation.
    """
    whole = ((0, 0, 0), shape_zyx)
    box = within or whole
    sizes = shape_of(box)
    if any(p > s for p, s in zip(patch_zyx, sizes, strict=True)):
        room = triple(max(size, 0) for size in sizes)
        where = "" if box == whole else f", where its condition and mask exist ({format_box(box)})"
        raise DataError(
            f"data.patch_size {patch_zyx} does not fit into {room} of {name}{where}; reduce it, or choose a finer level"
        )
    if config.fraction == 0:
        return Split(train=box, validation=None)
    axis = max(range(3), key=lambda a: sizes[a] / patch_zyx[a])
    patch, size = patch_zyx[axis], sizes[axis]
    held_out = max(math.ceil(config.fraction * size), patch)
    guard = math.ceil(config.guard * patch)
    train_stop = size - held_out - guard
    if train_stop < patch:
        raise DataError(
            f"a volume must hold a training patch, the guard and the validation slab along {'zyx'[axis]}; got {patch} "
            f"+ {guard} + {held_out} voxels in {size} of {name}; reduce data.patch_size or data.validation.guard, or "
            "set data.validation.fraction=0"
        )
    return Split(
        train=(box[0], _replace(box[1], axis, box[0][axis] + train_stop)),
        validation=(_replace(box[0], axis, box[1][axis] - held_out), box[1]),
    )


def _replace(zyx: Triple, axis: int, value: int) -> Triple:
    return triple(value if a == axis else old for a, old in enumerate(zyx))
