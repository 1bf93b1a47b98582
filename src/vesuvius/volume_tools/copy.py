"""A box of a level of a volume, remote or not, becomes an OME-Zarr on disk; killed at any instant, it goes on.

The box is read region by region (`copy_plan.py`) while the next ones are being fetched; each chunk of the copy is
written whole or not at all (`partial.py`).  Chunks of a remote source that are needed more than once wait in a disk
cache in between.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray

from vesuvius.config import ArrayConfig, StoreConfig, Triple
from vesuvius.errors import ConfigError, DataError, StorageError
from vesuvius.plan.occupancy import read_sidecar
from vesuvius.volume_tools.copy_plan import CopyPlan
from vesuvius.volume_tools.partial import PartialVolume, check_record, finished_record, is_begun, partial_path
from vesuvius.volume_tools.pyramid import halve
from vesuvius.volumes.box import Box, shape_of, slices
from vesuvius.volumes.errors import OutageError, UnreadableChunkError
from vesuvius.volumes.geometry import Geometry
from vesuvius.volumes.volume import Volume, metadata_hash, open_volume

log = logging.getLogger(__name__)

_REGIONS_AHEAD = 2
_WRITERS = min(4, os.cpu_count() or 1)
_VOXELS = Geometry((1.0, 1.0, 1.0), (0.0, 0.0, 0.0), (None, None, None))


@dataclass(frozen=True)
class CopyRequest:
    """What is copied where.

    Attributes:
        out: a name that ends in .zarr.
        size_zyx: None = to the end of the level.
        levels: of the copy; those after the first are means of 2x2x2 voxels.
        check_space: refuse to begin where the disk has less room than all voxels take without compression.
    """

    source: ArrayConfig
    out: Path
    start_zyx: Triple = (0, 0, 0)
    size_zyx: Triple | None = None
    levels: int = 1
    check_space: bool = True


@dataclass
class CopyFigures:
    """How far a copy is, and in the end the report of it.

    Attributes:
        source_box: what is copied.
        chunks: of the copy, all levels.
        before: of these, done by earlier processes.
        written, air, failed: of these, done by this one; air is not stored.
        raw_bytes: voxels of the finest level that this process has read.
        stored_bytes: what it wrote.
        fetched_bytes: what came from a remote store; None for a source on a disk.
    """

    source_box: Box
    chunks: int
    before: int = 0
    written: int = 0
    air: int = 0
    failed: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    fetched_bytes: int | None = None
    seconds: float = 0.0
    failures: list[UnreadableChunkError] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Chunks that are done."""
        return self.before + self.written + self.air


class UnfinishedCopyError(DataError):
    """Some chunks could not be read; what could be is copied.

    Attributes:
        figures: how far the copy is.
    """

    def __init__(self, message: str, figures: CopyFigures) -> None:
        super().__init__(message)
        self.figures = figures


def copy_box(
    request: CopyRequest, store: StoreConfig = StoreConfig(), on_progress: Callable[[CopyFigures], None] | None = None
) -> CopyFigures:
    """Copy a box, or go on with a copy that was begun; nothing is done where it is there already.

    Args:
        on_progress: called after each chunk, from this thread.

    Raises:
        ConfigError: the box is not inside the level, or something else is at `out` or was begun there.
        UnfinishedCopyError: chunks could not be read, or the store did not answer for `outage_minutes`.
        DataError: the source cannot be opened.
        StorageError: the disk refuses or is too small.
    """
    started = time.monotonic()
    volume = open_volume(request.source, store)
    try:
        box = _checked_box(request, volume)
        plan = CopyPlan(box, volume.chunk_zyx, request.levels, volume.dtype.itemsize, store.requests)
        figures = CopyFigures(box, plan.chunk_count)
        record = _record(request, box, volume)
        if os.path.lexists(request.out):
            check_record(request.out, finished_record(request.out), record)
            shutil.rmtree(partial_path(request.out), ignore_errors=True)
            figures.before = figures.chunks
            return figures
        cache_bytes = plan.cache_bytes if volume.source.remote else 0
        if request.check_space and not is_begun(request.out):
            _check_space(request.out, volume, plan, cache_bytes)
        with PartialVolume(request.out, record, volume.dtype, volume.chunk_zyx, volume.fill_value) as target:
            if cache_bytes:
                volume.close()
                cached = {"cache_dir": str(target.cache), "cache_gib": cache_bytes / 2**30}
                volume = open_volume(request.source, store.model_copy(update=cached))
            _Copier(volume, plan, target, figures, on_progress or (lambda figures: None), started).run(request.out)
    finally:
        volume.close()
    return figures


class _Copier:
    """Fills a partial volume, and counts."""

    def __init__(
        self,
        volume: Volume,
        plan: CopyPlan,
        target: PartialVolume,
        figures: CopyFigures,
        on_progress: Callable[[CopyFigures], None],
        started: float,
    ) -> None:
        self._volume, self._plan, self._target, self._figures = volume, plan, target, figures
        self._on_progress, self._started = on_progress, started

    def run(self, out: Path) -> None:
        """All levels, then the metadata."""
        with ThreadPoolExecutor(_WRITERS, thread_name_prefix="write") as self._writers:
            try:
                self._copy_finest()
            except OutageError as error:
                raise UnfinishedCopyError(f"{error}; {self._so_far(out)}", self._figures) from error
            if self._figures.failures:
                raise self._unfinished(out)
            finer = self._target.finish_level(0, self._plan.shapes[0])
            for level, shape in enumerate(self._plan.shapes[1:], 1):
                self._build(level, finer)
                finer = self._target.finish_level(level, shape)
        self._target.publish(_multiscale_of(self._volume, self._plan, out))
        self._tell()

    def _copy_finest(self) -> None:
        """Read and write box after box, while the next ones are being fetched."""
        reads = self._reads()
        waiting: deque[tuple[Box, list[Triple]]] = deque()
        while True:
            for read in itertools.islice(reads, _REGIONS_AHEAD + 1 - len(waiting)):
                self._volume.stage(self._plan.in_source(read[0]))
                waiting.append(read)
            if not waiting:
                return
            self._copy(*waiting.popleft())

    def _reads(self) -> Iterator[tuple[Box, list[Triple]]]:
        """Boxes of the copy that are yet to be read, each with its chunks: whole regions, and single chunks of those
        that were being written when an earlier process ended."""
        for chunks in self._plan.regions():
            missing = [chunk for chunk in chunks if self._is_missing(0, chunk)]
            if len(missing) == len(chunks):
                yield (self._plan.box_of(0, chunks[0])[0], self._plan.box_of(0, chunks[-1])[1]), chunks
            else:
                yield from ((self._plan.box_of(0, chunk), [chunk]) for chunk in missing)

    def _copy(self, box: Box, chunks: list[Triple]) -> None:
        """Read one box and write its chunks; if it cannot be read, chunk by chunk."""
        try:
            voxels = self._volume.read(self._plan.in_source(box))
        except UnreadableChunkError as error:
            if len(chunks) == 1:
                self._fail(error)
                return
            for chunk in chunks:
                self._copy(self._plan.box_of(0, chunk), [chunk])
            return
        self._figures.raw_bytes += voxels.nbytes
        self._write(0, chunks, lambda chunk: voxels[slices(self._plan.box_of(0, chunk), box[0])])

    def _build(self, level: int, finer: zarr.Array[Any]) -> None:
        """Write a coarser level from the one before."""

        def halved(chunk: Triple) -> NDArray[Any]:
            z, y, x = (slice(2 * lo, 2 * hi) for lo, hi in zip(*self._plan.box_of(level, chunk), strict=True))
            return halve(np.asarray(finer[z, y, x]))

        missing = (chunk for chunk in self._plan.chunks(level) if self._is_missing(level, chunk))
        while batch := list(itertools.islice(missing, _WRITERS)):
            self._write(level, batch, halved)

    def _write(self, level: int, chunks: Sequence[Triple], voxels_of: Callable[[Triple], NDArray[Any]]) -> None:
        """Have chunks made and written on several threads, and count them."""
        sizes = self._writers.map(lambda chunk: self._target.write(level, chunk, voxels_of(chunk)), chunks)
        air = []
        for chunk, size in zip(chunks, sizes, strict=True):
            self._figures.stored_bytes += size
            if size:
                self._figures.written += 1
            else:
                self._figures.air += 1
                air.append(chunk)
            self._tell()
        self._target.note_air(level, air)

    def _is_missing(self, level: int, chunk: Triple) -> bool:
        """Whether a chunk is yet to be written; counts it if it is not."""
        missing = self._target.stored_bytes(level, chunk) is None
        self._figures.before += not missing
        return missing

    def _fail(self, error: UnreadableChunkError) -> None:
        log.warning("chunk %s cannot be read and is left out for now: %s", list(error.chunk), error.cause)
        self._figures.failures.append(error)
        self._figures.failed += 1
        self._tell()

    def _unfinished(self, out: Path) -> UnfinishedCopyError:
        figures = self._figures
        first = figures.failures[0]
        return UnfinishedCopyError(
            f"every chunk of the box must be readable; got {figures.failed} that cannot be read, the first chunk "
            f"{list(first.chunk)} of {first.volume}: {first.cause}; restore the chunk, then give the same command "
            f"again: {self._so_far(out)}",
            figures,
        )

    def _so_far(self, out: Path) -> str:
        return f"{self._figures.done} of {self._figures.chunks} chunks are done and stay in {partial_path(out)}"

    def _tell(self) -> None:
        self._figures.seconds = time.monotonic() - self._started
        if self._volume.source.remote:
            self._figures.fetched_bytes = self._volume.figures.bytes_fetched
        self._on_progress(self._figures)


def _checked_box(request: CopyRequest, volume: Volume) -> Box:
    if request.out.suffix != ".zarr":
        raise ConfigError(f"the name of a volume must end in .zarr; got {request.out}; add the ending")
    start, shape = request.start_zyx, volume.shape_zyx
    size = request.size_zyx or tuple(n - lo for n, lo in zip(shape, start, strict=True))
    z, y, x = (lo + n for lo, n in zip(start, size, strict=True))
    if min(size) < 1 or any(hi > n for hi, n in zip((z, y, x), shape, strict=True)):
        raise ConfigError(
            f"a box must lie inside the level; got start {_commas(start)} and size {_commas(size)} in {volume.name} of "
            f"{_commas(shape)} voxels; change --start or --size"
        )
    most = (max(size) - 1).bit_length() + 1
    if not 1 <= request.levels <= most:
        raise ConfigError(
            f"a copy has at least 1 level, and at most {most} where the last one is to be a single voxel; got "
            f"{request.levels} for a box of {_commas(size)}; change --levels"
        )
    return start, (z, y, x)


def _record(request: CopyRequest, box: Box, volume: Volume) -> dict[str, Any]:
    """The arguments that must stay the same, as plain JSON."""
    address = request.source.path
    return {
        "source": address if volume.source.remote else str(Path(address).resolve()),
        "level": request.source.level,
        "select": list(request.source.select),
        "start_zyx": list(box[0]),
        "size_zyx": list(shape_of(box)),
        "levels": request.levels,
        "source_metadata": metadata_hash(volume.array),
    }


def _check_space(out: Path, volume: Volume, plan: CopyPlan, cache_bytes: int) -> None:
    """Refuse a copy that may not fit.  How well it compresses is not known before."""
    need = int(plan.raw_bytes * _stored_share(volume, plan)) + cache_bytes
    free = shutil.disk_usage(next(parent for parent in out.absolute().parents if parent.exists())).free
    if need > free:
        raise StorageError(
            f"the disk must have room for the voxels of the box without compression; got {need / 2**30:.2f} GiB needed "
            f"and {free / 2**30:.2f} GiB free for {out}; free space, copy less, or begin with --no-space-check where "
            "much of it is air"
        )


def _stored_share(volume: Volume, plan: CopyPlan) -> float:
    """Share of the box's chunks that are stored, where a sidecar tells; else 1."""
    stored = read_sidecar(volume)
    if stored is None or stored.shape != volume.grid.counts_zyx:
        return 1.0
    ends = zip(*plan.source_box, plan.chunk_zyx, strict=True)
    return float(np.mean(stored[tuple(slice(lo // c, -(-hi // c)) for lo, hi, c in ends)]))


def _multiscale_of(volume: Volume, plan: CopyPlan, out: Path) -> dict[str, Any]:
    """OME-Zarr 0.4 metadata of the copy.  Its voxels keep their place: the box's offset is a translation, in the units
    of the source; in voxels where that has no scale.  As in the published scrolls, all levels begin at one corner."""
    geometry = volume.geometry or _VOXELS
    offset = zip(geometry.translation_zyx, geometry.scale_zyx, plan.source_box[0], strict=True)
    corner = [t + size * lo for t, size, lo in offset]
    axes = [
        {"name": name, "type": "space"} | ({"unit": unit} if unit else {})
        for name, unit in zip("zyx", geometry.units_zyx, strict=True)
    ]
    datasets = [
        {
            "path": str(level),
            "coordinateTransformations": [
                {"type": "scale", "scale": [size * 2**level for size in geometry.scale_zyx]},
                {"type": "translation", "translation": corner},
            ],
        }
        for level in range(plan.levels)
    ]
    return {"version": "0.4", "name": out.stem, "axes": axes, "datasets": datasets}


def _commas(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))
