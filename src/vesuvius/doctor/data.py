"""Checks of the volumes of a config: can they be opened and read, and how fast?"""

from __future__ import annotations

import itertools
import time

from vesuvius.config import Config
from vesuvius.doctor.check import Finding
from vesuvius.runlog.units import format_duration, format_sizes, number
from vesuvius.stream.start.prepare import PreparedData, prepare_data

_GIVE_UP_MINUTES = 0.05  # an examination does not wait for an outage to pass
_PATCHES = 16
_READ_S = 2.0
_SLOTS = 1000  # among the first so many regions one of each volume is looked for
LONG_S = 30 * 86400.0
"""A run that takes longer is not what anybody wants."""
FASTER = "raise training.workers or data.store.requests, or copy the volume to a faster disk (`vesuvius volume copy`)"
"""What makes reading faster."""


def open_data(config: Config) -> PreparedData:
    """Open the volumes, without the disk cache.  Raises DataError, soon where a store does not answer."""
    data = config.data.with_store(outage_minutes=_GIVE_UP_MINUTES, timeout_s=5.0, cache_dir=None)
    return prepare_data(config.seed, data)


def time_reads(data: PreparedData, config: Config) -> tuple[Finding, float]:
    """Read regions of each volume for two seconds, as a reader would, and hold that against what the run reads.

    Returns:
        The finding, and the seconds that one reader takes for a patch.
    """
    volumes = [_read(data, number) for number in range(len(data.volumes))]
    weights = [volume.weight for volume in data.plan.volumes]
    patch_s = sum(weight * seconds for weight, (_, seconds) in zip(weights, volumes, strict=True)) / sum(weights)
    value = "; ".join(text for text, _ in volumes)
    run_s = patch_s * config.global_batch * config.stop_step / readers_of(config)
    if run_s > LONG_S:
        value += f": {format_duration(run_s)} for all patches of this run"
        return Finding("warn", value, FASTER), patch_s
    return Finding("ok", value), patch_s


def readers_of(config: Config) -> int:
    """That read at once, on all ranks."""
    ranks = 1 if config.training.ranks == "auto" else config.training.ranks
    return ranks * max(config.training.workers, 1)


def _read(data: PreparedData, volume: int) -> tuple[str, float]:
    """What to say of a volume, and the seconds for a patch: those of a region, from which several are cut."""
    plan, opened = data.plan, data.volumes[volume]
    visits = (plan.visit(slot) for slot in itertools.count())
    wanted = (visit for visit in itertools.islice(visits, _SLOTS) if visit.volume == volume)
    began, voxels_bytes, patches = time.perf_counter(), 0, 0
    while patches < _PATCHES and (not patches or time.perf_counter() - began < _READ_S / len(data.volumes)):
        visit = next(wanted, None)
        box = visit.region if visit is not None else plan.uniform_patch(volume, patches)  # its weight is next to none
        voxels_bytes += data.read_patch("volume", volume, box).nbytes
        patches += plan.patches_per_region if visit is not None else 1
    seconds = time.perf_counter() - began
    fetched = opened.source.figures.bytes_fetched
    of_store = f", {number(fetched / 1e6)} MB fetched since it was opened" if fetched else ""
    shape = format_sizes(opened.shape_zyx)
    text = (
        f"{opened.name}: {shape} {opened.dtype}, {patches} patches in {number(seconds)} s, "
        f"{number(voxels_bytes / seconds / 1e6)} MB/s of voxels{of_store}"
    )
    return text, seconds / patches
