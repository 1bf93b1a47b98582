"""Stored condition voxels, labels and metadata as network input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from tests.conftest import textured, write_array
from vesuvius.config import Config
from vesuvius.loader.device import DeviceFeed
from vesuvius.monitor.clock import StepClock
from vesuvius.stream.options import StreamOptions
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.training.step.feed import Conditioner, TrainingBatch, TrainingFeed

CPU = torch.device("cpu")


def write_group(path: Path, voxels: np.ndarray[Any, Any], scale: list[float]) -> Path:
    """An OME-Zarr with one level."""
    dataset = {"path": "0", "coordinateTransformations": [{"type": "scale", "scale": scale}]}
    multiscale: dict[str, Any] = {
        "version": "0.4",
        "axes": [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"],
        "datasets": [dataset],
    }
    zarr.create_group(path, zarr_format=2, attributes={"multiscales": [multiscale]})
    write_array(path / "0", voxels)
    return path


def make_config(volumes: list[dict[str, Any]], **data: Any) -> Config:
    return Config.model_validate(
        {
            "name": "t",
            "data": {
                "volumes": tuple(volumes),
                "patch_size": (8, 16, 16),
                "patches_per_region": 2,
            }
            | data,
            "model": {"channels": (8,), "stem_stride": (1, 1, 1), "attention_heads": 0},
        }
    )


LABELS: dict[str, list[float]] = {
    "bool": [0, 1],
    "uint8": [0, 1, 2, 255],
    "int8": [0, 1, 2, -1, -128],
    "int16": [0, 1, 2, -1, 256],
    "uint16": [0, 1, 2, 256, 65535],
    "int32": [0, 1, 2, -1, 2**24 + 1, -(2**31)],
    "uint32": [0, 1, 2, 2**31, 2**32 - 1],
    "int64": [0, 1, 2, -1, 2**32, 2**33 + 1, -(2**63)],
    "uint64": [0, 1, 2, 2**32, 2**64 - 1],
    "float16": [0, 1, 2, 0.5, -1],
    "float32": [0, 1, 2, 0.5, -1],
    "float64": [0, 1, 2, 0.5, -1, 1e300],
}


@pytest.mark.parametrize("dtype", LABELS)
def test_labels_become_one_hot_channels_and_unknown_labels_none(dtype: str) -> None:
    labels = LABELS[dtype]
    raw = torch.from_numpy(np.array(labels, dtype)).view(1, 1, 1, 1, -1)
    condition = Conditioner(range(3), [], CPU)(raw, [0])
    assert condition is not None
    expected = [[float(label == channel) for label in labels] for channel in range(3)]
    assert condition[0, :, 0, 0].tolist() == [*expected, [1.0] * len(labels)]


def test_a_condition_is_augmented_with_its_patch(tmp_path: Path) -> None:
    voxels = textured((96, 128, 128))
    scan, labels = write_array(tmp_path / "scan.zarr", voxels), write_array(tmp_path / "labels.zarr", 255 - voxels)
    config = make_config(
        [{"path": str(scan), "condition": {"path": str(labels)}}],
        normalize={"low": 0.0, "high": 255.0},
        condition_normalize={"low": 0.0, "high": 255.0},
    )
    data = prepare_data(0, config.data)
    intensities = data.intensity_ranges(config.data)
    options = StreamOptions(8, num_workers=0)
    conditioner = Conditioner(None, intensities.conditions, CPU)
    feed = TrainingFeed(DeviceFeed(CPU, options, data.job, intensities.volumes), conditioner)
    with feed.open():
        batch = feed.next(StepClock())
    assert batch.condition is not None
    # The condition is the negative: wherever both are, model values add up to 0.  1e-6: float32 rounding near 1.
    torch.testing.assert_close(batch.condition[:, :1], -batch.x_0, rtol=0, atol=1e-6)


def batches_of(config: Config, count: int = 3) -> list[TrainingBatch]:
    data = prepare_data(config.seed, config.data)
    intensities = data.intensity_ranges(config.data)
    conditioner = Conditioner(None, intensities.conditions, CPU)
    device_feed = DeviceFeed(CPU, StreamOptions(8, num_workers=0), data.job, intensities.volumes)
    feed = TrainingFeed(device_feed, conditioner, config.diffusion.condition_noise)
    with feed.open():
        return [feed.next(StepClock()) for _ in range(count)]


def test_with_context_the_network_sees_the_same_condition_at_the_patch_and_the_window(tmp_path: Path) -> None:
    voxels = textured((96, 128, 128), dtype="float32")
    scan = write_array(tmp_path / "scan.zarr", voxels)
    coarse = write_array(tmp_path / "coarse.zarr", textured((48, 64, 64), seed=1))
    keys: dict[str, Any] = {"condition_normalize": {"low": 0.0, "high": 200.0}}
    volume: dict[str, Any] = {"path": str(scan), "condition": {"path": str(coarse)}}
    without = batches_of(make_config([volume], **keys))
    volume["condition"]["context"] = 2
    config = make_config([volume], **keys)
    noisy = config.model_copy(update={"diffusion": config.diffusion.model_copy(update={"condition_noise": 0.5})})
    assert {each.data.context for each in (config, noisy)} == {2}
    spreads = []
    for plain, seen, disturbed in zip(without, batches_of(config), batches_of(noisy), strict=True):
        for batch in (seen, disturbed):
            assert batch.condition is not None
            assert batch.condition.shape[1] == config.condition_channels == 4
            for name in ("x_0", "eps"):
                assert torch.equal(getattr(batch, name), getattr(plain, name)), "order and noise are the same"
        assert plain.condition is not None
        assert seen.condition is not None
        assert disturbed.condition is not None
        assert torch.equal(seen.condition[:, :2], plain.condition)
        assert torch.equal(seen.condition[:, 2], torch.zeros_like(seen.condition[:, 2]))
        for clean, noise in zip(seen.condition, disturbed.condition, strict=True):
            (std,) = noise[2].unique().tolist()
            of_window, at_patch = (noise - clean)[3] / std, (noise - clean)[0] / std
            assert float(of_window.std()) == pytest.approx(1, abs=0.1)
            assert set(at_patch.unique().tolist()) <= set(of_window.unique().tolist()), "of the same voxels"
            assert len(at_patch.unique()) <= 5 * 9 * 9, "constant in each coarse voxel"
            spreads.append(std)
    assert 0 < min(spreads) < 0.15 < 0.35 < max(spreads) < 0.5
