"""The patches that are compared, as model values: held-out ones, those of training, generated ones.  Reads files.

A model that has learned its training draws patches as training shows them: mirrored, turned, brighter or darker.  So
real patches get the training's augmentation, each its own, and are rounded to grey values as generated ones are.
Generated patches whose orientation is not the model's own, because they are cut from one volume or were drawn under
conditions as they are stored, are mirrored and turned like real ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from numpy.typing import NDArray

from vesuvius.config import DataConfig, Triple
from vesuvius.errors import ConfigError, DataError, one_line
from vesuvius.generate.sample_zarr import CONDITIONS, SAMPLE, SAMPLES, cast_grey_values, to_grey_values
from vesuvius.loader.device import apply_symmetries, model_values
from vesuvius.loader.intensity import intensity_scales, normalised
from vesuvius.plan.plan import augmentation_of
from vesuvius.stream.start.fixed_patches import FixedPatches, read_fixed_patches, read_training_patches
from vesuvius.stream.start.prepare import IntensityRange, PreparedData, prepare_data
from vesuvius.volume_tools.record import finished_record
from vesuvius.volumes.box import box_along, box_at, intersection, shape_of, slices, triple

log = logging.getLogger(__name__)

LEAST_PATCHES = 16
_SEARCHED_VOXELS = 2**27
_HELD_OUT, _TRAINING, _GENERATED = range(3)
"""Seeds of augmentations."""
_STRIPES = (16, 8, 4, 2)


@dataclass(frozen=True, eq=False)
class PatchSet:
    """Patches of one origin."""

    values: NDArray[np.float32]  # [N, Z, Y, X], model values
    # [N, 4], volume and start: two patches of one volume may share voxels, or be drawn under conditions that do.
    # Volume -1 = one volume that was drawn.  None = all are apart from all others
    places: NDArray[np.int64] | None = None
    # [N], 0 or 1, so that no patch shares a voxel with the other side (`disjoint_sides`); -1 = on neither
    side: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def is_conditional(self) -> bool:
        """Whether they were drawn under the conditions of known places of the run's volumes."""
        return self.places is not None and bool((self.places[:, 0] >= 0).all())

    def groups(self, edge: int = 1) -> NDArray[np.int64]:
        """[N], the cell of so many patches along each axis that each is in: patches of one may share voxels, and count
        as one in tests."""
        if self.places is None:
            return np.arange(len(self))
        found = self.places // np.array((1, *self.values.shape[1:])) // (1, edge, edge, edge)
        return np.unique(found, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)

    def rows(self, rows: Sequence[int] | NDArray[np.int64]) -> PatchSet:
        """Some of them."""
        places = None if self.places is None else self.places[rows]
        return PatchSet(self.values[rows], places, self.side[rows] if len(self.side) else self.side)


@dataclass(frozen=True, eq=False)
class RealPatches:
    """What a run's volumes hold."""

    held_out: PatchSet  # patches that training never sees
    training: PatchSet  # as many that it draws, from all over its voxels
    sides: tuple[PatchSet, PatchSet]  # others of these, in two sets that share no voxel
    searched: list[NDArray[np.float32]]  # boxes of training voxels, in which nearest places are looked for
    training_voxels: int  # how many there are in all


class RealSource:
    """Opens the volumes of a run.

    Args:
        number: the volume to compare with; None = all.
        greys: grey range of each volume of the run.
        drawn: grey range and dtype that generated patches are stored in.
    """

    def __init__(
        self,
        seed: int,
        config: DataConfig,
        number: int | None,
        greys: Sequence[IntensityRange],
        drawn: tuple[IntensityRange, np.dtype[Any]],
    ) -> None:
        """Reads metadata.  Raises ConfigError without held-out voxels, and DataError."""
        if config.validation.fraction == 0:
            raise ConfigError(
                "The run holds out no patches to compare with (data.validation.fraction=0); train with 0.05 or the like"
            )
        if number is not None:
            config, greys = config.model_copy(update={"volumes": (config.volumes[number],)}), [greys[number]]
        self.config, self.drawn, self._scales = config, drawn, intensity_scales(greys)
        self.data: PreparedData = prepare_data(seed, config)

    def read(self, count: int) -> RealPatches:
        """Read so many patches of each kind.  Raises DataError."""
        data, config = self.data, self.config
        held_out = read_fixed_patches(data, config, count)
        found = read_training_patches(data, config, 4 * count)
        side = disjoint_sides(_places(found), config.patch_size, len(found.volumes))
        sides = [np.flatnonzero(side == k)[:count].tolist() for k in (0, 1)]
        if min(map(len, sides)) < LEAST_PATCHES:
            raise DataError(
                f"The volumes of the run are too small to compare by: {len(sides[0])} and {len(sides[1])} patches of "
                f"training that share no voxel were found, and twice {LEAST_PATCHES} are needed"
            )
        held_out_boxes = [split.validation for split in data.splits if split.validation is not None]
        side_by_side = sum(_side_by_side(shape_of(box), config.patch_size) for box in held_out_boxes)
        if side_by_side < count:
            log.warning(
                "held-out voxels hold %d patches side by side, and %d are compared: they overlap, and all metrics rest "
                "on that little; data.validation.fraction says how much is held out",
                *(side_by_side, count),
            )
        return RealPatches(
            self._set_of(held_out, _HELD_OUT),
            self._set_of(found, _TRAINING, range(min(count, len(found.volumes)))),
            (self._set_of(found, _TRAINING, sides[0]), self._set_of(found, _TRAINING, sides[1])),
            self._searched(found),
            sum(math.prod(shape_of(split.train)) for split in data.splits),
        )

    def is_held_out(self, number: int, start_zyx: Triple) -> bool:
        """Whether the patch at a place of a volume lies in held-out voxels."""
        held_out, box = self.data.splits[number].validation, box_at(start_zyx, self.config.patch_size)
        return held_out is not None and intersection(held_out, box) == box

    def qualifies(self, number: int, start_zyx: Triple) -> bool:
        """Whether training could draw the patch at a place of a volume: it holds enough foreground."""
        foreground = self.data.plan.volumes[number].foreground
        return foreground is None or foreground.qualifies(start_zyx)

    def values_of(self, stored: NDArray[Any]) -> NDArray[np.float32]:
        """Model values of grey values as generated patches have them."""
        values: NDArray[np.float32] = normalised(torch.from_numpy(stored), intensity_scales([self.drawn[0]])).numpy()
        return values

    def _set_of(self, found: FixedPatches, seed: int, rows: Sequence[int] | None = None) -> PatchSet:
        """Some of these patches, or all, as a perfect model would have drawn them."""
        rows = list(range(len(found.volumes)) if rows is None else rows)
        places = _places(found)[rows]
        shown = [augmentation_of(seed, self.config.augment, row) for row in rows]
        values = model_values(torch.from_numpy(found.patches[rows]), shown, self._scales[places[:, 0]])[:, 0].numpy()
        return PatchSet(self.values_of(to_grey_values(values, *self.drawn)), places)

    def _searched(self, found: FixedPatches) -> list[NDArray[np.float32]]:
        """All training voxels, or where they are too many those around patches of training."""
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
            raw = torch.from_numpy(data.read_patch("volume", number, box)[None])
            searched.append(normalised(raw, self._scales[[number]])[0].numpy())
        return searched


def _side_by_side(shape: Sequence[int], patch_zyx: Sequence[int]) -> int:
    """How many patches a box holds that share no voxel."""
    return math.prod(size // patch for size, patch in zip(shape, patch_zyx, strict=True))


def _places(found: FixedPatches) -> NDArray[np.int64]:
    """[N, 4], volume and start of each patch."""
    return np.column_stack([found.volumes, np.array(found.starts_zyx).reshape(-1, 3)]).astype(np.int64)


def disjoint_sides(places: NDArray[np.int64] | None, patch_zyx: Sequence[int], count: int) -> NDArray[np.int64]:
    """Which of two sides each of `count` patches is on, 0 or 1, so that none shares a voxel with the other side.

    Sides are stripes in turn, as narrow as leaves half of the patches: the two halves of a volume would differ in what
    they show.  -1: a patch shares voxels with both.  Pure.

    Args:
        places: [count, 4], volume and start; None = patches share no voxels.
    """
    if places is None:
        return np.arange(count) % 2
    least = np.array((1, *patch_zyx))
    axis = int(np.argmax(np.ptp(places[:, 1:], axis=0) / patch_zyx)) + 1
    found = []
    for stripes in _STRIPES:
        from_first = (places[:, axis] - places[:, axis].min()) / (np.ptp(places[:, axis]) + 1)
        wanted, side = (from_first * stripes).astype(int) % 2, np.full(count, -1)
        for row in range(count):
            near = side[:row][(abs(places[:row] - places[row]) < least).all(1)]
            taken = set(near.tolist()) - {-1}
            side[row] = wanted[row] if not taken else taken.pop() if len(taken) == 1 else -1
        smaller = min((side == 0).sum(), (side == 1).sum())
        if 4 * smaller >= count:
            return side
        found.append((smaller, stripes, side))
    return max(found, key=lambda each: each[:2])[2]


def disjoint_from(patches: PatchSet, others: PatchSet) -> NDArray[np.bool_]:
    """Which patches share no voxel with any of the others: bool [N].  Pure."""
    if patches.places is None or others.places is None:
        return np.ones(len(patches), np.bool_)
    least = np.array((1, *patches.values.shape[1:]))
    shared = ((abs(others.places - place) < least).all(1).any() for place in patches.places)
    return ~np.fromiter(shared, np.bool_)


@dataclass(frozen=True, eq=False)
class GeneratedPatches:
    """Generated patches in grey values, not read yet."""

    stored: Any  # [N, Z, Y, X]
    places: NDArray[np.int64] | None  # as in `PatchSet`


def open_generated(path: Path, patch_zyx: Triple, count: int, condition: str | None, number: int) -> GeneratedPatches:
    """Generated patches of a file.

    Args:
        path: what `vesuvius sample` writes; of any program a .npy or zarr array (or group with one in "0") of patches
            [N, Z, Y, X], or of one volume [Z, Y, X], whose patches are cut at random places.
        count: at most so many.
        condition: name of the training's condition, which is that of volume `number`.

    Raises:
        ConfigError: they are not patches of this size, or too few.
    """
    folder = path if (path / SAMPLES).is_dir() else None
    array = _opened(folder / SAMPLES if folder else path)
    shape = tuple(array.shape)
    if len(shape) == 3:
        return _cut(array, patch_zyx, count, path)
    if len(shape) != 4 or shape[1:] != tuple(patch_zyx):
        raise ConfigError(
            f"The shape {list(shape)} of --generated {path} is not that of patches of the training, "
            f"[N, {', '.join(map(str, patch_zyx))}]; cut them to that size, or give another file"
        )
    if shape[0] < LEAST_PATCHES:
        raise ConfigError(
            f"{shape[0]} generated patches in {path} are too few to compare; draw {LEAST_PATCHES} or more"
        )
    count, places = min(count, shape[0]), None
    if folder is not None and (folder / CONDITIONS / ".zattrs").is_file():
        record = finished_record(folder / CONDITIONS, SAMPLE) or {}
        # Places in another volume say nothing about the held-out voxels.
        if record.get("condition") == condition and "starts_zyx" in record:
            places = np.array([(number, *start) for start in record["starts_zyx"][:count]], np.int64)
    return GeneratedPatches(array[:count], places)


def _cut(volume: Any, patch_zyx: Triple, count: int, path: Path) -> GeneratedPatches:
    """Patches from random places of a drawn volume.  Raises ConfigError: it holds too few."""
    if (apart := _side_by_side(volume.shape, patch_zyx)) < LEAST_PATCHES:
        raise ConfigError(
            f"{path} is too small to compare: {apart} disjoint patches fit into it, and {LEAST_PATCHES} are needed; "
            "generate a larger volume"
        )
    last = [size - patch for size, patch in zip(volume.shape, patch_zyx, strict=True)]
    starts = list(map(triple, np.random.default_rng(0).integers(0, last, (count, 3), endpoint=True).tolist()))
    stored = np.stack([volume[slices(box_at(start, patch_zyx))] for start in starts])
    return GeneratedPatches(stored, np.array([(-1, *start) for start in starts], np.int64))


def _opened(path: Path) -> Any:
    if not path.exists():
        raise ConfigError(f"--generated {path} does not exist; name a .npy file or a zarr array")
    try:
        if path.suffix == ".npy":
            return np.lib.format.open_memmap(path, mode="r")  # unlike np.load, it never speaks of unpickling
        found = zarr.open(path, mode="r")
        return found["0"] if isinstance(found, zarr.Group) else found
    except (OSError, ValueError, KeyError, zarr.errors.BaseZarrError) as error:
        raise ConfigError(f"--generated {path} is no .npy file or zarr array: {one_line(error)}") from error


def generated_set(found: GeneratedPatches, source: RealSource, has_condition: bool) -> PatchSet:
    """Generated patches as model values; first rounded to the dtype of the volume, as real voxels are.

    Those drawn under conditions of places that training could not draw are left out.  Patches whose orientation is not
    the model's own, as it is a condition's or a volume's, are mirrored and turned.

    Raises:
        ConfigError: too few are left, or voxels are not finite.
    """
    voxels, places, patch = np.array(found.stored), found.places, source.config.patch_size
    if voxels.dtype.kind not in "biuf" or not np.isfinite(voxels).all():
        raise ConfigError(f"Generated patches ({voxels.dtype}) hold NaN or infinity, or are no numbers; draw others")
    if places is not None:
        at = [(number, triple(start)) for number, *start in places.tolist()]
        rows = [row for row, place in enumerate(at) if place[0] < 0 or source.qualifies(*place)]
        if len(rows) < LEAST_PATCHES:
            raise ConfigError(
                f"{len(rows)} of {len(at)} samples lie at places with enough foreground for training "
                f"(data.min_foreground), and an evaluation needs {LEAST_PATCHES}; draw more with --count"
            )
        voxels, places, at = voxels[rows], places[rows], [at[row] for row in rows]
    raw = torch.from_numpy(np.ascontiguousarray(cast_grey_values(voxels, source.drawn[1])))
    if has_condition or places is not None:
        turns = [augmentation_of(_GENERATED, source.config.augment, row) for row in range(len(raw))]
        raw = apply_symmetries(raw, turns)
    values, side = source.values_of(raw.numpy()), disjoint_sides(places, patch, len(raw))
    if places is None:
        return PatchSet(values, None, side)
    # Under other conditions than held-out ones nothing real is there to compare them with.
    real = [place[0] < 0 or source.is_held_out(*place) for place in at]
    return PatchSet(values, places, np.where(real, side, -1))
