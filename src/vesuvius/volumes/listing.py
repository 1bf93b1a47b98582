"""Lists which chunks of a volume are stored: from the sidecar beside it, or from the store."""

from __future__ import annotations

import io
import itertools
import logging
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import DataError, one_line
from vesuvius.runlog.progress import with_progress
from vesuvius.volumes.box import box_at, grid_shape, slices, times, triple
from vesuvius.volumes.errors import FetchError, RefusedError
from vesuvius.volumes.format.metadata import metadata_hash
from vesuvius.volumes.volume import Volume

log = logging.getLogger(__name__)

SIDECAR = ".chunk_occupancy.npz"
_PROBES = 16

Bools = NDArray[np.bool_]


def chunk_occupancy(volume: Volume, max_damaged: int = 0) -> Bools:
    """Which chunks are stored: bool over the chunk grid (of a sharded array: of inner chunks, or of shards).

    From the sidecar beside the array, else as `list_chunks`, whose parameter and errors it has.
    """
    sidecar = read_sidecar(volume)
    return list_chunks(volume, max_damaged) if sidecar is None else sidecar


# ---- sidecars


def read_sidecar(volume: Volume) -> Bools | None:
    """The occupancy beside the array, if there is one.

    Raises:
        DataError: it is damaged, out of date, or not of this volume.
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

    Raises:
        DataError: the store cannot list, or on a disk a folder of chunks is a broken link or a file.
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
