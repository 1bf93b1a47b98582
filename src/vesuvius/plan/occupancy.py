"""Where there is something to see in a volume: the foreground map, made from metadata, a listing or a coarse array.

Three sources, none of which reads level 0: the list of stored chunks (or its `.chunk_occupancy.npz` sidecar), a coarse
level above a threshold, or a mask volume.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import logging
import math
import os
import time
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, DataConfig, StoreConfig, Triple, VolumeConfig
from vesuvius.errors import DataError, one_line
from vesuvius.plan.foreground import ForegroundMap
from vesuvius.volumes.box import Box
from vesuvius.volumes.errors import FetchError, RefusedError
from vesuvius.volumes.stored import Stored
from vesuvius.volumes.volume import Volume, metadata_hash, open_volume

log = logging.getLogger(__name__)

SIDECAR = ".chunk_occupancy.npz"
_CELLS_MAX = 64_000_000
_BLOCK_BYTES = 64 * 2**20
_PROGRESS_S = 5.0
_POWERS = tuple(2**n for n in range(16))

Bools = NDArray[np.bool_]


def foreground_map(volume: Volume, spec: VolumeConfig, config: DataConfig) -> ForegroundMap | None:
    """The map that `data.min_foreground` is measured on; None where that is 0.  Reads, and logs progress.

    Where it is made of the list of stored chunks, the volume is told of that list.

    Raises:
        DataError: the listing, the coarse level or the mask cannot be had, or does not fit the volume.
    """
    if config.min_foreground == 0:
        return None
    if spec.mask is not None:
        mask = open_volume(spec.mask, config.store)
        return coarse_map(volume, mask, None, config.patch_size)
    if config.foreground.source == "level":
        coarse_spec = ArrayConfig(path=spec.path, level=config.foreground.level, select=spec.select)
        return coarse_map(
            volume, open_volume(coarse_spec, config.store), config.foreground.threshold, config.patch_size
        )
    occupancy = chunk_occupancy(volume, config.store, config.max_quarantined)
    if occupancy.shape == volume.grid.counts_zyx:  # of a stored shard any chunk may be absent
        volume.expect(Stored.of(occupancy))
    return occupancy_map(volume, occupancy)


def occupancy_map(volume: Volume, occupancy: Bools) -> ForegroundMap:
    """The map whose cells are chunks (or shards), all foreground where they are stored."""
    cell = volume.chunk_zyx if occupancy.shape == volume.grid.counts_zyx else volume.grid.shard_zyx
    assert cell is not None
    return ForegroundMap(np.where(occupancy, np.uint8(255), np.uint8(0)), cell, volume.shape_zyx)


def chunk_occupancy(volume: Volume, store: StoreConfig, max_damaged: int = 0) -> Bools:
    """Which chunks are stored: bool over the chunk grid (of a sharded array: of inner chunks, or of shards).

    From the sidecar beside the array, else from a listing made earlier, else from a listing, which is kept.

    Args:
        max_damaged: so many shards may have a damaged index.  None of their chunks can be read: they count as absent,
            and the listing is not kept.

    Raises:
        DataError: the store cannot list, more shards are damaged, or the sidecar is not of this volume.
    """
    sidecar = read_sidecar(volume)
    if sidecar is not None:
        return sidecar
    path, signature = kept_file(volume, "occupancy", ".npz"), _signature(volume)
    if path.exists():
        try:
            kept = _parse_sidecar(path.read_bytes())
            if kept[1] == signature:
                return kept[0]
        except (OSError, ValueError) as error:
            log.warning("a kept listing is damaged and made anew: %s (%s)", path, one_line(error))
    occupancy, damaged = _listed(volume)
    if damaged:
        if len(damaged) > max_damaged:
            raise _damaged_shards(volume, damaged)
        log.warning(
            "%s: the index of %d of its shards cannot be read, the first: %s; no patch comes from there; restore them "
            "(`vesuvius volume verify` lists what is broken) and start anew: behind that the plan is another one, and "
            "--resume needs --allow-drift",
            *(volume.name, len(damaged), damaged[0]),
        )
        return occupancy
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sidecar(path, occupancy, signature)
    except OSError as error:
        log.warning("the listing of chunks could not be kept and is made again next time: %s", error)
    return occupancy


def read_sidecar(volume: Volume) -> Bools | None:
    """The occupancy beside the array, if there is one.

    Raises:
        DataError: it is damaged, or its shape is not that of the chunk grid.
    """
    key = f"{volume.array.path}/{SIDECAR}".lstrip("/")
    try:
        data = volume.source.get(key, cached=False)
    except (FetchError, RefusedError) as error:
        log.warning("the sidecar %s of %s cannot be read and is left out: %s", key, volume.name, one_line(error))
        return None
    if data is None:
        return None
    try:
        occupancy, signature = _parse_sidecar(data)
    except ValueError as error:
        raise DataError(
            f"a sidecar must be an npz with `occupancy` and `signature`; got {one_line(error)} in {key} of "
            f"{volume.name}; make it anew with `vesuvius volume occupancy`, or remove it"
        ) from error
    if signature.startswith("vesuvius:") and not signature.startswith(sidecar_signature(volume)):
        raise DataError(
            f"a sidecar must belong to its array; got the signature {signature} for {sidecar_signature(volume)} in "
            f"{key} of {volume.name}; make it anew with `vesuvius volume occupancy`, or remove it"
        )
    wanted = [volume.grid.counts_zyx] + ([_shard_counts(volume)] if volume.grid.shard_zyx else [])
    if occupancy.shape not in wanted:
        raise DataError(
            f"a sidecar's occupancy must have the shape of the chunk grid; got {occupancy.shape} for {wanted[0]} in "
            f"{key} of {volume.name}; make it anew with `vesuvius volume occupancy`, or remove it"
        )
    return occupancy


def write_sidecar(path: Path, occupancy: Bools, signature: str) -> None:
    """Write an occupancy under another name and rename it when whole.  Raises OSError."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as out:
        np.savez_compressed(out, occupancy=occupancy, signature=np.array(signature))
    partial.replace(path)


def sidecar_signature(volume: Volume) -> str:
    """What a sidecar made here says of the array that it belongs to."""
    return f"vesuvius:{metadata_hash(volume.array)}"


def list_chunks(volume: Volume) -> Bools:
    """Ask the store which chunks it holds.  Streams the listing, with a line of progress every few seconds.

    Of a sharded array the indices of all its shards are read.

    Raises:
        DataError: the store cannot list, or a shard's index is damaged.
    """
    occupancy, damaged = _listed(volume)
    if damaged:
        raise _damaged_shards(volume, damaged)
    return occupancy


def _listed(volume: Volume) -> tuple[Bools, list[str]]:
    """As `list_chunks`; and a line on each shard whose index is damaged, whose chunks count as absent."""
    objects = list_objects(volume)
    return _inner_occupancy(volume, objects) if volume.grid.shard_zyx and volume.grid.indexed else (objects, [])


def _damaged_shards(volume: Volume, damaged: list[str]) -> DataError:
    more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
    return DataError(
        f"every shard's index must be readable; got {damaged[0]}{more} in {volume.name}; restore them (`vesuvius "
        "volume verify` lists what is broken)"
    )


def list_objects(volume: Volume) -> Bools:
    """Which chunks, or of a sharded array which shards, the store lists; as `list_chunks` but reads no shard.

    Raises:
        DataError: the store cannot list, or on a disk a folder of chunks is a dangling link or a file.
    """
    grid = volume.grid
    occupancy = np.zeros(_shard_counts(volume) if grid.shard_zyx else grid.counts_zyx, bool)
    places = (place for keys in _listed_keys(volume) for key in keys if (place := _place_of(volume, key)))
    for place in _with_progress(places, f"listing the chunks of {volume.name}"):
        if all(i < n for i, n in zip(place, occupancy.shape, strict=True)):
            occupancy[place] = True
    return occupancy


def _place_of(volume: Volume, key: str) -> Triple | None:
    """The place of a chunk's key; of another one None, after a look whether it is the folder that it should be."""
    place = volume.grid.place_of(key)
    if place is None and not volume.source.remote and volume.grid.leads_to_chunks(key):
        volume.source.check_folder(key)
    return place


def coarse_map(volume: Volume, coarse: Volume, threshold: float | None, patch_zyx: Triple) -> ForegroundMap:
    """The map of a coarser array's voxels above a threshold; None = that are not 0.  Streams the array once.

    Cells are a quarter of a patch or one coarse voxel, whichever is larger, and larger still where there would be more
    than 64 million.

    Raises:
        DataError: the array is not coarser by whole factors, or cannot be read.
    """
    factors = _factors(volume, coarse)
    merged = [max(p // (4 * f), 1) for p, f in zip(patch_zyx, factors, strict=True)]
    while np.prod([-(-n // m) for n, m in zip(coarse.shape_zyx, merged, strict=True)]) > _CELLS_MAX:
        finest = min(range(3), key=lambda axis: merged[axis] * factors[axis])
        merged[finest] *= 2
    cell = [m * f for m, f in zip(merged, factors, strict=True)]
    counts = [-(-size // c) for size, c in zip(volume.shape_zyx, cell, strict=True)]
    fraction = np.zeros(counts, np.uint8)
    boxes = list(_blocks(coarse, merged))
    what = f"reading {coarse.name} for the foreground of {volume.name}"
    with closing(coarse):
        for number, box in enumerate(_with_progress(boxes, what, len(boxes))):
            for near in boxes[number : number + 2]:
                coarse.stage(near)
            voxels = coarse.read(box)
            share = _share_of_cells(voxels != 0 if threshold is None else voxels > threshold, merged)
            first = [lo // m for lo, m in zip(box[0], merged, strict=True)]
            fraction[tuple(slice(lo, lo + n) for lo, n in zip(first, share.shape, strict=True))] = share
    z, y, x = cell
    return ForegroundMap(fraction, (z, y, x), volume.shape_zyx)


def _factors(volume: Volume, coarse: Volume) -> Triple:
    """Voxels of the volume per coarse voxel along each axis.

    Sizes alone leave room: 100 voxels become 4 by any factor from 21 to 33.  As pyramids halve, a power of two is taken
    where one fits, the same for all axes if it can be.
    """
    sizes = list(zip(volume.shape_zyx, coarse.shape_zyx, strict=True))
    fitting = [{f for f in (*_POWERS, round(fine / size)) if f and _fits(fine, size, f)} for fine, size in sizes]
    if not all(fitting):
        raise DataError(
            "a mask or coarse level must be smaller than its volume by a whole factor per axis; got "
            f"{coarse.shape_zyx} of {coarse.name} for {volume.shape_zyx} of {volume.name}; take another level, or "
            "resample it"
        )
    common = set.intersection(*fitting).intersection(_POWERS)
    z, y, x = (min(common or factors.intersection(_POWERS) or factors) for factors in fitting)
    return z, y, x


def _fits(fine: int, size: int, factor: int) -> bool:
    return size in (fine // factor, -(-fine // factor))


def _blocks(coarse: Volume, merged: list[int]) -> Iterator[Box]:
    """Boxes of some 64 MiB that cover an array, their edges multiples of `merged`, and of its chunks where they can."""
    edge = int((_BLOCK_BYTES / coarse.dtype.itemsize) ** (1 / 3))
    whole = [math.lcm(m, chunk) for m, chunk in zip(merged, coarse.chunk_zyx, strict=True)]
    units = [unit if unit <= edge else m for unit, m in zip(whole, merged, strict=True)]
    steps = [max(edge // unit, 1) * unit for unit in units]
    shape = coarse.shape_zyx
    for z, y, x in itertools.product(*(range(0, size, step) for size, step in zip(shape, steps, strict=True))):
        yield (
            (z, y, x),
            (min(z + steps[0], shape[0]), min(y + steps[1], shape[1]), min(x + steps[2], shape[2])),
        )


def _share_of_cells(foreground: Bools, merged: list[int]) -> NDArray[np.uint8]:
    """Share of each cell that is foreground, 0..255; cells at the end hold what is left."""
    total: NDArray[Any] = foreground.astype(np.uint32)
    voxels: NDArray[Any] = np.ones((1, 1, 1), np.uint32)
    for axis, m in enumerate(merged):
        starts = np.arange(0, foreground.shape[axis], m)
        total = np.add.reduceat(total, starts, axis=axis)
        sizes = np.diff(np.append(starts, foreground.shape[axis]))
        voxels = voxels * sizes.reshape([-1 if a == axis else 1 for a in range(3)])
    share: NDArray[np.uint8] = ((255 * total.astype(np.uint64) + voxels // 2) // voxels).astype(np.uint8)
    return share


def _listed_keys(volume: Volume) -> Iterator[Iterable[str]]:
    """Keys below the array; from a remote store folder by folder, several at once, where chunks lie in folders."""
    source = volume.source
    if not source.remote:
        yield source.list_keys(volume.array.path, folders_too=True)
        return
    folders = [volume.array.path]
    while len(folders) == 1:  # of one folder there is one listing: go down to where there are several
        keys, folders = source.list_one_level(folders[0])
        yield keys
    with ThreadPoolExecutor(source.config.requests) as pool:
        yield from pool.map(lambda folder: list(source.list_keys(folder)), folders)


def _inner_occupancy(volume: Volume, shards: Bools) -> tuple[Bools, list[str]]:
    """Which inner chunks are stored, from the index of each shard that is; the rest as `_listed`."""
    grid = volume.grid
    assert grid.shard_zyx is not None
    per_shard = [s // c for s, c in zip(grid.shard_zyx, grid.chunk_zyx, strict=True)]
    occupancy = np.zeros(grid.counts_zyx, bool)
    stored = np.argwhere(shards).tolist()
    firsts: list[Triple] = [(z * per_shard[0], y * per_shard[1], x * per_shard[2]) for z, y, x in stored]

    def present_in(first: Triple) -> Bools | str:
        try:
            return grid.present_in_shard(first)
        except (FetchError, ValueError) as error:
            return f"{grid.key_of(first)}: {one_line(error)}"

    damaged: list[str] = []
    with ThreadPoolExecutor(volume.source.config.requests) as pool:
        found = _with_progress(pool.map(present_in, firsts), f"reading the shards of {volume.name}")
        for first, present in zip(firsts, found, strict=True):
            if isinstance(present, str):
                damaged.append(present)
                continue
            part = tuple(slice(i, i + n) for i, n in zip(first, per_shard, strict=True))
            view = occupancy[part]
            view[...] = present[tuple(slice(n) for n in view.shape)]
    return occupancy, damaged


def _shard_counts(volume: Volume) -> Triple:
    assert volume.grid.shard_zyx is not None
    z, y, x = (-(-size // s) for size, s in zip(volume.shape_zyx, volume.grid.shard_zyx, strict=True))
    return z, y, x


def _with_progress(items: Iterable[Any], what: str, total: int | None = None) -> Iterator[Any]:
    """The items, with a line in the log every few seconds."""
    started = said = time.monotonic()
    count = 0
    for count, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - said >= _PROGRESS_S:
            log.info("%s: %d%s", what, count, f" of {total}" if total else "")
            said = now
    if said != started:
        log.info("%s: done, %d in %.0f s", what, count, time.monotonic() - started)


def _parse_sidecar(data: bytes) -> tuple[Bools, str]:
    """Occupancy and signature.  Raises ValueError where it is something else."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as found:
            occupancy, signature = found["occupancy"], str(found["signature"]) if "signature" in found else ""
    except (KeyError, OSError, zipfile.BadZipFile, EOFError) as error:
        raise ValueError(one_line(error)) from error
    if occupancy.dtype != bool or occupancy.ndim != 3:
        raise ValueError(f"occupancy of {occupancy.dtype} and {occupancy.ndim} axes")
    return occupancy, signature


def kept_file(volume: Volume, kind: str, ending: str) -> Path:
    """Where something about a volume, such as its listing, is kept between runs.  The folder may not be there yet."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    address = volume.source.address if volume.source.remote else str(Path(volume.source.address).resolve())
    name = hashlib.sha256(f"{address}#{volume.array.path}#{volume.axes}".encode()).hexdigest()[:24]
    return root / "vesuvius" / kind / f"{name}{ending}"


def _signature(volume: Volume) -> str:
    """Changes when a kept listing may no longer hold: with the metadata, on disk also with any folder of chunks."""
    signature = sidecar_signature(volume)
    if volume.source.remote:
        return signature
    folder = Path(volume.source.address) / volume.array.path
    depth = volume.grid.key_of((0, 0, 0)).removeprefix(volume.array.path).strip("/").count("/")
    stamps = hashlib.sha256(repr(sorted(_folder_stamps(folder, depth))).encode()).hexdigest()
    return f"{signature}:{stamps[:16]}"


def _folder_stamps(folder: Path, depth: int) -> Iterator[tuple[str, int]]:
    """Path and time of change of a folder and of those below it, `depth` levels down."""
    yield str(folder), folder.stat().st_mtime_ns
    if depth:
        with os.scandir(folder) as entries:
            below = [entry.path for entry in entries if entry.is_dir()]
        for path in below:
            yield from _folder_stamps(Path(path), depth - 1)
