"""Reads the fixed patches of validation and previews: from the held-out slabs, identical in all runs on the same data.

A separate plan over the validation boxes, with a constant seed, positions them.  They are read once per session, at its
start.
"""

import hashlib
import logging
from dataclasses import dataclass
from functools import cached_property
from itertools import tee
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import DataConfig, Triple
from vesuvius.errors import DataError
from vesuvius.plan.make_plan import Split, make_plan, plan_volume
from vesuvius.plan.plan import Plan, PlanVolume
from vesuvius.stream.start.prepare import PreparedData
from vesuvius.volumes.errors import UnreadableChunkError

log = logging.getLogger(__name__)

# Constants instead of the config's, so that runs with other seeds, mixing or readers use the same patches.
_SEED, _TRIES = 0, 4
_LAYOUT: dict[str, Any] = {"patches_per_region": 1, "regions_in_flight": 8}


@dataclass(frozen=True, eq=False)
class FixedPatches:
    """N patches and their positions."""

    held_out: bool  # False if `data.validation.fraction` is 0: training uses their voxels, too
    volumes: tuple[int, ...]  # index of the volume of each
    starts_zyx: tuple[Triple, ...]  # start of each in its volume
    patches: NDArray[Any]  # [N, Z, Y, X] in the stored dtype, not augmented
    conditions: NDArray[Any] | None  # [N, Z, Y, X] in the stored dtype, at the same positions; None without conditions
    first: int = 0  # index of the first
    # of each, its place in the window of its condition, as `ContextAlignment.rows`; empty without context
    windows: tuple[list[NDArray[np.int64]], ...] = ()

    @cached_property
    def fingerprint(self) -> tuple[str, str]:
        """Hashes of their positions and of their voxels."""
        voxels = hashlib.sha256(self.patches.data)
        voxels.update(b"" if self.conditions is None else self.conditions.data)
        places = hashlib.sha256(repr((self.volumes, self.starts_zyx)).encode())
        return places.hexdigest(), voxels.hexdigest()

    def rows(self, first: int, end: int) -> Self:
        """Return patches first ... end - 1."""
        rows = slice(first, end)
        conditions = None if self.conditions is None else self.conditions[rows]
        arrays = self.volumes[rows], self.starts_zyx[rows], self.patches[rows], conditions
        return type(self)(self.held_out, *arrays, first, self.windows[rows])


def read_fixed_patches(data: PreparedData, config: DataConfig, count: int) -> FixedPatches:
    """Read the first `count` fixed patches; a larger count adds to them.

    Held-out patches depend on the volumes, their weights, the patch size, the split and the foreground, not on the
    run's seed, batch, workers or regions.  Without a split they come from the regions that training reads.  An
    unreadable one is replaced by another of its volume, with a warning, up to `data.max_quarantined` times.

    Raises DataError: no held-out slab holds enough foreground, or too many patches cannot be read.
    """
    held_out = config.validation.fraction > 0
    plan, indices = _fixed_plan(data, config, held_out)
    arrays = [np.empty(shape, dtype) for shape, dtype in data.job.batch_layout(count)]
    positions, samples = range(len(arrays)), [plan.sample(index) for index in range(count)]
    boxes = [(indices[sample.volume], sample.box) for sample in samples]
    patches = data.read_patches("reading the patches for validation and previews", boxes, count, positions)
    for index, voxels in enumerate(patches):
        attempt = 0
        while isinstance(voxels, UnreadableChunkError):
            start_zyx, attempt = samples[index].start_zyx, attempt + 1
            log.warning("Fixed patch %d at %s is replaced with another of its volume: %s", index, start_zyx, voxels)
            if attempt > config.max_quarantined:
                raise DataError(
                    f"Fixed patch {index} of {voxels.volume} cannot be read, nor any of "
                    f"data.max_quarantined={config.max_quarantined} replacements; restore the volume or raise the limit"
                )
            samples[index] = sample = plan.sample(index, attempt)
            box = indices[sample.volume], sample.box
            (voxels,) = data.read_patches("reading a replacement for a damaged patch", [box], 1, positions)
        for array, each in zip(arrays, voxels, strict=True):
            array[index] = each
    volumes, starts_zyx = tuple(indices[each.volume] for each in samples), tuple(each.start_zyx for each in samples)
    contexts = data.job.contexts and [data.job.contexts[volume] for volume in volumes]
    return FixedPatches(
        held_out=held_out,
        volumes=volumes,
        starts_zyx=starts_zyx,
        patches=arrays[0],
        conditions=arrays[1] if data.conditions else None,
        windows=tuple(context.rows(start) for context, start in zip(contexts, starts_zyx, strict=False)),
    )


def read_training_patches(data: PreparedData, config: DataConfig, count: int) -> FixedPatches:
    """Read up to `count` patches that training may draw, without conditions: the same for the same data.

    Skips unreadable ones, which the readers will report and quarantine.

    Raises DataError: fewer than two can be read.
    """
    plan, indices = _fixed_plan(data, config, held_out=False)
    samples, upcoming = tee(map(plan.sample, range(_TRIES * count)))  # planned only as far as they are read
    boxes = ((indices[sample.volume], sample.box) for sample in upcoming)
    tried = list(zip(samples, data.read_patches("reading training patches", boxes, count), strict=False))
    read = [(sample, voxels[0]) for sample, voxels in tried if not isinstance(voxels, UnreadableChunkError)]
    if len(read) < 2:
        readable = f"{len(read)} of {len(tried)} training patches"
        raise DataError(f"Only {readable} can be read; the last: {tried[-1][1]}; restore the volumes")
    return FixedPatches(
        held_out=False,
        volumes=tuple(indices[sample.volume] for sample, _ in read),
        starts_zyx=tuple(sample.start_zyx for sample, _ in read),
        patches=np.stack([voxels for _, voxels in read]),
        conditions=None,
    )


def _fixed_plan(data: PreparedData, config: DataConfig, held_out: bool) -> tuple[Plan, list[int]]:
    """Return the plan whose first samples are the patches, and the index in `data` of each of its volumes."""
    layout = config.model_copy(update=_LAYOUT)
    if not held_out:
        return make_plan(_SEED, layout, data.plan.volumes), list(range(len(data.volumes)))
    slabs = [(index, _plan_slab(data, index, layout)) for index in range(len(data.volumes))]
    planned = {index: slab for index, slab in slabs if slab is not None}
    if not planned:
        raise DataError(
            "No held-out patch has data.min_foreground of foreground in any volume; raise data.validation.fraction, or "
            "disable validation and previews: training.validate_every=0 and training.preview_every=0"
        )
    return make_plan(_SEED, layout, list(planned.values())), list(planned)


def _plan_slab(data: PreparedData, volume_index: int, layout: DataConfig) -> PlanVolume | None:
    """Plan the validation box of a volume; None without one and, with a warning, if it has too little foreground."""
    volume, box = data.volumes[volume_index], data.splits[volume_index].validation
    foreground = data.plan.volumes[volume_index].foreground
    if box is None:  # the slab that it shares with another entry lies elsewhere
        return None
    try:
        return plan_volume(
            volume.name,
            Split(train=box, validation=None),
            volume.shape_zyx,
            volume.chunk_zyx,
            volume.dtype.name,
            layout.volumes[volume_index].weight,
            layout,
            foreground=None if foreground is None else foreground.map,
            min_foreground=0.0 if foreground is None else foreground.min_fraction,
        )
    except DataError as error:  # a slab is large enough for a patch, so it lacks foreground
        log.warning("Volume %s is not validated, as its held-out end looks like air: %s", volume.name, error)
        return None
