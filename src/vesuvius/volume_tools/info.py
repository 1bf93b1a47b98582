"""Describes a volume before training: levels, codec, stored chunks and intensities.

`describe_volume` reads metadata, a sidecar or a listing, and the voxels of a few boxes.  Unknown values are None, with
the reason, never 0.
"""

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zarr
from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, StoreConfig, Triple
from vesuvius.errors import ConfigError, DataError, one_line, storage_errors
from vesuvius.volumes.box import Box, box_along, triple
from vesuvius.volumes.errors import FetchError, UnreadableChunkError
from vesuvius.volumes.geometry import FloatTriple, Names
from vesuvius.volumes.occupancy import SIDECAR, Bools, check_shards, list_chunks, read_sidecar, write_sidecar
from vesuvius.volumes.volume import Volume, open_volume
from vesuvius.volumes.voxels import percentiles

log = logging.getLogger(__name__)

# Objects on disk that are listed without --list; takes a few seconds.
_LISTED_UNASKED = 500_000
PERCENTILES = (0.5, 50.0, 99.5)
BOX_ZYX: Triple = (72, 136, 136)
_DRAWS_PER_BOX = 16
_BOXES_AHEAD = 4


@dataclass(frozen=True)
class LevelFacts:
    level: int
    path: str  # of the array within the group; '' for a bare array
    shape: tuple[int, ...]  # all axes in stored order
    chunk_zyx: Triple
    shard_zyx: Triple | None
    dtype: str
    raw_bytes: int
    scale_zyx: FloatTriple | None  # this and the rest: None for a bare array, or if absent from the metadata
    translation_zyx: FloatTriple | None
    unit: str | None
    voxel_size_um: FloatTriple | None


@dataclass(frozen=True)
class Occupancy:
    present: int | None  # None if unknown
    total: int
    unit: Literal["chunks", "shards"]  # what is counted; shards if the sidecar counts them
    source: Literal["sidecar", "listing"] | None  # of `present`
    unknown: str | None = None  # why `present` is unknown


@dataclass(frozen=True)
class IntensityStats:
    """Intensities of a sample of stored boxes; None if all voxels are air."""

    boxes: int  # that were read
    unreadable: int  # boxes that could not be read
    chunks_tried: int | None  # random chunks that were checked; None with a listing or sidecar
    chunks_found: int | None  # those of them that are stored
    voxels: int  # voxels read
    air_share: float | None  # share of air, NaN and infinity; the statistics below exclude them
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    std: float | None = None
    percentiles: tuple[float, ...] | None = None  # at `PERCENTILES`


@dataclass(frozen=True)
class VolumeFacts:
    """The output of `vesuvius volume info`."""

    spec: ArrayConfig
    ome_version: str | None  # None for a bare array, as the title
    title: str | None
    zarr_format: int
    axes: Names | None  # of the chosen level, in stored order; None if the metadata do not name them
    zyx: Triple  # positions of z, y and x among them
    levels: tuple[LevelFacts, ...]
    broken: dict[str, str]  # path of each level that cannot be opened -> reason
    contradictory: dict[str, str]  # path of each level whose scale or translation cannot be right -> reason
    chosen: LevelFacts  # the level to which the fields below refer
    codec: str
    occupancy: Occupancy
    intensity: IntensityStats | None


def describe_volume(
    spec: ArrayConfig,
    store: StoreConfig = StoreConfig(),
    *,
    listing: bool = False,
    num_boxes: int = 16,
    box_zyx: Triple = BOX_ZYX,
) -> VolumeFacts:
    """Describe a volume, and the level `spec` in detail.  Reads.  Raises DataError: the level cannot be opened.

    With `listing`, chunks are counted by a listing even if there is a sidecar or listing takes long.  Intensities are
    sampled in `num_boxes` boxes; 0 = none.
    """
    with open_volume(spec, store) as volume:
        spec = volume.spec
        levels, broken = {spec.level: _level_facts(volume, spec.level)}, dict[str, str]()
        for level, path in enumerate(volume.level.paths if volume.level else ("",)):
            try:
                with open_volume(spec.model_copy(update={"level": level}), store) as other:
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
            levels=tuple(levels[level] for level in sorted(levels)),
            broken=broken,
            contradictory=volume.contradictions,
            chosen=levels[spec.level],
            codec=describe_codecs(volume.array),
            occupancy=occupancy,
            intensity=intensity_stats(volume, stored, num_boxes, box_zyx) if num_boxes else None,
        )


def make_sidecar(spec: ArrayConfig, out: Path | None, store: StoreConfig = StoreConfig()) -> tuple[Path, Occupancy]:
    """List the chunks of a level and write the sidecar, by default next to the level, which must then be on disk.

    Returns its path and the number of chunks.  Raises ConfigError: `out` is required for this volume; DataError: the
    volume cannot be opened or listed; StorageError.
    """
    with open_volume(spec, store) as volume:
        path = out or _default_sidecar(volume)
        occupancy = list_chunks(volume)
        counted = _counted(volume, occupancy, "listing")
    with storage_errors(f"the sidecar {path}", "choose another file with --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sidecar(path, volume, occupancy)
    return path, counted


def describe_codecs(array: zarr.Array[Any]) -> str:
    """'blosc(cname=zstd, clevel=3)': the codecs of the chunks and their settings.  Pure."""
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
    """The number of stored chunks, and which they are."""
    if not listing:
        try:
            if (sidecar := read_sidecar(volume)) is not None:
                return _counted(volume, sidecar, "sidecar"), sidecar
        except DataError as error:
            log.warning("%s", error)
    objects = math.prod(volume.grid.object_counts_zyx)
    if not volume.source.can_list:
        reason = "web servers cannot be listed"
    elif not listing and (volume.source.remote or objects > _LISTED_UNASKED):
        reason = f"listing up to {objects} objects can take long; request it with --list"
    else:
        try:
            occupancy = list_chunks(volume)
        except DataError as error:
            reason = one_line(error)
        else:
            return _counted(volume, occupancy, "listing"), occupancy
    return Occupancy(None, math.prod(volume.grid.counts_zyx), "chunks", None, reason), None


def _counted(volume: Volume, occupancy: Bools, source: Literal["sidecar", "listing"]) -> Occupancy:
    if not occupancy.any():
        check_shards(volume, occupancy)
    unit: Literal["chunks", "shards"] = "chunks" if occupancy.shape == volume.grid.counts_zyx else "shards"
    return Occupancy(int(np.count_nonzero(occupancy)), occupancy.size, unit, source)


def _default_sidecar(volume: Volume) -> Path:
    """The path at which readers look for the sidecar of a volume."""
    shared = math.prod(volume.axes.others_of(volume.array.shape)) > 1
    if volume.source.remote or shared:
        reason = "it would apply to every `select`" if shared else "it is not on a disk"
        raise ConfigError(f"Cannot write a sidecar next to {volume.source.address}: {reason}; add --out FILE")
    return Path(volume.source.address) / volume.array.path / SIDECAR


# ---- intensities of a fixed random sample of stored boxes


def intensity_stats(volume: Volume, stored: Bools | None, num_boxes: int, box_zyx: Triple = BOX_ZYX) -> IntensityStats:
    """Read `num_boxes` boxes of about `box_zyx` and compute statistics of their voxels.

    `stored` says which chunks (or shards) are stored; None = unknown: random chunks are checked.  Raises DataError: the
    store does not tell whether a chunk exists, or no chunk is stored under its key.
    """
    chunks, tried = _sample_chunks(volume, stored, num_boxes)
    rng = np.random.default_rng((0, 1))
    sample = [_box_in(volume, chunk, box_zyx, rng) for chunk in chunks]
    material: list[NDArray[Any]] = []
    voxels = unreadable = 0
    for number, box in enumerate(sample):
        for ahead in sample[number : number + _BOXES_AHEAD]:
            volume.stage(ahead)
        try:
            read = volume.read(box)
        except UnreadableChunkError as error:
            log.warning("%s", error)
            unreadable += 1
            continue
        voxels += read.size
        material.append(volume.material(read))
    values: NDArray[Any] = np.concatenate(material) if material else np.empty(0, volume.dtype)
    found, air_share = None if tried is None else len(chunks), 1 - len(values) / voxels if voxels else None
    known = IntensityStats(len(sample) - unreadable, unreadable, tried, found, voxels, air_share)
    if len(values) == 0:
        return known
    return replace(
        known,
        minimum=float(values.min()),
        maximum=float(values.max()),
        mean=float(values.mean(dtype=np.float64)),
        std=float(values.std(dtype=np.float64)),
        percentiles=percentiles(values, PERCENTILES),
    )


def _sample_chunks(volume: Volume, stored: Bools | None, count: int) -> tuple[list[Triple], int | None]:
    """Up to `count` random stored chunks; and how many were checked, None if `stored` is given."""
    grid, rng = volume.grid, np.random.default_rng((0, 0))
    if stored is not None:
        numbers = np.flatnonzero(stored)
        drawn = rng.choice(numbers, min(count, len(numbers)), replace=False)
        per_cell = [-(-n // m) for n, m in zip(grid.counts_zyx, stored.shape, strict=True)]  # chunks in a shard
        cells = np.stack(np.unravel_index(drawn, stored.shape), 1) * per_cell
        return list(map(triple, cells.tolist())), None
    total = math.prod(grid.counts_zyx)
    tried, found = 0, list[Triple]()
    for number in rng.choice(total, min(count * _DRAWS_PER_BOX, total), replace=False):
        chunk = triple(map(int, np.unravel_index(number, grid.counts_zyx)))
        tried += 1
        try:
            if not grid.absent(grid.box_of(chunk)):
                found.append(chunk)
        except FetchError as error:
            raise DataError(
                f"Cannot check whether chunk {list(chunk)} of {volume.name} exists: {one_line(error)}; check the "
                "address, the network and the credentials"
            ) from error
        except ValueError as error:
            log.warning("skipping chunk %s of %s: %s; restore the shard", list(chunk), volume.name, error)
        if len(found) == count:
            break
    if not found and volume.source.absent([grid.object_key((0, 0, 0))]):
        volume.missing.check_keys((0, 0, 0))
    return found, tried


def _box_in(volume: Volume, chunk: Triple, box_zyx: Triple, rng: np.random.Generator) -> Box:
    """A box of about this size at little decoding cost: part of a chunk, or whole chunks."""
    ends = []
    for i, edge, size, patch in zip(chunk, volume.chunk_zyx, volume.shape_zyx, box_zyx, strict=True):
        lo, hi = i * edge, min((i + 1) * edge, size)
        if patch < hi - lo:
            lo = int(rng.integers(lo, hi - patch + 1))
            hi = lo + patch
        else:
            hi = min(lo + max(patch // edge, 1) * edge, size)
        ends.append((lo, hi))
    return box_along(ends)
