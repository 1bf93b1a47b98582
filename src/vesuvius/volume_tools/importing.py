"""Converts a scan in another format to an OME-Zarr pyramid; can be resumed if killed at any time.

The source is decoded in layers as deep as a shard to an unnamed temporary file, from which chunks are read.
"""

import hashlib
import itertools
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Triple
from vesuvius.errors import DataError
from vesuvius.volume_tools.copy import CopyStats
from vesuvius.volume_tools.partial import IMPORT, PartialCopy, check_name, disk_errors, is_finished
from vesuvius.volume_tools.pyramid import Pyramid, check_levels, levels_to_one
from vesuvius.volume_tools.sources.files import Stored
from vesuvius.volume_tools.sources.source import open_source
from vesuvius.volumes.box import Box, box_at, chunk_box, chunk_ranges, intersection, slices, triple
from vesuvius.volumes.geometry import FloatTriple

_CHUNK, _PER_SHARD = 128, 4
_LAYER = _CHUNK * _PER_SHARD  # slices
_MAP_BYTES = 2**26  # mapped at once: what was written there counts as memory of the process


@dataclass(frozen=True)
class ImportRequest:
    source: str
    out: Path  # a name that ends in .zarr
    select: tuple[int, ...] = ()
    shape: Triple | None = None  # this and dtype: for a file without a header
    dtype: np.dtype[Any] | None = None
    voxel_size_um: FloatTriple | None = None  # None = from the source
    levels: int | None = None  # None = down to the first that fits into a chunk
    labels: bool = False  # coarser levels have the most frequent voxel instead of the mean


def import_volume(
    request: ImportRequest, on_progress: Callable[[CopyStats, str], None] = lambda stats, doing: None
) -> tuple[Stored, CopyStats]:
    """Import a scan, or resume an import; a finished import is left unchanged.  Returns the scan and a report.

    Calls `on_progress` after each chunk, and with a text while a layer is decoded, from this thread.  Raises
    ConfigError: the arguments are wrong, or something else is at `out`; DataError: the source cannot be read;
    StorageError: the disk fails, is full, or returns other bytes than were written.  Finished chunks are kept.
    """
    started = time.monotonic()
    check_name(request.out)
    source = open_source(request.source, request.select, request.shape, request.dtype)
    if request.voxel_size_um:
        source = replace(source, geometry=source.geometry.resized(request.voxel_size_um, ("micrometer",) * 3))
    shape = triple(source.shape)
    levels = levels_to_one(shape, _CHUNK) if request.levels is None else request.levels
    check_levels(levels, shape)
    chunk = triple(min(size, _CHUNK) for size in shape)
    plan = Pyramid(shape, chunk, levels, source.dtype.itemsize, _PER_SHARD)
    stats = CopyStats(box_at((0, 0, 0), shape), plan.chunk_count)
    record = _record(request, source)
    if is_finished(request.out, record, IMPORT):
        stats.before = stats.chunks
        return source, stats

    def count(size: int) -> None:
        stats.count(size)
        stats.seconds = time.monotonic() - started
        on_progress(stats, "")

    with PartialCopy(request.out, record, plan, source.dtype, 0, IMPORT, request.labels).locked() as target:
        stats.before = stats.chunks - sum(len(target.missing(level)) for level in range(levels))
        with _by_layers(source, target, stats, on_progress) as read:
            target.fill(0, read, count)
        source.finish()
        if _record(request, source) != record:
            raise DataError(f"{request.source} changed while it was read; remove {target.path} and import it again")
        target.fill_coarser(count)
        target.publish(source.geometry)
    return source, stats


def _record(request: ImportRequest, source: Stored) -> dict[str, Any]:
    """The arguments that identify an import, and a hash of the source files' sizes and times, as plain JSON."""
    known = ((file.name, file.stat()) for file in source.files if file.exists())
    about = [(name, facts.st_size, facts.st_mtime_ns) for name, facts in known]
    arguments = vars(request) | {"source": str(Path(request.source).resolve()), "out": None}
    files = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    plain: dict[str, Any] = json.loads(json.dumps(arguments | {"source_files": files}, default=str))
    return plain


@contextmanager
def _by_layers(
    source: Stored, target: PartialCopy, stats: CopyStats, on_progress: Callable[[CopyStats, str], None]
) -> Iterator[Callable[[Box], NDArray[Any]]]:
    """A function that reads boxes of the source, decoding one layer at a time to a temporary file."""
    shape, unit = triple(source.shape), triple(source.unit)
    depth, *plane = shape
    slice_bytes, decoded = math.prod(plane) * source.dtype.itemsize, -1
    deep = max(1, _MAP_BYTES // slice_bytes)
    with disk_errors(target.out):
        file = tempfile.TemporaryFile(dir=target.path)  # noqa: SIM115 - used outside `disk_errors`
        # Allocated in advance, because a memory map kills the process when the disk is full.
        os.posix_fallocate(file.fileno(), 0, min(depth, _LAYER) * slice_bytes)

    def slices_at(z: int, count: int = 1) -> NDArray[Any]:
        return np.memmap(file, source.dtype, "r+", z % _LAYER * slice_bytes, (count, *plane))

    def read(box: Box) -> NDArray[Any]:
        nonlocal decoded
        (first, *_), (last, *_) = box
        if decoded != (decoded := first // _LAYER):
            layer = chunk_box((decoded, 0, 0), (_LAYER, plane[0], plane[1]), shape)
            units = list(itertools.product(*chunk_ranges(layer, unit)))
            for index in reversed(units) if source.backwards else units:
                part = intersection(chunk_box(index, unit, shape), layer)
                on_progress(stats, f"decoding slice {part[0][0]} of {depth}")
                (top, *_), (bottom, *_), voxels = *part, source.get(slices(part))
                for z in range(top, bottom, deep):
                    each = voxels[z - top : z - top + deep]
                    slices_at(z, len(each))[:, *slices(part)[1:]] = each
        voxels = np.stack([slices_at(z)[0][slices(box)[1:]].copy() for z in range(first, last)])
        stats.voxel_bytes += voxels.nbytes
        return voxels

    with file:
        yield read
