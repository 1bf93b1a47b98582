"""Makes the plan of a run from its config, volumes and foreground maps.  Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vesuvius.config import DataConfig, Triple
from vesuvius.errors import DataError
from vesuvius.plan.cells import cells_of_region_size, lay_cells
from vesuvius.plan.foreground import qualifying_starts
from vesuvius.plan.mixing import GROUPS, Mixing
from vesuvius.plan.plan import Plan, PlanVolume
from vesuvius.plan.split import Split
from vesuvius.volumes.occupancy import ForegroundMap

# Patches per region follow from the bytes decoded per byte of patch, within bounds.
_READ_AMPLIFICATION = 0.95
_PATCHES_PER_REGION = (4, 64)
# The decoded regions of a task take at most so much.
_TASK_BYTES = 2**28
# Regions in flight by default: 64, fewer where they would take more than 1.5 GiB, at least one of each group.
_REGIONS_IN_FLIGHT = 64
_IN_FLIGHT_BYTES = 3 * 2**29


def make_plan(seed: int, config: DataConfig, volumes: Sequence[PlanVolume]) -> Plan:
    """The plan of a run.  Pure."""
    patch = config.patch_size
    region_bytes = max(math.prod(v.cells.region_zyx(patch)) * v.voxel_bytes for v in volumes)
    fitting = max(min(_IN_FLIGHT_BYTES // region_bytes, _REGIONS_IN_FLIGHT) // GROUPS, 1) * GROUPS
    patches = config.patches_per_region or _patches_per_region(patch, volumes)
    return Plan(
        seed=seed,
        patch_zyx=patch,
        mixing=Mixing(seed, config.regions_in_flight or fitting, patches),
        regions_per_task=config.regions_per_task,
        augment=config.augment,
        volumes=tuple(volumes),
    )


def plan_volume(
    name: str,
    split: Split,
    shape_zyx: Triple,
    chunk_zyx: Triple,
    dtype: str,
    weight: float,
    config: DataConfig,
    *,
    voxel_bytes: int | None = None,
    foreground: ForegroundMap | None = None,
) -> PlanVolume:
    """Partition the starts in the training box of a volume into cells (`cells.lay_cells`).  Pure.

    R regions fit into 256 MiB, and the volume has at least as many cells as regions in flight where its starts
    allow it.  `data.region_size` overrides both.

    Args:
        voxel_bytes: bytes that a reader holds per voxel; more than the dtype's where a condition is read as well.
        foreground: what `data.min_foreground` is measured on.

    Raises:
        DataError: a region is smaller than a patch, or no start holds enough foreground.
    """
    patch, voxel_bytes = config.patch_size, voxel_bytes or np.dtype(dtype).itemsize
    if config.region_size is not None and any(r < p for r, p in zip(config.region_size, patch, strict=True)):
        raise DataError(
            f"a region must hold a patch; got data.region_size {list(config.region_size)} for patch {list(patch)}; "
            "enlarge it or set it to null"
        )
    if config.region_size is not None:
        cells = cells_of_region_size(split.train, patch, config.region_size)
    else:
        region_bytes_max = _TASK_BYTES // config.regions_per_task
        wanted = config.regions_in_flight or _REGIONS_IN_FLIGHT
        cells = lay_cells(split.train, patch, chunk_zyx, voxel_bytes, region_bytes_max, wanted)
    planned = PlanVolume(name, weight, shape_zyx, split.train, chunk_zyx, dtype, voxel_bytes, cells)
    if foreground is None:
        return planned
    last = [axis.first + axis.count for axis in cells.axes]
    starts = split.train[0], (last[0], last[1], last[2])
    found = qualifying_starts(foreground, starts, patch, config.min_foreground, cells.longest_zyx)
    if found is None:
        raise DataError(
            f"some patch must hold data.min_foreground of foreground; got none with {config.min_foreground:g} among "
            f"{cells.starts} starts in {name}; lower it, or check data.foreground and the mask"
        )
    return replace(planned, foreground=found)


def _patches_per_region(patch: Triple, volumes: Sequence[PlanVolume]) -> int:
    """As many as bring the volume with the costliest regions to the target read amplification."""
    low, high = _PATCHES_PER_REGION
    decoded = max(volume.cells.decoded_voxels(patch, volume.chunk_zyx) for volume in volumes)
    return min(max(math.ceil(decoded / (_READ_AMPLIFICATION * math.prod(patch))), low), high)
