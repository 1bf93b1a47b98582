"""Other loaders of random patches behind a torch DataLoader, and the measurement of any loader (`loaders.py`).

A measurement starts a loader, waits for its first batch, warms up, then counts the whole batches of a window.
Prefetched batches are not throughput: the warm-up fills every buffer twice, and a window begins and ends after whole
rounds (a batch or a task of each worker), so that the buffers are equally full at both ends.  The consumer copies
nothing: it reads a voxel of every plane of each patch, instead of a copy to the device.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import zarr
from numcodecs import blosc
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

Triple = tuple[int, int, int]
Library = Literal["zarr-python", "zarrs", "tensorstore"]
Figures = dict[str, float | None]
Batches = Generator[NDArray[Any], None, None]
Box = tuple[slice, ...]
Reads = Callable[[Box], Callable[[], NDArray[Any]]]

PREFETCH = 2
SEED = 0


@dataclass(frozen=True)
class Setup:
    """Patches to measure: of a volume (a path or an address of a zarr array, or of a group with `level`)."""

    volume: str
    level: int
    patch_zyx: Triple
    batch: int
    workers: int
    seconds: float  # least length of the window
    unsigned: bool = False  # whether requests to s3 and gs carry no signature


class Feed(Protocol):
    """A loader."""

    warmup_batches: int  # batches before the window
    round_batches: int  # batches of a round: afterwards all workers are at the same point again

    def batches(self) -> Batches:
        """Start the workers; endless batches (B, Z, Y, X).  Closing the generator ends the workers."""

    def worker_pids(self) -> list[int]: ...


def run_feed(feed: Feed, seconds: float) -> Figures:
    """Measure a loader, and close it."""
    started = time.perf_counter()
    with contextlib.closing(feed.batches()) as batches:
        touch(next(batches))
        first_batch_s = time.perf_counter() - started
        for batch in itertools.islice(batches, feed.warmup_batches):
            touch(batch)
        patches, cpu_s, begun = 0, tree_cpu_s(), time.perf_counter()
        while (elapsed_s := time.perf_counter() - begun) < seconds:
            for batch in itertools.islice(batches, feed.round_batches):
                touch(batch)
                patches += len(batch)
        cpu_s = tree_cpu_s() - cpu_s
        workers = [rss_anon_bytes(pid) for pid in feed.worker_pids()]
    return {
        "samples_s": patches / elapsed_s,
        "cpu_ms": 1e3 * cpu_s / patches,
        "start_s": first_batch_s,
        "worker_bytes": max(workers, default=None),
    }


def touch(batch: NDArray[Any]) -> int:
    """Read one voxel of every plane (y, x) of a batch."""
    return int(batch[..., 0, 0].sum())


def tree_cpu_s() -> float:
    """CPU seconds of this process and its live descendants (Linux)."""
    parents, ticks = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)], ticks[int(folder.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    tree = {os.getpid()}
    while below := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= below
    return sum(ticks[pid] for pid in tree) / os.sysconf("SC_CLK_TCK")


def rss_anon_bytes(pid: int) -> int:
    """Private memory of a process (Linux); without memory shared between workers."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


def open_array(setup: Setup) -> Any:
    """The zarr array of a level, as named by the OME metadata of a group."""
    node: Any = zarr.open(store_of(setup) if "://" in setup.volume else setup.volume, mode="r")
    if hasattr(node, "shape"):
        return node
    attributes = dict(node.attrs)
    return node[attributes.get("ome", attributes)["multiscales"][0]["datasets"][setup.level]["path"]]


def place_of(setup: Setup, array: Any) -> str:
    """The path or the address of the array of a level."""
    return "/".join(part for part in (setup.volume.rstrip("/"), array.path) if part)


def store_of(setup: Setup) -> Any:
    """The store for an http(s), s3 or gs address, configured by the usual AWS_* and GOOGLE_* environment."""
    from obstore.store import from_url
    from zarr.storage import ObjectStore

    unsigned: dict[str, Any] = {"skip_signature": True} if setup.unsigned else {}
    return ObjectStore(from_url(setup.volume, client_options={"allow_http": True}, **unsigned), read_only=True)


def random_box(rng: np.random.Generator, shape_zyx: Triple, patch_zyx: Triple) -> Box:
    """Slices of a random patch of a volume."""
    start_zyx = rng.integers(0, np.subtract(shape_zyx, patch_zyx) + 1).tolist()
    return tuple(slice(s, s + p) for s, p in zip(start_zyx, patch_zyx, strict=True))


class UniformPatches(IterableDataset[torch.Tensor]):
    """Endless random patches of a volume, which is opened in the worker."""

    def __init__(self, library: Library, setup: Setup) -> None:
        self._library, self._setup = library, setup

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        rng = np.random.default_rng((SEED, worker.id if worker else 0))
        shape_zyx, read = self.open()
        pending: deque[Callable[[], NDArray[Any]]] = deque()
        while True:
            pending.append(read(random_box(rng, shape_zyx, self._setup.patch_zyx)))
            if len(pending) == (self._setup.batch if self._library == "tensorstore" else 1):
                yield torch.from_numpy(pending.popleft()())

    def open(self) -> tuple[Triple, Reads]:
        """The shape, and a function that starts to read a box and returns a function that waits for its voxels."""
        if self._library == "tensorstore":
            array = open_tensorstore(self._setup)
            return array.shape, lambda box: array[box].read().result
        blosc.set_nthreads(1)
        if self._library == "zarrs":
            zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline", "codec_pipeline.strict": True})
        array = open_array(self._setup)
        return array.shape, lambda box: functools.partial(array.__getitem__, box)


def open_tensorstore(setup: Setup) -> Any:
    """With one data-copy thread, for one of several processes, and without a cache of decoded chunks."""
    import tensorstore

    array = open_array(setup)
    place = place_of(setup, array) + "/"
    driver = {2: "zarr", 3: "zarr3"}[array.metadata.zarr_format]
    kvstore: Any = place if "://" in place else {"driver": "file", "path": place}
    if place.startswith("s3://"):
        bucket, _, path = place.removeprefix("s3://").partition("/")
        kvstore = {"driver": "s3", "bucket": bucket, "path": path}
        kvstore |= {"endpoint": address} if (address := os.environ.get("AWS_ENDPOINT_URL")) else {}
        kvstore |= {"aws_credentials": {"type": "anonymous"}} if setup.unsigned else {}
    context = {"cache_pool": {"total_bytes_limit": 0}, "data_copy_concurrency": {"limit": 1}}
    # "open": do not revalidate the cache against the disk at each read, which is the default
    spec = {"driver": driver, "kvstore": kvstore, "context": context, "recheck_cached_data": "open"}
    return tensorstore.open(spec, open=True, read=True).result()


class LoaderFeed:
    """A DataLoader over a dataset of patches: spawned persistent workers, torch's own collation in the worker."""

    def __init__(self, dataset: IterableDataset[Any], setup: Setup) -> None:
        self.round_batches = max(setup.workers, 1)
        self.warmup_batches = 2 * PREFETCH * self.round_batches
        self._dataset, self._setup = dataset, setup

    def batches(self) -> Batches:
        workers = self._setup.workers
        spawned: dict[str, Any] = {"prefetch_factor": PREFETCH, "persistent_workers": True}
        loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_size=self._setup.batch,
            num_workers=workers,
            **(spawned | {"multiprocessing_context": "spawn"} if workers else {}),
        )
        for patches in loader:
            yield patches.numpy()

    def worker_pids(self) -> list[int]:
        return child_pids()


def child_pids() -> list[int]:
    """The worker processes of a DataLoader of this process, or this process if there are none."""
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None] or [os.getpid()]


def uniform_feed(library: Library, setup: Setup) -> Feed:
    """Random patches read by zarr-python, zarrs or tensorstore."""
    return LoaderFeed(UniformPatches(library, setup), setup)
