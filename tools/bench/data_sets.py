"""Data sets of other libraries behind a torch DataLoader, for `peers.py`: cellmap-data, villa, zarrdataset, MONAI."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import zarr
from feeds import (
    PREFETCH,
    SEED,
    Batches,
    Feed,
    LoaderFeed,
    Reads,
    Setup,
    Triple,
    UniformPatches,
    child_pids,
    open_array,
    place_of,
    random_box,
)
from numcodecs import blosc
from torch.utils.data import DataLoader, RandomSampler

try:
    from zarrdataset import ImagesDatasetSpecs, PatchSampler, ZarrDataset, zarrdataset_worker_init_fn
except ImportError:  # the other data sets do not need it
    ZarrDataset = object

_PLACES = 4096  # of villa
_ENDLESS = 2**40


class RandomItems:
    """A map-style data set behind a DataLoader, sampled with replacement; `take` maps a batch to (B, Z, Y, X)."""

    def __init__(
        self,
        setup: Setup,
        dataset: Any,
        take: Callable[[Any], torch.Tensor],
        *,
        batch_size: int,
        loader: Callable[..., Any] = DataLoader,
        worker_init_fn: Callable[[int], None],
    ) -> None:
        self.round_batches = setup.workers
        self.warmup_batches = 2 * PREFETCH * setup.workers
        self._dataset, self._take = dataset, take
        self._loader = functools.partial(
            loader,
            batch_size=batch_size,
            num_workers=setup.workers,
            prefetch_factor=PREFETCH,
            persistent_workers=True,
            multiprocessing_context="spawn",
            worker_init_fn=worker_init_fn,
        )

    def batches(self) -> Batches:
        sampler = RandomSampler(self._dataset, replacement=True, num_samples=_ENDLESS)
        for batch in self._loader(self._dataset, sampler=sampler):
            yield self._take(batch).numpy()

    def worker_pids(self) -> list[int]:
        return child_pids()


def one_blosc_thread(_: int) -> None:
    """Decode on one thread, because the workers are processes."""
    blosc.set_nthreads(1)


def cellmap_feed(setup: Setup, scratch: Path) -> Feed:
    """`CellMapDataset` behind the library's own DataLoader."""
    from cellmap_data import CellMapDataLoader, CellMapDataset

    # it requires a group with OME metadata, which a bare array lacks: write one with a single level, of voxels of 1 nm
    group = scratch / "volume.zarr"
    raw: Any = zarr.open_group(str(group), mode="w")
    scale = {"type": "scale", "scale": [1.0] * 3}
    axes = [{"name": name, "type": "space", "unit": "nanometer"} for name in "zyx"]
    raw.attrs["multiscales"] = [{"axes": axes, "datasets": [{"path": "0", "coordinateTransformations": [scale]}]}]
    (group / "0").symlink_to(Path(place_of(setup, open_array(setup))).resolve())
    dataset = CellMapDataset(
        raw_path=str(group),
        target_path=str(scratch / "[none]"),
        classes=["none"],
        input_arrays={"raw": {"shape": setup.patch_zyx, "scale": (1, 1, 1)}},
        target_arrays={"none": {"shape": (1, 1, 1), "scale": (1, 1, 1)}},
    )
    return RandomItems(
        setup,
        dataset,
        lambda batch: batch["raw"][:, 0],
        batch_size=setup.batch,
        loader=CellMapDataLoader,
        worker_init_fn=one_blosc_thread,
    )


def villa_feed(setup: Setup, scratch: Path) -> Feed:
    """`ZarrDataset` of villa, with random positions as the samples of a packed volume."""
    from vesuvius.models.datasets.zarr_dataset import ZarrDataset as VillaDataset

    array, rng = open_array(setup), np.random.default_rng(SEED)
    (scratch / "images").mkdir()
    (scratch / "images" / "volume.zarr").symlink_to(Path(place_of(setup, array)).resolve())
    boxes = [random_box(rng, array.shape, setup.patch_zyx) for _ in range(_PLACES)]
    samples = [{"zarr_position": [axis.start for axis in box]} for box in boxes]
    mapping = {"layout": {"sample_shape": setup.patch_zyx}, "samples": samples}
    (scratch / "samples_mapping.json").write_text(json.dumps(mapping))
    wanted = SimpleNamespace(
        data_path=scratch, train_patch_size=setup.patch_zyx, allow_unlabeled_data=True, normalization_scheme="none"
    )
    dataset = VillaDataset(wanted, is_training=False)  # training adds augmentation
    return RandomItems(
        setup,
        dataset,
        lambda batch: batch["image"][:, 0],
        batch_size=setup.batch,
        worker_init_fn=one_blosc_thread,
    )


class VillaReads(UniformPatches):
    """Reads through villa's `Volume`."""

    def open(self) -> tuple[Triple, Reads]:
        from vesuvius import Volume  # type: ignore[attr-defined]  # villa's package

        blosc.set_nthreads(1)
        array = open_array(self._setup)
        volume = Volume(type="zarr", path=place_of(self._setup, array))
        return array.shape, lambda box: functools.partial(volume.__getitem__, box)


class ChunkByChunk(ZarrDataset):  # type: ignore[misc]
    """Endless passes of zarrdataset over the volume."""

    def __init__(self, setup: Setup) -> None:
        step_zyx = [max(size // 2, 1) for size in setup.patch_zyx]
        super().__init__(
            [ImagesDatasetSpecs(filenames=place_of(setup, open_array(setup)), source_axes="ZYX")],
            patch_sampler=PatchSampler(list(setup.patch_zyx), stride=step_zyx),
            shuffle=True,
            draw_same_chunk=True,
        )

    def __iter__(self) -> Iterator[torch.Tensor]:
        blosc.set_nthreads(1)
        while True:
            yield from map(torch.from_numpy, super().__iter__())


def zarrdataset_feed(setup: Setup) -> Feed:
    """zarrdataset, whose workers divide the chunks by its own `worker_init_fn`."""
    return LoaderFeed(ChunkByChunk(setup), setup, worker_init_fn=zarrdataset_worker_init_fn)


def monai_feed(setup: Setup) -> Feed:
    """Random crops of a volume in RAM."""
    from monai.data.dataloader import DataLoader
    from monai.data.dataset import CacheDataset
    from monai.transforms.croppad.dictionary import RandSpatialCropSamplesd

    blosc.set_nthreads(setup.workers)
    voxels = torch.from_numpy(open_array(setup)[:])[None]
    crop = RandSpatialCropSamplesd("image", setup.patch_zyx, setup.batch, random_size=False)
    dataset = CacheDataset([{"image": voxels}], crop, copy_cache=False, progress=False)
    return RandomItems(
        setup,
        dataset,
        lambda batch: batch["image"][:, 0],
        batch_size=1,
        loader=DataLoader,
        worker_init_fn=init_monai_worker,
    )


def init_monai_worker(worker_id: int) -> None:
    """MONAI's own seeds, and tensors without metadata."""
    from monai.data.meta_obj import set_track_meta
    from monai.data.utils import worker_init_fn

    worker_init_fn(worker_id)
    set_track_meta(False)
