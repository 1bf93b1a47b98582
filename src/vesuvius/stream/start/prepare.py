"""Opens the volumes, splits them, makes the plan, and estimates the intensity ranges."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import DataConfig, NormalizeConfig, Triple
from vesuvius.errors import DataError
from vesuvius.plan.make_plan import Split, make_plan, plan_volume
from vesuvius.plan.plan import Plan
from vesuvius.runlog.progress import Progress, with_progress
from vesuvius.runlog.units import format_sizes
from vesuvius.stream.options import to_integer
from vesuvius.stream.reading.reader import ReaderJob
from vesuvius.stream.start.split import split_volumes
from vesuvius.volumes.alignment import Alignment, align, log_alignment
from vesuvius.volumes.box import Box, box_along, intersection
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.occupancy import foreground_map
from vesuvius.volumes.volume import Volume, open_volume
from vesuvius.volumes.voxels import check_labels, percentiles

log = logging.getLogger(__name__)

_AHEAD = 9  # boxes fetched or read concurrently: on a slow store the chunks of one patch use few of the requests
_BOXES_PER_ESTIMATE = 16
_BOX_MAX: Triple = (72, 136, 136)  # unless patches are larger
_PATCHES_OF_LABELS = 4
_PERCENTILES = (0.5, 99.5)
_SMALL_BYTES = 2**28  # decoded size of a volume that soon fits into the page cache: reading it again costs little
_SEED = 0  # a constant, so that runs with other seeds on the same data use the same intensity ranges

Kind = Literal["volume", "condition"]
KINDS: tuple[Kind, Kind] = ("volume", "condition")


@dataclass(frozen=True)
class IntensityRange:
    """The intensities of one volume that are mapped to -1 and +1."""

    low: float
    high: float


@dataclass(frozen=True)
class IntensityRanges:
    """The intensity ranges of a run, one per volume; `conditions` is empty without conditions and with labels."""

    volumes: tuple[IntensityRange, ...]
    conditions: tuple[IntensityRange, ...]


@dataclass(frozen=True)
class PreparedData:
    """Volumes, splits, plan and job of a run, ready to read; the tuples have one entry per volume."""

    volumes: tuple[Volume, ...]
    conditions: tuple[Volume, ...]
    within: tuple[Box, ...]  # the box covered by the volume, its condition and its mask
    splits: tuple[Split, ...]  # of that box
    plan: Plan
    job: ReaderJob

    def array(self, kind: Kind, volume_index: int) -> tuple[Volume, Alignment]:
        """Return a volume or its condition, and its alignment to the volume."""
        volume = self.volumes[volume_index]
        array = volume if kind == "volume" else self.conditions[volume_index]
        return array, align(volume, array, "the condition")

    def read_patch(self, kind: Kind, volume_index: int, box: Box) -> NDArray[Any]:
        """Read a box of a volume, or of its condition at the same position.

        Raises the errors of `Volume.read`, and DataError for labels outside the classes.
        """
        array, alignment = self.array(kind, volume_index)
        voxels = alignment.read(box, array.read)
        if kind == "condition" and self.job.data.class_values:
            check_labels(voxels, self.job.data.class_values, array.name, box)
        return voxels

    def read_patches(
        self, what: str, boxes: Iterable[tuple[int, Box]], total: int, kinds: Sequence[Kind] = ("volume",)
    ) -> Iterator[list[NDArray[Any]] | UnreadableChunkError]:
        """Read (volume index, box) pairs of each kind, in order, until `total` have been read; logs progress.

        Prefetches the next ones from remote stores.  Yields the error in place of an unreadable one.
        """
        upcoming, waiting, count = iter(boxes), deque[tuple[int, Box]](), 0
        progress = Progress(what, total)
        try:
            while count < total:
                for index, box in islice(upcoming, min(_AHEAD, total - count) - len(waiting)):
                    waiting.append((index, box))
                    for array, alignment in (self.array(kind, index) for kind in kinds):
                        array.stage(alignment.array_box(box))
                if not waiting:
                    return
                index, box = waiting.popleft()
                try:
                    voxels = [self.read_patch(kind, index, box) for kind in kinds]
                except UnreadableChunkError as error:
                    self._release(kinds, index, box)
                    yield error
                    continue
                progress.add(sum(each.nbytes for each in voxels))
                count += 1
                yield voxels
            progress.end()
        finally:
            progress.close()
            for index, box in waiting:
                self._release(kinds, index, box)
            for array in (*self.volumes, *self.conditions):
                if (bad := array.nonfinite) is not None:
                    bad.warn()

    def _release(self, kinds: Sequence[Kind], volume_index: int, box: Box) -> None:
        """Drop the chunks fetched for a box that is not read completely."""
        for array, alignment in (self.array(kind, volume_index) for kind in kinds):
            array.release(alignment.array_box(box))

    def intensity_ranges(self, config: DataConfig) -> IntensityRanges:
        """Return the configured intensity ranges, or estimate one per volume from a few training patches.

        Raises DataError: all sampled voxels are air or equal, or labels are outside the classes.
        """
        if config.condition_classes:
            self._check_labels()
        conditions = () if config.condition_classes else self.conditions
        return IntensityRanges(
            self._ranges("volume", self.volumes, config.normalize, "data.normalize"),
            self._ranges("condition", conditions, config.condition_normalize, "data.condition_normalize"),
        )

    def _ranges(
        self, kind: Kind, arrays: Sequence[Volume], normalize: NormalizeConfig, key: str
    ) -> tuple[IntensityRange, ...]:
        if normalize.low is not None and normalize.high is not None:
            return (IntensityRange(normalize.low, normalize.high),) * len(arrays)
        ranges = []
        for index, array in enumerate(arrays):
            boxes = ((index, box) for box in self._sample_boxes(index))
            what = f"reading patches of {array.name} to estimate its intensity range"
            voxels = self.read_patches(what, boxes, _BOXES_PER_ESTIMATE, (kind,))
            ranges.append(estimate_intensity_range(array, voxels, key))
        return tuple(ranges)

    def _sample_boxes(self, volume_index: int) -> Iterator[Box]:
        """Yield boxes of training voxels to estimate an intensity range from: the same for the same plan.

        Small patches are enlarged to their chunks, up to the size of a large patch: that decodes nothing more, and a
        few small patches would miss much of a volume.
        """
        plan, volume = replace(self.plan, seed=_SEED), self.volumes[volume_index]
        train = self.splits[volume_index].train
        for draw in range(4 * _BOXES_PER_ESTIMATE):
            ends = []
            patch = plan.uniform_patch(volume_index, draw)
            for lo, hi, chunk, first, last, large in zip(*patch, volume.chunk_zyx, *train, _BOX_MAX, strict=True):
                least, most = max(lo // chunk * chunk, first), min(-(-hi // chunk) * chunk, last)
                size = min(max(large, hi - lo), most - least)
                start = min(max((lo + hi - size) // 2, least), most - size)
                ends.append((start, start + size))
            yield box_along(ends)

    def _check_labels(self) -> None:
        """Read a few patches of labels.  Raises DataError for labels outside the classes."""
        for index, labels in enumerate(self.conditions):
            boxes = [(index, self.plan.uniform_patch(index, draw)) for draw in range(_PATCHES_OF_LABELS)]
            for _ in self.read_patches(f"reading patches of {labels.name}", boxes, len(boxes), ("condition",)):
                pass  # damage is reported and quarantined by the readers

    def describe(self, ranges: IntensityRanges) -> dict[str, Any]:
        return {
            "plan_hash": self.plan.hash,
            "plan": self.plan.describe(),
            "volumes": [
                {
                    "path": volume.source.display_address,
                    "level": volume.spec.level,
                    "shape": list(volume.shape_zyx),
                    "dtype": volume.dtype.name,
                    "chunk": list(volume.chunk_zyx),
                    "voxel_size_um": volume.voxel_size_um,
                    "train": split.train,
                    "validation": split.validation,
                    "intensity_low": intensity.low,
                    "intensity_high": intensity.high,
                }
                for volume, split, intensity in zip(self.volumes, self.splits, ranges.volumes, strict=True)
            ],
        }


def prepare_data(
    seed: int, config: DataConfig, rank: int = 0, world_size: int = 1, splits: Sequence[Split] | None = None
) -> PreparedData:
    """Open and check all volumes and make the plan.

    Reads metadata; with `data.min_foreground` also the source of the foreground map.  `splits` are those of an earlier
    run that had more volumes.

    Raises DataError: a volume cannot be used, is too small or has too little foreground, or volumes do not match.
    """
    seed = to_integer("seed", seed, 0)
    specs = with_progress(config.volumes, "opening the volumes", len(config.volumes))
    volumes = tuple(open_volume(spec, config.store, config.missing_chunk, config.nan) for spec in specs)
    conditions = tuple(
        open_volume(spec.condition, config.store, config.missing_chunk, config.condition_nan)
        for spec in config.volumes
        if spec.condition
    )
    config = _without_unequal_turns(config, volumes)
    dtype, condition_dtype = _common_dtype(volumes), _common_dtype(conditions, are_labels=True)
    assert dtype is not None
    voxel_bytes = sum(np.dtype(name).itemsize for name in (dtype, condition_dtype) if name)
    within, maps = [], []
    for index, (spec, volume) in enumerate(zip(config.volumes, volumes, strict=True)):
        foreground = foreground_map(volume, spec, config)
        volume.missing.listed = foreground.stored(volume.chunk_zyx) if foreground else None
        box = (foreground and foreground.within) or ((0, 0, 0), volume.shape_zyx)
        if conditions:
            box = intersection(box, log_alignment(volume, conditions[index], "the condition").covered)
        within.append(box)
        maps.append(foreground)
    splits = splits or split_volumes(volumes, within, config.patch_size, config.validation)
    planned = [
        plan_volume(
            volume.name,
            split,
            volume.shape_zyx,
            volume.chunk_zyx,
            volume.dtype.name,
            spec.weight,
            config,
            voxel_bytes=voxel_bytes,
            foreground=foreground,
            min_foreground=config.min_foreground_of(spec),
        )
        for spec, volume, split, foreground in zip(config.volumes, volumes, splits, maps, strict=True)
    ]
    plan = make_plan(seed, config, planned)
    job = ReaderJob(plan, config, dtype, condition_dtype, rank=rank, world_size=world_size)
    return PreparedData(volumes, conditions, tuple(within), tuple(splits), plan, job)


def amplified_reads(plan: Plan, world: int) -> list[str]:
    """Describe the volumes that `world` ranks decode more than once over, one line each.  Pure."""
    return [
        f"the read amplification of {volume.name} is {amplification:.2f}: chunks of {format_sizes(volume.chunk_zyx)}, "
        f"each read by {plan.reads_per_region(world):.1f} ranks; raise data.patches_per_region (now "
        f"{plan.patches_per_region}) in a new run, or use smaller chunks"
        for index, volume in enumerate(plan.volumes)
        if (amplification := plan.read_amplification(index, world)) > 1
        and math.prod(volume.shape_zyx) * volume.voxel_bytes > _SMALL_BYTES
    ]


def _without_unequal_turns(config: DataConfig, volumes: Sequence[Volume]) -> DataConfig:
    """Return the config without rotations by 90 degrees if they would exchange axes of unequal voxel size; logs it."""
    unequal = [volume for volume in volumes if volume.geometry and not volume.geometry.is_square]
    if not unequal or not config.augment.rot90:
        return config
    level = logging.WARNING if "rot90" in config.augment.model_fields_set else logging.INFO
    text = "Patches are mirrored, not rotated (data.augment.rot90): the voxels of %s are not square in y and x"
    log.log(level, text, unequal[0].name)
    return config.model_copy(update={"augment": config.augment.model_copy(update={"rot90": False})})


def _common_dtype(volumes: Sequence[Volume], are_labels: bool = False) -> str | None:
    """Return the smallest dtype that holds the values of all volumes; None without volumes.

    Raises DataError: labels would become floats.
    """
    dtypes = [volume.dtype for volume in volumes]
    common = np.result_type(*dtypes) if dtypes else None
    if are_labels and common is not None and common.kind == "f" and any(dtype.kind != "f" for dtype in dtypes):
        text = ", ".join(f"{volume.dtype.name} in {volume.name}" for volume in volumes)
        raise DataError(f"No integer dtype holds all labels or conditions: {text}; convert them to one dtype")
    return None if common is None else common.name


def estimate_intensity_range(
    volume: Volume, boxes: Iterable[list[NDArray[Any]] | UnreadableChunkError], key: str
) -> IntensityRange:
    """Return the 0.5th and 99.5th percentile of the material in the readable boxes of `read_patches`.

    Excludes NaN and voxels equal to the fill value: these are masked air, whose share differs between volumes.  The
    range of bool is always 0 to 1.

    Raises DataError: nothing but air, or a single intensity.
    """
    if volume.dtype == np.bool_:
        return IntensityRange(0.0, 1.0)
    material: list[NDArray[Any]] = []
    for voxels in boxes:
        if isinstance(voxels, UnreadableChunkError):
            log.warning("A patch is excluded from the intensity range: %s", voxels)
            continue
        material.append(volume.material(voxels[0]))
    if material and not any(map(len, material)):
        raise DataError(
            f"All voxels in {len(material)} boxes of {volume.name} equal its fill value; check it with `vesuvius "
            "volume info` and correct its path, level or select in data.volumes, or avoid air with data.min_foreground"
        )
    low, high = percentiles(np.concatenate(material), _PERCENTILES) if material else (0.0, 0.0)
    if not low < high:
        raise DataError(
            f"Cannot estimate the intensity range of {volume.name}: its values are {low:g} to {high:g} in "
            f"{len(material)} boxes; set {key}.low and {key}.high"
        )
    return IntensityRange(low, high)
