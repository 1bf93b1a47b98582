"""Third stop of a patch: read each region of a task once and cut its patches.

The same code runs in a Ray worker and in the trainer (`workers: 0`), so both deliver the same bytes.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import VolumeConfig
from vesuvius.data.plan import Plan, Sample, Task
from vesuvius.data.volume import open_volume

Block = dict[str, NDArray[Any]]
"""Columns of equal length n: `patch` (n, Z, Y, X) in the stored dtype, `index` (n,) int64, and one figure per block
repeated n times: `pid`, `rss_anon_bytes`, `read_s`, `cut_s`, `bytes_read` (bytes decoded and kept, before cutting)."""

# A block costs the trainer's process 4-5 ms in Ray, so short runs of small patches travel together.
_BLOCK_BYTES_MIN = 2 * 2**20


@dataclass(frozen=True)
class ReaderJob:
    """What a reader needs to know.  Picklable."""

    plan: Plan
    volumes: tuple[VolumeConfig, ...]
    dtype: str
    rank: int = 0
    world: int = 1

    @property
    def patch_bytes(self) -> int:
        return math.prod(self.plan.patch_zyx) * np.dtype(self.dtype).itemsize

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


class Reader:
    """Opens the volumes once, then turns tasks into blocks."""

    def __init__(self, job: ReaderJob) -> None:
        self._job = job
        self._volumes = [open_volume(spec) for spec in job.volumes]

    def blocks(self, task: Task) -> Iterator[Block]:
        """Yield the rank's samples of a task, in order, in blocks.

        The number of blocks and their bytes depend on the task alone, so a task that is run again after its worker died
        gives the same.

        Raises:
            DataError: a region cannot be read; names volume and region.
        """
        job = self._job
        samples = [job.plan.sample(i) for i in range(task.first, task.stop) if i % job.world == job.rank]
        if not samples:
            return
        started = time.perf_counter()
        regions = {
            key: self._volumes[key[0]].read(key[1]) for key in dict.fromkeys((s.volume, s.region) for s in samples)
        }
        read_s = time.perf_counter() - started
        bytes_read = sum(voxels.nbytes for voxels in regions.values())
        for first in range(task.first // job.block_samples * job.block_samples, task.stop, job.block_samples):
            part = [s for s in samples if first <= s.index < first + job.block_samples]
            if part:
                yield self._cut(part, regions, read_s, bytes_read)
                read_s, bytes_read = 0.0, 0

    def _cut(self, samples: list[Sample], regions: dict[Any, NDArray[Any]], read_s: float, bytes_read: int) -> Block:
        started = time.perf_counter()
        size = self._job.plan.patch_zyx
        patches = np.empty((len(samples), *size), dtype=self._job.dtype)
        for out, sample in zip(patches, samples, strict=True):
            offsets = zip(sample.start_zyx, sample.region[0], size, strict=True)
            out[...] = regions[sample.volume, sample.region][tuple(slice(s - r, s - r + p) for s, r, p in offsets)]
        figures = {
            "pid": os.getpid(),
            "rss_anon_bytes": rss_anon_bytes(),
            "read_s": read_s,
            "cut_s": time.perf_counter() - started,
            "bytes_read": bytes_read,
        }
        block: Block = {"patch": patches, "index": np.array([s.index for s in samples], dtype=np.int64)}
        return block | {key: np.full(len(samples), value) for key, value in figures.items()}


def rss_anon_bytes() -> int:
    """Private memory of this process: what it alone would give back.  0 where the system does not tell (not Linux)."""
    try:
        with open("/proc/self/status") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon")), 0)
    except OSError:
        return 0
