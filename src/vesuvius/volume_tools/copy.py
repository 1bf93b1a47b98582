"""Copies a box of a volume's level, local or remote, to an OME-Zarr on disk; can be resumed if killed at any time.

Chunk i of the copy starts at voxel i * chunk of the box.  Chunks are read while the next ones are fetched, and written
atomically (`partial.py`); existing ones are skipped.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, StoreConfig, Triple
from vesuvius.errors import ConfigError, DataError
from vesuvius.runlog.units import format_sizes
from vesuvius.volume_tools.partial import PartialCopy, check_name, is_finished
from vesuvius.volume_tools.pyramid import Pyramid, check_levels
from vesuvius.volumes.box import Box, box_at, chunk_ranges, is_inside, shape_of, shifted
from vesuvius.volumes.errors import OutageError, UnreadableChunkError
from vesuvius.volumes.format.metadata import metadata_hash
from vesuvius.volumes.geometry import VOXELS
from vesuvius.volumes.volume import Volume, open_volume

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CopyRequest:
    source: ArrayConfig
    out: Path  # a name that ends in .zarr
    start_zyx: Triple = (0, 0, 0)
    size_zyx: Triple | None = None  # None = to the end of the level
    levels: int = 1  # of the copy; each after the first halves the one before
    labels: bool = False  # by the most frequent voxel instead of the mean


@dataclass
class CopyStats:
    """Progress and final report of a copy."""

    source_box: Box  # in voxels of the source
    chunks: int  # of the copy, all levels
    before: int = 0  # chunks written by earlier processes
    # written, air: chunks of this process; air is not stored
    written: int = 0
    air: int = 0
    voxel_bytes: int = 0  # of the finest level, read by this process
    stored_bytes: int = 0  # written by this process
    fetched_bytes: int | None = None  # from a remote store; None for a source on disk
    seconds: float = 0.0
    failures: list[UnreadableChunkError] = field(default_factory=list)  # one per chunk

    @property
    def done(self) -> int:
        """Number of finished chunks."""
        return self.before + self.written + self.air

    def count(self, size: int) -> None:
        """Count a finished chunk of `size` stored bytes; 0 = air."""
        self.stored_bytes += size
        self.written += size > 0
        self.air += size == 0


def copy_box(
    request: CopyRequest,
    store: StoreConfig = StoreConfig(),
    on_progress: Callable[[CopyStats], None] = lambda stats: None,
) -> CopyStats:
    """Copy a box, or resume a copy; a finished copy is left unchanged.

    Calls `on_progress` after each chunk, from this thread.  Raises ConfigError: the box is not inside the level, or
    `out` or its partial copy is something else; DataError: the source cannot be opened, chunks are unreadable (all
    others are copied then), or the store did not answer for `outage_minutes`; StorageError: the disk fails or is full.
    Finished chunks are kept.
    """
    started = time.monotonic()
    volume = open_volume(request.source, store, nan="keep")
    try:
        box = _checked_box(request, volume)
        plan = Pyramid(shape_of(box), volume.chunk_zyx, request.levels, volume.dtype.itemsize)
        stats = CopyStats(box, plan.chunk_count)
        record = _record(request, box, volume)
        if is_finished(request.out, record):
            stats.before = stats.chunks
            return stats
        cache_bytes = _cache_bytes(volume, box)
        about = request.out, record, plan, volume.dtype, volume.fill_value
        with PartialCopy(*about, labels=request.labels).locked() as target:
            if cache_bytes:
                volume.close()
                cached = {"cache_dir": str(target.path / "cache"), "cache_gib": cache_bytes / 2**30}
                volume = open_volume(request.source, store.model_copy(update=cached), nan="keep")
            _fill(target, volume, stats, on_progress, started)
            target.publish((volume.geometry or VOXELS).starting_at(box[0]))
    finally:
        volume.close()
    return stats


def _fill(
    target: PartialCopy, volume: Volume, stats: CopyStats, on_progress: Callable[[CopyStats], None], started: float
) -> None:
    """Write all levels and count chunks."""
    corner = stats.source_box[0]
    stats.before = stats.chunks - sum(len(target.missing(level)) for level in range(target.plan.levels))

    def report() -> None:
        stats.seconds = time.monotonic() - started
        if volume.source.remote:
            stats.fetched_bytes = volume.source.stats.bytes_fetched
        on_progress(stats)

    def count(size: int) -> None:
        stats.count(size)
        report()

    def stage(boxes: Sequence[Box], number: int) -> None:
        for box in boxes[number : number + volume.source.config.requests]:
            volume.stage(shifted(box, corner))

    def read(box: Box) -> NDArray[Any] | None:
        try:
            voxels = volume.read(shifted(box, corner))
        except UnreadableChunkError as error:
            log.warning("skipping chunk %s, which cannot be read: %s", list(error.chunk), error.cause)
            stats.failures.append(error)
            report()
            return None
        stats.voxel_bytes += voxels.nbytes
        return voxels

    problem = ""
    try:
        target.fill(0, read, count, stage)
        if stats.failures:
            first = stats.failures[0]
            more = f" (and {len(stats.failures) - 1} more chunks)" if len(stats.failures) > 1 else ""
            problem = (
                f"Cannot read chunk {list(first.chunk)} of {first.volume}: {first.cause}{more}; restore it from its "
                "source and run the same command again"
            )
    except OutageError as error:
        problem = str(error)
    if problem:
        raise DataError(f"{problem}; {stats.done} of {stats.chunks} chunks are finished and kept in {target.path}")
    target.fill_coarser(count)


def _checked_box(request: CopyRequest, volume: Volume) -> Box:
    check_name(request.out)
    start, shape = request.start_zyx, volume.shape_zyx
    size = request.size_zyx or shape_of((start, shape))
    box = box_at(start, size)
    if not is_inside(box, shape):
        raise ConfigError(
            f"The box (start {list(start)}, size {list(size)}) is not inside {volume.name} of {format_sizes(shape)} "
            "voxels; change --start or --size"
        )
    check_levels(request.levels, size)
    return box


def _record(request: CopyRequest, box: Box, volume: Volume) -> dict[str, Any]:
    """The arguments that identify a copy, as plain JSON."""
    address = request.source.path
    return {
        "source": volume.source.display_address if volume.source.remote else str(Path(address).resolve()),
        "level": volume.spec.level,
        "select": list(request.source.select),
        "start_zyx": list(box[0]),
        "size_zyx": list(shape_of(box)),
        "levels": request.levels,
        "labels": request.labels,
        "source_metadata": metadata_hash(volume.array),
    }


def _cache_bytes(volume: Volume, box: Box) -> int:
    """Size of a disk cache for three layers of source chunks, each in several chunks of the copy; 0: none is needed."""
    aligned = all(lo % chunk == 0 for lo, chunk in zip(box[0], volume.chunk_zyx, strict=True))
    if aligned or not volume.source.remote:
        return 0
    depth, *rows = map(len, chunk_ranges(box, volume.chunk_zyx))
    chunk_bytes = math.prod(volume.chunk_zyx) * volume.dtype.itemsize + 2**14
    return 2**22 + min(depth, 3) * math.prod(rows) * chunk_bytes * 5 // 4
