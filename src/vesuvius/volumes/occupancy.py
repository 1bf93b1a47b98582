"""Occupancy (which chunks of a volume are stored) and foreground maps, without reading the volume's voxels.

Sources: the sidecar next to a level, a listing of the store, a coarse level above a threshold, or a mask.
"""

import hashlib
import io
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, DataConfig, MaskConfig, Triple, VolumeConfig
from vesuvius.errors import DataError, one_line
from vesuvius.runlog.progress import with_progress
from vesuvius.volumes.alignment import ONES, Alignment, AnyAlignment, log_alignment
from vesuvius.volumes.box import Box, box_along, box_at, grid_shape, intersection, scale, slices, triple
from vesuvius.volumes.errors import FetchError, RefusedError
from vesuvius.volumes.format.metadata import metadata_hash
from vesuvius.volumes.volume import Volume, open_volume
from vesuvius.volumes.voxels import Nan

log = logging.getLogger(__name__)

SIDECAR = ".chunk_occupancy.npz"
_PROBES = 16

Bools = NDArray[np.bool_]
Select = Callable[[NDArray[Any]], Bools]
"""Which voxels of an array are foreground; NaN and infinity never are."""
_CELLS_MAX = 64_000_000
_VOXELS_MAX = 2**30  # of an array whose foreground is counted in each patch: 128 MiB
_BLOCK_BYTES = 8 * 2**20


@dataclass(frozen=True, eq=False)
class ForegroundVoxels:
    """Which voxels of an array are foreground, a bit each: what a patch holds can be counted."""

    alignment: Alignment
    bits: NDArray[np.uint8]  # (nz, ny, ceil(nx / 8))

    def count(self, box: Box) -> int:
        """Number of foreground voxels in a box of the volume; 0 where the array does not cover it."""
        ends = intersection(box, self.alignment.covered)
        if any(lo >= hi for lo, hi in zip(*ends, strict=True)):
            return 0
        if self.alignment.factors == ONES:
            *zy, row = slices(self.alignment.array_box(ends))
            inside = np.packbits(np.arange(row.start // 8 * 8, row.stop) >= row.start)
            whole = self.bits[(*zy, slice(row.start // 8, -(-row.stop // 8)))]
            return int(np.bitwise_count(whole & inside).sum())
        rows = (self.alignment.indices(axis, lo, hi) for axis, (lo, hi) in enumerate(zip(*ends, strict=True)))
        # each voxel of the array, and how many planes of the box it covers
        (z, nz), (y, ny), (x, nx) = (np.unique(row, return_counts=True) for row in rows)
        first = int(x[0]) // 8
        found = self.bits[z[:, None], y, first : int(x[-1]) // 8 + 1]
        planes, counts = np.bincount(x - 8 * first, nx), np.zeros(found.shape[1:], np.float32)
        for n in np.unique(nx):
            bits = np.bitwise_count(found & np.packbits(planes == n)).reshape(len(z), -1)
            counts += n * (nz.astype(np.float32) @ bits.astype(np.float32)).reshape(counts.shape)  # exact below 2^24
        return int(ny @ counts.sum(1, np.float64))


@dataclass(frozen=True, eq=False)
class ForegroundMap:
    """The foreground fraction of each map cell of a volume.  Compared by identity; compare `hash` for content."""

    fraction: NDArray[np.uint8]  # (nz, ny, nx), 0 no foreground ... 255 only foreground
    cell_zyx: Triple  # voxels of a cell
    shape_zyx: Triple  # of the volume; cells that extend past it count inner voxels only
    within: Box | None = None  # the part of the volume that the map covers; None = all
    listed: bool = False  # whether its cells are the chunks (or shards) of a listing
    voxels: ForegroundVoxels | None = None  # of a mask or level that is not too large; fractions are then upper bounds

    def __post_init__(self) -> None:
        cells = grid_shape(self.shape_zyx, self.cell_zyx)
        if self.fraction.dtype != np.uint8 or self.fraction.shape != cells:
            raise ValueError(
                f"The foreground map is {self.fraction.dtype} {self.fraction.shape}, not uint8 {cells}, for cells of "
                f"{self.cell_zyx} in a volume of {self.shape_zyx}; rebuild it for this volume"
            )

    @cached_property
    def hash(self) -> str:
        digest = hashlib.sha256(np.array([self.cell_zyx, self.shape_zyx], "<i8").tobytes())
        digest.update(np.ascontiguousarray(self.fraction).data)
        if self.voxels:
            digest.update(f"{self.voxels.alignment}".encode())
            digest.update(self.voxels.bits.data)
        return digest.hexdigest()[:16]

    def stored(self, chunk_zyx: Triple) -> NDArray[np.uint8] | None:
        """The map if its cells are chunks in a listing; None without one, or for shards, whose chunks may be absent."""
        return self.fraction if self.listed and self.cell_zyx == chunk_zyx else None


def foreground_map(volume: Volume, spec: VolumeConfig, config: DataConfig) -> ForegroundMap | None:
    """The map for `data.min_foreground`; None for a volume with 0 there.  Reads, and logs progress.

    Raises DataError: the listing, the coarse level or the mask cannot be read or does not fit the volume.
    """
    if config.min_foreground_of(spec) == 0:
        return None
    nan: Nan = "error" if config.nan == "error" else "keep"  # NaN never counts as foreground
    if spec.mask is not None:
        mask = open_volume(spec.mask, config.store, nan=nan)
        return coarse_maps(volume, mask, [selection(spec.mask)], config.patch_size)[0]
    if (level := config.foreground.level) is not None:
        coarse = open_volume(ArrayConfig(path=spec.path, level=level, select=spec.select), config.store, nan=nan)
        above = config.foreground.threshold
        return coarse_maps(volume, coarse, [lambda v: v > above], config.patch_size, "the foreground level")[0]
    occupancy = chunk_occupancy(volume, config.max_quarantined)
    cell = volume.chunk_zyx if occupancy.shape == volume.grid.counts_zyx else volume.grid.object_zyx
    fraction = np.where(occupancy, np.uint8(255), np.uint8(0))
    return ForegroundMap(fraction, cell, volume.shape_zyx, listed=True)


def class_maps(volume: Volume, spec: VolumeConfig, config: DataConfig) -> list[ForegroundMap]:
    """The map of each class of `data.class_weights`, from the condition.  Reads and raises as `foreground_map`."""
    if spec.condition is None or not config.class_weights:
        return []
    labels = open_volume(spec.condition, config.store, nan="error" if config.nan == "error" else "keep")
    selects: list[Select] = [partial(np.equal, each.label) for each in config.class_weights]
    return coarse_maps(volume, labels, selects, config.patch_size, "the condition")


def selection(mask: MaskConfig) -> Select:
    """Return which voxels of a mask are foreground."""
    if mask.labels:
        return lambda voxels: np.logical_or.reduce([voxels == label for label in mask.labels])
    return lambda voxels: np.logical_and.reduce([voxels != label for label in mask.ignore or (0,)])


def coarse_maps(
    volume: Volume, coarse: Volume, selects: Sequence[Select], patch_zyx: Triple, what: str = "the mask"
) -> list[ForegroundMap]:
    """Maps of the finite voxels of an array that each of `selects` returns, aligned with the volume.

    Streams the array once.  Cells are a quarter of a patch or one voxel of the array, whichever is larger, and grow
    until there are at most 64 million.  The voxels of up to 2^30 are kept too, so that patches can be counted exactly;
    of a larger array, shares are estimated from the cells, with a warning.

    Raises DataError: the array cannot be aligned with the volume, or cannot be read.
    """
    found = log_alignment(volume, coarse, what)
    alignment, source = _separable(found, coarse)
    merged = [int(max(p // (4 * f), 1)) for p, f in zip(patch_zyx, alignment.factors, strict=True)]
    while True:
        cell = triple(math.ceil(m * f) for m, f in zip(merged, alignment.factors, strict=True))
        counts = grid_shape(volume.shape_zyx, cell)
        if math.prod(counts) <= _CELLS_MAX:
            break
        merged[cell.index(min(cell))] *= 2
    fractions, bits = [np.zeros(counts, np.uint8) for _ in selects], list[NDArray[np.uint8]]()
    nz, ny, nx = alignment.array_zyx
    if nz * ny * nx <= _VOXELS_MAX:
        bits = [np.zeros((nz, ny, -(-nx // 8)), np.uint8) for _ in selects]
    else:
        log.warning(
            "%s has more than %d voxels: the foreground of patches of %s is estimated from the shares of cells of %s "
            "voxels, so that some hold less than data.min_foreground; a coarser level of it is counted exactly",
            *(coarse.name, _VOXELS_MAX, volume.name, cell),
        )
    steps = [step // m for step, m in zip(_block_edges(coarse, merged), merged, strict=True)]
    blocks = list(itertools.product(*(_spans(alignment, axis, cell[axis], steps[axis]) for axis in range(3))))
    boxes = [box_along(voxels for voxels, _, _ in block) for block in blocks]
    reading = f"reading {coarse.name} for the foreground of {volume.name}"
    with coarse:
        for number, block in enumerate(with_progress(blocks, reading, len(blocks))):
            for near in boxes[number : number + 2]:
                coarse.stage(source.array_box(near))
            voxels = source.read(boxes[number], coarse.read)
            finite = np.isfinite(voxels)
            for index, (select, fraction) in enumerate(zip(selects, fractions, strict=True)):
                foreground = select(voxels) & finite
                if bits:
                    (z, y, (first, _)) = zip(*boxes[number], strict=True)
                    packed = np.packbits(np.pad(foreground, ((0, 0), (0, 0), (first % 8, 0))), axis=-1)
                    bits[index][slice(*z), slice(*y), first // 8 : first // 8 + packed.shape[-1]] |= packed
                total, sizes = foreground.astype(np.float64), np.ones((1, 1, 1))
                for *_, weights in block:  # each product moves the first axis to the end
                    total, sizes = np.tensordot(total, weights, (0, 1)), sizes[0, ..., None] * weights.sum(1)
                fraction[tuple(cells for _, cells, _ in block)] = -(-255 * total // sizes)
    counted = {index: ForegroundVoxels(alignment, each) for index, each in enumerate(bits)}
    return [
        ForegroundMap(fraction, cell, volume.shape_zyx, found.covered, voxels=counted.get(index))
        for index, fraction in enumerate(fractions)
    ]


def _separable(found: AnyAlignment, array: Volume) -> tuple[Alignment, AnyAlignment]:
    """Return the alignment of an array, or of a resampled one that is about as coarse, and how that one is read."""
    if isinstance(found, Alignment):
        return found, Alignment(array.shape_zyx, array.shape_zyx)
    source, factors = replace(found, linear=False, fill=0.0).coarsened()
    return Alignment(found.volume_zyx, source.volume_zyx, factors), source


def _spans(
    alignment: Alignment, axis: int, cell: int, step: int
) -> Iterator[tuple[tuple[int, int], slice, NDArray[np.float64]]]:
    """Yield spans of `step` cells along an axis, over the extent of the array: start and stop of the array's voxels in
    these cells, the cells, and [cells, voxels]: how many positions of a cell map to a voxel.
    """
    first, stop = alignment.extent(axis)
    for begin in range(first // cell, -(-stop // cell), step):
        lo, hi = max(begin * cell, first), min((begin + step) * cell, stop)
        voxels, cells = alignment.indices(axis, lo, hi), np.arange(lo, hi) // cell
        weights = np.zeros((cells[-1] + 1 - cells[0], voxels[-1] + 1 - voxels[0]))
        np.add.at(weights, (cells - cells[0], voxels - voxels[0]), 1)
        yield (int(voxels[0]), int(voxels[-1]) + 1), slice(int(cells[0]), int(cells[-1]) + 1), weights


def _block_edges(coarse: Volume, merged: list[int]) -> Triple:
    """Edges of boxes of about 8 MiB; multiples of `merged`, and of chunks if possible."""
    edge = int((_BLOCK_BYTES / coarse.dtype.itemsize) ** (1 / 3))
    aligned = [math.lcm(m, chunk) for m, chunk in zip(merged, coarse.chunk_zyx, strict=True)]
    units = [unit if unit <= edge else m for unit, m in zip(aligned, merged, strict=True)]
    return triple(max(edge // unit, 1) * unit for unit in units)


# ---- stored chunks: by a sidecar next to the array


def chunk_occupancy(volume: Volume, max_damaged: int = 0) -> Bools:
    """As `read_sidecar`, or `list_chunks` without a sidecar."""
    sidecar = read_sidecar(volume)
    return list_chunks(volume, max_damaged) if sidecar is None else sidecar


def read_sidecar(volume: Volume) -> Bools | None:
    """Which chunks are stored, by the sidecar, if any: bool over the grid of chunks (maybe of shards).

    Raises DataError: it is damaged, outdated or another volume's.
    """
    key = f"{volume.array.path}/{SIDECAR}".lstrip("/")
    try:
        data = volume.source.get(key, cached=False)
    except (FetchError, RefusedError) as error:
        log.warning("Cannot read the sidecar %s of %s; ignored: %s", key, volume.name, one_line(error))
        return None
    if data is None:
        return None
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as found:
            occupancy: Bools = found["occupancy"]
            signature = str(found.get("signature", ""))
    except Exception as error:  # a flipped bit can raise nearly anything: zlib.error, BadZipFile, MemoryError, ...
        problem = f"is not an npz with `occupancy` and `signature` ({type(error).__name__}: {one_line(error)})"
    else:
        problem = _problem(volume, occupancy, signature)
    if problem:
        raise DataError(
            f"The sidecar {key} of {volume.name} {problem}; rebuild it with `vesuvius volume occupancy` or remove it"
        )
    return occupancy


def _problem(volume: Volume, occupancy: Bools, signature: str) -> str:
    """Why a sidecar does not match the volume, checked on a few random objects; '' if no problem is found.

    A sidecar from another writer may omit stored chunks on purpose, but not all of them.
    """
    grid, expected = volume.grid, _signature(volume)
    if signature.startswith("vesuvius:") and not signature.startswith(expected):
        return f"belongs to another array: its signature is {signature}, not {expected}"
    if occupancy.dtype != bool or occupancy.shape not in (grid.counts_zyx, grid.object_counts_zyx):
        return f"has {occupancy.dtype} {occupancy.shape} instead of bool over the chunk grid {grid.counts_zyx}"
    if not occupancy.any():
        return "lists no chunk, but some are stored"
    if not signature.startswith("vesuvius:"):
        return ""
    per_object = triple(-(-n // c) for n, c in zip(occupancy.shape, grid.object_counts_zyx, strict=True))
    boxes = ((i, box_at(scale(i, per_object), per_object)) for i in grid.random_objects(64))
    unlisted = (i for i, box in boxes if not occupancy[slices(box)].any())
    keys = list(dict.fromkeys(map(grid.object_key, unlisted)))[:_PROBES]
    added = sorted(set(keys) - set(volume.source.absent(keys)))
    return f"is out of date: {added[0]} is stored but not listed" if added else ""


def write_sidecar(path: Path, volume: Volume, occupancy: Bools) -> None:
    """Write an occupancy atomically.  Raises OSError."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as out:
        np.savez_compressed(out, occupancy=occupancy, signature=np.array(_signature(volume)))
    partial.replace(path)


def _signature(volume: Volume) -> str:
    return f"vesuvius:{metadata_hash(volume.array)}"


# ---- stored chunks: by a listing


def list_chunks(volume: Volume, max_damaged: int = 0) -> Bools:
    """Which chunks are stored, by a listing: bool over the chunk grid.  Reads the index of every shard; logs progress.

    The chunks of up to `max_damaged` shards with a damaged index count as missing, because they are unreadable.  Raises
    DataError: more are damaged, or the store cannot list.
    """
    grid, objects = volume.grid, list_objects(volume)
    if grid.shard_zyx is None:
        return objects
    per_shard = grid_shape(grid.shard_zyx, grid.chunk_zyx)
    occupancy, damaged = np.zeros(grid.counts_zyx, bool), list[str]()
    firsts = [scale(triple(shard), per_shard) for shard in np.argwhere(objects).tolist()]

    def present_in(first: Triple) -> Bools | str:
        try:
            return grid.present_in_shard(first)
        except (FetchError, ValueError) as error:
            return f"{grid.key_of(first)}: {one_line(error)}"

    found = [volume.source.start(present_in, first) for first in firsts]
    indices = with_progress(found, f"reading the indices of the shards of {volume.name}", len(firsts))
    for first, future in zip(firsts, indices, strict=True):
        if isinstance(present := future.result(), str):
            damaged.append(present)
        else:
            view = occupancy[slices(box_at(first, per_shard))]
            view[...] = present[tuple(slice(n) for n in view.shape)]
    if damaged:
        more = f" and of {len(damaged) - 1} more shards" if len(damaged) > 1 else ""
        what = f"Cannot read the index of {damaged[0]}{more} in {volume.name}"
        remedy = "restore them (`vesuvius volume verify` lists what is broken)"
        if len(damaged) > max_damaged:
            raise DataError(f"{what}; {remedy}")
        log.warning("%s; their chunks yield no patches; %s and start a new run (the plan changes)", what, remedy)
    return occupancy


def check_shards(volume: Volume, listed: Bools) -> None:
    """Raise DataError if no listed shard holds a chunk; reads indices up to the first that does or is damaged."""
    per_shard = grid_shape(volume.grid.object_zyx, volume.grid.chunk_zyx)
    for shard in np.argwhere(listed).tolist():
        with suppress(FetchError, ValueError):
            if not volume.grid.present_in_shard(scale(triple(shard), per_shard)).any():
                continue
        return
    raise DataError(f"No chunk of {volume.name} is stored: all of its shards are empty; copy the volume again")


def list_objects(volume: Volume) -> Bools:
    """Which chunks (of a sharded array: which shards) the store lists.  Reads no shard.

    Raises DataError: the store cannot list, or a folder of chunks on disk is a broken link or a file.
    """
    grid = volume.grid
    occupancy = np.zeros(grid.object_counts_zyx, bool)
    keys = itertools.chain.from_iterable(_listed_keys(volume))
    for key in with_progress(keys, f"listing the chunks of {volume.name}"):
        if (index := grid.index_of_key(key)) is not None:
            occupancy[index] = True
        elif not volume.source.remote and grid.is_chunk_folder(key):
            path = Path(volume.source.address, key)
            if not path.is_dir():
                raise DataError(
                    f"{path} is a {'broken link' if path.is_symlink() else 'file'}, not a folder of chunks; mount the "
                    "disk that holds it, or restore it from its source"
                )
    if not occupancy.any():
        volume.missing.check_keys((0, 0, 0))
    return occupancy


def _listed_keys(volume: Volume) -> Iterator[Iterable[str]]:
    """Keys below the array; nested folders of a remote store are listed concurrently."""
    source = volume.source
    if not source.remote:
        yield source.list_keys(volume.array.path)
        return
    folders = [volume.array.path]
    while len(folders) == 1:  # descend until there are several folders to list concurrently
        keys, folders = source.list_one_level(folders[0])
        yield keys
    for listed in [source.start(lambda folder: list(source.list_keys(folder)), each) for each in folders]:
        yield listed.result()
