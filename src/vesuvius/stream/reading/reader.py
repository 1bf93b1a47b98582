"""Reads each region of a task once.

The same code runs in Ray actors and in the trainer (`workers: 0`), so both deliver the same bytes.  Patches are cut in
the trainer (`cutter.py`), straight from the regions in shared memory: that saves a copy of each patch.
"""

from __future__ import annotations

import math
import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from vesuvius.config import DataConfig, Triple
from vesuvius.errors import DataError
from vesuvius.plan.plan import Plan, Task, Visit
from vesuvius.stream.reading.quarantine import DamagedBox, quarantine_record
from vesuvius.stream.reading.reader_stats import BlockReport, ReaderTotals
from vesuvius.stream.reading.reading_log import crashed_chunks, open_reading_log
from vesuvius.volumes.alignment import Alignment, align
from vesuvius.volumes.box import Box, format_box, intersects, shape_of
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.missing import StoredChunks
from vesuvius.volumes.store.retry import Outage
from vesuvius.volumes.volume import Volume, open_volume
from vesuvius.volumes.voxels import check_labels

Block = NDArray[np.uint8]
"""One region on its way from a reader to the trainer: a head of `HEAD_BYTES` (a pickled `BlockHead`), the voxels of the
region, then those of its condition.  All blocks of a job have the same length: Ray would merge short ones."""

HEAD_BYTES = 2**16
_ALIGNED = 64
# Limit on compressed chunks fetched ahead of the region being decoded, in decoded bytes.
STAGED_BYTES_MAX = 64 * 2**20
_SUBSTITUTES_TRIED = 100
_PUBLISH_S = 1.0
_FETCHED = ("bytes_fetched", "requests", "retries", "cache_hits", "cache_misses")


@dataclass(frozen=True)
class ReaderJob:
    """What to read.  Picklable."""

    plan: Plan
    data: DataConfig
    # dtype, condition_dtype: of the patches; the latter None without conditions
    dtype: str
    condition_dtype: str | None = None
    # the chunks listed for each volume, where they were listed: a missing one is damage, not air
    stored: tuple[StoredChunks | None, ...] = ()
    # known damage; regions that touch it are replaced without a read
    quarantined: frozenset[DamagedBox] = frozenset()
    rank: int = 0
    world: int = 1
    # folder on each machine where Ray readers keep notes of what they read; None = a temporary one
    reading_log_dir: str | None = None

    @property
    def dtypes(self) -> list[np.dtype[Any]]:
        """Of the volume, and of the condition where there is one."""
        return [np.dtype(name) for name in (self.dtype, self.condition_dtype) if name]

    def batch_layout(self, batch_size: int) -> list[tuple[tuple[int, int, int, int], np.dtype[Any]]]:
        """Shape (B, Z, Y, X) and dtype of the patches of a batch, and of its conditions where there are some."""
        return [((batch_size, *self.plan.patch_zyx), dtype) for dtype in self.dtypes]

    @property
    def patch_bytes(self) -> int:
        """Bytes of one patch, with its condition."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.batch_layout(1))

    @property
    def block_bytes(self) -> int:
        """Bytes of every block."""
        return HEAD_BYTES + sum(_aligned(self.plan.region_voxels_max * dtype.itemsize) for dtype in self.dtypes)

    def tasks(self, first: int, stop: int) -> Iterator[Task]:
        """What to read, in this order, for this rank's samples first <= i < stop."""
        return self.plan.tasks(first, stop, self.rank, self.world)


@dataclass(frozen=True)
class Region:
    """What the reader of a visit delivers."""

    visit: Visit
    voxels: list[NDArray[Any]]  # of its region (Z, Y, X), and of the region's condition where there is one
    report: BlockReport | None = None  # None where nothing was read


@dataclass(frozen=True)
class BlockHead:
    """What a block holds: the region of a visit, and the reader's report."""

    visit: Visit
    report: BlockReport


def region_in(block: Block, job: ReaderJob) -> Region:
    """What a block holds, as views of it."""
    head: BlockHead = pickle.loads(block[:HEAD_BYTES].data)
    return Region(head.visit, voxels_in(block, job, shape_of(head.visit.region)), head.report)


def voxels_in(block: Block, job: ReaderJob, shape_zyx: Triple) -> list[NDArray[Any]]:
    """Views of a block: the region (Z, Y, X), and that of the condition where there is one."""
    views, offset = [], HEAD_BYTES
    for dtype in job.dtypes:
        size = math.prod(shape_zyx) * dtype.itemsize
        views.append(block[offset : offset + size].view(dtype).reshape(shape_zyx))
        offset += _aligned(job.plan.region_voxels_max * dtype.itemsize)
    return views


class Reader:
    """Opens the volumes once, then turns tasks into blocks.

    Args:
        ring: number of buffers, reused in turn: decoding into fresh memory costs twice as much.
        actor: the Ray actor whose process this is; '' without Ray.
        threads: how many decode; with 1 the one that reads does.
    """

    def __init__(self, job: ReaderJob, ring: int, actor: str = "", threads: int = 1) -> None:
        self._job = job
        self._ring = [np.empty(job.block_bytes, np.uint8) for _ in range(ring)]
        self._turn = 0
        self._decoders = ThreadPoolExecutor(threads, "decode") if threads > 1 else None
        self._actor, self._began = actor, time.time()
        self._arrays = [_open_arrays(number, job) for number in range(len(job.data.volumes))]
        self._opened = [volume for arrays in self._arrays for volume, _ in arrays]
        self._damaged = set(job.quarantined)
        self._staged: list[_RegionKey] = []
        self._last_cause = "all of them touch known damage"
        self._found: list[dict[str, Any]] = []  # damage since the last block
        self._blocks, self._decode_s, self._bytes_read = 0, 0.0, 0
        self._reported = self._totals()
        self._notes_dir = Path(job.reading_log_dir) if job.reading_log_dir else None
        self._crashed: dict[tuple[str | None, Triple | None], str] = {}
        self._note = open_reading_log(self._notes_dir, actor) if self._notes_dir and actor else None
        self._closed = threading.Event()
        if self._note:  # the trainer's own sources say it themselves
            threading.Thread(target=self._publish_outages, name="notes", daemon=True).start()

    def blocks(self, task: Task, ahead: Task = ()) -> Iterator[Block]:
        """Yield the regions of a task's slots, each once; valid for one round of the ring.

        The blocks depend on the task alone, so a retry after a reader died yields the same.

        Args:
            ahead: the task that this reader will probably get next; its first chunks are fetched from remote stores
                while this one is decoded.

        Raises:
            DataError: a chunk is missing and must not be, or no region can be read in place of an unreadable one.
        """
        plan = self._job.plan
        if self._notes_dir is not None:  # other readers may have died meanwhile
            self._crashed = crashed_chunks(self._notes_dir)
        visits, later = ([plan.visit(slot) for slot in some] for some in (task, ahead))
        queue = [(visit.volume, visit.region) for visit in (*visits, *later)]
        if any(key not in queue for key in self._staged):  # another task came than was expected
            for volume in self._opened:
                volume.unstage()
            self._staged.clear()
        for number, visit in enumerate(visits):
            self._stage(queue[number:])
            self._turn = (self._turn + 1) % len(self._ring)
            self._write_head(self._fill(visit))
            yield self._block
        self._stage(queue[len(visits) :])

    @property
    def outages(self) -> list[Outage]:
        """Of the stores that do not answer at the moment.  Any thread may ask."""
        return [outage for volume in self._opened if (outage := volume.source.outage) is not None]

    def is_damaged(self, number: int, box: Box) -> bool:
        """Whether a box of volume `number` touches known damage."""
        return self._is_damaged((number, box))

    def close(self) -> None:
        """End the threads that fetch."""
        self._closed.set()
        for volume in self._opened:
            volume.close()
        if self._decoders is not None:
            self._decoders.shutdown(wait=False)

    @property
    def _block(self) -> Block:
        """The buffer that is being filled."""
        return self._ring[self._turn]

    def _stage(self, queue: list[_RegionKey]) -> None:
        """Start fetching the chunks of the next regions, within the limit."""
        held = 0
        for key in queue:
            held += math.prod(shape_of(key[1])) * np.dtype(self._job.dtype).itemsize
            if held > STAGED_BYTES_MAX and key is not queue[0]:
                return
            if key not in self._staged and not self._is_damaged(key):
                self._staged.append(key)
                for volume, alignment in self._arrays[key[0]]:
                    volume.stage(alignment.array_box(key[1]))

    def _fill(self, visit: Visit) -> Visit:
        """Read the region of a visit into the block, or that of a substitute; returns which.

        Raises DataError: none of the substitutes can be read.
        """
        for attempt in range(_SUBSTITUTES_TRIED + 1):
            instead = self._job.plan.visit(visit.slot, attempt) if attempt else visit
            if self._try_region((instead.volume, instead.region)):
                return instead
        raise DataError(
            f"some region must be readable in place of an unreadable one; got none in {_SUBSTITUTES_TRIED} draws for "
            f"volume {self._arrays[visit.volume][0][0].name}, region {format_box(visit.region)}, the last because of "
            f"{self._last_cause}; restore the volume (`vesuvius volume verify` lists what is broken)"
        )

    def _try_region(self, key: _RegionKey) -> bool:
        """Decode a region into the block; where it is damaged, quarantine the damage and return False."""
        staged = key in self._staged
        if staged:
            self._staged.remove(key)
        number, box = key
        if self._is_damaged(key):
            if staged:
                self._unstage(key)
            return False
        try:
            self.read(number, box, voxels_in(self._block, self._job, shape_of(box)))
        except UnreadableChunkError as error:
            self._unstage(key)
            self._quarantine(number, error)
            return False
        return True

    def read(self, number: int, box: Box, out: list[NDArray[Any]]) -> None:
        """Read a box of volume `number`, and of its condition if it has one, into arrays of its shape (Z, Y, X).

        Raises:
            UnreadableChunkError: a chunk of it is damaged.
            DataError: a chunk is missing and must not be.
        """
        started = time.perf_counter()
        try:
            for (volume, alignment), voxels in zip(self._arrays[number], out, strict=True):
                read = partial(volume.read, decoders=self._decoders)
                alignment.read(box, partial(read, before=partial(self._before, volume, box)), voxels)
                if voxels is not out[0] and self._job.data.labels:
                    check_labels(voxels, self._job.data.labels, volume.name, box)
                self._bytes_read += _decoded_bytes(volume, alignment.array_box(box))
        finally:
            self._decode_s += time.perf_counter() - started
            if self._note is not None:
                self._note.chunk(None, None)

    def _before(self, volume: Volume, box: Box, chunk: Triple) -> None:
        """Note a chunk that is decoded next.  Raises UnreadableChunkError for one that has crashed two readers."""
        if (crash := self._crashed.get((volume.name, chunk))) is not None:
            cause = f"killed two readers, the last by {crash}"
            raise UnreadableChunkError(volume.name, box, chunk, volume.grid.box_of(chunk), cause)
        if self._note is not None:
            self._note.chunk(volume.name, chunk)

    def _unstage(self, key: _RegionKey) -> None:
        """Drop what was fetched for a region that is not read to its end."""
        for volume, alignment in self._arrays[key[0]]:
            volume.release(alignment.array_box(key[1]))

    def _is_damaged(self, key: _RegionKey) -> bool:
        return any(number == key[0] and intersects(box, key[1]) for number, box in self._damaged)

    def _quarantine(self, number: int, error: UnreadableChunkError) -> None:
        """Remember and report damage."""
        self._damaged.add((number, error.box))
        self._last_cause = f"chunk {list(error.chunk)} of {error.volume}: {error.cause}"
        self._found.append(quarantine_record(number, error))

    def _write_head(self, visit: Visit) -> None:
        head = pickle.dumps(BlockHead(visit, self.report()))
        assert len(head) <= HEAD_BYTES, f"a head must fit into {HEAD_BYTES} bytes; got {len(head)}"
        self._block[: len(head)] = np.frombuffer(head, np.uint8)

    def report(self) -> BlockReport:
        """What was done and found since the last one."""
        self._blocks += 1
        before, self._reported = self._reported, self._totals()
        found, self._found = self._found, []
        return BlockReport(
            pid=os.getpid(),
            node=socket.gethostname() if self._actor else "",
            actor=self._actor,
            began=self._began,
            rss_anon_bytes=_rss_anon_bytes(),
            done=self._reported.plus(before, sign=-1),
            quarantined=found,
            nonfinite=[bad for volume in self._opened if (bad := volume.nonfinite)],
        )

    def _totals(self) -> ReaderTotals:
        """What it has done so far."""
        fetched = [volume.source.figures for volume in self._opened]
        waited_s = sum(volume.wait_s for volume in self._opened)
        return ReaderTotals(
            blocks=self._blocks,
            read_s=waited_s if any(volume.source.remote for volume in self._opened) else None,
            decode_s=self._decode_s - waited_s,
            bytes_read=self._bytes_read,
            **{name: sum(getattr(figures, name) for figures in fetched) for name in _FETCHED},
        )

    def _publish_outages(self) -> None:
        """Note which store does not answer, on a thread of its own: the reading one waits then."""
        while self._note is not None and not self._closed.wait(_PUBLISH_S):
            self._note.outage(min(self.outages, key=lambda outage: outage.since, default=None))


_RegionKey = tuple[int, Box]  # volume number and region


def _open_arrays(number: int, job: ReaderJob) -> list[tuple[Volume, Alignment]]:
    """A volume, and its condition if it has one, with how they lie in the volume."""
    data, spec = job.data, job.data.volumes[number]
    specs = [(spec, data.nan), *([(spec.condition, data.condition_nan)] if spec.condition else [])]
    stored = (job.stored[number] if job.stored else None, None)
    arrays = [
        open_volume(array, data.store, data.missing_chunk, nan, reopened=True, stored=listed)
        for (array, nan), listed in zip(specs, stored, strict=False)
    ]
    return [(array, align(arrays[0], array, "the condition")) for array in arrays]


def _decoded_bytes(volume: Volume, box: Box) -> int:
    """Bytes of the whole chunks that a box touches."""
    chunks = math.prod(-(-hi // c) - lo // c for lo, hi, c in zip(*box, volume.chunk_zyx, strict=True))
    return chunks * math.prod(volume.chunk_zyx) * volume.dtype.itemsize


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _rss_anon_bytes() -> int | None:
    """Private memory of this process, without what it shares; None where the system does not tell."""
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared if hasattr(memory, "shared") else None
