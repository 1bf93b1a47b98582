"""Splits a volume into training voxels and a held-out slab, with a gap between them.  Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vesuvius.config import Triple, ValidationConfig
from vesuvius.errors import DataError
from vesuvius.volumes.box import Box, triple


@dataclass(frozen=True)
class Split:
    """Training and validation boxes of one volume; the guard lies between them."""

    train: Box
    validation: Box | None


def split_volume(name: str, shape_zyx: Triple, patch_zyx: Triple, config: ValidationConfig) -> Split:
    """Hold out the end of the axis that is longest in patches.

    The slab is `fraction` of that axis, at least one patch; the guard before it is `guard` patches.

    Raises:
        DataError: the volume is smaller than a patch, or too small for patch + guard + validation.
    """
    if any(p > s for p, s in zip(patch_zyx, shape_zyx, strict=True)):
        raise DataError(
            f"patch_size must fit inside the volume; got {patch_zyx} in {shape_zyx} of {name}; reduce data.patch_size"
        )
    if config.fraction == 0:
        return Split(train=((0, 0, 0), shape_zyx), validation=None)
    axis = max(range(3), key=lambda a: shape_zyx[a] / patch_zyx[a])
    patch, size = patch_zyx[axis], shape_zyx[axis]
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
        train=((0, 0, 0), _replace(shape_zyx, axis, train_stop)),
        validation=(_replace((0, 0, 0), axis, size - held_out), shape_zyx),
    )


def _replace(zyx: Triple, axis: int, value: int) -> Triple:
    return triple(value if a == axis else old for a, old in enumerate(zyx))
