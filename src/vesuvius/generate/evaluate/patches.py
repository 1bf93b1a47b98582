"""The patches to compare, as model values: held-out, training and generated ones.  Reads files.

A perfect model generates patches as training shows them.  So each real patch gets a random augmentation of training,
and is rounded to intensities as generated patches are.  Generated patches with an orientation not chosen by the model,
because they are cut from one volume or follow conditions, are flipped and rotated like real ones.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import zarr
from numpy.typing import NDArray

from vesuvius.config import DataConfig, Triple
from vesuvius.errors import ConfigError, DataError, one_line
from vesuvius.generate.sample_zarr import CONDITIONS, SAMPLE, SAMPLES, cast_intensities, to_intensities, to_model_values
from vesuvius.loader.device import apply_symmetries
from vesuvius.loader.intensity import intensity_scales, normalized
from vesuvius.plan.make_plan import Split
from vesuvius.plan.plan import augmentation_of
from vesuvius.stream.start.prepare import IntensityRange, PreparedData, prepare_data
from vesuvius.training.validation.fixed_patches import FixedPatches, read_fixed_patches, read_training_patches
from vesuvius.volume_tools.partial import finished_record
from vesuvius.volumes.box import box_along, box_at, intersection, shape_of, slices, triple

log = logging.getLogger(__name__)

LEAST_PATCHES = 16
_SEARCHED_VOXELS = 2**27
_HELD_OUT, _TRAINING, _GENERATED = range(3)
"""Seeds of the augmentations."""
_STRIPES = (16, 8, 4, 2)


@dataclass(frozen=True, eq=False)
class PatchSet:
    values: NDArray[Any]  # [N, Z, Y, X]: model values, float32; as stored before `generated_set`
    # [N, 4], volume index (-1 = one generated volume) and start of the patches or their conditions, which may share
    # voxels; None = none do
    locations: NDArray[np.int64] | None = None
    # [N], 0 or 1, so that no patch shares a voxel with the other side (`disjoint_sides`); -1 = on neither side
    side: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def is_cut(self) -> bool:
        """Whether they are cut from one generated volume."""
        return self.locations is not None and bool((self.locations[:, 0] < 0).all())

    @property
    def is_conditional(self) -> bool:
        """Whether they were generated with conditions from known locations in the run's volumes."""
        return self.locations is not None and bool((self.locations[:, 0] >= 0).all())

    def groups(self, edge: int = 2) -> NDArray[np.int64]:
        """Return the cell of `edge` patches per axis of each patch, [N]; patches of one cell count as one in tests.

        With cells of one patch, which share most voxels across their borders, families of equal sets cut densely from
        two volumes differ in 22 % of all tables instead of 5 %.
        """
        if self.locations is None:
            return np.arange(len(self))
        found = self.locations // np.array((1, *self.values.shape[1:])) // (1, edge, edge, edge)
        return np.unique(found, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)

    def rows(self, rows: Sequence[int] | NDArray[np.int64]) -> Self:
        locations = None if self.locations is None else self.locations[rows]
        side = self.side[rows] if len(self.side) else self.side
        return replace(self, values=self.values[rows], locations=locations, side=side)


@dataclass(frozen=True, eq=False)
class RealPatches:
    held_out: PatchSet  # patches that training never sees
    training: PatchSet  # as many training patches, from everywhere
    sides: tuple[PatchSet, PatchSet]  # more training patches, in two sets that share no voxel
    searched: list[NDArray[np.float32]]  # boxes of training voxels in which copies are searched
    training_voxels: int  # total number of training voxels


class RealSource:
    """The volumes of a run, or one of them; `generated` is the intensity range and dtype of generated patches."""

    def __init__(
        self,
        seed: int,
        config: DataConfig,
        volume_index: int | None,
        intensities: Sequence[IntensityRange],
        generated: tuple[IntensityRange, np.dtype[Any]],
        splits: Sequence[Split] | None = None,
    ) -> None:
        """Reads metadata.  Raises ConfigError without held-out voxels, and DataError."""
        if config.validation.fraction == 0:
            raise ConfigError(
                "The run has no held-out patches (data.validation.fraction=0); train with a fraction such as 0.05"
            )
        if volume_index is not None:
            config = config.model_copy(update={"volumes": (config.volumes[volume_index],)})
            intensities = [intensities[volume_index]]
            splits = splits and [splits[volume_index]]
        self.config, self.stored_as, self._scales = config, generated, intensity_scales(intensities)
        self.data: PreparedData = prepare_data(seed, config, splits=splits)

    def read(self, count: int) -> RealPatches:
        """Read `count` patches of each kind.  Raises DataError."""
        data, config = self.data, self.config
        held_out = read_fixed_patches(data, config, count)
        found = read_training_patches(data, config, 4 * count)
        side = disjoint_sides(_locations(found), config.patch_size, len(found.volumes))
        sides = [np.flatnonzero(side == k)[:count].tolist() for k in (0, 1)]
        if min(map(len, sides)) < LEAST_PATCHES:
            raise DataError(
                f"The run's volumes are too small: {len(sides[0])} and {len(sides[1])} disjoint training patches were "
                f"found, and an evaluation needs {LEAST_PATCHES} of each; train on a larger volume, or with a smaller "
                "data.patch_size"
            )
        held_out_boxes = [split.validation for split in data.splits if split.validation is not None]
        disjoint = sum(_disjoint_patches(shape_of(box), config.patch_size) for box in held_out_boxes)
        if disjoint < count:
            log.warning(
                "Only %d disjoint patches fit into the held-out voxels, so the %d compared patches overlap and all "
                "metrics rest on little data; increase data.validation.fraction in the next run",
                *(disjoint, count),
            )
        return RealPatches(
            self._set_of(held_out, _HELD_OUT),
            self._set_of(found, _TRAINING, range(min(count, len(found.volumes)))),
            (self._set_of(found, _TRAINING, sides[0]), self._set_of(found, _TRAINING, sides[1])),
            self._searched(found),
            sum(math.prod(shape_of(split.train)) for split in data.splits),
        )

    def is_held_out(self, volume_index: int, start_zyx: Triple) -> bool:
        held_out, box = self.data.splits[volume_index].validation, box_at(start_zyx, self.config.patch_size)
        return held_out is not None and intersection(held_out, box) == box

    def qualifies(self, volume_index: int, start_zyx: Triple) -> bool:
        """Whether a patch holds enough foreground to be drawn in training."""
        foreground = self.data.plan.volumes[volume_index].foreground
        return foreground is None or foreground.qualifies(start_zyx)

    def _set_of(self, found: FixedPatches, seed: int, rows: Sequence[int] | None = None) -> PatchSet:
        """Return these patches, or some of them, as a perfect model would generate them."""
        rows = list(range(len(found.volumes)) if rows is None else rows)
        locations = _locations(found)[rows]
        shown = [augmentation_of(seed, self.data.plan.augment, row) for row in rows]
        raw = apply_symmetries(torch.from_numpy(found.patches[rows]), shown)
        values = normalized(raw, self._scales[locations[:, 0]]).numpy()
        if not np.isfinite(values).all():
            raise DataError("Patches of the run's volumes contain NaN or infinity; replace them and train again")
        return PatchSet(to_model_values(to_intensities(values, *self.stored_as), self.stored_as[0]), locations)

    def _searched(self, found: FixedPatches) -> list[NDArray[np.float32]]:
        """Return all training voxels or, if they are too many, those around training patches."""
        data, left = self.data, _SEARCHED_VOXELS
        boxes = [(number, split.train) for number, split in enumerate(data.splits)]
        if sum(math.prod(shape_of(box)) for _, box in boxes) > left:
            patch, boxes = self.config.patch_size, []
            for number, start_zyx in zip(found.volumes, found.starts_zyx, strict=True):
                around = box_along((at - size, at + 2 * size) for at, size in zip(start_zyx, patch, strict=True))
                boxes.append((number, intersection(around, data.splits[number].train)))
        searched = []
        for number, box in boxes:
            left -= math.prod(shape_of(box))
            if left < 0:
                break
            raw = torch.from_numpy(data.read_patch(number, box)[None])
            searched.append(normalized(raw, self._scales[[number]])[0].numpy())
        return searched


def _disjoint_patches(shape: Sequence[int], patch_zyx: Sequence[int]) -> int:
    return math.prod(size // patch for size, patch in zip(shape, patch_zyx, strict=True))


def _locations(found: FixedPatches) -> NDArray[np.int64]:
    """Return volume index and start of each patch: [N, 4]."""
    return np.column_stack([found.volumes, np.array(found.starts_zyx).reshape(-1, 3)]).astype(np.int64)


def disjoint_sides(locations: NDArray[np.int64] | None, patch_zyx: Sequence[int], count: int) -> NDArray[np.int64]:
    """Assign each of `count` patches to side 0 or 1, so that no patch shares a voxel with the other side; -1 = neither.

    Sides are alternating stripes, as narrow as possible while half of the patches remain: two halves of a volume would
    show different structures.
    """
    if locations is None:
        return np.arange(count) % 2
    least = np.array((1, *patch_zyx))
    axis = int(np.argmax(np.ptp(locations[:, 1:], axis=0) / patch_zyx)) + 1
    found = []
    for stripes in _STRIPES:
        from_first = (locations[:, axis] - locations[:, axis].min()) / (np.ptp(locations[:, axis]) + 1)
        wanted, side = (from_first * stripes).astype(int) % 2, np.full(count, -1)
        for row in range(count):
            near = side[:row][(abs(locations[:row] - locations[row]) < least).all(1)]
            taken = set(near.tolist()) - {-1}
            side[row] = wanted[row] if not taken else taken.pop() if len(taken) == 1 else -1
        smaller = min((side == 0).sum(), (side == 1).sum())
        if 4 * smaller >= count:
            return side
        found.append((smaller, stripes, side))
    return max(found, key=lambda each: each[:2])[2]


def share_voxels(patches: PatchSet, others: PatchSet) -> NDArray[np.bool_]:
    """Return which of the first share voxels with which of the others: bool [N, M].  Pure."""
    if patches.locations is None or others.locations is None:
        return np.zeros((len(patches), len(others)), np.bool_)
    least = np.array((1, *patches.values.shape[1:]))
    return np.stack([(abs(others.locations - location) < least).all(1) for location in patches.locations])


def open_generated(path: Path, patch_zyx: Triple, count: int, condition: str | None, volume_index: int) -> PatchSet:
    """Open at most `count` generated patches, as stored.  Raises ConfigError if they have another size, or are too few.

    `path` is output of `vesuvius sample`, or a .npy file or zarr array (or group with one in "0") of patches [N, Z, Y,
    X] or of one volume [Z, Y, X], from which patches are cut at random.  `condition` is the name of the condition of
    `volume_index`.
    """
    folder = path if (path / SAMPLES).is_dir() else None
    array = open_array(folder / SAMPLES if folder else path)
    shape = tuple(array.shape)
    if len(shape) == 3:
        return _cut(array, patch_zyx, count, path)
    if len(shape) != 4 or shape[1:] != tuple(patch_zyx):
        raise ConfigError(
            f"--generated {path} has shape {list(shape)}, not that of training patches, "
            f"[N, {', '.join(map(str, patch_zyx))}]; crop the patches, or use another file"
        )
    if shape[0] < LEAST_PATCHES:
        raise ConfigError(f"{path} holds {shape[0]} patches, too few to compare; generate at least {LEAST_PATCHES}")
    count, locations = min(count, shape[0]), None
    if folder is not None and (folder / CONDITIONS / ".zattrs").is_file():
        record = finished_record(folder / CONDITIONS, SAMPLE) or {}
        # locations in another volume say nothing about the held-out voxels
        if record.get("condition") == condition and "starts_zyx" in record:
            locations = np.array([(volume_index, *start) for start in record["starts_zyx"][:count]], np.int64)
    return PatchSet(array[:count], locations)


def _cut(volume: Any, patch_zyx: Triple, count: int, path: Path) -> PatchSet:
    if (apart := _disjoint_patches(volume.shape, patch_zyx)) < LEAST_PATCHES:
        raise ConfigError(
            f"{path} is too small to compare: {apart} disjoint patches fit into it, and {LEAST_PATCHES} are needed; "
            "generate a larger volume"
        )
    last = [size - patch for size, patch in zip(volume.shape, patch_zyx, strict=True)]
    starts = list(map(triple, np.random.default_rng(0).integers(0, last, (count, 3), endpoint=True).tolist()))
    stored = np.stack([volume[slices(box_at(start, patch_zyx))] for start in starts])
    return PatchSet(stored, np.array([(-1, *start) for start in starts], np.int64))


def open_array(path: Path) -> Any:
    if not path.exists():
        raise ConfigError(f"--generated {path} does not exist; use a .npy file or a zarr array")
    try:
        if path.suffix == ".npy":
            return np.lib.format.open_memmap(path, mode="r")  # unlike np.load, its errors never suggest unpickling
        found = zarr.open(path, mode="r")
        return found["0"] if isinstance(found, zarr.Group) else found
    except (OSError, ValueError, KeyError, zarr.errors.BaseZarrError) as error:
        raise ConfigError(f"--generated {path} is not a .npy file or zarr array: {one_line(error)}") from error


def generated_set(found: PatchSet, source: RealSource, has_condition: bool) -> PatchSet:
    """Convert generated patches to model values, rounded to the dtype of the volume as real voxels are.

    Patches with conditions from locations that training does not draw are dropped.  Raises ConfigError if too few are
    left, or voxels are not finite.
    """
    voxels, locations, patch = np.array(found.values), found.locations, source.config.patch_size
    if voxels.dtype.kind not in "biuf" or not np.isfinite(voxels).all():
        raise ConfigError(f"Generated patches ({voxels.dtype}) are not finite real numbers; generate new ones")
    if locations is not None:
        at = [(number, triple(start)) for number, *start in locations.tolist()]
        rows = [row for row, location in enumerate(at) if location[0] < 0 or source.qualifies(*location)]
        if len(rows) < LEAST_PATCHES:
            raise ConfigError(
                f"Only {len(rows)} of {len(at)} samples have conditions with enough foreground (data.min_foreground), "
                f"and an evaluation needs {LEAST_PATCHES}; increase --count"
            )
        voxels, locations, at = voxels[rows], locations[rows], [at[row] for row in rows]
    cast = cast_intensities(voxels, source.stored_as[1])
    if cast.dtype.kind != "f" and (clipped := np.count_nonzero(abs(cast.astype(np.float64) - voxels) >= 1)):
        remedy = "are clipped; give samples in the intensities of the training volume"
        log.warning("%d of %d generated voxels do not fit into %s and %s", clipped, cast.size, cast.dtype, remedy)
    raw = torch.from_numpy(np.ascontiguousarray(cast))
    if has_condition or locations is not None:
        turns = [augmentation_of(_GENERATED, source.data.plan.augment, row) for row in range(len(raw))]
        raw = apply_symmetries(raw, turns)
    values, side = to_model_values(raw.numpy(), source.stored_as[0]), disjoint_sides(locations, patch, len(raw))
    if locations is None:
        return PatchSet(values, None, side)
    # samples with other than held-out conditions have no real counterpart
    real = [location[0] < 0 or source.is_held_out(*location) for location in at]
    return PatchSet(values, locations, np.where(real, side, -1))
