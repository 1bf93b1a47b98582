"""From stored voxels to model values."""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import textured, write_array
from tests.support.gpu import GPU, GPU_MARKS, needs_gpu, no_waiting, sleep
from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.loader.device import DeviceFeed, apply_symmetries
from vesuvius.monitor.clock import StepClock, make_clock
from vesuvius.plan.plan import Augmentation
from vesuvius.stream.options import StreamOptions, batches_ahead
from vesuvius.stream.start.prepare import IntensityRange, PreparedData, prepare_data

CPU = torch.device("cpu")
ALL = [
    Augmentation((z, y, x), turns) for z, y, x, turns in product([False, True], [False, True], [False, True], range(4))
]


INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES = [*INTEGERS, "float16", "float32", "float64"]


@pytest.mark.parametrize("dtype", [*DTYPES, "bool"])
def test_symmetries_move_voxels_without_changing_them(dtype: str) -> None:
    patch = textured((4, 6, 6), dtype=dtype)
    if dtype == "bool":
        patch ^= textured((4, 6, 6)) > 100
    out = apply_symmetries(torch.from_numpy(np.stack([patch] * len(ALL))), ALL).numpy()
    assert out.dtype == patch.dtype
    for turned, symmetry in zip(out, ALL, strict=True):
        axes = [a for a, flip in enumerate(symmetry.flip_zyx) if flip]
        np.testing.assert_array_equal(turned, np.rot90(np.flip(patch, axes), symmetry.num_rot90, (1, 2)))
    # Mirrors and quarter turns of a slice make 8 symmetries, with the mirror along z 16.
    assert len({turned.tobytes() for turned in out}) == 16


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float16"])
def test_each_volumes_intensity_range_maps_to_minus_one_and_one(tmp_path: Path, dtype: str) -> None:
    volumes = []
    for number in range(2):
        voxels = np.full((96, 128, 128), 50 + 100 * number, dtype)
        path = write_array(tmp_path / f"{number}.zarr", voxels)
        volumes.append(VolumeConfig(path=str(path)))
    config = DataConfig(volumes=tuple(volumes), patch_size=(8, 16, 16), patches_per_region=2)
    data = prepare_data(0, config)
    intensities = [IntensityRange(0, 100), IntensityRange(100, 150)]
    options = StreamOptions(16, num_workers=0)
    feed = DeviceFeed(CPU, options, data.job, intensities)
    with feed.open():
        batch, _ = feed.next(StepClock())
    x_0 = batch.image
    assert x_0.shape == (16, 1, 8, 16, 16)
    assert x_0.dtype == torch.float32
    drawn = [sample.volume for sample in batch.samples]
    assert set(drawn) == {0, 1}
    for value, number in zip(x_0, drawn, strict=True):
        # intensity 50 lies in the middle of 0..100, intensity 150 at the top of 100..150
        torch.testing.assert_close(value, torch.full_like(value, float(number)))


def textured_feed(path: Path, device: torch.device) -> tuple[DeviceFeed, PreparedData, StreamOptions]:
    volume = write_array(path / "volume.zarr", textured((96, 128, 128), dtype="uint16"))
    config = DataConfig(volumes=(VolumeConfig(path=str(volume)),), patch_size=(8, 16, 16), patches_per_region=2)
    data = prepare_data(0, config)
    stream_options = StreamOptions(2, num_workers=0)
    return DeviceFeed(device, stream_options, data.job, [IntensityRange(0, 1000)]), data, stream_options


on_each_device = pytest.mark.parametrize(
    "device",
    [
        CPU,
        pytest.param(GPU, marks=GPU_MARKS),
    ],
    ids=str,
)


@on_each_device
def test_model_values_do_not_depend_on_prefetch(tmp_path: Path, device: torch.device) -> None:
    """All batches are compared at the end: on a GPU, pinned memory must not be reused before it has been copied."""
    feed, data, options = textured_feed(tmp_path, device)
    clock = StepClock()
    with feed.open():
        expected = [feed.next(clock)[0].image.cpu() for _ in range(24)]
    feed = DeviceFeed(device, options, data.job, [IntensityRange(0, 1000)])
    got = []
    with feed.open() as stream:
        for number in range(24):
            if number % 4 == 3:
                ahead = (1, 6, 3)[number // 4 % 3]
                stream.reconfigure(prefetch_factor=ahead)
                assert batches_ahead(stream.options) == ahead
            got.append(feed.next(clock)[0].image)
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine.cpu(), theirs)


@needs_gpu
def test_on_a_gpu_the_copy_to_pinned_memory_counts_as_copying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(tensor: torch.Tensor) -> torch.Tensor:
        time.sleep(0.3)
        return tensor.pin_memory()

    monkeypatch.setattr("vesuvius.loader.device._pinned", slow)
    feed, _, _ = textured_feed(tmp_path, GPU)
    with feed.open():
        clock = make_clock(GPU)
        feed.next(clock)
        clock.step_done()
        (times,) = clock.finished(wait=True)
    assert times.h2d_s > 0.29, "the device idles meanwhile"


@needs_gpu
@pytest.mark.parametrize("busy", ["computing", "copying"])
def test_on_a_gpu_batches_are_those_of_the_cpu_if_a_stream_lags_behind(tmp_path: Path, busy: str) -> None:
    """If the device computes, copies run ahead of it and must not overwrite what it has yet to read; if it copies, the
    device must wait, and the host must not.
    """
    (tmp_path / "cpu").mkdir()
    on_cpu, _, _ = textured_feed(tmp_path / "cpu", CPU)
    feed, _, _ = textured_feed(tmp_path, GPU)
    clock = make_clock(GPU)
    with on_cpu.open(), feed.open(), no_waiting():
        got = [feed.next(clock)[0].image]  # a GPU may finish all other work before it loads a kernel
        with torch.accelerator.current_stream(GPU) if busy == "computing" else feed._copies:
            sleep(1.0)
        busy_until = torch.accelerator.current_stream(GPU).record_event()
        got += [feed.next(clock)[0].image]
        while busy == "computing" and not clock._step[-1].before.copied[-1][1].query():
            time.sleep(0.001)
        assert busy == "copying" or not busy_until.query(), "it is copied while the device computes"
        got += [feed.next(clock)[0].image for _ in range(4)]
        expected = [on_cpu.next(StepClock())[0].image for _ in range(6)]
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine.cpu(), theirs)
