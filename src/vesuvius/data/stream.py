"""Fourth stop of a patch: an endless, ordered iterator of batches, read by Ray workers or in this process.

The content of batch n depends on the plan alone: not on the number of workers, nor on the prefetch.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import ClusterConfig, TrainingConfig
from vesuvius.data.reader import Block, Reader, ReaderJob
from vesuvius.errors import ConfigError

_ENDLESS = 2**62


@dataclass(frozen=True)
class Batch:
    """Consecutive samples of one rank.

    Attributes:
        patches: (B, Z, Y, X) in the stored dtype.  Where the stream was given buffers, one of them: valid until the
            stream comes round to it again.
        indices: (B,) int64, the sample index of each patch.
    """

    patches: NDArray[Any]
    indices: NDArray[np.int64]


@dataclass
class ReaderFigures:
    """What a reader process last said of itself."""

    rss_anon_bytes: int = 0
    rss_anon_peak_bytes: int = 0
    read_s: float = 0.0
    cut_s: float = 0.0
    bytes_read: int = 0


class BlockSource(Protocol):
    """Blocks of consecutive samples, from wherever they are read."""

    def __iter__(self) -> Iterator[Block]: ...

    def __next__(self) -> Block: ...

    def close(self) -> None: ...


class PatchStream(Iterator[Batch]):
    """Batches from sample `first` on.  A context manager; closing it ends the readers.

    Args:
        job: plan, volumes and rank.
        batch_size: samples per batch of this rank.
        first: sample index to start at; a multiple of world.
        stop: sample index to end before, or None for an endless stream.  A last short batch is delivered.
        training: takes `workers` and `prefetch_factor`.
        cluster: where Ray runs; not used with `workers: 0`.
        buffers: arrays (batch_size, Z, Y, X) of the job's dtype to deliver batches in, in turn (a ring, e.g. of pinned
            memory); new arrays by default.

    Raises:
        DataError: on opening or iterating, where a volume cannot be read.
    """

    def __init__(
        self,
        job: ReaderJob,
        batch_size: int,
        training: TrainingConfig,
        cluster: ClusterConfig,
        *,
        first: int = 0,
        stop: int | None = None,
        buffers: Sequence[NDArray[Any]] = (),
    ) -> None:
        self._job = job
        self._batch_size = batch_size
        self._buffers = itertools.cycle(buffers) if buffers else None
        self._expected = first + job.rank
        self._block: Block | None = None
        self._used = 0
        self.readers: dict[int, ReaderFigures] = {}
        self._source = _open_source(job, batch_size, training, cluster, first, _ENDLESS if stop is None else stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __next__(self) -> Batch:
        patches = self._next_buffer()
        indices = np.empty(self._batch_size, dtype=np.int64)
        filled = 0
        while filled < self._batch_size and self._fill_block():
            assert self._block is not None
            take = min(self._batch_size - filled, len(self._block["index"]) - self._used)
            part = slice(self._used, self._used + take)
            patches[filled : filled + take] = self._block["patch"][part]
            indices[filled : filled + take] = self._block["index"][part]
            filled += take
            self._used += take
            if self._used == len(self._block["index"]):
                self._block = None  # a view into the object store: held, it would keep the whole block alive
        if not filled:
            raise StopIteration
        self._check_order(indices[:filled])
        return Batch(patches[:filled], indices[:filled])

    def close(self) -> None:
        """End the readers.  Safe to call again."""
        self._block = None
        self._source.close()

    def reader_memory(self) -> dict[int, int]:
        """Bytes of private memory of each reader process, by pid, as it last said."""
        return {pid: figures.rss_anon_bytes for pid, figures in self.readers.copy().items()}

    def _next_buffer(self) -> NDArray[Any]:
        if self._buffers is not None:
            return next(self._buffers)
        return np.empty((self._batch_size, *self._job.plan.patch_zyx), dtype=self._job.dtype)

    def _fill_block(self) -> bool:
        """Have a block with samples left; False at the end of the stream."""
        if self._block is None:
            self._block = next(self._source, None)
            self._used = 0
            if self._block is not None:
                self._note(self._block)
        return self._block is not None

    def _note(self, block: Block) -> None:
        figures = self.readers.setdefault(int(block["pid"][0]), ReaderFigures())
        figures.rss_anon_bytes = int(block["rss_anon_bytes"][0])
        figures.rss_anon_peak_bytes = max(figures.rss_anon_peak_bytes, figures.rss_anon_bytes)
        figures.read_s += float(block["read_s"][0])
        figures.cut_s += float(block["cut_s"][0])
        figures.bytes_read += int(block["bytes_read"][0])

    def _check_order(self, indices: NDArray[np.int64]) -> None:
        # A lost, repeated or reordered block must never train silently.
        expected = self._expected + self._job.world * np.arange(len(indices))
        assert np.array_equal(indices, expected), f"samples out of order: expected {expected}, got {indices}"
        self._expected += self._job.world * len(indices)


def _open_source(
    job: ReaderJob, batch_size: int, training: TrainingConfig, cluster: ClusterConfig, first: int, stop: int
) -> BlockSource:
    if training.workers == 0:
        reader = Reader(job)
        return (block for task in job.plan.tasks(first, stop) for block in reader.blocks(task))
    from vesuvius.data import ray_stream  # Ray takes a second to import and is not needed with workers: 0

    need_bytes = store_need_bytes(job, batch_size, training)
    prefetch_blocks = -(-_prefetch_bytes(job, batch_size, training) // job.block_bytes)
    ray_stream.start_ray(cluster, training.workers, job.world, store_size_bytes(need_bytes, cluster))
    return ray_stream.RayBlocks(job, first, stop, training.workers, prefetch_blocks, need_bytes)


def store_need_bytes(job: ReaderJob, batch_size: int, training: TrainingConfig) -> int:
    """Bytes of the object store that can be in use at once: each worker's task in flight and the block it works on, and
    the batches read ahead.  0 with `workers: 0`.  Pure."""
    tasks_bytes = training.workers * (job.blocks_per_task + 1) * job.block_bytes
    return tasks_bytes + _prefetch_bytes(job, batch_size, training)


def store_size_bytes(need_bytes: int, cluster: ClusterConfig) -> int:
    """Size of a private Ray's object store.  Ray's limit is soft (0.25 GiB configured, 0.64 GiB seen in use): half as
    much again as needed, and a floor for Ray's own use.  Pure."""
    return int(cluster.object_store_gib * 2**30) if cluster.object_store_gib else max(3 * need_bytes // 2, 2**28)


def check_store(job: ReaderJob, batch_size: int, training: TrainingConfig, cluster: ClusterConfig) -> None:
    """Raises ConfigError where /dev/shm cannot hold the object store of a private Ray: it would silently use /tmp."""
    shared = Path("/dev/shm")
    if training.workers == 0 or cluster.address is not None or not shared.is_dir():
        return
    size = store_size_bytes(store_need_bytes(job, batch_size, training), cluster)
    free = shutil.disk_usage(shared).free
    if size > free:
        raise ConfigError(
            f"the object store must fit into /dev/shm; got {size / 2**30:.2f} GiB needed and {free / 2**30:.2f} GiB "
            "free; start the container with a larger --shm-size, or lower training.workers, training.prefetch_factor, "
            "data.patches_per_region or cluster.object_store_gib"
        )


def _prefetch_bytes(job: ReaderJob, batch_size: int, training: TrainingConfig) -> int:
    return training.workers * training.prefetch_factor * batch_size * job.patch_bytes
