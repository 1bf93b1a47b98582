"""From stored voxels to model values."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import textured, write_array
from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.data.plan import Augmentation
from vesuvius.data.prepare import GreyRange, prepare_data
from vesuvius.data.stream import PatchStream
from vesuvius.data.stream_options import StreamOptions
from vesuvius.engine.conditioning import Conditioner
from vesuvius.engine.device import DeviceFeed, apply_symmetries
from vesuvius.observe.clock import HostClock

CPU = torch.device("cpu")
ALL = [
    Augmentation((z, y, x), turns) for z, y, x, turns in product([False, True], [False, True], [False, True], range(4))
]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_symmetries_move_voxels_and_change_none(dtype: str) -> None:
    patch = textured((4, 6, 6), dtype=dtype)
    out = apply_symmetries(torch.from_numpy(np.stack([patch] * len(ALL))), ALL).numpy()
    assert out.dtype == patch.dtype
    for turned, symmetry in zip(out, ALL, strict=True):
        axes = [a for a, flip in enumerate(symmetry.flip_zyx) if flip]
        np.testing.assert_array_equal(turned, np.rot90(np.flip(patch, axes), symmetry.turns, (1, 2)))
    # Mirrors and quarter turns of a slice make 8 symmetries, with the mirror along z 16.
    assert len({turned.tobytes() for turned in out}) == 16


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
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
    conditioner = Conditioner(None, [], np.zeros((2, 0), np.float32), CPU)
    feed = DeviceFeed(CPU, options, data.job, greys, conditioner)
    with PatchStream(data.job, options) as stream:
        batch = feed.next(stream, HostClock())
    x_0 = batch.x_0
    assert x_0.shape == (16, 1, 8, 16, 16)
    assert x_0.dtype == torch.float32
    drawn = [data.plan.sample(int(i)).volume for i in batch.indices]
    assert set(drawn) == {0, 1}
    for value, number in zip(x_0, drawn, strict=True):
        # grey 50 lies in the middle of 0..100, grey 150 at the top of 100..150
        torch.testing.assert_close(value, torch.full_like(value, float(number)))
