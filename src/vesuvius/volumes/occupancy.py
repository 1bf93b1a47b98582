"""Where a volume holds something: which of its chunks are stored, and its foreground map, without reading its voxels.

From the sidecar beside a level, a listing of its store, a coarse level above a threshold, or a mask.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import logging
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, DataConfig, Triple, VolumeConfig
from vesuvius.errors import DataError, one_line
from vesuvius.runlog.progress import with_progress
from vesuvius.volumes.alignment import Alignment, log_alignment
from vesuvius.volumes.box import Box, box_along, box_at, grid_shape, slices, times, triple
from vesuvius.volumes.errors import FetchError, RefusedError
from vesuvius.volumes.format.metadata import metadata_hash
from vesuvius.volumes.missing import StoredChunks
from vesuvius.volumes.volume import Volume, open_volume
from vesuvius.volumes.voxels import Nan

log = logging.getLogger(__name__)

SIDECAR = ".chunk_occupancy.npz"
_PROBES = 16

Bools = NDArray[np.bool_]
_CELLS_MAX = 64_000_000
_BLOCK_BYTES = 8 * 2**20


@dataclass(frozen=True, eq=False)
class ForegroundMap:
    """The foreground share of each map cell of a volume.  Compared by identity; compare `hash` for content."""

    fraction: NDArray[np.uint8]  # (nz, ny, nx), 0 none ... 255 all of the cell
    cell_zyx: Triple  # voxels of a cell
    shape_zyx: Triple  # of the volume; the last cell of an axis may stick out of it: its fraction is that of its inside
    within: Box | None = None  # the part of the volume that the map knows; None = all
    listed: bool = False  # whether its cells are the chunks (or shards) that a listing has found

    def __post_init__(self) -> None:
        cells = grid_shape(self.shape_zyx, self.cell_zyx)
        if self.fraction.dtype != np.uint8 or self.fraction.shape != cells:
            raise ValueError(
                f"a foreground map must be uint8 {cells}; got {self.fraction.dtype} {self.fraction.shape} for cells of "
                f"{self.cell_zyx} in a volume of {self.shape_zyx}; make the map again for this volume"
            )

    @cached_property
    def hash(self) -> str:
        """Changes with any cell, the cells' size or the volume's shape."""
        digest = hashlib.sha256(np.array([self.cell_zyx, self.shape_zyx], "<i8").tobytes())
        digest.update(np.ascontiguousarray(self.fraction).data)
        return digest.hexdigest()[:16]

    def stored(self, chunk_zyx: Triple) -> StoredChunks | None:
        """The chunks that the listing has found; None without one, or one of shards: any chunk of these may be
        absent."""
        return StoredChunks.of(self.fraction > 0) if self.listed and self.cell_zyx == chunk_zyx else None


def foreground_map(volume: Volume, spec: VolumeConfig, config: DataConfig) -> ForegroundMap | None:
    """The map that `data.min_foreground` is measured on; None for a volume where that is 0.  Reads, and logs progress.

    Raises DataError: the listing, the coarse level or the mask cannot be read, or does not fit the volume.
    """
    if config.min_foreground_of(spec) == 0:
        return None
    nan: Nan = "error" if config.nan == "error" else "keep"  # whatever NaN is read as, it is no foreground
    if spec.mask is not None:
        mask = open_volume(spec.mask, config.store, nan=nan)
        return coarse_map(volume, mask, None, config.patch_size)
    foreground = spec.foreground or config.foreground
    if foreground.source == "level":
        coarse_spec = ArrayConfig(path=spec.path, level=foreground.level, select=spec.select)
        coarse = open_volume(coarse_spec, config.store, nan=nan)
        return coarse_map(volume, coarse, foreground.threshold, config.patch_size, "the foreground level")
    occupancy = chunk_occupancy(volume, config.max_quarantined)
    cell = volume.chunk_zyx if occupancy.shape == volume.grid.counts_zyx else volume.grid.object_zyx
    fraction = np.where(occupancy, np.uint8(255), np.uint8(0))
    return ForegroundMap(fraction, cell, volume.shape_zyx, listed=True)


def coarse_map(
    volume: Volume, coarse: Volume, threshold: float | None, patch_zyx: Triple, what: str = "the mask"
) -> ForegroundMap:
    """The map of an array's voxels above a threshold (None = that are not 0), where it lies.  NaN and
    infinity are not.  Streams the array once.

    Cells are a quarter of a patch or one voxel of the array, whichever is larger, or larger to stay below 64 million.

    Raises:
        DataError: the array does not lie in the volume, or cannot be read.
    """
    alignment = log_alignment(volume, coarse, what)
    merged = [int(max(p // (4 * f), 1)) for p, f in zip(patch_zyx, alignment.factors, strict=True)]
    while True:
        cell = triple(math.ceil(m * f) for m, f in zip(merged, alignment.factors, strict=True))
        counts = grid_shape(volume.shape_zyx, cell)
        if math.prod(counts) <= _CELLS_MAX:
            break
        merged[cell.index(min(cell))] *= 2
    fraction = np.zeros(counts, np.uint8)
    steps = [step // m for step, m in zip(_block_edges(coarse, merged), merged, strict=True)]
    blocks = list(itertools.product(*(_spans(alignment, axis, cell[axis], steps[axis]) for axis in range(3))))
    boxes = [box_along(voxels for voxels, _, _ in block) for block in blocks]
    reading = f"reading {coarse.name} for the foreground of {volume.name}"
    with closing(coarse):
        for number, block in enumerate(with_progress(blocks, reading, len(blocks))):
            for near in boxes[number : number + 2]:
                coarse.stage(near)
            voxels = coarse.read(boxes[number])
            foreground = (voxels != 0 if threshold is None else voxels > threshold) & np.isfinite(voxels)
            shown, sizes = foreground.astype(np.float64), np.ones((1, 1, 1))
            for *_, places in block:  # the first axis goes to the end, three times
                shown, sizes = np.tensordot(shown, places, (0, 1)), sizes[0, ..., None] * places.sum(1)
            fraction[tuple(cells for _, cells, _ in block)] = (255 * shown + sizes // 2) // sizes
    return ForegroundMap(fraction, cell, volume.shape_zyx, alignment.covered)


def _spans(
    alignment: Alignment, axis: int, cell: int, step: int
) -> Iterator[tuple[tuple[int, int], slice, NDArray[np.float64]]]:
    """`step` cells at a time along an axis, where the array lies; its last voxels count as a whole.

    Yields:
        The array's voxels (first and stop) that these cells are shown, the cells, and [cells, voxels]: at how many
        places of a cell the volume is shown a voxel.
    """
    first, stop = alignment.shown(axis)
    for begin in range(first // cell, -(-stop // cell), step):
        lo, hi = max(begin * cell, first), min((begin + step) * cell, stop)
        voxels, cells = alignment.indices(axis, lo, hi), np.arange(lo, hi) // cell
        places = np.zeros((cells[-1] + 1 - cells[0], voxels[-1] + 1 - voxels[0]))
        np.add.at(places, (cells - cells[0], voxels - voxels[0]), 1)
        yield (int(voxels[0]), int(voxels[-1]) + 1), slice(int(cells[0]), int(cells[-1]) + 1), places


def _block_edges(coarse: Volume, merged: list[int]) -> Triple:
    """Edges of boxes of some 8 million voxels; multiples of `merged`, and of chunks where possible."""
    edge = int((_BLOCK_BYTES / coarse.dtype.itemsize) ** (1 / 3))
    whole = [math.lcm(m, chunk) for m, chunk in zip(merged, coarse.chunk_zyx, strict=True)]
    units = [unit if unit <= edge else m for unit, m in zip(whole, merged, strict=True)]
    return triple(max(edge // unit, 1) * unit for unit in units)


# ---- stored chunks


def chunk_occupancy(volume: Volume, max_damaged: int = 0) -> Bools:
    """Which chunks are stored: bool over the chunk grid (of a sharded array: of inner chunks, or of shards).

    From the sidecar beside the array, else as `list_chunks`, whose parameter and errors it has.
    """
    sidecar = read_sidecar(volume)
    return list_chunks(volume, max_damaged) if sidecar is None else sidecar


# ---- sidecars


def read_sidecar(volume: Volume) -> Bools | None:
    """The occupancy beside the array, if there is one.

    Raises DataError: it is damaged, out of date, or not of this volume.
    """
    key = f"{volume.array.path}/{SIDECAR}".lstrip("/")
    try:
        data = volume.source.get(key, cached=False)
    except (FetchError, RefusedError) as error:
        log.warning("the sidecar %s of %s cannot be read and is ignored: %s", key, volume.name, one_line(error))
        return None
    if data is None:
        return None
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as found:
            occupancy: Bools = found["occupancy"]
            signature = str(found.get("signature", ""))
    except Exception as error:  # a flipped bit leads to nearly any type: zlib.error, BadZipFile, MemoryError, ...
        problem = f"is no npz with `occupancy` and `signature`: {type(error).__name__}: {one_line(error)}"
    else:
        problem = _problem(volume, occupancy, signature)
    if problem:
        raise DataError(
            f"The sidecar {key} of {volume.name} {problem}; rebuild it with `vesuvius volume occupancy`, or remove it"
        )
    return occupancy


def _problem(volume: Volume, occupancy: Bools, signature: str) -> str:
    """Why a sidecar is not one of a volume as it is now, as a few random objects tell; '' where nothing is found.

    One that was not made here may leave out on purpose what is stored, but not everything.
    """
    grid, of_ours = volume.grid, sidecar_signature(volume)
    if signature.startswith("vesuvius:") and not signature.startswith(of_ours):
        return f"belongs to another array: its signature is {signature}, not {of_ours}"
    if occupancy.dtype != bool or occupancy.shape not in (grid.counts_zyx, grid.object_counts_zyx):
        return f"is not bool over the chunk grid: {occupancy.dtype} {occupancy.shape}, not {grid.counts_zyx}"
    if not occupancy.any():
        return "says that no chunk is stored, and some are"
    if not signature.startswith("vesuvius:"):
        return ""
    drawn = np.random.default_rng(0).integers(math.prod(grid.object_counts_zyx), size=64)
    places = [triple(map(int, np.unravel_index(number, grid.object_counts_zyx))) for number in drawn]
    per_object = triple(-(-n // c) for n, c in zip(occupancy.shape, grid.object_counts_zyx, strict=True))
    left_out = (p for p in places if not occupancy[slices(box_at(times(p, per_object), per_object))].any())
    keys = list(dict.fromkeys(map(grid.object_key, left_out)))[:_PROBES]
    grown = sorted(set(keys) - set(volume.source.absent(keys)))
    return f"is out of date: {grown[0]} is stored and is not in it" if grown else ""


def write_sidecar(path: Path, occupancy: Bools, signature: str) -> None:
    """Write an occupancy under another name, then rename it.  Raises OSError."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as out:
        np.savez_compressed(out, occupancy=occupancy, signature=np.array(signature))
    partial.replace(path)


def sidecar_signature(volume: Volume) -> str:
    """The signature in sidecars made here: it identifies their array."""
    return f"vesuvius:{metadata_hash(volume.array)}"


# ---- listings


def list_chunks(volume: Volume, max_damaged: int = 0) -> Bools:
    """List the chunks in the store, with a line of progress every few seconds.  Reads the index of every shard.

    Args:
        max_damaged: so many shards may have a damaged index.  Their chunks cannot be read and count as missing.

    Raises:
        DataError: the store cannot list, or the index of more than `max_damaged` shards is damaged.
    """
    grid, objects = volume.grid, list_objects(volume)
    if grid.shard_zyx is None:
        return objects
    per_shard = grid_shape(grid.shard_zyx, grid.chunk_zyx)
    occupancy, damaged = np.zeros(grid.counts_zyx, bool), list[str]()
    firsts = [times(triple(shard), per_shard) for shard in np.argwhere(objects).tolist()]

    def present_in(first: Triple) -> Bools | str:
        try:
            return grid.present_in_shard(first)
        except (FetchError, ValueError) as error:
            return f"{grid.key_of(first)}: {one_line(error)}"

    with ThreadPoolExecutor(volume.source.config.requests) as pool:
        reading = f"reading the indices of the shards of {volume.name}"
        found = with_progress(pool.map(present_in, firsts), reading, len(firsts))
        for first, present in zip(firsts, found, strict=True):
            if isinstance(present, str):
                damaged.append(present)
            else:
                view = occupancy[slices(box_at(first, per_shard))]
                view[...] = present[tuple(slice(n) for n in view.shape)]
    if damaged:
        more = f" (and of {len(damaged) - 1} more shards)" if len(damaged) > 1 else ""
        what = f"Cannot read the index of {damaged[0]}{more} in {volume.name}"
        remedy = "restore them (`vesuvius volume verify` lists what is broken)"
        if len(damaged) > max_damaged:
            raise DataError(f"{what}; {remedy}")
        log.warning("%s; no patch comes from there; %s and start a new run, as the plan then differs", what, remedy)
    return occupancy


def list_objects(volume: Volume) -> Bools:
    """Which chunks, or of a sharded array which shards, the store lists; reads no shard.

    Raises DataError: the store cannot list, or on a disk a folder of chunks is a broken link or a file.
    """
    grid = volume.grid
    occupancy = np.zeros(grid.object_counts_zyx, bool)
    keys = itertools.chain.from_iterable(_listed_keys(volume))
    for key in with_progress(keys, f"listing the chunks of {volume.name}"):
        if (place := grid.place_of(key)) is not None:
            occupancy[place] = True
        elif not volume.source.remote and grid.leads_to_chunks(key):
            path = Path(volume.source.address, key)
            if not path.is_dir():
                raise DataError(
                    f"a folder of chunks must be a folder; got a {'broken link' if path.is_symlink() else 'file'}, "
                    f"{path}; mount the disk that holds it, or restore it from its source"
                )
    return occupancy


def _listed_keys(volume: Volume) -> Iterator[Iterable[str]]:
    """Keys below the array; from a remote store, where chunks lie in folders, several folders at once."""
    source = volume.source
    if not source.remote:
        yield source.list_keys(volume.array.path)
        return
    folders = [volume.array.path]
    while len(folders) == 1:  # go down to where there are several folders to list at once
        keys, folders = source.list_one_level(folders[0])
        yield keys
    with ThreadPoolExecutor(source.config.requests) as pool:
        yield from pool.map(lambda folder: list(source.list_keys(folder)), folders)
