"""Opens the volumes, splits them, makes the plan, and finds the grey values that become -1 and +1."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import DataConfig, NormalizeConfig, Triple
from vesuvius.errors import DataError
from vesuvius.plan.make_plan import Split, make_plan, plan_volume, split_volume
from vesuvius.plan.plan import Plan
from vesuvius.runlog.progress import Progress, with_progress
from vesuvius.stream.reading.reader import ReaderJob
from vesuvius.volumes.alignment import Alignment, align, log_alignment
from vesuvius.volumes.box import Box, box_along, intersection
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.occupancy import foreground_map
from vesuvius.volumes.volume import Volume, open_volume
from vesuvius.volumes.voxels import check_labels, percentiles

log = logging.getLogger(__name__)

_AHEAD = 9  # boxes that are fetched or read at once: on a slow store a patch's chunks take few of all requests
_BOXES_PER_ESTIMATE = 16
_GREY_BOX: Triple = (72, 136, 136)  # at most, unless patches are larger
_PATCHES_OF_LABELS = 4
_PERCENTILES = (0.5, 99.5)
_SEED = 0  # not the run's, so that runs with other seeds on the same data see the same model values

Kind = Literal["volume", "condition"]
KINDS: tuple[Kind, Kind] = ("volume", "condition")


@dataclass(frozen=True)
class IntensityRange:
    """The grey values of one volume that become -1 and +1 for the model."""

    low: float
    high: float


@dataclass(frozen=True)
class IntensityRanges:
    """The grey ranges of a run, one entry per volume; `conditions` is empty where there are none, or labels."""

    volumes: tuple[IntensityRange, ...]
    conditions: tuple[IntensityRange, ...]


@dataclass(frozen=True)
class PreparedData:
    """Everything that is known before the first patch is read, one entry per volume where plural."""

    volumes: tuple[Volume, ...]
    conditions: tuple[Volume, ...]
    # within, splits: where a volume and its condition and mask exist, and how that is split
    within: tuple[Box, ...]
    splits: tuple[Split, ...]
    plan: Plan
    job: ReaderJob

    def array(self, kind: Kind, number: int) -> tuple[Volume, Alignment]:
        """The volume of this number, or its condition, and how that lies in the volume."""
        volume = self.volumes[number]
        array = volume if kind == "volume" else self.conditions[number]
        return array, align(volume, array, "the condition")

    def read_patch(self, kind: Kind, number: int, box: Box) -> NDArray[Any]:
        """A box of the volume of this number, or its condition as it lies there.

        Raises as `Volume.read`, and DataError for labels of no class.
        """
        array, alignment = self.array(kind, number)
        voxels = alignment.read(box, array.read)
        if kind == "condition" and self.job.data.labels:
            check_labels(voxels, self.job.data.labels, array.name, box)
        return voxels

    def read_patches(
        self, what: str, boxes: Iterable[tuple[int, Box]], total: int, kinds: Sequence[Kind] = ("volume",)
    ) -> Iterator[list[NDArray[Any]] | UnreadableChunkError]:
        """Read boxes of volumes by their numbers, of each kind, in order, until `total` could be read.

        Of remote stores those that come next are fetched meanwhile.  In place of one that cannot be read comes why.

        Args:
            what: is done, for the progress in the log.
        """
        upcoming, waiting, count = iter(boxes), deque[tuple[int, Box]](), 0
        progress = Progress(what, total)
        try:
            while count < total:
                for number, box in islice(upcoming, min(_AHEAD, total - count) - len(waiting)):
                    waiting.append((number, box))
                    for array, alignment in (self.array(kind, number) for kind in kinds):
                        array.stage(alignment.array_box(box))
                if not waiting:
                    return
                number, box = waiting.popleft()
                try:
                    voxels = [self.read_patch(kind, number, box) for kind in kinds]
                except UnreadableChunkError as error:
                    self._release(kinds, number, box)
                    yield error
                    continue
                progress.add(sum(each.nbytes for each in voxels))
                count += 1
                yield voxels
            progress.end()
        finally:
            progress.close()
            for number, box in waiting:
                self._release(kinds, number, box)
            for array in (*self.volumes, *self.conditions):
                if (bad := array.nonfinite) is not None:
                    bad.warn()

    def _release(self, kinds: Sequence[Kind], number: int, box: Box) -> None:
        """Forget what was fetched for a box that is not read to its end."""
        for array, alignment in (self.array(kind, number) for kind in kinds):
            array.release(alignment.array_box(box))

    def intensity_ranges(self, config: DataConfig) -> IntensityRanges:
        """The configured ranges, or one estimated from each volume.  Reads a few patches of training voxels.

        Raises DataError: a range must be estimated, and all sampled voxels are air or equal, or labels are of no class.
        """

        if config.condition_classes:
            self._look_at_labels()
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
        found = []
        for number, array in enumerate(arrays):
            boxes = ((number, box) for box in self._grey_boxes(number))
            what = f"reading patches of {array.name} for its grey range"
            voxels = self.read_patches(what, boxes, _BOXES_PER_ESTIMATE, (kind,))
            found.append(estimate_intensity_range(array, voxels, key))
        return tuple(found)

    def _grey_boxes(self, number: int) -> Iterator[Box]:
        """Boxes of training voxels to estimate a grey range from, around patches: the same for the same plan.

        Where patches are small, as much as their chunks hold, up to the size of a large patch: that costs nothing
        more to decode, and a few small patches would miss much of a volume.
        """
        plan, volume, train = replace(self.plan, seed=_SEED), self.volumes[number], self.splits[number].train
        for draw in range(4 * _BOXES_PER_ESTIMATE):
            ends = []
            patch = plan.uniform_patch(number, draw)
            for lo, hi, chunk, first, last, large in zip(*patch, volume.chunk_zyx, *train, _GREY_BOX, strict=True):
                least, most = max(lo // chunk * chunk, first), min(-(-hi // chunk) * chunk, last)
                size = min(max(large, hi - lo), most - least)
                start = min(max((lo + hi - size) // 2, least), most - size)
                ends.append((start, start + size))
            yield box_along(ends)

    def _look_at_labels(self) -> None:
        """Read a few patches of labels.  Raises DataError for labels of no class."""
        for number, labels in enumerate(self.conditions):
            boxes = [(number, self.plan.uniform_patch(number, draw)) for draw in range(_PATCHES_OF_LABELS)]
            for _ in self.read_patches(f"reading patches of {labels.name}", boxes, len(boxes), ("condition",)):
                pass  # the readers will find, report and quarantine what is damaged

    def describe(self, config: DataConfig, greys: IntensityRanges) -> dict[str, Any]:
        """The content of `split.json`."""
        return {
            "plan_hash": self.plan.hash,
            "plan": self.plan.describe(),
            "volumes": [
                {
                    "path": volume.source.shown,
                    "level": spec.level,
                    "shape": list(volume.shape_zyx),
                    "dtype": volume.dtype.name,
                    "chunk": list(volume.chunk_zyx),
                    "voxel_size_um": volume.voxel_size_um,
                    "train": split.train,
                    "validation": split.validation,
                    "grey_low": grey.low,
                    "grey_high": grey.high,
                }
                for spec, volume, split, grey in zip(
                    config.volumes, self.volumes, self.splits, greys.volumes, strict=True
                )
            ],
        }


def prepare_data(seed: int, config: DataConfig, rank: int = 0, world: int = 1) -> PreparedData:
    """Open and check all volumes and make the plan.

    Reads metadata; with `data.min_foreground` also what the foreground map is made of.

    Raises:
        DataError: a volume cannot be used, is too small or has too little foreground, or volumes do not go together.
    """
    specs = with_progress(config.volumes, "opening the volumes", len(config.volumes))
    volumes = tuple(open_volume(spec, config.store, config.missing_chunk, config.nan) for spec in specs)
    conditions = tuple(
        open_volume(spec.condition, config.store, config.missing_chunk, config.condition_nan)
        for spec in config.volumes
        if spec.condition
    )
    dtype, condition_dtype = _common_dtype("volumes", volumes), _common_dtype("conditions", conditions)
    assert dtype is not None
    voxel_bytes = sum(np.dtype(name).itemsize for name in (dtype, condition_dtype) if name)
    listed, within, splits, planned = [], [], [], []
    for number, (spec, volume) in enumerate(zip(config.volumes, volumes, strict=True)):
        found = foreground_map(volume, spec, config)
        listed.append(found.stored(volume.chunk_zyx) if found else None)
        volume.missing.set_stored(listed[-1])
        box = (found and found.within) or ((0, 0, 0), volume.shape_zyx)
        if conditions:
            box = intersection(box, log_alignment(volume, conditions[number], "the condition").covered)
        within.append(box)
        splits.append(split_volume(volume.name, volume.shape_zyx, config.patch_size, config.validation, box))
        grid = volume.shape_zyx, volume.chunk_zyx, volume.dtype.name
        shown: dict[str, Any] = {"foreground": found, "min_foreground": config.min_foreground_of(spec)}
        planned.append(
            plan_volume(volume.name, splits[-1], *grid, spec.weight, config, voxel_bytes=voxel_bytes, **shown)
        )
    plan = make_plan(seed, config, planned)
    job = ReaderJob(plan, config, dtype, condition_dtype, tuple(listed), rank=rank, world=world)
    return PreparedData(volumes, conditions, tuple(within), tuple(splits), plan, job)


def _common_dtype(what: str, volumes: tuple[Volume, ...]) -> str | None:
    """The one dtype of several volumes; None where there are no volumes."""
    dtypes = {volume.dtype.name for volume in volumes}
    if len(dtypes) > 1:
        got = ", ".join(f"{volume.dtype.name} in {volume.name}" for volume in volumes)
        raise DataError(f"{what} of one run must share a dtype; got {got}; convert them to one")
    return next(iter(dtypes), None)


def estimate_intensity_range(
    volume: Volume, boxes: Iterable[list[NDArray[Any]] | UnreadableChunkError], key: str
) -> IntensityRange:
    """0.5th and 99.5th percentile of the material in the first boxes that can be read, as `read_patches` yields them.

    Voxels equal to the fill value are masked air and left out, as their share differs between volumes; so is NaN.
    The range of bool is always 0 to 1.

    Raises:
        DataError: nothing but air, or one grey value only.
    """
    if volume.dtype == np.bool_:
        return IntensityRange(0.0, 1.0)
    material: list[NDArray[Any]] = []
    for found in boxes:
        if isinstance(found, UnreadableChunkError):
            log.warning("a patch is left out of the grey range: %s", found)
            continue
        material.append(volume.material(found[0]))
    if material and not any(map(len, material)):
        raise DataError(
            f"a volume must hold more than its fill value; got nothing else in {len(material)} boxes of "
            f"{volume.name}; look at it with `vesuvius volume info`, and correct its path, level or select in "
            "data.volumes, or draw patches where something is with data.min_foreground"
        )
    low, high = percentiles(np.concatenate(material), _PERCENTILES) if material else (0.0, 0.0)
    if not low < high:
        raise DataError(
            f"grey values must differ for their range to be estimated; got {low:g} to {high:g} in {len(material)} "
            f"boxes of {volume.name}; set {key}.low and {key}.high"
        )
    return IntensityRange(low, high)
