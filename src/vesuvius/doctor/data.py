"""Checks of the volumes of a config: can they be opened and read, and how fast?"""

from __future__ import annotations

import time

import numpy as np

from vesuvius.config import Config, DataConfig
from vesuvius.doctor.check import Finding
from vesuvius.runlog.units import number
from vesuvius.stream.start.prepare import PreparedData, prepare_data
from vesuvius.volumes.box import Box, shape_of

_GIVE_UP_MINUTES = 0.05  # an examination does not wait for an outage to pass
_PATCHES = 16
_READ_S = 2.0


def open_data(config: Config) -> PreparedData:
    """Open the volumes, without the disk cache.  Raises DataError, soon where a store does not answer."""
    store = {"outage_minutes": _GIVE_UP_MINUTES, "timeout_s": 5.0, "cache_dir": None}
    data = config.data.model_copy(update={"store": config.data.store.model_copy(update=store)})
    return prepare_data(config.seed, data)


def time_reads(data: PreparedData, config: DataConfig) -> Finding:
    """Read patches of each volume at random places for two seconds."""
    found = [_speed(data, number, config) for number in range(len(data.volumes))]
    return Finding("ok", "; ".join(found))


def _speed(data: PreparedData, volume: int, config: DataConfig) -> str:
    generator = np.random.default_rng((0, volume))
    began, voxels_bytes, patches = time.perf_counter(), 0, 0
    while patches < _PATCHES and time.perf_counter() - began < _READ_S / len(data.volumes):
        voxels_bytes += data.read("volume", volume, _some_box(data, volume, config, generator)).nbytes
        patches += 1
    seconds, opened = time.perf_counter() - began, data.volumes[volume]
    fetched = opened.figures.bytes_fetched
    of_store = f", {number(fetched / 1e6)} MB fetched since it was opened" if fetched else ""
    shape = "x".join(map(str, opened.shape_zyx))
    return (
        f"{opened.name}: {shape} {opened.dtype}, {patches} patches in {number(seconds)} s, "
        f"{number(voxels_bytes / seconds / 1e6)} MB/s of voxels{of_store}"
    )


def _some_box(data: PreparedData, volume: int, config: DataConfig, generator: np.random.Generator) -> Box:
    train = data.splits[volume].train
    room = [size - patch for size, patch in zip(shape_of(train), config.patch_size, strict=True)]
    z, y, x = (int(low + generator.integers(0, left + 1)) for low, left in zip(train[0], room, strict=True))
    dz, dy, dx = config.patch_size
    return (z, y, x), (z + dz, y + dy, x + dx)
