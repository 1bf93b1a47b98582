"""Splits volumes into a training box and a held-out slab with a gap between them, and makes the plan.  Pure."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from vesuvius.config import DataConfig, Triple, ValidationConfig
from vesuvius.errors import DataError
from vesuvius.plan.cells import lay_cells, patches_of
from vesuvius.plan.foreground import QualifyingStarts, qualifying_starts
from vesuvius.plan.order import Mixing
from vesuvius.plan.plan import Plan, PlanVolume
from vesuvius.volumes.alignment import Alignment, AnyAlignment
from vesuvius.volumes.box import Box, format_box, shape_of, triple
from vesuvius.volumes.occupancy import ForegroundMap

# M: the largest that fits, so that up to 64 ranks have regions of their own.
_LEAST, _FEW, _MANY = 24, 32, 64
_GIB_OF_MANY = 2.0  # memory from which cells are limited so that many regions fit, instead of few
# K follows from the size of a cell; larger, up to 64, if more bytes would be decoded than delivered.
_PATCHES_PER_REGION = (1, 128)
_READ_AMPLIFICATION, _PATCHES_TO_AMORTIZE = 0.95, 64
# R: upper limit on the decoded regions of a task.
_TASK_BYTES, _REGIONS_PER_TASK = 2**27, (1, 8)


@dataclass(frozen=True)
class Split:
    """Training and validation boxes of one volume, with the gap between them."""

    train: Box
    validation: Box | None


def split_volume(
    name: str, shape_zyx: Triple, patch_zyx: Triple, config: ValidationConfig, within: Box | None = None
) -> Split:
    """Hold out the end of the axis that is longest in patches.

    The slab is `fraction` of that axis, at least one patch; the gap before it is `gap` patches.  `within` is the box to
    split, e.g. that covered by the labels.  Raises DataError: it is smaller than a patch, or too small for patch + gap
    + validation.
    """
    full = ((0, 0, 0), shape_zyx)
    box = within or full
    sizes = shape_of(box)
    if any(p > s for p, s in zip(patch_zyx, sizes, strict=True)):
        room = triple(max(size, 0) for size in sizes)
        covered = "" if box == full else f", the box covered by its condition, channels and mask ({format_box(box)})"
        problem = f"data.patch_size {patch_zyx} does not fit into {room} of {name}{covered}"
        raise DataError(f"{problem}; reduce it or choose a finer level")
    if config.fraction == 0:
        return Split(train=box, validation=None)
    axis = max(range(3), key=lambda a: sizes[a] / patch_zyx[a])
    patch, size = patch_zyx[axis], sizes[axis]
    held_out = max(math.ceil(config.fraction * size), patch)
    gap = math.ceil(config.gap * patch)
    if size - held_out - gap < patch:
        raise DataError(
            f"A training patch, the gap and the validation slab need {patch} + {gap} + {held_out} voxels along "
            f"{'zyx'[axis]}, but {name} has {size}; reduce data.patch_size or data.validation.gap, or set "
            "data.validation.fraction=0"
        )
    slab = Fraction(box[1][axis] - held_out), Fraction(box[1][axis])
    return _around(slab, axis, box, Alignment(shape_zyx, shape_zyx), patch_zyx, config)


def split_shared(
    names: Sequence[str],
    boxes: Sequence[Box],
    grids: Sequence[AnyAlignment],
    patch_zyx: Triple,
    config: ValidationConfig,
) -> list[Split]:
    """Hold out one slab of the voxels that several volumes share, across all of them.

    Each volume, with a box to split, has its own grid, aligned with that of the first.  It trains on the larger side of
    the slab, a gap away, and validates on what the slab has of its box, if that is a patch.  If all boxes are the same,
    so is the split of `split_volume`.  Otherwise the slab lies at an end of one of the boxes, or of all together, where
    most volumes can be validated; of these, where the most affected volume keeps most.

    Raises DataError: a box is smaller than a patch, or some volume would have no training patch wherever the slab is.
    """
    for name, box, grid in zip(names, boxes, grids, strict=True):
        split_volume(name, grid.array_zyx, patch_zyx, ValidationConfig(fraction=0), box)
    if len({(box, grid.factors, grid.offsets) for box, grid in zip(boxes, grids, strict=True)}) == 1:
        return [split_volume(names[0], grids[0].array_zyx, patch_zyx, config, boxes[0])] * len(boxes)
    spans = [
        [(o + f * lo, o + f * hi) for lo, hi, o, f in zip(*box, grid.offsets, grid.factors, strict=True)]
        for box, grid in zip(boxes, grids, strict=True)
    ]
    hull = [(min(lo for lo, _ in ends), max(hi for _, hi in ends)) for ends in zip(*spans, strict=True)]
    axes = sorted(range(3), key=lambda a: (hull[a][0] - hull[a][1]) / patch_zyx[a])
    best, most = None, (0, Fraction(0))
    for ends, axis, at_end in itertools.product((hull, *spans), axes, (True, False)):
        lo, hi = ends[axis]
        # a voxel more than the patch of another level, whose voxels may begin in between
        patch = max(g.factors[axis] * (patch_zyx[axis] + (g.factors[axis] != 1)) for g in grids)
        held_out = max(math.ceil(config.fraction * (hi - lo)), math.ceil(patch))
        slab = (hi - held_out, hi) if at_end else (lo, lo + held_out)
        splits = [_around(slab, axis, box, grid, patch_zyx, config) for box, grid in zip(boxes, grids, strict=True)]
        sizes = [(shape_of(split.train)[axis], shape_of(box)[axis]) for split, box in zip(splits, boxes, strict=True)]
        worth = sum(split.validation is not None for split in splits), min(Fraction(*size) for size in sizes)
        if worth > most and min(size for size, _ in sizes) >= patch_zyx[axis]:
            best, most = splits, worth
    if best is None:
        raise DataError(
            f"No slab can be held out of the voxels that {' and '.join(dict.fromkeys(names))} share that leaves each "
            f"entry of data.volumes a training patch of {patch_zyx}; reduce data.patch_size or data.validation.gap, or "
            "set data.validation.fraction=0"
        )
    return best


def _around(
    slab: tuple[Fraction, Fraction],
    axis: int,
    box: Box,
    grid: AnyAlignment,
    patch_zyx: Triple,
    config: ValidationConfig,
) -> Split:
    """Split a box at a slab, which is given on the grid of another volume; the training box may be empty."""
    start, stop = ((edge - grid.offsets[axis]) / grid.factors[axis] for edge in slab)
    (lo, hi), patch = (box[0][axis], box[1][axis]), patch_zyx[axis]
    gap = math.ceil(config.gap * patch)
    below, above = min(math.floor(start) - gap, hi), max(math.ceil(stop) + gap, lo)
    before = _replace(box[1], axis, max(below, lo))
    train = (box[0], before) if below - lo >= hi - above else (_replace(box[0], axis, min(above, hi)), box[1])
    first, last = max(math.ceil(start), lo), min(math.floor(stop), hi)
    held_out = _replace(box[0], axis, first), _replace(box[1], axis, last)
    return Split(train, held_out if last - first >= patch else None)


def _replace(zyx: Triple, axis: int, value: int) -> Triple:
    return triple(value if a == axis else old for a, old in enumerate(zyx))


def make_plan(seed: int, config: DataConfig, volumes: Sequence[PlanVolume]) -> Plan:
    patch = config.patch_size
    largest = max(volumes, key=lambda volume: _region_bytes(volume, patch))
    region_bytes = _region_bytes(largest, patch)
    fitting = min(int(config.stream_gib * 2**30) // region_bytes, sum(volume.num_visits_per_pass for volume in volumes))
    regions = config.regions_in_flight or next((count for count in (_MANY, _FEW) if count <= fitting), _LEAST)
    return Plan(
        seed=seed,
        patch_zyx=patch,
        mixing=Mixing(regions, config.patches_per_region or _patches_per_region(largest, patch)),
        regions_per_task=_within(_TASK_BYTES // region_bytes, _REGIONS_PER_TASK),
        augment=config.augment,
        volumes=tuple(volumes),
    )


def plan_volume(
    name: str,
    split: Split,
    shape_zyx: Triple,
    chunk_zyx: Triple,
    dtype: str,
    weight: float,
    config: DataConfig,
    *,
    voxel_bytes: int | None = None,
    foreground: ForegroundMap | None = None,
    min_foreground: float = 0.0,
) -> PlanVolume:
    """Partition the starts in the training box of a volume into cells (`cells.lay_cells`).  Pure.

    64 regions fit into `data.stream_gib` (below 2 GiB: 32), except that a cell may always be a quarter as long as a
    patch, and the volume has at least 32 cells if its starts allow it.  A reader holds `voxel_bytes` per voxel, those
    of the dtype and of a condition.  `min_foreground` is measured on the map.  Raises DataError: no start holds enough
    foreground.
    """
    patch, voxel_bytes = config.patch_size, voxel_bytes or np.dtype(dtype).itemsize
    held = config.regions_in_flight or (_MANY if config.stream_gib >= _GIB_OF_MANY else _FEW)
    voxels_max = int(config.stream_gib * 2**30) // (held * voxel_bytes)
    voxels_max = max(voxels_max, math.prod(5 * size // 4 for size in patch))
    patches_max = config.patches_per_region or _PATCHES_PER_REGION[1]
    cells = lay_cells(split.train, patch, chunk_zyx, voxels_max, config.regions_in_flight or _FEW, patches_max)
    planned = PlanVolume(name, weight, shape_zyx, split.train, chunk_zyx, dtype, voxel_bytes, cells)
    if foreground is None:
        return planned
    qualifying = _qualifying(planned, foreground, patch, min_foreground)
    if qualifying is None:
        raise DataError(
            f"No patch with data.min_foreground={min_foreground:g} of foreground was found among {cells.num_starts} "
            f"starts in {name}; lower it, or check data.foreground and the mask"
        )
    return replace(planned, foreground=qualifying)


def class_volumes(
    volumes: Sequence[PlanVolume], maps: Sequence[Sequence[ForegroundMap]], config: DataConfig
) -> tuple[list[PlanVolume], list[str]]:
    """Add an entry for each class of `data.class_weights` in each volume that holds it; `maps` has one per class.

    The patches of an entry hold a voxel of the class, and `data.min_foreground` like all of the volume.  Each volume
    keeps its share of all patches; that of a class comes from the volumes that hold it, by weight.  Also returns
    warnings.  Pure.  Raises DataError: no volume holds a class, or one would have to give more patches than it has.
    """
    total, one_voxel = sum(volume.weight for volume in volumes), 1 / math.prod(config.patch_size)
    rest, entries, warnings = [volume.weight for volume in volumes], list[PlanVolume](), list[str]()
    for wanted, of_volumes in zip(config.class_weights, zip(*maps, strict=True), strict=True):
        found = [
            _qualifying(volume, each, config.patch_size, one_voxel, volume.foreground)
            for volume, each in zip(volumes, of_volumes, strict=True)
        ]
        lacking = ", ".join(volume.name for volume, starts in zip(volumes, found, strict=True) if starts is None)
        if not any(found):
            none = f"No training patch holds class {wanted.label} of data.class_weights in {lacking}"
            raise DataError(f"{none}; correct the class, remove it, or lower data.min_foreground")
        if lacking:
            warnings.append(f"class {wanted.label} (data.class_weights) is in no training patch of {lacking}")
        held = sum(volume.weight for volume, starts in zip(volumes, found, strict=True) if starts)
        for index, (volume, starts) in enumerate(zip(volumes, found, strict=True)):
            if starts is not None:
                weight = wanted.share * total * volume.weight / held
                rest[index] -= weight
                entries.append(replace(volume, weight=weight, foreground=starts, same_as=index))
    if short := [volume.name for volume, left in zip(volumes, rest, strict=True) if left < 1e-9 * volume.weight]:
        raise DataError(
            f"data.class_weights ask for more patches than those of {short[0]}, as other volumes lack the classes; "
            "lower the shares or raise the weight of that volume"
        )
    everywhere = [replace(volume, weight=left) for volume, left in zip(volumes, rest, strict=True)]
    return everywhere + entries, warnings


def _qualifying(
    volume: PlanVolume, foreground: ForegroundMap, patch: Triple, share: float, also: QualifyingStarts | None = None
) -> QualifyingStarts | None:
    z, y, x = (axis.first + axis.count for axis in volume.cells.axes)
    return qualifying_starts(foreground, (volume.train[0], (z, y, x)), patch, share, volume.cells.largest_zyx, also)


def _region_bytes(volume: PlanVolume, patch: Triple) -> int:
    return math.prod(volume.cells.region_zyx(patch)) * volume.voxel_bytes


def _patches_per_region(volume: PlanVolume, patch: Triple) -> int:
    decoded = volume.cells.decoded_voxels(patch, volume.chunk_zyx)
    amortizing = min(math.ceil(decoded / (_READ_AMPLIFICATION * math.prod(patch))), _PATCHES_TO_AMORTIZE)
    return _within(max(int(patches_of(volume.cells.largest, patch)), amortizing), _PATCHES_PER_REGION)


def _within(value: int, bounds: tuple[int, int]) -> int:
    low, high = bounds
    return min(max(value, low), high)
