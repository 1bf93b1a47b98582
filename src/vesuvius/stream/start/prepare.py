"""Opens the volumes, splits them, makes the plan, and finds the grey values that become -1 and +1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import DataConfig, NormalizeConfig, Triple, VolumeConfig
from vesuvius.errors import DataError
from vesuvius.plan.foreground import ForegroundMap
from vesuvius.plan.make_plan import make_plan, plan_volume
from vesuvius.plan.occupancy import foreground_map
from vesuvius.plan.plan import Plan
from vesuvius.plan.split import Split, split_volume
from vesuvius.runlog.progress import with_progress
from vesuvius.stream.reading.reader import ReaderJob
from vesuvius.stream.start.start_reads import Kind, Wanted
from vesuvius.volumes.alignment import Alignment, align, log_alignment
from vesuvius.volumes.box import Box, box_along, intersection
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.labels import check_labels
from vesuvius.volumes.volume import Volume, open_volume
from vesuvius.volumes.voxels import percentiles

_BOXES_PER_ESTIMATE = 16
_GREY_BOX: Triple = (72, 136, 136)  # at most, unless patches are larger
_PATCHES_OF_LABELS = 4
_PERCENTILES = (0.5, 99.5)
_SEED = 0  # not the run's, so that runs with other seeds on the same data see the same model values

ReadBox = Callable[[Kind, int, Box], NDArray[Any]]
"""Reads a box of a volume, or of its condition in voxels of its own, by the number of the volume."""
Expect = Callable[[str, Sequence[Wanted]], None]
"""Takes what is done, for the log, and the boxes that will be read for it, e.g. `StartReads.expect`."""
MakeForeground = Callable[[Volume, VolumeConfig, DataConfig], ForegroundMap | None]


def expect_nothing(what: str, boxes: Sequence[Wanted]) -> None:
    """An `Expect` of reads that are not fetched ahead."""


@dataclass(frozen=True)
class GreyRange:
    """The grey values of one volume that become -1 and +1 for the model."""

    low: float
    high: float


@dataclass(frozen=True)
class GreyRanges:
    """The grey ranges of a run, one entry per volume; `conditions` is empty where there are none, or labels."""

    volumes: tuple[GreyRange, ...]
    conditions: tuple[GreyRange, ...]


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

    def read(self, kind: Kind, number: int, box: Box) -> NDArray[Any]:
        """A `ReadBox` in this process.  Raises as `Volume.read`."""
        return self.array(kind, number)[0].read(box)

    def read_patch(self, read: ReadBox, kind: Kind, number: int, box: Box) -> NDArray[Any]:
        """A box of the volume of this number, or its condition as it lies there.

        Raises as `read`, and DataError for labels of no class.
        """
        array, alignment = self.array(kind, number)
        voxels = alignment.read(box, lambda inner, _: read(kind, number, inner))
        if kind == "condition" and self.job.labels:
            check_labels(voxels, self.job.labels, array.name, box)
        return voxels

    def wanted(self, kind: Kind, number: int, box: Box) -> Wanted:
        """What `read_patch` reads for a box."""
        return kind, number, self.array(kind, number)[1].array_box(box)

    def grey_ranges(
        self, config: DataConfig, read: ReadBox | None = None, expect: Expect = expect_nothing
    ) -> GreyRanges:
        """The configured ranges, or one estimated from each volume.  Reads a few patches of training voxels.

        Args:
            read: what reads them, e.g. `StartReads.read`; by default this process.
            expect: told what will be read.

        Raises:
            DataError: a range must be estimated, and all sampled voxels are air or equal, or labels are of no class.
        """

        def ranges(
            kind: Kind, key: str, normalize: NormalizeConfig, volumes: tuple[Volume, ...]
        ) -> tuple[GreyRange, ...]:
            if normalize.low is not None and normalize.high is not None:
                return (GreyRange(normalize.low, normalize.high),) * len(volumes)
            read_patch, found = partial(self.read_patch, read or self.read, kind), []
            for n, v in enumerate(volumes):
                boxes = list(islice(self._grey_boxes(n), _BOXES_PER_ESTIMATE))
                expect(f"reading patches of {v.name} for its grey range", [self.wanted(kind, n, box) for box in boxes])
                found.append(estimate_grey_range(v, self._grey_boxes(n), key, partial(read_patch, n)))
            return tuple(found)

        conditions = () if config.condition_classes else self.conditions
        if config.condition_classes:
            self._look_at_labels(read or self.read, expect)
        return GreyRanges(
            ranges("volume", "data.normalize", config.normalize, self.volumes),
            ranges("condition", "data.condition_normalize", config.condition_normalize, conditions),
        )

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

    def _look_at_labels(self, read: ReadBox, expect: Expect) -> None:
        """Read a few patches of labels.  Raises DataError for labels of no class."""
        for number, labels in enumerate(self.conditions):
            boxes = [self.plan.uniform_patch(number, draw) for draw in range(_PATCHES_OF_LABELS)]
            expect(f"reading patches of {labels.name}", [self.wanted("condition", number, box) for box in boxes])
            for box in boxes:
                with suppress(UnreadableChunkError):  # the readers will find, report and quarantine it
                    self.read_patch(read, "condition", number, box)

    def describe(self, config: DataConfig, greys: GreyRanges) -> dict[str, Any]:
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


def prepare_data(
    seed: int, config: DataConfig, rank: int = 0, world: int = 1, foreground: MakeForeground = foreground_map
) -> PreparedData:
    """Open and check all volumes and make the plan.

    Reads metadata; with `data.min_foreground` also what the foreground map is made of.

    Args:
        foreground: what makes those maps, e.g. `StartReads.foreground_map`; by default this process.

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
    maps = [foreground(volume, spec, config) for volume, spec in zip(volumes, config.volumes, strict=True)]
    within = [(found and found.within) or ((0, 0, 0), v.shape_zyx) for v, found in zip(volumes, maps, strict=True)]
    for number, (volume, condition) in enumerate(zip(volumes, conditions, strict=False)):
        covered = log_alignment(volume, condition, "the condition").covered
        within[number] = intersection(within[number], covered)
    assert dtype is not None
    voxel_bytes = sum(np.dtype(name).itemsize for name in (dtype, condition_dtype) if name)
    splits = tuple(
        split_volume(v.name, v.shape_zyx, config.patch_size, config.validation, box)
        for v, box in zip(volumes, within, strict=True)
    )
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
            foreground=found,
        )
        for spec, volume, split, found in zip(config.volumes, volumes, splits, maps, strict=True)
    ]
    plan = make_plan(seed, config, planned)
    job = ReaderJob(
        plan=plan,
        volumes=config.volumes,
        dtype=dtype,
        condition_dtype=condition_dtype,
        labels=config.labels,
        store=config.store,
        missing_chunk=config.missing_chunk,
        nan=config.nan,
        condition_nan=config.condition_nan,
        max_quarantined=config.max_quarantined,
        key_forms=tuple(
            tuple(array.key_form for array in arrays)
            for arrays in zip(volumes, *([conditions] if conditions else []), strict=True)
        ),
        stored=tuple(volume.missing.stored for volume in volumes),
        max_reader_deaths=config.max_reader_deaths,
        rank=rank,
        world=world,
    )
    return PreparedData(volumes, conditions, tuple(within), splits, plan, job)


def _common_dtype(what: str, volumes: tuple[Volume, ...]) -> str | None:
    """The one dtype of several volumes; None where there are no volumes."""
    dtypes = {volume.dtype.name for volume in volumes}
    if len(dtypes) > 1:
        got = ", ".join(f"{volume.dtype.name} in {volume.name}" for volume in volumes)
        raise DataError(f"{what} of one run must share a dtype; got {got}; convert them to one")
    return next(iter(dtypes), None)


def estimate_grey_range(
    volume: Volume, boxes: Iterable[Box], key: str, read: Callable[[Box], NDArray[Any]]
) -> GreyRange:
    """0.5th and 99.5th percentile of the material in the first boxes that can be read.

    Voxels equal to the fill value are masked air and left out, as their share differs between volumes; so is NaN.
    The range of bool is always 0 to 1.

    Raises:
        DataError: nothing but air, or one grey value only.
    """
    if volume.dtype == np.bool_:
        return GreyRange(0.0, 1.0)
    material: list[NDArray[Any]] = []
    for box in boxes:
        try:
            voxels = read(box)
        except UnreadableChunkError:
            continue  # the readers will find, report and quarantine it
        material.append(volume.material(voxels))
        if len(material) == _BOXES_PER_ESTIMATE:
            break
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
    return GreyRange(low, high)
