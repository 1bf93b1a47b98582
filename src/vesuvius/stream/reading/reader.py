"""Reads each region of a task once: in Ray actors, and on threads of this process."""

import math
import os
import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from vesuvius.config import DataConfig, Triple, VolumeConfig
from vesuvius.errors import DataError
from vesuvius.plan.plan import Plan, Task, Visit
from vesuvius.stream.reading.quarantine import DamagedBox, quarantine_record
from vesuvius.stream.reading.reader_stats import BlockReport, ReaderTotals
from vesuvius.stream.reading.reading_log import crashed_chunks, node_name, open_reading_log
from vesuvius.volumes.alignment import AnyAlignment, align
from vesuvius.volumes.box import Box, chunk_ranges, format_box, intersects, shape_of, slices
from vesuvius.volumes.context import ContextAlignment, with_context
from vesuvius.volumes.errors import Outage, UnreadableChunkError
from vesuvius.volumes.volume import Volume, open_volume
from vesuvius.volumes.voxels import check_labels

Block = NDArray[np.uint8]
"""One region as it travels from a reader to the trainer: a head of `HEAD_BYTES` (its visit and the reader's report,
pickled), then the voxels of each array.  All of a job have the same length, as Ray would merge short ones."""

_RegionKey = tuple[int, Box]  # index of the volume, and region

HEAD_BYTES = 2**16
# Limit on compressed chunks fetched ahead of the region being decoded, in decoded bytes.
STAGED_BYTES_MAX = 64 * 2**20
_SUBSTITUTES_TRIED = 100
_PUBLISH_S = 1.0
_FETCHED = ("bytes_fetched", "requests", "retries", "cache_hits", "cache_misses")


@dataclass(frozen=True)
class ReaderJob:
    """Everything that a reader needs to know.  Picklable."""

    plan: Plan
    data: DataConfig
    # of each array: the channels of the image, then the conditions
    dtypes: tuple[np.dtype[Any], ...]
    channels: int = 1
    # of each volume, where the windows of its condition lie; empty without context
    contexts: tuple[ContextAlignment, ...] = ()
    # known damage; regions that touch it are replaced without a read
    quarantined: frozenset[DamagedBox] = frozenset()
    rank: int = 0
    world_size: int = 1
    # folder on each machine for the reading logs of Ray readers; None = a temporary one
    reading_log_dir: str | None = None

    @property
    def condition_dtype(self) -> str | None:
        """Of the first condition; None without one."""
        return self.dtypes[self.channels].name if len(self.dtypes) > self.channels else None

    def batch_layout(self, batch_size: int) -> list[tuple[tuple[int, int, int, int], np.dtype[Any]]]:
        """Return shape (B, Z, Y, X) and dtype of each array of a batch."""
        return [((batch_size, *self.plan.patch_zyx), dtype) for dtype in self.dtypes]

    @property
    def patch_bytes(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.batch_layout(1))

    @cached_property
    def array_bytes_max(self) -> tuple[int, ...]:
        """Bytes of each array of a block: of the largest region."""
        voxels = [self.plan.region_voxels_max] * len(self.dtypes)
        if self.contexts:
            regions = (volume.cells.region_zyx(self.plan.patch_zyx) for volume in self.plan.volumes)
            voxels[self.channels] = max(map(self.contexts[0].cover_voxels_max, regions))
        return tuple(aligned(n * dtype.itemsize) for n, dtype in zip(voxels, self.dtypes, strict=True))

    @property
    def block_bytes(self) -> int:
        return HEAD_BYTES + sum(self.array_bytes_max)

    def boxes_of(self, volume_index: int, box: Box) -> list[Box]:
        """Return the box of each array that is read for a box of a volume: the same one, except for a context."""
        boxes = [box] * len(self.dtypes)
        if self.contexts:
            boxes[self.channels] = self.contexts[volume_index].cover(box)
        return boxes

    def cut(self, volume_index: int, voxels: list[NDArray[Any]], region: Box, box: Box) -> list[NDArray[Any]]:
        """Return views of a patch, the box, in the arrays of a region."""
        boxes = [box] * len(voxels)
        if self.contexts:
            boxes[self.channels] = self.contexts[volume_index].window(box[0])
        places = zip(voxels, boxes, self.boxes_of(volume_index, region), strict=True)
        return [array[slices(part, whole[0])] for array, part, whole in places]

    def tasks(self, first: int, stop: int) -> Iterator[Task]:
        """Yield the tasks, in reading order, for this rank's samples first <= i < stop."""
        return self.plan.tasks(first, stop, self.rank, self.world_size)


@dataclass(frozen=True)
class Region:
    visit: Visit
    voxels: list[NDArray[Any]]  # (Z, Y, X) of each array
    report: BlockReport | None = None  # None if nothing was read
    box: Box | None = None  # of the voxels, if it is not the region's


def region_in(block: Block, job: ReaderJob) -> Region:
    """Return the region in a block, as views of it."""
    visit, report = pickle.loads(block[:HEAD_BYTES].data)
    return Region(visit, voxels_in(block, job, visit.volume, visit.region), report)


def voxels_in(block: Block, job: ReaderJob, volume_index: int, region: Box) -> list[NDArray[Any]]:
    """Return views of a block: the region (Z, Y, X) of each array."""
    views, offset = [], HEAD_BYTES
    for dtype, box, reserved in zip(job.dtypes, job.boxes_of(volume_index, region), job.array_bytes_max, strict=True):
        size = math.prod(shape_of(box)) * dtype.itemsize
        views.append(block[offset : offset + size].view(dtype).reshape(shape_of(box)))
        offset += reserved
    return views


class Reader:
    """Opens the volumes once, then turns tasks into blocks.

    The `ring` buffers are reused in turn: decoding into fresh memory takes twice as long.  `actor` is the id of the Ray
    actor, '' without Ray.  For a single thread.
    """

    def __init__(self, job: ReaderJob, ring: int, actor: str = "") -> None:
        self._job = job
        self._ring = [np.empty(job.block_bytes, np.uint8) for _ in range(ring)]
        self._ring_index = 0
        self._actor, self._began = actor, time.time()
        self._arrays = [_open_aligned(number, job) for number in range(len(job.data.volumes))]
        self._opened = [volume for arrays in self._arrays for volume, _ in arrays]
        self._damaged = set(job.quarantined)
        self._staged: list[_RegionKey] = []
        self._latest = 0  # index of the volume that was read last
        self._last_cause = "all of them touch known damage"
        self._new_damage: list[dict[str, Any]] = []  # since the last block
        self._blocks, self._decode_s, self._bytes_read = 0, 0.0, 0
        self._reported = self._totals()
        self._log_dir = Path(job.reading_log_dir) if job.reading_log_dir else None
        self._crashed: dict[tuple[str | None, Triple | None], str] = {}
        self._log = open_reading_log(self._log_dir, actor) if self._log_dir and actor else None
        self._closed = threading.Event()
        if self._log:
            threading.Thread(target=self._log_outages, name="outages", daemon=True).start()

    def blocks(self, task: Task, ahead: Task = ()) -> Iterator[Block]:
        """Yield the regions of a task's slots, once each; valid for one round of the ring.

        The blocks depend only on the task.  Meanwhile the first chunks of `ahead`, the task that this worker will
        probably get next, are fetched from remote stores.  Raises DataError: a chunk is missing that must exist, or no
        region can replace an unreadable one.
        """
        plan = self._job.plan
        if self._log_dir is not None:  # other readers may have crashed meanwhile
            self._crashed = crashed_chunks(self._log_dir)
        visits, later = ([plan.visit(slot) for slot in some] for some in (task, ahead))
        queue = [(visit.volume, visit.region) for visit in (*visits, *later)]
        if any(key not in queue for key in self._staged):  # not the expected task
            for volume in self._opened:
                volume.unstage()
            self._staged.clear()
        for position, visit in enumerate(visits):
            self._stage(queue[position:])
            self._ring_index = (self._ring_index + 1) % len(self._ring)
            head = pickle.dumps((self._fill(visit), self.report()))
            assert len(head) <= HEAD_BYTES, f"head of {len(head)} bytes exceeds {HEAD_BYTES}"
            self._block[: len(head)] = np.frombuffer(head, np.uint8)
            yield self._block
        self._stage(queue[len(visits) :])

    @property
    def outages(self) -> list[Outage]:
        return [outage for volume in self._opened if (outage := volume.source.outage) is not None]

    def is_damaged(self, volume_index: int, box: Box) -> bool:
        return any(index == volume_index and intersects(damaged, box) for index, damaged in self._damaged)

    def close(self) -> None:
        """Stop the fetching threads."""
        self._closed.set()
        for volume in self._opened:
            volume.close()

    @property
    def _block(self) -> Block:
        return self._ring[self._ring_index]

    def _stage(self, queue: list[_RegionKey]) -> None:
        """Start fetching the chunks of the next regions, up to the limit."""
        staged_bytes = 0
        for key in queue:
            staged_bytes += math.prod(shape_of(key[1])) * self._job.dtypes[0].itemsize
            if staged_bytes > STAGED_BYTES_MAX and key is not queue[0]:
                return
            if key not in self._staged and not self.is_damaged(*key):
                self._staged.append(key)
                for volume, alignment in self._arrays[key[0]]:
                    volume.stage(alignment.array_box(key[1]))

    def _fill(self, visit: Visit) -> Visit:
        """Read the region of a visit, or a substitute, into the block.  Returns the visit that was read.

        Raises DataError: no substitute can be read.
        """
        for attempt in range(_SUBSTITUTES_TRIED + 1):
            candidate = self._job.plan.visit(visit.slot, attempt) if attempt else visit
            if self._try_region((candidate.volume, candidate.region)):
                return candidate
        raise DataError(
            f"Neither region {format_box(visit.region)} of volume {self._arrays[visit.volume][0][0].name} nor any of "
            f"{_SUBSTITUTES_TRIED} substitutes can be read; last cause: {self._last_cause}; restore the volume "
            "(`vesuvius volume verify` lists the damage)"
        )

    def _try_region(self, key: _RegionKey) -> bool:
        """Decode a region into the block; if it is damaged, quarantine the damage and return False."""
        if key in self._staged:
            self._staged.remove(key)
        volume_index, box = key
        if volume_index != self._latest:
            for volume, _ in self._arrays[self._latest]:  # each has threads, and there may be hundreds
                volume.source.rest()
        self._latest = volume_index
        try:
            if self.is_damaged(volume_index, box):
                return False
            self.read(volume_index, box, voxels_in(self._block, self._job, volume_index, box))
        except UnreadableChunkError as error:
            self._damaged.add((volume_index, error.box))
            self._last_cause = f"chunk {list(error.chunk)} of {error.volume}: {error.cause}"
            self._new_damage.append(quarantine_record(volume_index, error))
            return False
        finally:  # drops the chunks fetched for what was not read
            for volume, alignment in self._arrays[volume_index]:
                volume.release(alignment.array_box(box))
        return True

    def read(self, volume_index: int, box: Box, out: list[NDArray[Any]]) -> None:
        """Read a box of each array of a volume into arrays (Z, Y, X) of the shapes of `boxes_of`.

        Raises UnreadableChunkError: a chunk is damaged; DataError: one is missing that must exist.
        """
        started = time.perf_counter()
        try:
            for position, ((volume, alignment), voxels) in enumerate(zip(self._arrays[volume_index], out, strict=True)):
                alignment.read(box, partial(volume.read, before=partial(self._before, volume, box)), voxels)
                if position == self._job.channels and self._job.data.class_values:
                    check_labels(voxels, self._job.data.class_values, volume.name, box)
                self._bytes_read += _decoded_bytes(volume, alignment.array_box(box))
        finally:
            self._decode_s += time.perf_counter() - started
            if self._log is not None:
                self._log.chunk(None, None)

    def _before(self, volume: Volume, box: Box, chunk: Triple) -> None:
        """Log the chunk that is decoded next.  Raises UnreadableChunkError for one that crashed two readers."""
        if (crash := self._crashed.get((volume.name, chunk))) is not None:
            cause = f"crashed two workers, the last with {crash}"
            raise UnreadableChunkError(volume.name, box, chunk, volume.grid.box_of(chunk), cause)
        if self._log is not None:
            self._log.chunk(volume.name, chunk)

    def report(self) -> BlockReport:
        self._blocks += 1
        before, self._reported = self._reported, self._totals()
        damage, self._new_damage = self._new_damage, []
        memory = psutil.Process().memory_info()
        return BlockReport(
            pid=os.getpid(),
            node=node_name() if self._actor else "",
            actor=self._actor,
            began=self._began,
            rss_anon_bytes=memory.rss - memory.shared,
            done=self._reported.plus(before, sign=-1),
            quarantined=damage,
            nonfinite=[bad for volume in self._opened if (bad := volume.nonfinite)],
        )

    def _totals(self) -> ReaderTotals:
        fetched = [volume.source.stats for volume in self._opened]
        waited_s = sum(volume.wait_s for volume in self._opened)
        return ReaderTotals(
            blocks=self._blocks,
            read_s=waited_s if any(volume.source.remote for volume in self._opened) else None,
            decode_s=self._decode_s - waited_s,
            bytes_read=self._bytes_read,
            **{name: sum(getattr(stats, name) for stats in fetched) for name in _FETCHED},
        )

    def _log_outages(self) -> None:
        """Log the oldest outage, on its own thread because the reading thread waits during one."""
        while self._log is not None and not self._closed.wait(_PUBLISH_S):
            self._log.outage(min(self.outages, key=lambda outage: outage.since, default=None))


def open_arrays(spec: VolumeConfig, data: DataConfig, reopened: bool = False) -> tuple[Volume, ...]:
    """Open the channels of a volume and its conditions; `reopened` and errors as in `open_volume`."""
    arrays = [*((each, data.nan) for each in spec.images), *((each, data.condition_nan) for each in spec.labels)]
    return tuple(open_volume(array, data.store, data.missing_chunk, nan, reopened) for array, nan in arrays)


def _open_aligned(volume_index: int, job: ReaderJob) -> list[tuple[Volume, AnyAlignment]]:
    """Open the arrays of a volume, with their alignments to the first."""
    arrays = open_arrays(job.data.volumes[volume_index], job.data, reopened=True)
    if (foreground := job.plan.volumes[volume_index].foreground) is not None:
        arrays[0].missing.listed = foreground.map.stored(arrays[0].chunk_zyx)
    placed = (align(arrays[0], array, "an array") for array in arrays)
    patch_zyx = job.plan.patch_zyx
    return [(array, with_context(found, array.spec, patch_zyx)) for array, found in zip(arrays, placed, strict=True)]


def _decoded_bytes(volume: Volume, box: Box) -> int:
    chunks = math.prod(map(len, chunk_ranges(box, volume.chunk_zyx)))
    return chunks * math.prod(volume.chunk_zyx) * volume.dtype.itemsize


def aligned(size: int, to: int = 64) -> int:
    return -(-size // to) * to
