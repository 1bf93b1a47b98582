"""Other loaders of patches, in an environment of their own: zarrdataset wants zarr-python 2 and numpy 1.

    python3.11 -m venv /tmp/peers
    /tmp/peers/bin/pip install torch==2.13.0
    /tmp/peers/bin/pip install torch==2.13.0 zarrdataset==0.2.2 monai==1.6.1    # brings zarr 2.18.7, numpy 1.26.4
    /tmp/peers/bin/python tools/bench_peers.py --json peers.json

Run from the repository's root, after `bench_ingest.py` has written its phantom.  Reads zarr v2 from disk.  Options,
measuring rules, table and JSON are those of `bench_ingest.py`; nothing here imports vesuvius.

(a) torch DataLoader + zarr-python, uniform random patches: the anchor that both tables share, but with zarr-python 2.
(z) zarrdataset, chunk by chunk (`draw_same_chunk`): patches on a grid whose step is half a patch, 16 of one chunk in
    random order, then those of another chunk: consecutive patches of a worker overlap.
(m) MONAI: `CacheDataset` of the one volume, in RAM and shared by the workers, and `RandSpatialCropSamplesd`; without
    its defaults of tracking metadata and of a deep copy of the cache for each item.  Decodes nothing after its start.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator

import bench_ingest
import torch
from bench_systems import (
    PREFETCH,
    ArrayInfo,
    Batches,
    Figures,
    LoaderFeed,
    Setup,
    array_info,
    child_pids,
    open_node,
    run_feed,
    uniform_feed,
)
from numcodecs import blosc
from torch.utils.data import RandomSampler
from zarrdataset import ImagesDatasetSpecs, PatchSampler, ZarrDataset, zarrdataset_worker_init_fn  # type: ignore[import-not-found]

SYSTEMS = {"a": "zarr-python", "z": "zarrdataset", "m": "monai-ram"}
PACKAGES = ("numpy", "torch", "zarr", "numcodecs", "zarrdataset", "monai")


def measure(system: str, setup: Setup) -> Figures:
    """Run one system once and return its figures."""
    match system:
        case "zarr-python":
            return run_feed(uniform_feed("zarr-python", setup), setup.seconds)
        case "zarrdataset":
            dataset = ChunkByChunk(array_info(setup.volume, setup.level), setup)
            feed = LoaderFeed(dataset, setup, setup.workers, worker_init_fn=zarrdataset_worker_init_fn)
            return run_feed(feed, setup.seconds)
        case "monai-ram":
            return run_feed(MonaiFeed(setup), setup.seconds)
    raise ValueError(f"no such system: {system}")


class ChunkByChunk(ZarrDataset):  # type: ignore[misc]
    """Endless passes of zarrdataset over the volume: each patch, with the bytes decoded for it."""

    def __init__(self, info: ArrayInfo, setup: Setup) -> None:
        step_zyx = [max(size // 2, 1) for size in setup.patch_zyx]
        super().__init__(
            [ImagesDatasetSpecs(filenames=info.url, source_axes="ZYX")],
            patch_sampler=PatchSampler(list(setup.patch_zyx), stride=step_zyx),
            shuffle=True,
            draw_same_chunk=True,
            return_positions=True,
        )
        self._info = info

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        blosc.set_nthreads(1)
        cached: list[tuple[int, int]] = []
        while True:
            for position, patch in super().__iter__():
                decoded_bytes = 0
                # zarrdataset keeps the chunks of its last read, and reads anew what is not all within them.
                if not cached or any(lo < a or hi > b for (lo, hi), (a, b) in zip(position, cached, strict=True)):
                    axes = list(zip(position.tolist(), self._info.chunk_zyx, self._info.shape_zyx, strict=True))
                    # A grid whose step is below the patch's size ends with patches that it pads beyond the volume.
                    counts = [-(-min(hi, size) // chunk) - lo // chunk for (lo, hi), chunk, size in axes]
                    cached = [
                        (lo // chunk * chunk, max(hi, (lo // chunk + count) * chunk))
                        for ((lo, hi), chunk, _), count in zip(axes, counts, strict=True)
                    ]
                    decoded_bytes = self._info.itemsize * math.prod((*counts, *self._info.chunk_zyx))
                yield torch.from_numpy(patch), decoded_bytes


class MonaiFeed:
    """The whole volume in RAM, random crops of it."""

    decoded_bytes = 0

    def __init__(self, setup: Setup) -> None:
        self.round_batches = setup.workers
        self.warmup_batches = 2 * PREFETCH * setup.workers
        self._setup = setup
        started = time.perf_counter()
        blosc.set_nthreads(setup.workers)
        self._voxels = torch.from_numpy(open_node(array_info(setup.volume, setup.level).url)[:])[None]
        self._load_s = time.perf_counter() - started

    def batches(self) -> Batches:
        from monai.data import CacheDataset, DataLoader  # type: ignore[import-not-found]
        from monai.transforms import RandSpatialCropSamplesd  # type: ignore[import-not-found]

        crop = RandSpatialCropSamplesd("image", self._setup.patch_zyx, self._setup.batch, random_size=False)
        dataset = CacheDataset([{"image": self._voxels}], crop, copy_cache=False, progress=False)
        loader = DataLoader(
            dataset,
            batch_size=1,
            sampler=RandomSampler(dataset, replacement=True, num_samples=2**40),
            num_workers=self._setup.workers,
            prefetch_factor=PREFETCH,
            persistent_workers=True,
            multiprocessing_context="spawn",
            worker_init_fn=init_monai_worker,
        )
        for batch in loader:
            yield batch["image"][:, 0].numpy()

    def worker_pids(self) -> list[int]:
        return child_pids()

    def own_figures(self) -> Figures:
        return {"load_s": self._load_s}


def init_monai_worker(worker_id: int) -> None:
    """MONAI's own seeds, and tensors without metadata."""
    from monai.data import set_track_meta
    from monai.data.utils import worker_init_fn  # type: ignore[import-not-found]

    worker_init_fn(worker_id)
    set_track_meta(False)


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    bench_ingest.add_options(parser, SYSTEMS, workers=(2,))
    arguments = bench_ingest.parse(parser, SYSTEMS)
    if arguments.measure:
        return bench_ingest.measure_here(arguments, measure)
    urls = dict.fromkeys(SYSTEMS, str(arguments.volume.resolve()))
    entries = bench_ingest.make_entries(__file__, arguments, SYSTEMS, urls)
    return bench_ingest.report(arguments, entries, "zarr-python", PACKAGES)


if __name__ == "__main__":
    sys.exit(main())
