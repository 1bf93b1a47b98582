"""Grey values of a volume, from a fixed random sample of boxes where something is stored."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import DataError, one_line
from vesuvius.volumes.box import Box, box_along, triple
from vesuvius.volumes.errors import FetchError, UnreadableChunkError
from vesuvius.volumes.listing import Bools
from vesuvius.volumes.volume import Volume
from vesuvius.volumes.voxels import percentiles

log = logging.getLogger(__name__)

PERCENTILES = (0.5, 50.0, 99.5)
_BOX_ZYX: Triple = (72, 136, 136)
_DRAWS_PER_BOX = 16
_BOXES_AHEAD = 4


@dataclass(frozen=True)
class GreyStatistics:
    """Grey values of a sample of stored boxes; None where all of it is air."""

    places: int  # boxes that were read (the name is that of `vesuvius volume info --json`)
    unreadable: int  # boxes that could not be read
    # tried, found: chunks that were looked up at random, and those of them that are stored; None where a listing says
    # which are stored
    tried: int | None
    found: int | None
    voxels: int  # voxels read
    air_share: float | None  # share of them that are air, or NaN or infinite; the other figures are of the rest
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None
    std: float | None = None
    percentiles: tuple[float, ...] | None = None  # at `PERCENTILES`


def grey_statistics(volume: Volume, stored: Bools | None, boxes: int) -> GreyStatistics:
    """Read a few boxes of about the size of a large patch, and compute statistics of their voxels.

    Args:
        stored: which chunks (or shards) are stored; None where unknown: then random chunks are looked up.
        boxes: how many.

    Raises:
        DataError: the store does not say whether a chunk is there.
    """
    chunks, tried = _sample_chunks(volume, stored, boxes)
    rng = np.random.default_rng((0, 1))
    sample = [_box_in(volume, chunk, rng) for chunk in chunks]
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
    known = GreyStatistics(len(sample) - unreadable, unreadable, tried, found, voxels, air_share)
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
    """Up to `count` random chunks that are stored; and how many were looked up, where `stored` is None."""
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
                f"a volume's store must tell whether a chunk exists; got {one_line(error)} for chunk {list(chunk)} of "
                f"{volume.name}; check the address, the network and the credentials"
            ) from error
        except ValueError as error:
            log.warning("chunk %s of %s is skipped: %s; restore the shard", list(chunk), volume.name, error)
        if len(found) == count:
            break
    return found, tried


def _box_in(volume: Volume, chunk: Triple, rng: np.random.Generator) -> Box:
    """A box of about `_BOX_ZYX` that costs little else to decode: part of a chunk, or whole chunks."""
    ends = []
    for i, edge, size, patch in zip(chunk, volume.chunk_zyx, volume.shape_zyx, _BOX_ZYX, strict=True):
        lo, hi = i * edge, min((i + 1) * edge, size)
        if patch < hi - lo:
            lo = int(rng.integers(lo, hi - patch + 1))
            hi = lo + patch
        else:
            hi = min(lo + max(patch // edge, 1) * edge, size)
        ends.append((lo, hi))
    return box_along(ends)
