"""Other loaders of patches for `tools/bench/loaders.py`, each library in its own environment.

    python3.12 -m venv /tmp/env-zarr34; P=/tmp/env-zarr34/bin/pip              # zarr 3.4 requires Python 3.12
    $P install torch==2.14.1 zarr==3.4.2
    python3.11 -m venv /tmp/env-grain; P=/tmp/env-grain/bin/pip
    $P install torch==2.13.0; $P install torch==2.13.0 grain==0.2.18 tensorstore==0.1.86 zarr==3.1.6
    python3.11 -m venv /tmp/env-spdl; P=/tmp/env-spdl/bin/pip                  # Meta's SPDL without spdl-io
    $P install torch==2.13.0; $P install torch==2.13.0 spdl-core==0.8.0 tensorstore==0.1.86 zarr==3.1.6
    python3.11 -m venv /tmp/env-cellmap; P=/tmp/env-cellmap/bin/pip            # brings zarr 2.18.7
    $P install torch==2.14.1 torchvision==0.29.1 cellmap-data==2026.3.20.1935
    python3.11 -m venv /tmp/env-villa; P=/tmp/env-villa/bin/pip                # villa's distribution; zarr 2.18.7
    $P install torch==2.13.0; $P install torch==2.13.0 vesuvius==0.2.4 nest-asyncio==1.6.0 tqdm==4.70.1 \\
        simpleitk==2.5.7 pandas==3.1.1 scipy==1.17.1 scikit-image==0.26.0 fft-conv-pytorch==1.2.0
    python3.11 -m venv /tmp/peers; P=/tmp/peers/bin/pip                        # zarr 2.18.7, numpy 1.26.4
    $P install torch==2.13.0; $P install torch==2.13.0 zarrdataset==0.2.2 monai==1.6.1

    python tools/bench/loaders.py --config C.yaml \\
        --peer "grain=/tmp/env-grain/bin/python tools/bench/peers.py grain-tensorstore" --peer ...

| system | environment | description |
|---|---|---|
| zarr-python-fused | env-zarr34 | torch DataLoader, zarr-python's fused codec pipeline |
| grain-tensorstore | env-grain | grain, tensorstore in worker processes, a batch of reads at once in each |
| spdl-zarr | env-spdl | SPDL, zarr-python in threads, a batch each |
| spdl-tensorstore | env-spdl | SPDL, tensorstore in threads, a batch of reads at once in each |
| spdl-tensorstore-cached | env-spdl | the same, from a cache of the decoded volume, filled before the first batch |
| cellmap-data | env-cellmap | `CellMapDataset` of one raw array and an empty class of one voxel; float32 |
| villa | env-villa | `ZarrDataset` of the Vesuvius Challenge, without labels and augmentation; float32 |
| villa-volume | env-villa | torch DataLoader, villa's `Volume` |
| zarrdataset | peers | chunk by chunk (`draw_same_chunk`) |
| monai-ram | peers | `CacheDataset` of the volume in RAM, `RandSpatialCropSamplesd` |

Run from the repository's root.  A peer is any command: it receives --volume, --level, --patch, --batch, --workers,
--seconds and --result, the file into which it writes JSON with `samples_s`, and `start_s` and optional others.
Our package need not be installed; `feeds.py` measures a loader.  Volumes are read from disk; those
of zarr 2.18.7 must be zarr v2.

All sample patches uniformly, except zarrdataset: patches on a grid whose step is half a patch, 16 of one chunk in
random order, then those of another chunk: consecutive patches of a worker overlap.  villa draws from 4,096 random
places, which are its `samples_mapping.json`.  MONAI: without its defaults of tracking metadata and of a deep copy of
the cache for each item; its workers share the volume.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from data_sets import VillaReads, cellmap_feed, monai_feed, villa_feed, zarrdataset_feed
from feeds import (
    PREFETCH,
    SEED,
    Batches,
    Box,
    Feed,
    LoaderFeed,
    Reads,
    Setup,
    Triple,
    UniformPatches,
    child_pids,
    open_array,
    open_tensorstore,
    random_box,
    run_feed,
)
from numcodecs import blosc
from numpy.typing import NDArray

_SINK = 3  # batches that wait for the consumer: SPDL's default
_ENDLESS = 2**40


def feed_of(system: str, setup: Setup, scratch: Path) -> Feed:
    """The loader of a system, which may keep files in the folder `scratch`."""
    match system:
        case "zarr-python-fused":
            return LoaderFeed(FusedPatches("zarr-python", setup), setup)
        case "grain-tensorstore":
            return GrainFeed(setup)
        case "spdl-zarr" | "spdl-tensorstore" | "spdl-tensorstore-cached":
            return SpdlFeed(setup, system.removeprefix("spdl-"))
        case "cellmap-data":
            return cellmap_feed(setup, scratch)
        case "villa":
            return villa_feed(setup, scratch)
        case "villa-volume":
            return LoaderFeed(VillaReads("zarr-python", setup), setup)
        case "zarrdataset":
            return zarrdataset_feed(setup)
        case "monai-ram":
            return monai_feed(setup)
    raise SystemExit(f"unknown system {system!r}")


class FusedPatches(UniformPatches):
    """Read by zarr-python with its fused codec pipeline."""

    def open(self) -> tuple[Triple, Reads]:
        # max_workers: 1, as the worker processes share the cores
        fused = "zarr.core.codec_pipeline.FusedCodecPipeline"
        zarr.config.set({"codec_pipeline.path": fused, "codec_pipeline.max_workers": 1})
        return super().open()


class RandomBoxes:
    """Patch i of a volume, for grain; opened in the worker."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._array: Any = None

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> NDArray[Any]:
        array = self._array = self._array or open_tensorstore(self._setup)  # with one copy thread: processes
        box = random_box(np.random.default_rng((SEED, index)), array.shape, self._setup.patch_zyx)
        patch: NDArray[Any] = array[box].read().result()
        return patch


class GrainFeed:
    """grain's `MapDataset`, read by threads of worker processes, which hand over batches in shared memory."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._workers = setup, max(setup.workers, 1)
        self.round_batches = self._workers
        self.warmup_batches = 2 * (PREFETCH + 1) * self._workers

    def batches(self) -> Batches:
        import grain

        # grain's defaults of 16 threads and 500 elements are for elements of 10 KiB; here as many reads at once as
        # there are patches in a batch, whose threads wait for tensorstore
        reads = grain.ReadOptions(num_threads=self._setup.batch, prefetch_buffer_size=self._setup.batch)
        patches = grain.MapDataset.source(RandomBoxes(self._setup)).to_iter_dataset(reads)
        processes = grain.MultiprocessingOptions(num_workers=self._setup.workers, per_worker_buffer_size=PREFETCH)
        batches = iter(patches.batch(self._setup.batch).mp_prefetch(processes))
        try:
            yield from batches
        finally:
            batches.close()

    def worker_pids(self) -> list[int]:
        return child_pids()


class SpdlFeed:
    """SPDL's pipeline of this process: boxes of a batch, read into one array by each of several threads."""

    round_batches = 1  # in order of completion, by all together

    def __init__(self, setup: Setup, library: str) -> None:
        self.warmup_batches = 2 * (_SINK + 2 + 2 * setup.workers)
        self._setup, self._library = setup, library

    def batches(self) -> Batches:
        from spdl.pipeline import PipelineBuilder

        threads = max(self._setup.workers, 1)
        array, read = self._open(threads)
        rng = np.random.default_rng(SEED)
        boxes = (random_box(rng, array.shape, self._setup.patch_zyx) for _ in itertools.count())
        # a batch a thread: fewer hand-overs through SPDL's event loop than a patch a thread, and 1.3 times as fast
        pipeline = PipelineBuilder().add_source(boxes).aggregate(self._setup.batch).pipe(read, concurrency=threads)
        running = pipeline.add_sink(_SINK).build(num_threads=threads)
        with running.auto_stop():
            yield from running

    def worker_pids(self) -> list[int]:
        return child_pids()

    def _open(self, threads: int) -> tuple[Any, Callable[[list[Box]], NDArray[Any]]]:
        """The array, and a function that reads a batch of boxes of it."""
        if self._library == "zarr":
            blosc.set_nthreads(1)  # zarr-python decodes in threads of its own
            array = open_array(self._setup)
            return array, lambda boxes: np.stack([array[box] for box in boxes])
        import tensorstore

        cached = self._library == "tensorstore-cached"
        room = 2 * open_array(self._setup).nbytes if cached else 0  # twice: indices of shards, bookkeeping
        array = open_tensorstore(self._setup, threads, room)
        if cached:  # every chunk is read once
            for z in range(0, array.shape[0], array.chunk_layout.read_chunk.shape[0]):
                array[z : z + array.chunk_layout.read_chunk.shape[0]].read().result()

        def read(boxes: list[Box]) -> NDArray[Any]:
            batch = np.empty((len(boxes), *self._setup.patch_zyx), array.dtype.numpy_dtype)
            # straight into the batch, all at once: without the copy of np.stack
            reads = [
                tensorstore.array(to).write(array[box].translate_to[0]) for to, box in zip(batch, boxes, strict=True)
            ]
            for done in reads:
                done.result()
            return batch

        return array, read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system")
    parser.add_argument("--volume", required=True)
    parser.add_argument("--patch", required=True, metavar="Z,Y,X")
    for name in ("level", "batch", "workers"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    z, y, x = map(int, args.patch.split(","))
    if zarr.__version__.startswith("2.") and (Path(args.volume) / "zarr.json").exists():
        raise SystemExit(f"{args.system} has zarr {zarr.__version__}, which reads zarr v2; {args.volume} is zarr v3")
    setup = Setup(args.volume, args.level, (z, y, x), args.batch, args.workers, args.seconds)
    with tempfile.TemporaryDirectory() as scratch:
        args.result.write_text(json.dumps(run_feed(feed_of(args.system, setup, Path(scratch)), setup.seconds)))


if __name__ == "__main__":
    main()
