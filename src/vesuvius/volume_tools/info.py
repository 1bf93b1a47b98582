"""What a volume is, before anything is trained on it: levels, codec, stored chunks and grey values.

`describe_volume` reads metadata, a sidecar or a listing, and the voxels of a few boxes; what could not be found out is
None and comes with the reason, never 0.
"""

from __future__ import annotations

import logging
import math
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zarr

from vesuvius.config import ArrayConfig, StoreConfig, Triple
from vesuvius.errors import ConfigError, DataError, one_line, storage_errors
from vesuvius.volume_tools.grey_statistics import GreyStatistics, grey_statistics
from vesuvius.volumes.format.axes import Names
from vesuvius.volumes.geometry import FloatTriple
from vesuvius.volumes.listing import SIDECAR, Bools, list_chunks, read_sidecar, sidecar_signature, write_sidecar
from vesuvius.volumes.volume import Volume, open_volume

log = logging.getLogger(__name__)

# Chunks or shards on a disk that are listed without being asked to: a few seconds.
_LISTED_UNASKED = 500_000


@dataclass(frozen=True)
class LevelFacts:
    """One level."""

    level: int
    path: str  # of the array within the group; '' for a bare array
    shape: tuple[int, ...]  # all axes in stored order
    chunk_zyx: Triple
    shard_zyx: Triple | None
    dtype: str
    raw_bytes: int
    # scale_zyx, translation_zyx, unit, voxel_size_um: None for a bare array, or where the metadata do not say
    scale_zyx: FloatTriple | None
    translation_zyx: FloatTriple | None
    unit: str | None
    voxel_size_um: FloatTriple | None


@dataclass(frozen=True)
class Occupancy:
    """How many chunks are stored."""

    present: int | None  # None where unknown
    total: int
    unit: Literal["chunks", "shards"]  # what is counted; shards where the sidecar counts them
    source: Literal["sidecar", "listing"] | None  # where that is known from
    unknown: str | None = None  # why it is not known


@dataclass(frozen=True)
class VolumeFacts:
    """Everything that `vesuvius volume info` says."""

    spec: ArrayConfig
    # ome_version, title: None for a bare array
    ome_version: str | None
    title: str | None
    zarr_format: int
    axes: Names | None  # of the chosen level, in stored order; None where the metadata do not name them
    zyx: Triple  # which of them are z, y and x, counted from 0
    levels: tuple[LevelFacts, ...]
    broken: dict[str, str]  # path of each level that cannot be opened, and why
    chosen: LevelFacts  # the level that the rest is about
    codec: str
    occupancy: Occupancy
    grey: GreyStatistics | None


def describe_volume(
    spec: ArrayConfig, store: StoreConfig = StoreConfig(), *, listing: bool = False, places: int = 16
) -> VolumeFacts:
    """Look at a volume.  Reads.

    Args:
        spec: the level to look at closely.
        listing: count chunks by a listing, also where there is a sidecar or a listing may take long.
        places: boxes whose grey values are sampled; 0 = none.

    Raises:
        DataError: the level cannot be opened.
    """
    with closing(open_volume(spec, store)) as volume:
        levels, broken = dict[int, LevelFacts](), dict[str, str]()
        for level, path in enumerate(volume.level.paths if volume.level else ("",)):
            if level == spec.level:
                levels[level] = _level_facts(volume, level)
                continue
            try:
                with closing(open_volume(spec.model_copy(update={"level": level}), store)) as other:
                    levels[level] = _level_facts(other, level)
            except DataError as error:
                broken[path] = one_line(error)
        occupancy, stored = _occupancy(volume, listing)
        return VolumeFacts(
            spec=spec,
            ome_version=volume.level.version if volume.level else None,
            title=volume.level.title if volume.level else None,
            zarr_format=volume.array.metadata.zarr_format,
            axes=volume.axis_names if any(volume.axis_names) else None,
            zyx=volume.axes.zyx,
            levels=tuple(levels.values()),
            broken=broken,
            chosen=levels[spec.level],
            codec=codec_words(volume.array),
            occupancy=occupancy,
            grey=grey_statistics(volume, stored, places) if places else None,
        )


def make_sidecar(spec: ArrayConfig, out: Path | None, store: StoreConfig = StoreConfig()) -> tuple[Path, Occupancy]:
    """List the chunks of a level and write down which are stored.  Returns where, and how many there are.

    Args:
        out: where to; None = beside the level, which must then be on a disk.

    Raises:
        ConfigError: the place must be given and is not.
        DataError: the volume cannot be opened or listed.
        StorageError: the file cannot be written.
    """
    with closing(open_volume(spec, store)) as volume:
        path = out or _beside(volume)
        occupancy = list_chunks(volume)
    with storage_errors("a sidecar needs a writable folder", "choose another with --out", f"for {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sidecar(path, occupancy, sidecar_signature(volume))
    return path, _counted(volume, occupancy, "listing")


def codec_words(array: zarr.Array[Any]) -> str:
    """'blosc(cname=zstd, clevel=3)': each codec by which chunks are encoded, and its settings.  Pure."""
    if array.metadata.zarr_format == 2:
        settings = [dict(codec.get_config()) for codec in (*array.filters, *array.compressors)]
        steps = [(config.pop("id"), config) for config in settings]
    else:
        documents: Any = [codec.to_dict() for codec in array.metadata.codecs]
        steps = [(codec["name"], codec.get("configuration") or {}) for codec in documents]
    words = [f"{name}({', '.join(f'{key}={value}' for key, value in config.items())})" for name, config in steps]
    return ", ".join(words) or "none"


def _level_facts(volume: Volume, level: int) -> LevelFacts:
    geometry = volume.geometry
    units = {unit or "none" for unit in geometry.units_zyx} if geometry else set()
    return LevelFacts(
        level=level,
        path=volume.array.path,
        shape=volume.array.shape,
        chunk_zyx=volume.chunk_zyx,
        shard_zyx=volume.grid.shard_zyx,
        dtype=volume.dtype.name,
        raw_bytes=math.prod(volume.array.shape) * volume.dtype.itemsize,
        scale_zyx=geometry.scale_zyx if geometry else None,
        translation_zyx=geometry.translation_zyx if geometry else None,
        unit=units.pop() if len(units) == 1 else str(geometry.units_zyx) if geometry else None,
        voxel_size_um=volume.voxel_size_um,
    )


def _occupancy(volume: Volume, listing: bool) -> tuple[Occupancy, Bools | None]:
    """How many chunks are stored, and which."""
    if not listing:
        try:
            if (sidecar := read_sidecar(volume)) is not None:
                return _counted(volume, sidecar, "sidecar"), sidecar
        except DataError as error:
            log.warning("%s", error)
    objects = math.prod(volume.grid.object_counts_zyx)
    if not volume.source.can_list:
        reason = "a web server cannot list"
    elif volume.source.remote and not listing:
        reason = "listing a remote store can take long; request it with --list"
    elif objects > _LISTED_UNASKED and not listing:
        reason = f"listing {objects} files can take long; request it with --list"
    else:
        try:
            occupancy = list_chunks(volume)
            return _counted(volume, occupancy, "listing"), occupancy
        except DataError as error:
            reason = one_line(error)
    return Occupancy(None, math.prod(volume.grid.counts_zyx), "chunks", None, reason), None


def _counted(volume: Volume, occupancy: Bools, source: Literal["sidecar", "listing"]) -> Occupancy:
    unit: Literal["chunks", "shards"] = "chunks" if occupancy.shape == volume.grid.counts_zyx else "shards"
    return Occupancy(int(np.count_nonzero(occupancy)), occupancy.size, unit, source)


def _beside(volume: Volume) -> Path:
    """Where readers look for the sidecar of a volume."""
    if volume.source.remote:
        raise ConfigError(
            f"a sidecar is written to a disk; got the address {volume.source.address} and no file; add --out FILE"
        )
    if math.prod(volume.axes.others_of(volume.array.shape)) > 1:
        raise ConfigError(
            "a sidecar next to an array would apply to every `select`; got an array of shape "
            f"{list(volume.array.shape)}; add --out FILE"
        )
    return Path(volume.source.address) / volume.array.path / SIDECAR
