"""From stored voxels to model values."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import textured, write_array
from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.diffusion.randomness import draw_noise, sample_noise
from vesuvius.loader.device import DeviceFeed, apply_symmetries
from vesuvius.monitor.clock import HostClock
from vesuvius.plan.plan import Augmentation
from vesuvius.stream.options import StreamOptions, batches_ahead
from vesuvius.stream.start.prepare import GreyRange, PreparedData, prepare_data
from vesuvius.training.step.conditioner import Conditioner

CPU = torch.device("cpu")
ALL = [
    Augmentation((z, y, x), turns) for z, y, x, turns in product([False, True], [False, True], [False, True], range(4))
]


INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES = [*INTEGERS, "float16", "float32", "float64"]


@pytest.mark.parametrize("dtype", [*DTYPES, "bool"])
def test_symmetries_move_voxels_and_change_none(dtype: str) -> None:
    patch = textured((4, 6, 6), dtype=dtype)
    if dtype == "bool":
        patch ^= textured((4, 6, 6)) > 100
    out = apply_symmetries(torch.from_numpy(np.stack([patch] * len(ALL))), ALL).numpy()
    assert out.dtype == patch.dtype
    for turned, symmetry in zip(out, ALL, strict=True):
        axes = [a for a, flip in enumerate(symmetry.flip_zyx) if flip]
        np.testing.assert_array_equal(turned, np.rot90(np.flip(patch, axes), symmetry.turns, (1, 2)))
    # Mirrors and quarter turns of a slice make 8 symmetries, with the mirror along z 16.
    assert len({turned.tobytes() for turned in out}) == 16


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float16"])
def test_the_grey_range_becomes_minus_one_to_one_per_volume(tmp_path: Path, dtype: str) -> None:
    volumes = []
    for number in range(2):
        voxels = np.full((96, 128, 128), 50 + 100 * number, dtype)
        path = write_array(tmp_path / f"{number}.zarr", voxels)
        volumes.append(VolumeConfig(path=str(path)))
    config = DataConfig(volumes=tuple(volumes), patch_size=(8, 16, 16), patches_per_region=2, regions_per_task=4)
    data = prepare_data(0, config)
    greys = [GreyRange(0, 100), GreyRange(100, 150)]
    options = StreamOptions(16, workers=0)
    conditioner = Conditioner(None, [], CPU)
    feed = DeviceFeed(CPU, options, data.job, greys, conditioner)
    with feed.open():
        batch = feed.next(HostClock())
    x_0 = batch.x_0
    assert x_0.shape == (16, 1, 8, 16, 16)
    assert x_0.dtype == torch.float32
    drawn = [data.plan.sample(int(i)).volume for i in batch.indices]
    assert set(drawn) == {0, 1}
    for value, number in zip(x_0, drawn, strict=True):
        # grey 50 lies in the middle of 0..100, grey 150 at the top of 100..150
        torch.testing.assert_close(value, torch.full_like(value, float(number)))


PAIRS = {"bool": "int8", "int16": "int32", "uint32": "int64", "int64": "bool", "float16": "uint64", "float64": "int16"}


@pytest.mark.parametrize("dtype", PAIRS)
def test_patches_and_labels_of_any_dtype_and_order_of_axes_are_those_that_the_plan_names(
    tmp_path: Path, dtype: str
) -> None:
    """From the store to the device: the scan is stored x, c, y, z, its labels y, x, z."""
    scan = (textured((96, 80, 72)) - 100).astype(np.int8).astype("float64")
    if dtype.startswith("u") or dtype == "bool":
        scan = scan > 0 if dtype == "bool" else np.abs(scan)
    labels = textured((96, 80, 72), seed=1) % 3
    stored_scan = np.stack([np.zeros_like(scan.T), scan.T], axis=1).astype(dtype)
    stored_labels = labels.transpose(1, 2, 0).astype(PAIRS[dtype])
    write_array(tmp_path / "scan.zarr", stored_scan, 16, zarr_format=3, dimension_names=["x", "c", "y", "z"])
    write_array(tmp_path / "labels.zarr", stored_labels, 16, zarr_format=3, dimension_names=["y", "x", "z"])
    config = DataConfig.model_validate(
        {
            "volumes": (
                {
                    "path": str(tmp_path / "scan.zarr"),
                    "select": (1,),
                    "condition": {"path": str(tmp_path / "labels.zarr")},
                },
            ),
            "patch_size": (8, 16, 12),
            "patches_per_region": 2,
            "regions_per_task": 4,
            "augment": {"flip": False, "turn": False},
            "condition_classes": 3,
        }
    )
    data, options = prepare_data(0, config), StreamOptions(8, workers=0)
    feed = DeviceFeed(CPU, options, data.job, [GreyRange(-100, 100)], Conditioner(range(3), [], CPU))
    with feed.open():
        batch = feed.next(HostClock())
    assert batch.condition is not None
    for row, index in enumerate(batch.indices):
        part = tuple(slice(s, s + n) for s, n in zip(data.plan.sample(int(index)).start_zyx, (8, 16, 12), strict=True))
        # 1e-6: float32 rounding of values up to 2.
        np.testing.assert_allclose(batch.x_0[row, 0], scan[part] / 100, rtol=0, atol=1e-6)
        expected = np.stack([labels[part].astype(PAIRS[dtype]) == label for label in range(3)])
        np.testing.assert_array_equal(batch.condition[row, :3], expected)


def _textured_feed(path: Path, device: torch.device) -> tuple[DeviceFeed, PreparedData, StreamOptions]:
    volume = write_array(path / "volume.zarr", textured((96, 128, 128), dtype="uint16"))
    config = DataConfig(
        volumes=(VolumeConfig(path=str(volume)),), patch_size=(8, 16, 16), patches_per_region=2, regions_per_task=4
    )
    data = prepare_data(0, config)
    stream_options = StreamOptions(2, workers=0)
    conditioner = Conditioner(None, [], device)
    return DeviceFeed(device, stream_options, data.job, [GreyRange(0, 1000)], conditioner), data, stream_options


def _ring_size(feed: DeviceFeed) -> int:
    return len(feed._ring) if feed._ring else 0


on_each_device = pytest.mark.parametrize(
    "device",
    [
        CPU,
        pytest.param(
            torch.device("cuda"),
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
    ids=str,
)


@on_each_device
def test_the_batch_kept_to_be_computed_again_holds_the_stored_voxels_however_many_come_after_it(
    tmp_path: Path, device: torch.device
) -> None:
    feed, data, _ = _textured_feed(tmp_path, device)
    clock = HostClock()
    with feed.open():
        kept = [feed.next(clock).stored for _ in range(3 + 2 * _ring_size(feed))]
    for batch in kept:
        for index, patch in zip(batch.indices, batch.patches, strict=True):
            start = data.plan.sample(int(index)).start_zyx
            stop = (start[0] + 8, start[1] + 16, start[2] + 16)
            np.testing.assert_array_equal(patch, data.volumes[0].read((start, stop)))


@on_each_device
def test_model_values_do_not_depend_on_how_many_batches_are_put_together_ahead(
    tmp_path: Path, device: torch.device
) -> None:
    """On a GPU the ring gets larger and smaller; the model values of all batches are compared at the end."""
    feed, data, options = _textured_feed(tmp_path, device)
    clock = HostClock()
    with feed.open():
        expected = [feed.next(clock).x_0.cpu() for _ in range(24)]
    feed = DeviceFeed(device, options, data.job, [GreyRange(0, 1000)], feed._conditioner)
    got = []
    with feed.open() as stream:
        for number in range(24):
            if number % 4 == 3:
                ahead = (1, 6, 3)[number // 4 % 3]
                feed.reconfigure(prefetch_factor=ahead)
                assert batches_ahead(stream.options) == ahead
                assert _ring_size(feed) == (2 + ahead if device.type == "cuda" else 0)
            got.append(feed.next(clock).x_0)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine.cpu(), theirs)


@on_each_device
def test_the_noise_of_a_batch_is_that_of_its_samples_on_any_rank_after_a_resume_and_in_a_short_batch(
    tmp_path: Path, device: torch.device
) -> None:
    feed, data, options = _textured_feed(tmp_path, device)
    for rank, world, first in [(0, 1, 0), (1, 2, 0), (2, 3, 30)]:
        job = replace(data.job, rank=rank, world=world)
        feed = DeviceFeed(device, options, job, [GreyRange(0, 1000)], feed._conditioner)
        with feed.open(first=first, stop=first + 5 * world):
            for batches in range(3):
                if batches == 1:
                    feed.reconfigure(prefetch_factor=3)
                batch = feed.next(HostClock())
                assert batch.indices[0] == first + rank + 2 * world * batches
                assert torch.equal(batch.eps, sample_noise(0, batch.indices, (1, 8, 16, 16), device))
                assert torch.equal(feed.to_device(batch.stored).eps, batch.eps)
            assert len(batch.eps) == 1


def test_the_noise_of_the_next_batch_is_drawn_while_this_one_is_computed_and_its_errors_reach_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that draws when it is asked never draws the second batch; one that waits for its own draw never returns."""
    begun, goes_on, drawn = [threading.Event() for _ in range(3)], threading.Event(), iter(range(3))

    def slow(*arguments: Any, **named: Any) -> torch.Tensor:
        begun[number := next(drawn)].set()
        if number == 1:
            assert goes_on.wait(60)
        if number == 2:
            raise MemoryError("no memory for noise")
        return draw_noise(*arguments, **named)

    monkeypatch.setattr("vesuvius.loader.device.draw_noise", slow)
    feed, _, _ = _textured_feed(tmp_path, CPU)
    with feed.open():
        feed.next(HostClock())
        assert begun[1].wait(60), "the trainer has the first batch, and asks for nothing"
        goes_on.set()
        feed.next(HostClock())
        with pytest.raises(MemoryError, match="for noise"):
            feed.next(HostClock())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("noise")]
