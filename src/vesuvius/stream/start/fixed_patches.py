"""The fixed patches of validation and previews: from the held-out slabs, the same in every run on the same data.

A separate plan over the validation boxes, with a constant seed, places them.  They are read once, at the start of a
session.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import DataConfig, Triple
from vesuvius.errors import DataError
from vesuvius.plan.make_plan import Split, make_plan, plan_volume
from vesuvius.plan.plan import Plan, PlanVolume
from vesuvius.stream.start.prepare import KINDS, PreparedData
from vesuvius.volumes.errors import UnreadableChunkError

log = logging.getLogger(__name__)

# Not those of the config, so that runs with other seeds, mixing or readers look at the same patches.
_SEED = 0
_TRIES = 4
_LAYOUT: dict[str, Any] = {
    "patches_per_region": 1,
    "regions_in_flight": 8,
    "regions_per_task": 8,
    "region_size": None,
}


@dataclass(frozen=True, eq=False)
class FixedPatches:
    """N patches and their places."""

    # whether they lie in the validation boxes; else (`data.validation.fraction` 0) training sees them too
    held_out: bool
    volumes: tuple[int, ...]  # the number of the volume of each
    starts_zyx: tuple[Triple, ...]  # where each starts in its volume
    patches: NDArray[Any]  # [N, Z, Y, X] in the stored dtype, not augmented
    # [N, Z, Y, X] in the stored dtype, cut at the same places; None where volumes have no conditions
    conditions: NDArray[Any] | None
    first: int = 0  # number of the first

    def rows(self, first: int, end: int) -> FixedPatches:
        """Those with the numbers first ... end - 1."""
        rows = slice(first, end)
        conditions = None if self.conditions is None else self.conditions[rows]
        return FixedPatches(
            self.held_out, self.volumes[rows], self.starts_zyx[rows], self.patches[rows], conditions, first
        )


def read_fixed_patches(data: PreparedData, config: DataConfig, count: int) -> FixedPatches:
    """Read the first `count` fixed patches; a larger count adds to them.

    Held-out ones depend on the volumes, their weights, the patch size, the split and the foreground, not on the run's
    seed, batch, workers or regions.  Without a split they come from the regions that training reads.  An unreadable one
    is replaced by another of its volume, with a warning, up to `data.max_quarantined` times.

    Raises:
        DataError: no held-out slab holds enough foreground, or too many patches cannot be read.
    """
    held_out = config.validation.fraction > 0
    plan, numbers = _fixed_plan(data, config, held_out)
    arrays = [np.empty(shape, dtype) for shape, dtype in data.job.batch_layout(count)]
    kinds, samples = KINDS[: len(arrays)], [plan.sample(index) for index in range(count)]
    boxes = [(numbers[sample.volume], sample.box) for sample in samples]
    found = data.read_patches("reading the patches of validation and previews", boxes, count, kinds)
    for index, voxels in enumerate(found):
        attempt = 0
        while isinstance(voxels, UnreadableChunkError):
            start_zyx, attempt = samples[index].start_zyx, attempt + 1
            log.warning("fixed patch %d is skipped at %s, for another of its volume: %s", index, start_zyx, voxels)
            if attempt > config.max_quarantined:
                raise DataError(
                    f"a fixed patch may be replaced data.max_quarantined={config.max_quarantined} times; got no "
                    f"readable one for patch {index} of {voxels.volume}; restore the volume or raise the limit"
                )
            samples[index] = sample = plan.sample(index, attempt)
            box = numbers[sample.volume], sample.box
            (voxels,) = data.read_patches("reading a patch in place of a damaged one", [box], 1, kinds)
        for array, each in zip(arrays, voxels, strict=True):
            array[index] = each
    return FixedPatches(
        held_out=held_out,
        volumes=tuple(numbers[sample.volume] for sample in samples),
        starts_zyx=tuple(sample.start_zyx for sample in samples),
        patches=arrays[0],
        conditions=arrays[1] if data.conditions else None,
    )


def read_training_patches(data: PreparedData, config: DataConfig, count: int) -> FixedPatches:
    """Read up to `count` patches that training may draw, without conditions: the same for the same data.

    Unreadable ones are left out: the readers will find, report and quarantine them.

    Raises:
        DataError: hardly any can be read.
    """
    plan, numbers = _fixed_plan(data, config, held_out=False)
    samples = [plan.sample(index) for index in range(_TRIES * count)]
    boxes = ((numbers[sample.volume], sample.box) for sample in samples)
    found = list(zip(samples, data.read_patches("reading patches of training", boxes, count), strict=False))
    read = [(sample, voxels[0]) for sample, voxels in found if not isinstance(voxels, UnreadableChunkError)]
    if len(read) < 2:
        raise DataError(
            f"some patches of training must be readable; got {len(read)} of {len(found)}, the last: {found[-1][1]}"
        )
    return FixedPatches(
        held_out=False,
        volumes=tuple(numbers[sample.volume] for sample, _ in read),
        starts_zyx=tuple(sample.start_zyx for sample, _ in read),
        patches=np.stack([voxels for _, voxels in read]),
        conditions=None,
    )


def _fixed_plan(data: PreparedData, config: DataConfig, held_out: bool) -> tuple[Plan, list[int]]:
    """The plan whose first samples are the patches, and the number in `data` of each of its volumes."""
    layout = config.model_copy(update=_LAYOUT)
    if not held_out:
        return make_plan(_SEED, layout, data.plan.volumes), list(range(len(data.volumes)))
    slabs = [(number, _plan_slab(data, number, layout)) for number in range(len(data.volumes))]
    planned = {number: slab for number, slab in slabs if slab is not None}
    if not planned:
        raise DataError(
            "the held-out slab of some volume must hold a patch with data.min_foreground of foreground; got none in "
            f"{len(data.volumes)} volumes; raise data.validation.fraction, or "
            "switch off validation and previews: training.validate_every=0 and training.preview_every=0"
        )
    return make_plan(_SEED, layout, list(planned.values())), list(planned)


def _plan_slab(data: PreparedData, number: int, layout: DataConfig) -> PlanVolume | None:
    """Regions over the validation box of a volume; None, with a warning, where it has too little foreground."""
    volume, box = data.volumes[number], data.splits[number].validation
    foreground = data.plan.volumes[number].foreground
    assert box is not None, "every volume has a validation box where data.validation.fraction is above 0"
    try:
        return plan_volume(
            volume.name,
            Split(train=box, validation=None),
            volume.shape_zyx,
            volume.chunk_zyx,
            volume.dtype.name,
            layout.volumes[number].weight,
            layout,
            foreground=None if foreground is None else foreground.map,
            min_foreground=0.0 if foreground is None else foreground.min_fraction,
        )
    except DataError as error:  # a slab is large enough for a patch: what it lacks is foreground
        log.warning("volume %s takes no part in validation, as its held-out end looks like air: %s", volume.name, error)
        return None
