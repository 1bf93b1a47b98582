"""Opens the volumes, splits them, makes the plan, and estimates the intensity ranges."""

import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import DataConfig, NormalizeConfig, Triple
from vesuvius.config.patterns import match_volumes
from vesuvius.errors import DataError
from vesuvius.plan.make_plan import Split, class_volumes, make_plan, plan_volume
from vesuvius.plan.plan import Plan
from vesuvius.runlog.progress import Progress, with_progress
from vesuvius.runlog.units import format_sizes
from vesuvius.stream.options import to_integer
from vesuvius.stream.reading.reader import ReaderJob, open_arrays
from vesuvius.stream.start.split import split_volumes
from vesuvius.volumes.alignment import AnyAlignment, align, log_alignment
from vesuvius.volumes.box import Box, box_along, intersection, shape_of, slices
from vesuvius.volumes.context import ContextAlignment, with_context
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.occupancy import class_maps, foreground_map
from vesuvius.volumes.volume import Volume
from vesuvius.volumes.voxels import check_labels, percentiles

log = logging.getLogger(__name__)

_AHEAD = 9  # boxes fetched or read concurrently: on a slow store the chunks of one patch use few of the requests
_BOXES_PER_ESTIMATE = 16
_BOX_MAX: Triple = (72, 136, 136)  # unless patches are larger
_PATCHES_OF_LABELS = 4
_PERCENTILES = (0.5, 99.5)
_SMALL_BYTES = 2**28  # decoded size of a volume that soon fits into the page cache: reading it again costs little
_SEED = 0  # a constant, so that runs with other seeds on the same data use the same intensity ranges


@dataclass(frozen=True)
class IntensityRange:
    """The intensities of one volume that are mapped to -1 and +1."""

    low: float
    high: float


@dataclass(frozen=True)
class IntensityRanges:
    """The intensity ranges of each channel of each volume; `conditions` is empty without conditions and with labels."""

    volumes: tuple[IntensityRange, ...]
    conditions: tuple[IntensityRange, ...]


@dataclass(frozen=True)
class PreparedData:
    """Volumes, splits, plan and job of a run, ready to read; the tuples have one entry per volume.

    A position counts the arrays of a volume: 0 is the volume itself, then come its other channels and its conditions.
    """

    arrays: tuple[tuple[Volume, ...], ...]
    within: tuple[Box, ...]  # the box covered by the arrays of the volume and its mask
    splits: tuple[Split, ...]  # of that box
    plan: Plan
    job: ReaderJob

    @property
    def volumes(self) -> tuple[Volume, ...]:
        return tuple(arrays[0] for arrays in self.arrays)

    @property
    def conditions(self) -> tuple[Volume, ...]:
        return tuple(each for arrays in self.arrays for each in arrays[self.job.channels :])

    def array(self, volume_index: int, position: int) -> tuple[Volume, AnyAlignment]:
        """Return an array of a volume, and its alignment to the volume."""
        volume, array = self.arrays[volume_index][0], self.arrays[volume_index][position]
        return array, with_context(align(volume, array, "an array"), array.spec, self.plan.patch_zyx)

    def read_patch(self, volume_index: int, box: Box, position: int = 0) -> NDArray[Any]:
        """Read a box of a volume, or of another of its arrays at the same position; with context the window of a patch.

        Raises the errors of `Volume.read`, and DataError for labels outside the classes.
        """
        array, alignment = self.array(volume_index, position)
        voxels = alignment.read(box, array.read)
        if position == self.job.channels and self.job.data.class_values:
            check_labels(voxels, self.job.data.class_values, array.name, box)
        if isinstance(alignment, ContextAlignment) and shape_of(box) == self.plan.patch_zyx:
            return voxels[slices(alignment.window(box[0]), alignment.cover(box)[0])]
        return voxels

    def read_patches(
        self, what: str, boxes: Iterable[tuple[int, Box]], total: int, positions: Sequence[int] = (0,)
    ) -> Iterator[list[NDArray[Any]] | UnreadableChunkError]:
        """Read (volume index, box) pairs of arrays, in order, until `total` have been read; logs progress.

        Prefetches the next ones from remote stores.  Yields the error in place of an unreadable one.
        """
        upcoming, waiting, count = iter(boxes), deque[tuple[int, Box]](), 0
        progress = Progress(what, total)
        try:
            while count < total:
                for index, box in islice(upcoming, min(_AHEAD, total - count) - len(waiting)):
                    waiting.append((index, box))
                    for array, alignment in (self.array(index, position) for position in positions):
                        array.stage(alignment.array_box(box))
                if not waiting:
                    return
                index, box = waiting.popleft()
                try:
                    voxels = [self.read_patch(index, box, position) for position in positions]
                except UnreadableChunkError as error:
                    self._release(positions, index, box)
                    yield error
                    continue
                progress.add(sum(each.nbytes for each in voxels))
                count += 1
                yield voxels
            progress.end()
        finally:
            progress.close()
            for index, box in waiting:
                self._release(positions, index, box)
            for array in chain(*self.arrays):
                array.source.rest()
                if (bad := array.nonfinite) is not None:
                    bad.warn()

    def _release(self, positions: Sequence[int], volume_index: int, box: Box) -> None:
        """Drop the chunks fetched for a box that is not read completely."""
        for array, alignment in (self.array(volume_index, position) for position in positions):
            array.release(alignment.array_box(box))

    def intensity_ranges(self, config: DataConfig) -> IntensityRanges:
        """Return the configured intensity ranges, or estimate one per volume from a few training patches.

        Raises DataError: all sampled voxels are air or equal, or labels are outside the classes.
        """
        if config.condition_classes:
            self._check_labels()
        images, stop = self.job.channels, 0 if config.condition_classes else len(self.job.dtypes)
        return IntensityRanges(
            self._ranges(range(images), config.normalize, "data.normalize"),
            self._ranges(range(images, stop), config.condition_normalize, "data.condition_normalize"),
        )

    def _ranges(self, positions: Sequence[int], normalize: NormalizeConfig, key: str) -> tuple[IntensityRange, ...]:
        arrays = [(index, position) for index in range(len(self.arrays)) for position in positions]
        if normalize.low is not None and normalize.high is not None:
            return (IntensityRange(normalize.low, normalize.high),) * len(arrays)
        ranges, opened = dict[Any, IntensityRange](), [self.arrays[index][position] for index, position in arrays]
        # One that is listed again has the same range.
        keys = [(array.source.address, array.node.key, array.spec.select) for array in opened]
        for identity, array, (index, position) in zip(keys, opened, arrays, strict=True):
            if identity not in ranges:
                boxes = ((index, box) for box in self._sample_boxes(index))
                what = f"reading patches of {array.name} to estimate its intensity range"
                voxels = self.read_patches(what, boxes, _BOXES_PER_ESTIMATE, (position,))
                ranges[identity] = estimate_intensity_range(array, voxels, key)
        return tuple(map(ranges.__getitem__, keys))

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
        position = self.job.channels
        for index, arrays in enumerate(self.arrays if self.conditions else ()):
            boxes = [(index, self.plan.uniform_patch(index, draw)) for draw in range(_PATCHES_OF_LABELS)]
            for _ in self.read_patches(f"reading patches of {arrays[position].name}", boxes, len(boxes), (position,)):
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
    seed, config = to_integer("seed", seed, 0), match_volumes(config)
    specs = with_progress(config.volumes, "opening the volumes", len(config.volumes))
    arrays = tuple(open_arrays(spec, config) for spec in specs)
    volumes, channels = tuple(each[0] for each in arrays), len(config.volumes[0].images)
    config = _without_unequal_turns(config, volumes)
    dtypes = tuple(common_dtype(each, index >= channels) for index, each in enumerate(zip(*arrays, strict=True)))
    within, maps, of_classes, transforms, contexts = [], [], [], [], list[ContextAlignment]()
    for spec, (volume, *others) in zip(config.volumes, arrays, strict=True):
        foreground = foreground_map(volume, spec, config)
        volume.missing.listed = foreground.stored(volume.chunk_zyx) if foreground else None
        box = (foreground and foreground.within) or ((0, 0, 0), volume.shape_zyx)
        whats = ["the channel"] * (channels - 1) + ["the condition"] * len(others)
        logged = [log_alignment(volume, array, what) for array, what in zip(others, whats, strict=False)]
        placed = [with_context(f, a.spec, config.patch_size) for f, a in zip(logged, others, strict=True)]
        contexts += [found for found in placed if isinstance(found, ContextAlignment)]
        for alignment in placed:
            box = intersection(box, alignment.covered)
        within.append(box)
        transforms.append(tuple(found for array, found in zip(others, placed, strict=True) if array.transform))
        maps.append(foreground)
        of_classes.append(class_maps(volume, spec, config))
    splits = splits or split_volumes([each[:channels] for each in arrays], within, config.patch_size, config.validation)
    planned = [
        plan_volume(
            volume.name,
            split,
            volume.shape_zyx,
            volume.chunk_zyx,
            volume.dtype.name,
            spec.weight,
            config,
            voxel_bytes=sum(dtype.itemsize for dtype in dtypes),
            foreground=foreground,
            min_foreground=config.min_foreground_of(spec),
        )
        for spec, volume, split, foreground in zip(config.volumes, volumes, splits, maps, strict=True)
    ]
    planned = [replace(each, transforms=found) for each, found in zip(planned, transforms, strict=True)]
    if config.class_weights:
        planned, warnings = class_volumes(planned, of_classes, config)
        for warning in warnings:
            log.warning("%s", warning)
    plan = make_plan(seed, config, planned)
    job = ReaderJob(plan, config, dtypes, channels, tuple(contexts), rank=rank, world_size=world_size)
    return PreparedData(arrays, tuple(within), tuple(splits), plan, job)


def amplified_reads(plan: Plan, world: int) -> list[str]:
    """Describe what `world` ranks read or decode more than once over, one line each.  Pure."""
    large = {n: v for n, v in enumerate(plan.sources) if math.prod(v.shape_zyx) * v.voxel_bytes > _SMALL_BYTES}
    lines = [
        f"the read amplification of {volume.name} is {amplification:.2f}, with chunks of "
        f"{format_sizes(volume.chunk_zyx)}; raise data.patches_per_region (now {plan.patches_per_region}) in a new "
        "run, or use smaller chunks"
        for index, volume in large.items()
        if (amplification := plan.read_amplification(index)) > 1
    ]
    if large and (reads := plan.reads_per_region(world)) > 1:
        regions = -(-plan.regions_in_flight // world) * world
        size = max(math.prod(v.cells.region_zyx(plan.patch_zyx)) * v.voxel_bytes for v in large.values())
        lines.append(
            f"each region is read by {reads} of {world} ranks, as {plan.regions_in_flight} regions in flight are no "
            f"multiple of {world}; set data.regions_in_flight={regions} and "
            f"data.stream_gib={math.ceil(regions * size / 2**30 * 10) / 10:g} in a new run"
        )
    return lines


def _without_unequal_turns(config: DataConfig, volumes: Sequence[Volume]) -> DataConfig:
    """Return the config without rotations by 90 degrees if they would exchange axes of unequal voxel size; logs it."""
    unequal = [volume for volume in volumes if volume.geometry and not volume.geometry.is_square]
    if not unequal or not config.augment.rot90:
        return config
    level = logging.WARNING if "rot90" in config.augment.model_fields_set else logging.INFO
    text = "Patches are mirrored, not rotated (data.augment.rot90): the voxels of %s are not square in y and x"
    log.log(level, text, unequal[0].name)
    return config.model_copy(update={"augment": config.augment.model_copy(update={"rot90": False})})


def common_dtype(volumes: Sequence[Volume], are_labels: bool = False) -> np.dtype[Any]:
    """Return the smallest dtype that holds the values of all volumes.  Raises DataError: labels would become floats."""
    common = np.result_type(*(volume.dtype for volume in volumes))
    if are_labels and common.kind == "f" and any(volume.dtype.kind != "f" for volume in volumes):
        text = ", ".join(f"{volume.dtype.name} in {volume.name}" for volume in volumes)
        raise DataError(f"No integer dtype holds all labels or conditions: {text}; convert them to one dtype")
    return common


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
        found = f"its values are {low:g} to {high:g} in {len(material)} boxes; set {key}.low and {key}.high"
        raise DataError(f"Cannot estimate the intensity range of {volume.name}: {found}")
    return IntensityRange(low, high)
