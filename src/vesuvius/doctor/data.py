"""Checks of the volumes of a config: can they be opened and read, and how fast?"""

from __future__ import annotations

import time

import numpy as np

from vesuvius.config import Config, DataConfig
from vesuvius.doctor.check import Finding
from vesuvius.runlog.units import format_sizes, number
from vesuvius.stream.start.prepare import PreparedData, prepare_data
from vesuvius.volumes.box import shape_of

_GIVE_UP_MINUTES = 0.05  # an examination does not wait for an outage to pass
_PATCHES = 16
_READ_S = 2.0


def open_data(config: Config) -> PreparedData:
    """Open the volumes, without the disk cache.  Raises DataError, soon where a store does not answer."""
    data = config.data.with_store(outage_minutes=_GIVE_UP_MINUTES, timeout_s=5.0, cache_dir=None)
    return prepare_data(config.seed, data)


def time_reads(data: PreparedData, config: DataConfig) -> Finding:
    """Read patches of each volume at random places for two seconds."""
    return Finding("ok", "; ".join(_speed(data, number, config) for number in range(len(data.volumes))))


def _speed(data: PreparedData, volume: int, config: DataConfig) -> str:
    generator = np.random.default_rng((0, volume))
    train, size = data.splits[volume].train, config.patch_size
    room = [have - need for have, need in zip(shape_of(train), size, strict=True)]
    began, voxels_bytes, patches = time.perf_counter(), 0, 0
    while patches < _PATCHES and time.perf_counter() - began < _READ_S / len(data.volumes):
        z, y, x = (int(low + generator.integers(0, left + 1)) for low, left in zip(train[0], room, strict=True))
        box = (z, y, x), (z + size[0], y + size[1], x + size[2])
        voxels_bytes += data.read("volume", volume, box).nbytes
        patches += 1
    seconds, opened = time.perf_counter() - began, data.volumes[volume]
    fetched = opened.source.figures.bytes_fetched
    of_store = f", {number(fetched / 1e6)} MB fetched since it was opened" if fetched else ""
    shape = format_sizes(opened.shape_zyx)
    return (
        f"{opened.name}: {shape} {opened.dtype}, {patches} patches in {number(seconds)} s, "
        f"{number(voxels_bytes / seconds / 1e6)} MB/s of voxels{of_store}"
    )
