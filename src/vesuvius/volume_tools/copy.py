"""Copies a box of a level of a volume, remote or not, to an OME-Zarr on disk; killed at any instant, it can be resumed.

Chunk i of the copy begins at voxel i * chunk of the box.  Each is read while the next ones are being fetched, and is
written whole or not at all (`partial.py`); what exists is skipped.
"""

from __future__ import annotations

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
from vesuvius.volume_tools.partial import PartialCopy, open_partial
from vesuvius.volume_tools.pyramid import Pyramid, check_levels, multiscale
from vesuvius.volume_tools.record import check_name, is_finished
from vesuvius.volumes.box import Box, box_at, chunk_ranges, is_inside, shape_of, shifted
from vesuvius.volumes.errors import OutageError, UnreadableChunkError
from vesuvius.volumes.format.metadata import metadata_hash
from vesuvius.volumes.geometry import VOXELS
from vesuvius.volumes.volume import Volume, open_volume

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CopyRequest:
    """What is copied where."""

    source: ArrayConfig
    out: Path  # a name that ends in .zarr
    start_zyx: Triple = (0, 0, 0)
    size_zyx: Triple | None = None  # None = to the end of the level
    levels: int = 1  # of the copy; those after the first are means of 2x2x2 voxels


@dataclass
class CopyFigures:
    """Progress of a copy, and in the end its report."""

    source_box: Box  # what is copied
    chunks: int  # of the copy, all levels
    before: int = 0  # chunks that earlier processes have written
    # written, air: chunks of this process; air is not stored
    written: int = 0
    air: int = 0
    voxel_bytes: int = 0  # of the finest level, that this process has read
    stored_bytes: int = 0  # what it has written
    fetched_bytes: int | None = None  # what came from a remote store; None for a source on a disk
    seconds: float = 0.0
    failures: list[UnreadableChunkError] = field(default_factory=list)  # one a chunk

    @property
    def done(self) -> int:
        """Chunks that are done."""
        return self.before + self.written + self.air

    def count(self, size: int) -> None:
        """A chunk of so many bytes is written; 0 = air."""
        self.stored_bytes += size
        self.written += size > 0
        self.air += size == 0


def copy_box(
    request: CopyRequest,
    store: StoreConfig = StoreConfig(),
    on_progress: Callable[[CopyFigures], None] = lambda figures: None,
) -> CopyFigures:
    """Copy a box, or resume its copy; a finished copy is left as it is.

    Args:
        on_progress: called after each chunk, from this thread.

    Raises:
        ConfigError: the box is not inside the level, or something else is at `out` or was begun there.
        DataError: the source cannot be opened, chunks could not be read (all others are copied then), or the store did
            not answer for `outage_minutes`.
        StorageError: the disk refuses or is full; what is done stays.
    """
    started = time.monotonic()
    volume = open_volume(request.source, store, nan="keep")
    try:
        box = _checked_box(request, volume)
        plan = Pyramid(shape_of(box), volume.chunk_zyx, request.levels, volume.dtype.itemsize)
        figures = CopyFigures(box, plan.chunk_count)
        record = _record(request, box, volume)
        if is_finished(request.out, record):
            figures.before = figures.chunks
            return figures
        cache_bytes = _cache_bytes(volume, box)
        with open_partial(request.out, record, plan, volume.dtype, volume.fill_value) as target:
            if cache_bytes:
                volume.close()
                cached = {"cache_dir": str(target.path / "cache"), "cache_gib": cache_bytes / 2**30}
                volume = open_volume(request.source, store.model_copy(update=cached), nan="keep")
            _fill(target, volume, figures, on_progress, started)
            target.publish(_multiscale_of(volume, plan, box, request.out))
    finally:
        volume.close()
    return figures


def _fill(
    target: PartialCopy,
    volume: Volume,
    figures: CopyFigures,
    on_progress: Callable[[CopyFigures], None],
    started: float,
) -> None:
    """Write all levels, and count."""
    corner = figures.source_box[0]
    figures.before = figures.chunks - sum(len(target.missing(level)) for level in range(target.plan.levels))

    def report() -> None:
        figures.seconds = time.monotonic() - started
        if volume.source.remote:
            figures.fetched_bytes = volume.source.figures.bytes_fetched
        on_progress(figures)

    def count(size: int) -> None:
        figures.count(size)
        report()

    def stage(boxes: Sequence[Box], number: int) -> None:
        for box in boxes[number : number + volume.source.config.requests]:
            volume.stage(shifted(box, corner))

    def read(box: Box) -> NDArray[Any] | None:
        try:
            voxels = volume.read(shifted(box, corner))
        except UnreadableChunkError as error:
            log.warning("chunk %s cannot be read and is skipped for now: %s", list(error.chunk), error.cause)
            figures.failures.append(error)
            report()
            return None
        figures.voxel_bytes += voxels.nbytes
        return voxels

    problem = ""
    try:
        target.fill(0, read, count, stage)
        if figures.failures:
            first = figures.failures[0]
            problem = (
                f"every chunk of the box must be readable; got {len(figures.failures)} that cannot be read, the first "
                f"chunk {list(first.chunk)} of {first.volume}: {first.cause}; restore the chunk, then run the same "
                "command again"
            )
    except OutageError as error:
        problem = str(error)
    if problem:
        raise DataError(f"{problem}; {figures.done} of {figures.chunks} chunks are done and stay in {target.path}")
    target.fill_coarser(count)


def _checked_box(request: CopyRequest, volume: Volume) -> Box:
    check_name(request.out)
    start, shape = request.start_zyx, volume.shape_zyx
    size = request.size_zyx or shape_of((start, shape))
    box = box_at(start, size)
    if not is_inside(box, shape):
        raise ConfigError(
            f"a box must lie inside the level; got start {list(start)} and size {list(size)} in {volume.name} of "
            f"{format_sizes(shape)} voxels; change --start or --size"
        )
    check_levels(request.levels, size)
    return box


def _record(request: CopyRequest, box: Box, volume: Volume) -> dict[str, Any]:
    """The arguments that a copy is resumed with, as plain JSON."""
    address = request.source.path
    return {
        "source": volume.source.shown if volume.source.remote else str(Path(address).resolve()),
        "level": request.source.level,
        "select": list(request.source.select),
        "start_zyx": list(box[0]),
        "size_zyx": list(shape_of(box)),
        "levels": request.levels,
        "source_metadata": metadata_hash(volume.array),
    }


def _cache_bytes(volume: Volume, box: Box) -> int:
    """Disk cache for the chunks of a remote source that several chunks of the copy need: three layers of them.

    None are where the box begins at a chunk.
    """
    aligned = all(lo % chunk == 0 for lo, chunk in zip(box[0], volume.chunk_zyx, strict=True))
    if aligned or not volume.source.remote:
        return 0
    depth, *rows = map(len, chunk_ranges(box, volume.chunk_zyx))
    chunk_bytes = math.prod(volume.chunk_zyx) * volume.dtype.itemsize + 2**14
    return 2**22 + min(depth, 3) * math.prod(rows) * chunk_bytes * 5 // 4


def _multiscale_of(volume: Volume, plan: Pyramid, box: Box, out: Path) -> dict[str, Any]:
    """Metadata of the copy.  Its voxels keep their place: the box's offset is a translation, in the units of the
    source; in voxels where the source has no scale.  As in the published scrolls, all levels begin at one corner."""
    geometry = volume.geometry or VOXELS
    offset = zip(geometry.translation_zyx, geometry.scale_zyx, box[0], strict=True)
    corner = [t + size * lo for t, size, lo in offset]
    return multiscale(out.stem, plan.levels, geometry.scale_zyx, geometry.units_zyx, corner)
