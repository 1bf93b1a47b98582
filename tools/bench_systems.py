"""What `bench_ingest.py` measures: the loaders, ours and others', behind one protocol, and the rules they share.

A measurement is a process of its own: it starts a loader, waits for its first batch, warms up, then counts the whole
batches of a window.  Prefetched batches are not throughput: the warm-up takes two fillings of every buffer (2 x workers
x prefetch batches, or two whole tasks per worker), and a window begins and ends after whole rounds (one batch of each
worker, or one task of each worker), so that what waits in the buffers is the same at both ends.  The consumer copies
nothing; it reads one voxel of every plane of each patch, in place of a trainer that copies to its device.

Settings of the others: DataLoader with spawn, persistent workers, prefetch_factor 2 (for our tasks: one task, a fifth
faster than 2), collated by torch's default_collate in the worker.  blosc decodes on one thread.  zarr-python and zarrs
keep their own defaults of concurrency, but zarrs gets 16 threads over HTTP: it fetches no more chunks at once than it
has threads, by default as many as there are cores.  tensorstore has no cache, one data-copy thread per worker, and a
batch of its reads in flight at any time.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
import zarr
from numcodecs import blosc
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

if TYPE_CHECKING:
    from vesuvius.stream.reader import BlockReport, ReaderJob
    from vesuvius.stream.stream import PatchStream

Triple = tuple[int, int, int]
Library = Literal["zarr-python", "zarrs", "tensorstore"]
Figures = dict[str, float | None]
Batches = Generator[NDArray[Any], None, None]

PREFETCH = 2
SEED = 0


@dataclass(frozen=True)
class Setup:
    """What to measure on.

    Attributes:
        volume: path or URL of a zarr group (of which `level` is read) or array.
        local_volume: path of the same volume on disk.
        seconds: least length of the window.
    """

    volume: str
    local_volume: str
    level: int
    patch_zyx: Triple
    batch: int
    workers: int
    seconds: float


class Feed(Protocol):
    """A loader that can be measured.

    Attributes:
        warmup_batches: batches before the window, the first included.
        round_batches: batches after which all workers are where they were before.
        decoded_bytes: bytes of all chunks decoded for the batches that were delivered.
    """

    warmup_batches: int
    round_batches: int

    @property
    def decoded_bytes(self) -> int: ...

    def batches(self) -> Batches:
        """Start the workers; endless batches (B, Z, Y, X).  Closing the generator ends the workers."""

    def worker_pids(self) -> list[int]: ...

    def own_figures(self) -> Figures:
        """What only this system has to tell."""


def measure(system: str, setup: Setup) -> Figures:
    """Run one system once and return its figures.  Raises whatever the system raises."""
    match system:
        case "zarr-python" | "zarrs" | "tensorstore":
            return run_feed(uniform_feed(system, setup), setup.seconds)
        case "torch-tasks":
            return run_feed(task_feed(setup), setup.seconds)
        case "ours" | "ours-no-latency":
            return run_feed(OurFeed(setup), setup.seconds)
        case "decode-limit":
            return decode_limit(setup)
    raise ValueError(f"no such system: {system}")


def run_feed(feed: Feed, seconds: float) -> Figures:
    """Measure one loader by the rules at the top, and close it."""
    started = time.perf_counter()
    with contextlib.closing(feed.batches()) as batches:
        touch(next(batches))
        first_batch_s = time.perf_counter() - started
        for batch in itertools.islice(batches, feed.warmup_batches - 1):
            touch(batch)
        patches, decoded_bytes, begun = 0, feed.decoded_bytes, time.perf_counter()
        while (elapsed_s := time.perf_counter() - begun) < seconds:
            for batch in itertools.islice(batches, feed.round_batches):
                touch(batch)
                patches += len(batch)
        return {
            "patches_s": patches / elapsed_s,
            "first_batch_s": first_batch_s,
            "bytes_per_patch": (feed.decoded_bytes - decoded_bytes) / patches,
            "rss_anon_bytes": max(map(rss_anon_bytes, feed.worker_pids())),
            "window_s": elapsed_s,
            **feed.own_figures(),
        }


def touch(batch: NDArray[Any]) -> int:
    """Read one voxel of every plane (y, x) of a batch."""
    return int(batch[..., 0, 0].sum())


def rss_anon_bytes(pid: int) -> int:
    """Private memory of a process (Linux)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


# ---- uniform random patches: zarr-python, zarrs, tensorstore behind a torch DataLoader


@dataclass(frozen=True)
class ArrayInfo:
    """One level of a volume, as the readers of other libraries need to know it."""

    url: str
    zarr_format: int
    shape_zyx: Triple
    chunk_zyx: Triple
    itemsize: int

    def touched_bytes(self, start_zyx: Triple, patch_zyx: Triple) -> int:
        """Decoded bytes of all chunks that a patch touches.  Pure."""
        axes = zip(start_zyx, patch_zyx, self.chunk_zyx, strict=True)
        return self.itemsize * math.prod(((s + p - 1) // c - s // c + 1) * c for s, p, c in axes)


def open_node(url: str) -> Any:
    """A zarr group or array on disk or behind HTTP."""
    if "://" not in url:
        return zarr.open(url, mode="r")
    from obstore.store import HTTPStore
    from zarr.storage import ObjectStore

    store = HTTPStore.from_url(url, client_options={"allow_http": True})
    return zarr.open(ObjectStore(store, read_only=True), mode="r")


def array_info(volume: str, level: int) -> ArrayInfo:
    """Find a level through the OME metadata.  Reads metadata only."""
    node = open_node(volume)
    if not hasattr(node, "shape"):
        attributes = dict(node.attrs)
        path = attributes.get("ome", attributes)["multiscales"][0]["datasets"][level]["path"]
        volume, node = f"{volume.rstrip('/')}/{path}", node[path]
    zarr_format = getattr(getattr(node, "metadata", None), "zarr_format", 2)  # zarr-python 2 knows no other
    return ArrayInfo(volume, zarr_format, node.shape, node.chunks, node.dtype.itemsize)


class UniformPatches(IterableDataset[tuple[torch.Tensor, int]]):
    """Endless random patches from anywhere in a volume, each with its `touched_bytes`; opened in the worker."""

    def __init__(self, library: Library, info: ArrayInfo, setup: Setup) -> None:
        self._library = library
        self._info = info
        self._patch_zyx = setup.patch_zyx
        self._batch = setup.batch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        worker = get_worker_info()
        assert worker is not None
        rng = np.random.default_rng((SEED, worker.id))
        high = np.subtract(self._info.shape_zyx, self._patch_zyx) + 1
        starts = iter(lambda: tuple(rng.integers(0, high).tolist()), None)
        read = self._open()
        pending: deque[tuple[Triple, Callable[[], NDArray[Any]]]] = deque()
        for start in starts:
            pending.append((start, read(start)))
            if len(pending) == (self._batch if self._library == "tensorstore" else 1):
                first, result = pending.popleft()
                yield torch.from_numpy(result()), self._info.touched_bytes(first, self._patch_zyx)

    def _open(self) -> Callable[[Triple], Callable[[], NDArray[Any]]]:
        """A function that begins to read the patch at a start, and returns one that waits for its voxels."""
        if self._library == "tensorstore":
            array = open_tensorstore(self._info)
            return lambda start: array[self._slices(start)].read().result
        blosc.set_nthreads(1)
        array = open_zarrs(self._info) if self._library == "zarrs" else open_node(self._info.url)
        return lambda start: functools.partial(array.__getitem__, self._slices(start))

    def _slices(self, start_zyx: Triple) -> tuple[slice, ...]:
        return tuple(slice(s, s + p) for s, p in zip(start_zyx, self._patch_zyx, strict=True))


def open_zarrs(info: ArrayInfo) -> Any:
    """The array behind zarrs; raises RuntimeError where zarrs would leave it to zarr-python."""
    import zarrs  # noqa: F401  registers the pipeline

    zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline", "codec_pipeline.strict": True})
    if "://" in info.url:
        os.environ["RAYON_NUM_THREADS"] = "16"  # read at the first decode; zarr's own setting cannot exceed the cores
        zarr.config.set({"threading.max_workers": 16})
    return open_node(info.url)


def open_tensorstore(info: ArrayInfo) -> Any:
    """The array behind tensorstore."""
    import tensorstore

    context = {"cache_pool": {"total_bytes_limit": 0}, "data_copy_concurrency": {"limit": 1}}
    kvstore = info.url.rstrip("/") + "/" if "://" in info.url else {"driver": "file", "path": f"{info.url}/"}
    spec = {"driver": {2: "zarr", 3: "zarr3"}[info.zarr_format], "kvstore": kvstore, "context": context}
    return tensorstore.open(spec, open=True, read=True).result()


class LoaderFeed:
    """A DataLoader over a dataset that yields (patch, decoded bytes)."""

    def __init__(
        self,
        dataset: IterableDataset[tuple[torch.Tensor, int]],
        setup: Setup,
        round_batches: int,
        prefetch: int = PREFETCH,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        self.round_batches = round_batches
        self.warmup_batches = 2 * max(round_batches, prefetch * setup.workers)
        self._prefetch = prefetch
        self.decoded_bytes = 0
        self._dataset = dataset
        self._setup = setup
        self._worker_init_fn = worker_init_fn

    def batches(self) -> Batches:
        loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_size=self._setup.batch,
            num_workers=self._setup.workers,
            prefetch_factor=self._prefetch,
            persistent_workers=True,
            multiprocessing_context="spawn",
            worker_init_fn=self._worker_init_fn,
        )
        for patches, decoded_bytes in loader:
            self.decoded_bytes += int(decoded_bytes.sum())
            yield patches.numpy()

    def worker_pids(self) -> list[int]:
        return child_pids()

    def own_figures(self) -> Figures:
        return {}


def child_pids() -> list[int]:
    """The worker processes of a DataLoader of this process."""
    return [process.pid for process in multiprocessing.active_children() if process.pid is not None]


def uniform_feed(library: Library, setup: Setup) -> Feed:
    """(a) zarr-python, (b) zarrs, (c) tensorstore."""
    __import__({"zarr-python": "zarr"}.get(library, library))  # missing is to be known here, not in a worker
    return LoaderFeed(UniformPatches(library, array_info(setup.volume, setup.level), setup), setup, setup.workers)


# ---- ours, and our tasks behind a torch DataLoader


def our_job(volume: str, setup: Setup) -> ReaderJob:
    """Our plan with its defaults over the whole volume: nothing held out, as the others have it."""
    from vesuvius.config import AugmentConfig, DataConfig, ValidationConfig, VolumeConfig
    from vesuvius.stream.prepare import prepare_data

    config = DataConfig(
        volumes=(VolumeConfig(path=volume, level=setup.level),),
        patch_size=setup.patch_zyx,
        augment=AugmentConfig(turn=False),  # drawn for the device, which is not here; would ask for patches y = x
        validation=ValidationConfig(fraction=0.0, guard=0.0),
    )
    return prepare_data(SEED, config).job


def task_round_batches(job: ReaderJob, setup: Setup) -> int:
    """Batches after which every worker has handed over whole tasks, and no batch is cut."""
    return setup.workers * math.lcm(job.plan.samples_per_task, setup.batch) // setup.batch


class OurTasks(IterableDataset[tuple[torch.Tensor, int]]):
    """Our samples, each worker reading and cutting those of one rank; decoded bytes come with the sample after them."""

    def __init__(self, job: ReaderJob) -> None:
        self._job = job

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        from vesuvius.stream.cutter import Cutter
        from vesuvius.stream.reader import Reader

        worker = get_worker_info()
        assert worker is not None
        job = replace(self._job, rank=worker.id, world=worker.num_workers)
        # Those in flight and those of a task more: a batch may hold views of regions that have left.
        reader = Reader(job, ring=job.plan.regions_in_flight + job.blocks_per_task + 1)
        pairs = itertools.pairwise(job.tasks(0, 2**62))
        blocks = (block for task, ahead in pairs for block in reader.blocks(task, ahead))
        reports: list[BlockReport] = []
        for patch in Cutter(job, blocks, reports.append, 0, 2**62).patches():
            bytes_read = sum(report.bytes_read for report in reports)
            reports.clear()
            yield torch.from_numpy(patch.voxels[0]), bytes_read


def task_feed(setup: Setup) -> Feed:
    """(d) torch DataLoader over our tasks, of which each worker may have one ready, as ours may."""
    job = our_job(setup.volume, setup)
    prefetch = max(job.plan.samples_per_task // setup.batch, PREFETCH)
    return LoaderFeed(OurTasks(job), setup, task_round_batches(job, setup), prefetch)


class OurFeed:
    """(e) `PatchStream` into a ring of three buffers, as the trainer has it with a GPU; Ray starts before the clock."""

    def __init__(self, setup: Setup) -> None:
        job = our_job(setup.volume, setup)
        self.round_batches = task_round_batches(job, setup)
        self.warmup_batches = 2 * self.round_batches
        started = time.perf_counter()
        self._open = start_ray(job, setup)
        self._ray_start_s = time.perf_counter() - started
        self._stream: PatchStream | None = None

    @property
    def decoded_bytes(self) -> int:
        return sum(figures.bytes_read for figures in self._stream.readers.values()) if self._stream else 0

    def batches(self) -> Batches:
        with self._open() as self._stream:
            for batch in self._stream:
                yield batch.patches

    def worker_pids(self) -> list[int]:
        return list(self._stream.readers) if self._stream else []

    def own_figures(self) -> Figures:
        return {"ray_start_s": self._ray_start_s, "object_store_peak_bytes": object_store_peak_bytes()}


def start_ray(job: ReaderJob, setup: Setup) -> Callable[[], PatchStream]:
    """Start Ray; returns what opens the stream.  The one place that knows how a stream is made."""
    from vesuvius.stream.options import StreamOptions, store_bytes
    from vesuvius.stream.ray import session as ray_session
    from vesuvius.stream.stream import PatchStream

    options = StreamOptions(setup.batch, setup.workers, PREFETCH)
    ray_session.Session(options.cluster, setup.workers, job.world, store_bytes(job, options))
    ring = [np.empty((setup.batch, *setup.patch_zyx), job.dtype) for _ in range(3)]
    return lambda: PatchStream(job, options, buffers=ring)


def object_store_peak_bytes() -> int | None:
    """Most memory that the object store of our private Ray took so far; None where it cannot be found.

    The store is a deleted file in /dev/shm that the raylet holds open.  Its pages are never given back, so the pages
    that it has are the peak.
    """
    import psutil

    for process in psutil.Process().children(recursive=True):
        if process.name() == "raylet":
            stores = [fd for fd in Path(f"/proc/{process.pid}/fd").iterdir() if "/plasma" in os.readlink(fd)]
            return max((fd.stat().st_blocks * 512 for fd in stores), default=None)
    return None


# ---- the limit: nothing but decoding


def decode_limit(setup: Setup) -> Figures:
    """(f) The patches/s that ours would reach if nothing but decoding took time.

    One process per worker decodes its share of the chunks, each once, in boxes of about the size of our regions and
    into one buffer; always from the local disk.
    """
    job = our_job(setup.local_volume, setup)
    amplification = job.plan.read_amplification(0)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(setup.workers, context, _set_barrier, (context.Barrier(setup.workers),)) as pool:
        futures = [pool.submit(_decode, job, worker, setup) for worker in range(setup.workers)]
        rates, memory = zip(*(future.result() for future in futures), strict=True)
    return {
        "patches_s": sum(rates) / (job.patch_bytes * amplification),
        "first_batch_s": None,
        "bytes_per_patch": job.patch_bytes * amplification,
        "rss_anon_bytes": max(memory),
        "decoded_bytes_s": sum(rates),
    }


_barrier: Any = None  # set in each worker: a barrier reaches a process only at its start


def _set_barrier(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _decode(job: ReaderJob, worker: int, setup: Setup) -> tuple[float, int]:
    """Decode this worker's boxes over and over for a while: bytes/s, private memory."""
    from vesuvius.volumes.volume import open_volume

    volume = open_volume(job.volumes[0])
    region_zyx = job.plan.volumes[0].cells.region_zyx(job.plan.patch_zyx)
    sides = [max(round(r / c), 1) * c for r, c in zip(region_zyx, volume.chunk_zyx, strict=True)]
    zs, ys, xs = (range(0, size, side) for size, side in zip(volume.shape_zyx, sides, strict=True))
    mine = itertools.cycle(list(itertools.product(zs, ys, xs))[worker :: setup.workers] or [(0, 0, 0)])
    buffer = np.ones(math.prod(sides), volume.dtype)
    _barrier.wait(timeout=120)
    begun, decoded_bytes = time.perf_counter(), 0
    while (elapsed_s := time.perf_counter() - begun) < setup.seconds:
        start = z0, y0, x0 = next(mine)
        z1, y1, x1 = (min(lo + side, size) for lo, side, size in zip(start, sides, volume.shape_zyx, strict=True))
        shape = (z1 - z0, y1 - y0, x1 - x0)
        volume.read((start, (z1, y1, x1)), buffer[: math.prod(shape)].reshape(shape))
        chunks = math.prod(-(-n // c) for n, c in zip(shape, volume.chunk_zyx, strict=True))
        decoded_bytes += chunks * math.prod(volume.chunk_zyx) * volume.dtype.itemsize
    return decoded_bytes / elapsed_s, rss_anon_bytes(os.getpid())
