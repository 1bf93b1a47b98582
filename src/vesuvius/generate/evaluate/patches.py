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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from numpy.typing import NDArray

from vesuvius.config import AugmentConfig, DataConfig, Triple
from vesuvius.errors import ConfigError, DataError, one_line
from vesuvius.generate.sample_zarr import CONDITIONS, SAMPLE, SAMPLES, as_stored, to_greys
from vesuvius.plan.plan import augmentation_of
from vesuvius.stream.start.fixed_patches import FixedPatches, read_fixed_patches, read_training_patches
from vesuvius.stream.start.prepare import GreyRange, PreparedData, prepare_data
from vesuvius.training.step.device import apply_symmetries, model_values
from vesuvius.training.step.grey_values import grey_scales, normalised
from vesuvius.volume_tools.partial import finished_record
from vesuvius.volumes.box import Box, box_along, box_at, intersection, moved, shape_of, triple
from vesuvius.volumes.volume import Volume

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
    groups: NDArray[np.int64]  # [N]; patches of one group may share voxels and count as one in intervals
    # [N], the half of the held-out voxels that a patch lies in or was drawn under the condition of: 0, 1, or -1 = both.
    # None = they have nothing to do with held-out voxels
    half: NDArray[np.int64] | None = None
    # [N, 4], volume and start of each: patches may share voxels.  None = they share none
    places: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def rows(self, rows: Sequence[int] | NDArray[np.int64]) -> PatchSet:
        """Some of them."""
        half, places = (None if each is None else each[rows] for each in (self.half, self.places))
        return PatchSet(self.values[rows], self.groups[rows], half, places)


@dataclass(frozen=True, eq=False)
class RealPatches:
    """What a run's volumes hold."""

    held_out: PatchSet  # patches that training never sees
    training: PatchSet  # as many that it draws, from all over its voxels
    sides: tuple[PatchSet, PatchSet]  # others of these, in two sets that share no voxel
    searched: list[NDArray[np.float32]]  # boxes of training voxels, in which nearest places are looked for
    training_voxels: int  # how many there are in all
    side_by_side: int  # how many patches fit into the held-out voxels without sharing any


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
        greys: Sequence[GreyRange],
        drawn: tuple[GreyRange, np.dtype[Any]],
    ) -> None:
        """Reads metadata.  Raises ConfigError without held-out voxels, and DataError."""
        if config.validation.fraction == 0:
            raise ConfigError(
                "an evaluation compares with held-out patches; got a run with "
                "data.validation.fraction=0, which holds out none; train with 0.05, for example"
            )
        if number is not None:
            config, greys = config.model_copy(update={"volumes": (config.volumes[number],)}), [greys[number]]
        self._config, self._scales, self._drawn = config, grey_scales(greys), drawn
        self.data: PreparedData = prepare_data(seed, config)

    def read(self, count: int) -> RealPatches:
        """Read so many patches of each kind.  Raises DataError."""
        data, config = self.data, self._config
        held_out = read_fixed_patches(data, config, count)
        found = read_training_patches(data, config, 4 * count)
        side = disjoint_sides(_places(found), config.patch_size, len(found.volumes))
        sides = [np.flatnonzero(side == k)[:count].tolist() for k in (0, 1)]
        if min(map(len, sides)) < LEAST_PATCHES:
            raise DataError(
                f"an evaluation needs twice {LEAST_PATCHES} patches of training that share no voxel; got "
                f"{len(sides[0])} and {len(sides[1])} of {len(found.volumes)} drawn; evaluate a run with larger "
                "volumes"
            )
        boxes = [split.validation for split in data.splits if split.validation is not None]
        side_by_side = sum(
            math.prod(n // p for n, p in zip(shape_of(box), config.patch_size, strict=True)) for box in boxes
        )
        if side_by_side < count:
            log.warning(
                "held-out voxels hold %d patches side by side, and %d are compared: they overlap, and count "
                "as fewer in all intervals; data.validation.fraction says how much is held out",
                side_by_side,
                count,
            )
        return RealPatches(
            replace(self._set_of(held_out, _HELD_OUT), half=self.halves(held_out)),
            self._set_of(found, _TRAINING, range(min(count, len(found.volumes)))),
            (self._set_of(found, _TRAINING, sides[0]), self._set_of(found, _TRAINING, sides[1])),
            self._searched(found),
            sum(math.prod(shape_of(split.train)) for split in data.splits),
            side_by_side,
        )

    def halves(self, places: FixedPatches) -> NDArray[np.int64]:
        """In which half of its held-out box each patch lies, along the longest axis: 0, 1 or -1 for both."""
        return np.array(
            [self.half_of(n, start) for n, start in zip(places.volumes, places.starts_zyx, strict=True)], np.int64
        )

    def half_of(self, number: int, start_zyx: Sequence[int]) -> int:
        """The same of one place; -1 also for one that is not held out."""
        box, patch = self.data.splits[number].validation, self._config.patch_size
        assert box is not None
        inside = all(lo <= at and at + p <= hi for lo, at, p, hi in zip(box[0], start_zyx, patch, box[1], strict=True))
        return _half_of(box, patch, start_zyx) if inside else -1

    def qualifies(self, number: int, start_zyx: Triple) -> bool:
        """Whether training could draw the patch at a place of a volume: it holds enough foreground."""
        foreground = self.data.plan.volumes[number].foreground
        return foreground is None or foreground.qualifies(start_zyx)

    def values_at(self, number: int, starts_zyx: Sequence[Triple]) -> NDArray[np.float32]:
        """Real voxels at these places of a volume, as model values, not augmented: [N, Z, Y, X].  Raises DataError."""
        boxes = [box_at(start, self._config.patch_size) for start in starts_zyx]
        return self._model_values([self.data.read_patch("volume", number, box) for box in boxes], [number] * len(boxes))

    def labels_at(self, number: int, starts_zyx: Sequence[Triple]) -> NDArray[Any]:
        """The condition there, as it is stored; a coarser one upsampled.  Raises DataError."""
        boxes = [box_at(start, self._config.patch_size) for start in starts_zyx]
        return np.stack([self.data.read_patch("condition", number, box) for box in boxes])

    def _set_of(self, found: FixedPatches, seed: int, rows: Sequence[int] | None = None) -> PatchSet:
        """Some of these patches, or all, as a perfect model would have drawn them."""
        rows = range(len(found.volumes)) if rows is None else rows
        places, (grey, dtype) = _places(found)[list(rows)], self._drawn
        shown = [augmentation_of(seed, self._config.augment, row) for row in rows]
        raw, scales = torch.from_numpy(found.patches[list(rows)]), self._scales[places[:, 0]]
        stored = to_greys(model_values(raw, shown, scales)[:, 0].numpy(), grey, dtype)
        values = normalised(torch.from_numpy(stored), grey_scales([grey])).numpy()
        return PatchSet(values, _cells(places, self._config.patch_size), places=places)

    def _model_values(self, stored: Sequence[NDArray[Any]], volumes: Sequence[int]) -> NDArray[np.float32]:
        """Stored voxels of the same shape as model values, each with the grey range of its volume."""
        raw, scales = torch.from_numpy(np.stack(stored)), self._scales[list(volumes)]
        values: NDArray[np.float32] = normalised(raw, scales).numpy()
        return values

    def _searched(self, found: FixedPatches) -> list[NDArray[np.float32]]:
        """All training voxels, or where they are too many those around patches of training."""
        data, left = self.data, _SEARCHED_VOXELS
        boxes = [(number, split.train) for number, split in enumerate(data.splits)]
        if sum(math.prod(shape_of(box)) for _, box in boxes) > left:
            boxes = [(n, self._around(n, s)) for n, s in zip(found.volumes, found.starts_zyx, strict=True)]
        searched = []
        for number, box in boxes:
            left -= math.prod(shape_of(box))
            if left < 0:
                break
            searched.append(self._model_values([data.read_patch("volume", number, box)], [number])[0])
        return searched

    def _around(self, number: int, start_zyx: Triple) -> Box:
        patch = self._config.patch_size
        around = box_along((start - size, start + 2 * size) for start, size in zip(start_zyx, patch, strict=True))
        return intersection(around, self.data.splits[number].train)


def _places(found: FixedPatches) -> NDArray[np.int64]:
    """[N, 4], volume and start of each patch."""
    return np.column_stack([found.volumes, np.array(found.starts_zyx).reshape(-1, 3)]).astype(np.int64)


def _cells(places: NDArray[np.int64], patch_zyx: Triple) -> NDArray[np.int64]:
    """Of places [N, 4], the number of the cell of the size of a patch that each is in: these patches share voxels."""
    return np.unique(places // np.array((1, *patch_zyx)), axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


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


def _half_of(box: Box, patch_zyx: Triple, start_zyx: Sequence[int]) -> int:
    """In which half of a box a patch lies, along the axis that is longest in patches: 0, 1 or -1 for both."""
    axis = max(range(3), key=lambda a: (box[1][a] - box[0][a]) / patch_zyx[a])
    middle = (box[0][axis] + box[1][axis]) // 2
    if start_zyx[axis] >= middle:
        return 1
    return 0 if start_zyx[axis] + patch_zyx[axis] <= middle else -1


@dataclass(frozen=True, eq=False)
class GeneratedPatches:
    """Generated patches in grey values, not read yet."""

    stored: Any  # [N, Z, Y, X]
    # the places, in the training's condition, that they were drawn under; None = not known
    starts_zyx: list[Triple] | None
    labels: Any  # the conditions themselves, [N, Z, Y, X] as they are stored; None = see `starts_zyx`
    groups: NDArray[np.int64]  # as in `PatchSet`
    places: NDArray[np.int64] | None = None  # as in `PatchSet`


def open_generated(path: Path, patch_zyx: Triple, count: int, condition: str | None) -> GeneratedPatches:
    """Generated patches of a file.

    Args:
        path: .npy, a zarr array, a group with one in "0", or what `vesuvius sample` writes.
        count: at most so many.
        condition: name of the training's condition.

    Raises:
        ConfigError: they are not patches of this size, or too few.
    """
    folder = path if (path / SAMPLES).is_dir() else None
    array = _opened(folder / SAMPLES if folder else path)
    shape = tuple(array.shape)
    if len(shape) != 4 or shape[1:] != tuple(patch_zyx):
        raise ConfigError(
            f"--generated must hold patches of the training's size, [N, {', '.join(map(str, patch_zyx))}]; got shape "
            f"{list(shape)} in {path}; cut them to that size, or give another file"
        )
    if shape[0] < LEAST_PATCHES:
        raise ConfigError(
            f"an evaluation needs {LEAST_PATCHES} generated patches or more; got {shape[0]} in {path}; draw more"
        )
    starts = labels = None
    count = min(count, shape[0])
    if folder is not None and (folder / CONDITIONS / ".zattrs").is_file():
        labels = _opened(folder / CONDITIONS)[:count]
        record = finished_record(folder / CONDITIONS, SAMPLE) or {}
        # Places in another volume (--condition) say nothing about the held-out voxels.
        if record.get("condition") == condition and "starts_zyx" in record:
            starts = list(map(triple, record["starts_zyx"]))[:count]
    return GeneratedPatches(array[:count], starts, labels, np.arange(count))


def cut_generated(volume: Volume, patch_zyx: Triple, count: int, first_zyx: Triple | None) -> GeneratedPatches:
    """Generated patches from random places of a drawn volume.  Reads them.

    Args:
        first_zyx: of the volume, in the training's condition that it was drawn under; None = it was not.

    Raises:
        ConfigError: the volume holds too few.
    """
    apart = math.prod(n // p for n, p in zip(volume.shape_zyx, patch_zyx, strict=True))
    if apart < LEAST_PATCHES:
        raise ConfigError(
            f"an evaluation needs {LEAST_PATCHES} patches side by side in --volume; got {apart} in {volume.name}; draw "
            "a larger one, or name samples to evaluate with --generated"
        )
    last = [size - patch for size, patch in zip(volume.shape_zyx, patch_zyx, strict=True)]
    starts = list(map(triple, np.random.default_rng(0).integers(0, last, (count, 3), endpoint=True).tolist()))
    stored = np.stack([volume.read(box_at(start, patch_zyx)) for start in starts])
    places = np.array([(0, *start) for start in starts], np.int64)
    shown = None if first_zyx is None else [moved(start, first_zyx) for start in starts]
    return GeneratedPatches(stored, shown, None, _cells(places, patch_zyx), places)


def _opened(path: Path) -> Any:
    if not path.exists():
        raise ConfigError(f"--generated must be a .npy file or a zarr array; got {path}, which is not there")
    try:
        if path.suffix == ".npy":
            return np.lib.format.open_memmap(path, mode="r")  # unlike np.load, it never speaks of unpickling
        found = zarr.open(str(path), mode="r")
        return found["0"] if isinstance(found, zarr.Group) else found
    except (OSError, ValueError, KeyError, zarr.errors.BaseZarrError) as error:
        raise ConfigError(
            f"--generated must be a .npy file or a zarr array [N, Z, Y, X]; got {path}: {one_line(error)}"
        ) from error


def qualifying(found: GeneratedPatches, source: RealSource, number: int) -> GeneratedPatches:
    """Those drawn under conditions of places that training could draw; all where the places are not known.

    Raises ConfigError where they are too few.
    """
    if found.starts_zyx is None:
        return found
    rows = [row for row, start in enumerate(found.starts_zyx) if source.qualifies(number, start)]
    if len(rows) < LEAST_PATCHES:
        raise ConfigError(
            f"{len(rows)} of {len(found.starts_zyx)} samples lie at places with enough foreground for training "
            f"(data.min_foreground), and an evaluation needs {LEAST_PATCHES}; draw more with --count"
        )
    return GeneratedPatches(
        np.array(found.stored)[rows],
        [found.starts_zyx[row] for row in rows],
        None if found.labels is None else np.array(found.labels)[rows],
        found.groups[rows],
        None if found.places is None else found.places[rows],
    )


def generated_set(
    found: GeneratedPatches, grey: GreyRange, dtype: np.dtype[Any], halves: Sequence[int] | None, turned: AugmentConfig
) -> PatchSet:
    """Generated patches as model values; first rounded to the dtype of the volume, as real voxels are.

    Args:
        turned: the symmetries that are drawn for each patch.

    Raises:
        ConfigError: voxels are not finite.
    """
    voxels = np.array(found.stored)
    if voxels.dtype.kind not in "biuf" or not np.isfinite(voxels).all():
        raise ConfigError(
            f"generated patches must be finite numbers; got {voxels.dtype} with NaN or infinity, or of another kind"
        )
    raw = torch.from_numpy(np.ascontiguousarray(as_stored(voxels, dtype)))
    raw = apply_symmetries(raw, [augmentation_of(_GENERATED, turned, row) for row in range(len(raw))])
    values = normalised(raw, grey_scales([grey])).numpy()
    half = None if halves is None else np.array(halves, np.int64)
    return PatchSet(values, found.groups, half, found.places)
