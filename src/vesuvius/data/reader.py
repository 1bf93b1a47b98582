"""Third stop of a patch: read each region of a task once and cut its patches.

The same code runs in a Ray worker and in the trainer (`workers: 0`), so both deliver the same bytes.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import StoreConfig, VolumeConfig
from vesuvius.data.box import Box, format_box, shape_of, slices
from vesuvius.data.plan import Plan, Sample, Task
from vesuvius.data.volume import UnreadableChunkError, Volume, open_volume
from vesuvius.errors import DataError

Block = dict[str, NDArray[Any]]
"""Columns of equal length n: `patch` (n, Z, Y, X) in the stored dtype, `condition` likewise where there is one, `index`
(n,) int64, and `report` (n,), a `BlockReport` as JSON in its first entry, the others empty."""

# A block costs the trainer's process 4-5 ms in Ray, so short runs of small patches travel together.
_BLOCK_BYTES_MIN = 2 * 2**20
# Compressed chunks that are fetched ahead of the region being decoded, in bytes once decoded.
_STAGED_BYTES_MAX = 64 * 2**20
_SUBSTITUTES_TRIED = 100

RegionKey = tuple[int, Box]
"""Volume number and box."""


@dataclass(frozen=True)
class ReaderJob:
    """What a reader needs to know.  Picklable.

    Attributes:
        dtype, condition_dtype: of the patches; the latter None without conditions.
        quarantined: regions that are known to be unreadable and are replaced without a try.
    """

    plan: Plan
    volumes: tuple[VolumeConfig, ...]
    dtype: str
    condition_dtype: str | None = None
    store: StoreConfig = StoreConfig()
    missing_chunk: Literal["air", "error"] = "air"
    max_quarantined: int = 0
    quarantined: frozenset[RegionKey] = frozenset()
    rank: int = 0
    world: int = 1

    @property
    def patch_bytes(self) -> int:
        """Bytes of one patch, with its condition."""
        voxel_bytes = sum(np.dtype(dtype).itemsize for dtype in (self.dtype, self.condition_dtype) if dtype)
        return math.prod(self.plan.patch_zyx) * voxel_bytes

    @property
    def block_samples(self) -> int:
        """Samples of one block over all ranks: a whole number of runs."""
        run = self.plan.regions_per_task
        runs = -(-_BLOCK_BYTES_MIN // (run * self.patch_bytes))
        return run * min(runs, self.plan.patches_per_region)

    @property
    def block_bytes(self) -> int:
        """Bytes of one full block's patches."""
        return max(self.block_samples // self.world, 1) * self.patch_bytes

    @property
    def blocks_per_task(self) -> int:
        return -(-self.plan.samples_per_task // self.block_samples)


@dataclass(frozen=True)
class BlockReport:
    """What a reader says of itself with each block; seconds and counts since its last block.

    Attributes:
        pid, node, actor: the process, its machine, and the Ray actor that it is an incarnation of ('' without Ray).
        rss_anon_bytes: private memory of the process; None where the system does not tell (not Linux).
        read_s: waiting for bytes from a remote store; None on disk, where zarrs reads and decodes in one call.
        decode_s: decoding regions (on disk with reading them).
        cut_s: copying patches out of regions.
        bytes_read: bytes decoded, whole chunks.
        bytes_fetched: bytes that came over the network.
        requests, retries, cache_hits, cache_misses: as `SourceFigures`.
        quarantined: regions found unreadable.
    """

    pid: int
    node: str
    actor: str
    rss_anon_bytes: int | None
    read_s: float | None
    decode_s: float
    cut_s: float
    bytes_read: int
    bytes_fetched: int
    requests: int
    retries: int
    cache_hits: int
    cache_misses: int
    quarantined: list[dict[str, Any]] = field(default_factory=list)


def report_of(block: Block) -> BlockReport:
    """The report that travels with a block."""
    return BlockReport(**json.loads(str(block["report"][0])))


class Reader:
    """Opens the volumes once, then turns tasks into blocks.

    Args:
        node, actor: for the report.
    """

    def __init__(self, job: ReaderJob, node: str = "", actor: str = "") -> None:
        self._job = job
        self._node, self._actor = node, actor
        self._volumes = [open_volume(spec, job.store, job.missing_chunk) for spec in job.volumes]
        self._conditions = [
            open_volume(spec.condition, job.store, job.missing_chunk) if spec.condition else None
            for spec in job.volumes
        ]
        self._bad = set(job.quarantined)
        self._buffers = _Buffers()
        self._staged: list[RegionKey] = []
        self._since = _Tally(self._opened)

    def blocks(self, task: Task, ahead: Task | None = None) -> Iterator[Block]:
        """Yield the rank's samples of a task, in order, in blocks.

        The number of blocks and their bytes depend on the task alone, so a task that is run again after its worker died
        gives the same.

        Args:
            ahead: the task that this reader will probably get next.  From remote stores its first chunks are fetched
                while this one is decoded and cut.

        Raises:
            DataError: a chunk is absent and must not be, or no region can be read in place of an unreadable one.
        """
        job = self._job
        samples = self._samples(task)
        if not samples:
            return
        samples, regions = self._load(samples, self._keys(ahead) if ahead else [])
        for first in range(task.first, task.stop, job.block_samples):  # only the last is short: Ray would merge others
            part = [s for s in samples if first <= s.index < first + job.block_samples]
            if part:
                yield self._cut(part, regions)

    def close(self) -> None:
        """End the threads that fetch."""
        for volume in self._opened:
            volume.close()

    @property
    def _opened(self) -> list[Volume]:
        return self._volumes + [volume for volume in self._conditions if volume is not None]

    def _samples(self, task: Task) -> list[Sample]:
        job = self._job
        return [job.plan.sample(i) for i in range(task.first, task.stop) if i % job.world == job.rank]

    def _keys(self, task: Task) -> list[RegionKey]:
        """The regions of a task, each once, in the order of their first sample."""
        return list(dict.fromkeys((s.volume, s.region) for s in self._samples(task)))

    def _load(
        self, samples: list[Sample], ahead: list[RegionKey]
    ) -> tuple[list[Sample], dict[RegionKey, list[NDArray[Any]]]]:
        """The regions of the samples, decoded; and the samples, moved to other regions where theirs is unreadable."""
        wanted = list(dict.fromkeys((s.volume, s.region) for s in samples))
        if any(key not in wanted for key in self._staged):  # another task came than was foreseen
            for volume in self._opened:
                volume.unstage()
            self._staged.clear()
        self._buffers.rewind()
        queue = wanted + [key for key in ahead if key not in wanted]
        regions: dict[RegionKey, list[NDArray[Any]]] = {}
        for number, key in enumerate(wanted):
            self._stage(queue[number:])
            self._try_region(key, regions)
        self._stage(queue[len(wanted) :])
        unread = [key for key in wanted if key not in regions]
        if unread:
            samples = self._substitute(samples, unread, regions)
        return samples, regions

    def _stage(self, queue: list[RegionKey]) -> None:
        """Have the chunks of the next regions fetched, as many as are to be held at once."""
        held = 0
        for key in queue:
            held += math.prod(shape_of(key[1])) * np.dtype(self._job.dtype).itemsize
            if held > _STAGED_BYTES_MAX and key is not queue[0]:
                return
            if key not in self._staged and key not in self._bad:
                self._staged.append(key)
                for volume in self._arrays(key[0]):
                    volume.stage(key[1])

    def _arrays(self, number: int) -> list[Volume]:
        """The volume of this number, and its condition if it has one."""
        condition = self._conditions[number]
        return [self._volumes[number], condition] if condition else [self._volumes[number]]

    def _try_region(self, key: RegionKey, regions: dict[RegionKey, list[NDArray[Any]]]) -> bool:
        """Decode a region into `regions`, or put it into quarantine and return False."""
        if key in self._staged:
            self._staged.remove(key)
        if key in self._bad:
            return False
        number, box = key
        started = time.perf_counter()
        try:
            regions[key] = [v.read(box, self._buffers.take(box, v.dtype)) for v in self._arrays(number)]
        except UnreadableChunkError as error:
            self._bad.add(key)
            self._since.quarantined.append(
                {
                    "volume": error.volume,
                    "number": number,
                    "region": [list(box[0]), list(box[1])],
                    "chunk": list(error.chunk),
                    "cause": error.cause,
                }
            )
            return False
        finally:
            self._since.decode_s += time.perf_counter() - started
        self._since.bytes_read += sum(_decoded_bytes(volume, box) for volume in self._arrays(number))
        return True

    def _substitute(
        self, samples: list[Sample], unread: list[RegionKey], regions: dict[RegionKey, list[NDArray[Any]]]
    ) -> list[Sample]:
        """Samples of unreadable regions, drawn anew from others: the same others whoever reads, and when."""
        plan = self._job.plan
        attempts: dict[int, int] = {}
        for slot in sorted({plan.slot_of(s.index) for s in samples if (s.volume, s.region) in unread}):
            attempts[slot] = self._find_substitute(slot, regions)
        return [plan.sample(s.index, attempts.get(plan.slot_of(s.index), 0)) for s in samples]

    def _find_substitute(self, slot: int, regions: dict[RegionKey, list[NDArray[Any]]]) -> int:
        """The first attempt whose region can be read; one that the task does not hold yet, if there is such a one."""
        held = None
        for attempt in range(1, _SUBSTITUTES_TRIED + 1):
            key = self._job.plan.region_of_slot(slot, attempt)
            if key in regions:
                held = held or attempt
            elif key not in self._bad and self._try_region(key, regions):
                return attempt
        if held is not None:
            return held
        volume, box = self._job.plan.region_of_slot(slot)
        raise DataError(
            f"some region must be readable in place of an unreadable one; got none in {_SUBSTITUTES_TRIED} tries for "
            f"volume {self._volumes[volume].name}, region {format_box(box)}; see quarantine.jsonl and "
            "restore the volume"
        )

    def _cut(self, samples: list[Sample], regions: dict[RegionKey, list[NDArray[Any]]]) -> Block:
        started = time.perf_counter()
        block: Block = {"patch": self._cut_patches(samples, regions, 0, self._job.dtype)}
        if self._job.condition_dtype:
            block["condition"] = self._cut_patches(samples, regions, 1, self._job.condition_dtype)
        self._since.cut_s += time.perf_counter() - started
        report = self._since.report(self._node, self._actor)
        block["index"] = np.array([s.index for s in samples], dtype=np.int64)
        block["report"] = np.array([json.dumps(asdict(report))] + [""] * (len(samples) - 1), dtype=object)
        return block

    def _cut_patches(
        self, samples: list[Sample], regions: dict[RegionKey, list[NDArray[Any]]], which: int, dtype: str
    ) -> NDArray[Any]:
        """One patch per sample out of the volume (0) or the condition (1): (n, Z, Y, X)."""
        size = self._job.plan.patch_zyx
        patches = np.empty((len(samples), *size), dtype=dtype)
        for out, sample in zip(patches, samples, strict=True):
            z, y, x = (start + length for start, length in zip(sample.start_zyx, size, strict=True))
            box = (sample.start_zyx, (z, y, x))
            out[...] = regions[sample.volume, sample.region][which][slices(box, sample.region[0])]
        return patches


class _Buffers:
    """Memory for decoded regions, used again for each task: fresh memory costs more than decoding into it."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[np.uint8]] = []
        self._used = 0

    def rewind(self) -> None:
        """All buffers are free again."""
        self._used = 0

    def take(self, box: Box, dtype: np.dtype[Any]) -> NDArray[Any]:
        """A C-contiguous array of the shape of a box; its content is anything."""
        shape = shape_of(box)
        need = math.prod(shape) * dtype.itemsize
        if self._used == len(self._arrays):
            self._arrays.append(np.empty(need, np.uint8))
        elif self._arrays[self._used].nbytes < need:
            self._arrays[self._used] = np.empty(need, np.uint8)
        buffer = self._arrays[self._used]
        self._used += 1
        return buffer[:need].view(dtype).reshape(shape)


class _Tally:
    """What happened since the last block."""

    def __init__(self, volumes: list[Volume]) -> None:
        self._volumes = volumes
        self._fetched = _fetched(volumes)
        self._clear()

    def _clear(self) -> None:
        self.decode_s = self.cut_s = 0.0
        self.bytes_read = 0
        self.quarantined: list[dict[str, Any]] = []

    def report(self, node: str, actor: str) -> BlockReport:
        """The figures, which start again from zero."""
        now = _fetched(self._volumes)
        since = {name: value - self._fetched[name] for name, value in now.items()}
        self._fetched = now
        waited_s = since.pop("wait_s")
        remote = any(volume.source.remote for volume in self._volumes)
        report = BlockReport(
            pid=os.getpid(),
            node=node,
            actor=actor,
            rss_anon_bytes=rss_anon_bytes(),
            read_s=waited_s if remote else None,
            decode_s=max(self.decode_s - waited_s, 0.0),
            cut_s=self.cut_s,
            bytes_read=self.bytes_read,
            quarantined=self.quarantined,
            **since,
        )
        self._clear()
        return report


def _fetched(volumes: list[Volume]) -> dict[str, Any]:
    """The sources' figures and the seconds spent waiting for them, added up."""
    totals = [asdict(volume.figures) | {"wait_s": volume.wait_s} for volume in volumes]
    return {name: sum(total[name] for total in totals) for name in totals[0]}


def _decoded_bytes(volume: Volume, box: Box) -> int:
    """Bytes of the whole chunks that a box touches."""
    chunks = math.prod(-(-hi // c) - lo // c for lo, hi, c in zip(*box, volume.chunk_zyx, strict=True))
    return chunks * math.prod(volume.chunk_zyx) * volume.dtype.itemsize


def rss_anon_bytes() -> int | None:
    """Private memory of this process: what it alone would give back.  None where the system does not tell."""
    try:
        with open("/proc/self/status") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon")), None)
    except OSError:
        return None
