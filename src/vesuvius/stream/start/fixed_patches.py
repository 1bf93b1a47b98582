"""The fixed patches of validation and previews: from the held-out slabs, the same in every run on the same data.

A separate plan over the validation boxes, with a constant seed, places them.  They are read once, at the start of a
session.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import DataConfig, Triple
from vesuvius.errors import DataError
from vesuvius.plan.make_plan import make_plan, plan_volume
from vesuvius.plan.plan import Plan, PlanVolume
from vesuvius.plan.split import Split
from vesuvius.stream.start.prepare import Expect, PreparedData, ReadBox, expect_nothing
from vesuvius.stream.start.start_reads import KINDS
from vesuvius.volumes.errors import UnreadableChunkError

log = logging.getLogger(__name__)

# Not those of the config, so that runs with other seeds, mixing or readers look at the same patches.
_SEED = 0
_TRIES = 4
_LAYOUT: dict[str, Any] = {
    "order": "regions",
    "patches_per_region": 1,
    "regions_in_flight": 8,
    "regions_per_task": 8,
    "region_size": None,
    "reader_mib": 256,
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


def read_fixed_patches(
    data: PreparedData,
    config: DataConfig,
    count: int,
    read: ReadBox | None = None,
    expect: Expect = expect_nothing,
) -> FixedPatches:
    """Read the first `count` fixed patches; a larger count adds to them.

    Held-out ones depend on the volumes, their weights, the patch size, the split and the foreground, not on the run's
    seed, batch, workers or regions.  Without a split they come from the regions that training reads.  An unreadable one
    is replaced by another of its volume, with a warning, up to `data.max_quarantined` times.

    Args:
        read: what reads them, e.g. `StartReads.read`; by default this process.
        expect: told what will be read.

    Raises:
        DataError: no held-out slab holds enough foreground, or too many patches cannot be read.
    """
    held_out = config.validation.fraction > 0
    plan, numbers = _fixed_plan(data, config, held_out)
    arrays = [np.empty(shape, dtype) for shape, dtype in data.job.batch_layout(count)]
    places = []
    kinds, samples = KINDS[: len(arrays)], [plan.sample(index) for index in range(count)]
    boxes = [data.wanted(kind, numbers[sample.volume], sample.box) for sample in samples for kind in kinds]
    expect("reading the patches of validation and previews", boxes)
    for index in range(count):
        out = [array[index] for array in arrays]
        places.append(_read_patch(data, plan, numbers, index, config.max_quarantined, out, read or data.read))
    return FixedPatches(
        held_out=held_out,
        volumes=tuple(number for number, _ in places),
        starts_zyx=tuple(start_zyx for _, start_zyx in places),
        patches=arrays[0],
        conditions=arrays[1] if data.conditions else None,
    )


def read_training_patches(
    data: PreparedData, config: DataConfig, count: int, read: ReadBox, expect: Expect = expect_nothing
) -> FixedPatches:
    """Read up to `count` patches that training may draw, without conditions: the same for the same data.

    Unreadable ones are left out: the readers will find, report and quarantine them.  Of what is read `expect` is told.

    Raises:
        DataError: hardly any can be read.
    """
    plan, numbers = _fixed_plan(data, config, held_out=False)
    patches: list[NDArray[Any]] = []
    places: list[tuple[int, Triple]] = []
    last = ""
    first = [plan.sample(index) for index in range(count)]
    expect("reading patches of training", [data.wanted("volume", numbers[s.volume], s.box) for s in first])
    for sample in (plan.sample(index) for index in range(_TRIES * count)):
        number = numbers[sample.volume]
        try:
            patches.append(np.array(read("volume", number, sample.box)))
        except UnreadableChunkError as error:
            last = str(error)
            continue
        places.append((number, sample.start_zyx))
        if len(patches) == count:
            break
    if len(patches) < 2:
        raise DataError(
            f"some patches of training must be readable; got {len(patches)} of {_TRIES * count}, the last: {last}"
        )
    return FixedPatches(
        held_out=False,
        volumes=tuple(number for number, _ in places),
        starts_zyx=tuple(start_zyx for _, start_zyx in places),
        patches=np.stack(patches),
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
            f"the held-out slab of some volume must hold a patch with data.min_foreground={config.min_foreground:g} of "
            f"foreground; got none in {len(data.volumes)} volumes; raise data.validation.fraction, or switch "
            "off validation and previews: training.validate_every=0 and training.preview_every=0"
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
        )
    except DataError as error:  # a slab is large enough for a patch: what it lacks is foreground
        log.warning("volume %s takes no part in validation, as its held-out end looks like air: %s", volume.name, error)
        return None


def _read_patch(
    data: PreparedData,
    plan: Plan,
    numbers: Sequence[int],
    index: int,
    replacements: int,
    out: Sequence[NDArray[Any]],
    read: ReadBox,
) -> tuple[int, Triple]:
    """Read sample `index` of the plan, or its first readable substitute, into `out`; returns its volume and start.

    Args:
        numbers: the number in `data` of each volume of the plan.
        out: of the patch, and of its condition if there are conditions.
    """
    for attempt in range(replacements + 1):
        sample = plan.sample(index, attempt)
        number, start_zyx = numbers[sample.volume], sample.start_zyx
        try:
            for kind, voxels in zip(KINDS, out, strict=False):
                voxels[...] = data.read_patch(read, kind, number, sample.box)
            return number, start_zyx
        except UnreadableChunkError as error:
            log.warning("fixed patch %d is skipped at %s, for another of its volume: %s", index, start_zyx, error)
    raise DataError(
        f"a fixed patch may be replaced data.max_quarantined={replacements} times; got no readable one for patch "
        f"{index} of {data.volumes[number].name}; restore the volume or raise the limit"
    )
