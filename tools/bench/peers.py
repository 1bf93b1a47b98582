"""Other loaders of patches for `tools/bench/loaders.py`, in an environment of their own: zarrdataset wants zarr 2.

    python3.11 -m venv /tmp/peers
    /tmp/peers/bin/pip install torch==2.13.0
    /tmp/peers/bin/pip install torch==2.13.0 zarrdataset==0.2.2 monai==1.6.1    # brings zarr 2.18.7, numpy 1.26.4
    export PEERS="/tmp/peers/bin/python tools/bench/peers.py"
    python tools/bench/loaders.py --config C.yaml --peer "zarrdataset=$PEERS zarrdataset" \\
        --peer "monai=$PEERS monai-ram"

Run from the repository's root.  Reads zarr v2 from disk.  A peer is any command: it is given --volume, --level,
--patch, --batch, --workers, --seconds and --result, the file into which it writes JSON with `samples_s`, and `start_s`
and others if it likes.  Nothing here needs vesuvius to be installed; how a loader is measured: `feeds.py`.

zarrdataset, chunk by chunk (`draw_same_chunk`): patches on a grid whose step is half a patch, 16 of one chunk in random
order, then those of another chunk: consecutive patches of a worker overlap.  MONAI: `CacheDataset` of the one volume,
in RAM and shared by the workers, and `RandSpatialCropSamplesd`; without its defaults of tracking metadata and of a deep
copy of the cache for each item.  Decodes nothing after its start.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from numcodecs import blosc
from torch.utils.data import RandomSampler

try:
    from zarrdataset import ImagesDatasetSpecs, PatchSampler, ZarrDataset, zarrdataset_worker_init_fn  # type: ignore[import-not-found]
except ImportError:  # MONAI does without it
    ZarrDataset = object

from feeds import (
    PREFETCH,
    Batches,
    Feed,
    LoaderFeed,
    Setup,
    child_pids,
    open_array,
    run_feed,
)

SYSTEMS = ("zarrdataset", "monai-ram")


class ChunkByChunk(ZarrDataset):  # type: ignore[misc]
    """Endless passes of zarrdataset over the volume."""

    def __init__(self, setup: Setup) -> None:
        array = open_array(setup)
        step_zyx = [max(size // 2, 1) for size in setup.patch_zyx]
        super().__init__(
            [ImagesDatasetSpecs(filenames=f"{setup.volume}/{array.path}".rstrip("/"), source_axes="ZYX")],
            patch_sampler=PatchSampler(list(setup.patch_zyx), stride=step_zyx),
            shuffle=True,
            draw_same_chunk=True,
        )

    def __iter__(self) -> Iterator[torch.Tensor]:
        blosc.set_nthreads(1)
        while True:
            yield from map(torch.from_numpy, super().__iter__())


class MonaiFeed:
    """The whole volume in RAM, random crops of it."""

    def __init__(self, setup: Setup) -> None:
        self.round_batches = setup.workers
        self.warmup_batches = 2 * PREFETCH * setup.workers
        self._setup = setup
        blosc.set_nthreads(setup.workers)
        self._voxels = torch.from_numpy(open_array(setup)[:])[None]

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


def init_monai_worker(worker_id: int) -> None:
    """MONAI's own seeds, and tensors without metadata."""
    from monai.data import set_track_meta
    from monai.data.utils import worker_init_fn  # type: ignore[import-not-found]

    worker_init_fn(worker_id)
    set_track_meta(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--volume", required=True)
    parser.add_argument("--patch", required=True, metavar="Z,Y,X")
    for name in ("level", "batch", "workers"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    z, y, x = map(int, args.patch.split(","))
    setup = Setup(args.volume, args.level, (z, y, x), args.batch, args.workers, args.seconds)
    feed: Feed
    if args.system == "zarrdataset":
        feed = LoaderFeed(ChunkByChunk(setup), setup, worker_init_fn=zarrdataset_worker_init_fn)
    else:
        feed = MonaiFeed(setup)
    args.result.write_text(json.dumps(run_feed(feed, setup.seconds)))


if __name__ == "__main__":
    main()
