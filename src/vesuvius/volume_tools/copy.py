"""Copies a box of a level of a volume, remote or not, to an OME-Zarr on disk; killed at any instant, it can be resumed.

Chunk i of the copy begins at voxel i * chunk of the box.  Each is read while the next ones are being fetched, and is
written whole or not at all (`partial.py`); what exists is skipped.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, StoreConfig, Triple
from vesuvius.errors import ConfigError, DataError, StorageError
from vesuvius.runlog.files import free_disk_bytes
from vesuvius.runlog.units import format_sizes
from vesuvius.volume_tools.partial import (
    PartialCopy,
    check_record,
    finished_record,
    is_begun,
    open_partial,
    partial_path,
)
from vesuvius.volume_tools.pyramid import Pyramid, multiscale
from vesuvius.volumes.box import Box, box_at, chunk_ranges, is_inside, shape_of, shifted, triple
from vesuvius.volumes.errors import OutageError, UnreadableChunkError
from vesuvius.volumes.geometry import Geometry
from vesuvius.volumes.volume import Volume, metadata_hash, open_volume

log = logging.getLogger(__name__)

_WRITERS = min(4, os.cpu_count() or 1)
_VOXELS = Geometry((1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (None, None, None))


@dataclass(frozen=True)
class CopyRequest:
    """What is copied where."""

    source: ArrayConfig
    out: Path  # a name that ends in .zarr
    start_zyx: Triple = (0, 0, 0)
    size_zyx: Triple | None = None  # None = to the end of the level
    levels: int = 1  # of the copy; those after the first are means of 2x2x2 voxels
    check_space: bool = True  # refuse to begin where the voxels without compression exceed the free space of the disk


@dataclass
class CopyFigures:
    """Progress of a copy, and in the end its report."""

    source_box: Box  # what is copied
    chunks: int  # of the copy, all levels
    before: int = 0  # chunks that earlier processes have written
    # written, air: chunks of this process; air is not stored
    written: int = 0
    air: int = 0
    raw_bytes: int = 0  # voxels of the finest level that this process has read
    stored_bytes: int = 0  # what it has written
    fetched_bytes: int | None = None  # what came from a remote store; None for a source on a disk
    seconds: float = 0.0
    failures: list[UnreadableChunkError] = field(default_factory=list)  # one a chunk

    @property
    def done(self) -> int:
        """Chunks that are done."""
        return self.before + self.written + self.air


class UnfinishedCopyError(DataError):
    """Some chunks could not be read; all others are copied.

    Attributes:
        figures: how far the copy is.
    """

    def __init__(self, message: str, figures: CopyFigures) -> None:
        super().__init__(message)
        self.figures = figures


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
        UnfinishedCopyError: chunks could not be read, or the store did not answer for `outage_minutes`.
        DataError: the source cannot be opened.
        StorageError: the disk refuses or is too small.
    """
    started = time.monotonic()
    volume = open_volume(request.source, store, nan="keep")
    try:
        box = _checked_box(request, volume)
        plan = Pyramid(shape_of(box), volume.chunk_zyx, request.levels, volume.dtype.itemsize)
        figures = CopyFigures(box, plan.chunk_count)
        record = _record(request, box, volume)
        if os.path.lexists(request.out):
            check_record(request.out, finished_record(request.out), record)
            shutil.rmtree(partial_path(request.out), ignore_errors=True)
            figures.before = figures.chunks
            return figures
        cache_bytes = _cache_bytes(volume, box)
        if request.check_space and not is_begun(request.out):
            _check_space(request.out, plan.raw_bytes + cache_bytes)
        with open_partial(request.out, record, plan, volume.dtype, volume.fill_value) as target:
            if cache_bytes:
                volume.close()
                cached = {"cache_dir": str(target.path / "cache"), "cache_gib": cache_bytes / 2**30}
                volume = open_volume(request.source, store.model_copy(update=cached), nan="keep")
            _Copier(volume, plan, target, figures, on_progress, started).run(request.out)
    finally:
        volume.close()
    return figures


@dataclass
class _Copier:
    """Fills a partial copy, and counts."""

    volume: Volume
    plan: Pyramid
    target: PartialCopy
    figures: CopyFigures
    on_progress: Callable[[CopyFigures], None]
    started: float

    def run(self, out: Path) -> None:
        """Write all levels, then the metadata."""
        todo = [self._missing(level) for level in range(self.plan.levels)]
        self.figures.before = self.figures.chunks - sum(map(len, todo))
        with ThreadPoolExecutor(_WRITERS, thread_name_prefix="write") as writers:
            try:
                self._copy_finest(todo[0], writers)
            except OutageError as error:
                raise UnfinishedCopyError(f"{error}; {self._so_far(out)}", self.figures) from error
            if self.figures.failures:
                raise self._unfinished(out)
            finer = self.target.finish_level(0)
            for level, chunks in enumerate(todo[1:], 1):
                self._downsample(level, chunks, finer, writers)
                finer = self.target.finish_level(level)
        self.target.publish(_multiscale_of(self.volume, self.plan, self.figures.source_box, out))
        self._report()

    def _missing(self, level: int) -> list[Triple]:
        places = map(triple, np.ndindex(self.plan.counts[level]))
        return [chunk for chunk in places if not self.target.is_done(level, chunk)]

    def _copy_finest(self, chunks: Sequence[Triple], writers: ThreadPoolExecutor) -> None:
        """Read chunk after chunk, while the next ones are being fetched and the last ones written."""
        boxes = [shifted(self.plan.box_of(0, chunk), self.figures.source_box[0]) for chunk in chunks]
        writing = deque[Future[int]]()
        for number, (chunk, box) in enumerate(zip(chunks, boxes, strict=True)):
            for ahead in boxes[number : number + self.volume.source.config.requests]:
                self.volume.stage(ahead)
            try:
                voxels = self.volume.read(box)
            except UnreadableChunkError as error:
                log.warning("chunk %s cannot be read and is skipped for now: %s", list(error.chunk), error.cause)
                self.figures.failures.append(error)
                self._report()
                continue
            self.figures.raw_bytes += voxels.nbytes
            writing.append(writers.submit(self.target.write, 0, chunk, voxels))
            if len(writing) > _WRITERS:
                self._count(writing.popleft().result())
        for written in writing:
            self._count(written.result())

    def _downsample(
        self, level: int, chunks: Sequence[Triple], finer: zarr.Array[Any], writers: ThreadPoolExecutor
    ) -> None:
        """Write a coarser level from the one before."""

        def write(chunk: Triple) -> int:
            voxels: NDArray[Any] = self.target.halved(level, chunk, finer)
            return self.target.write(level, chunk, voxels)

        for first in range(0, len(chunks), _WRITERS):
            for size in writers.map(write, chunks[first : first + _WRITERS]):
                self._count(size)

    def _count(self, size: int) -> None:
        self.figures.stored_bytes += size
        self.figures.written += size > 0
        self.figures.air += size == 0
        self._report()

    def _unfinished(self, out: Path) -> UnfinishedCopyError:
        first = self.figures.failures[0]
        return UnfinishedCopyError(
            f"every chunk of the box must be readable; got {len(self.figures.failures)} that cannot be read, the first "
            f"chunk {list(first.chunk)} of {first.volume}: {first.cause}; restore the chunk, then run the same "
            f"command again: {self._so_far(out)}",
            self.figures,
        )

    def _so_far(self, out: Path) -> str:
        return f"{self.figures.done} of {self.figures.chunks} chunks are done and stay in {partial_path(out)}"

    def _report(self) -> None:
        self.figures.seconds = time.monotonic() - self.started
        if self.volume.source.remote:
            self.figures.fetched_bytes = self.volume.source.figures.bytes_fetched
        self.on_progress(self.figures)


def _checked_box(request: CopyRequest, volume: Volume) -> Box:
    if request.out.suffix != ".zarr":
        raise ConfigError(f"the name of a volume must end in .zarr; got {request.out}; add the ending")
    start, shape = request.start_zyx, volume.shape_zyx
    size = request.size_zyx or shape_of((start, shape))
    box = box_at(start, size)
    if not is_inside(box, shape):
        raise ConfigError(
            f"a box must lie inside the level; got start {list(start)} and size {list(size)} in {volume.name} of "
            f"{format_sizes(shape)} voxels; change --start or --size"
        )
    most = (max(size) - 1).bit_length() + 1
    if not 1 <= request.levels <= most:
        raise ConfigError(
            f"a copy has at least 1 level, and at most {most}, where the last one is a single voxel; got "
            f"{request.levels} for a box of {format_sizes(size)}; change --levels"
        )
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


def _check_space(out: Path, need: int) -> None:
    """Raises StorageError where the copy may not fit; how well it compresses is not known in advance."""
    free = free_disk_bytes(out.parent)
    if need > free:
        raise StorageError(
            f"the disk must hold the voxels of the box without compression; got {need / 2**30:.2f} GiB needed "
            f"and {free / 2**30:.2f} GiB free for {out}; free space, copy less, or start with --no-space-check "
            "if much of it is air"
        )


def _multiscale_of(volume: Volume, plan: Pyramid, box: Box, out: Path) -> dict[str, Any]:
    """Metadata of the copy.  Its voxels keep their place: the box's offset is a translation, in the units of the
    source; in voxels where the source has no scale.  As in the published scrolls, all levels begin at one corner."""
    geometry = volume.geometry or _VOXELS
    offset = zip(geometry.translation_zyx, geometry.scale_zyx, box[0], strict=True)
    corner = [t + size * lo for t, size, lo in offset]
    return multiscale(out.stem, plan.levels, geometry.scale_zyx, geometry.units_zyx, corner)
