"""Labels outside the classes are refused wherever they are read, with their share, examples and position."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import textured, write_array
from tests.stream.test_stream import open_stream
from vesuvius.config import ArrayConfig, DataConfig, VolumeConfig
from vesuvius.errors import DataError
from vesuvius.generate.volume.inputs import InputConfig, Inputs
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.training.validation.fixed_patches import read_fixed_patches
from vesuvius.volumes.voxels import check_labels

BOX = ((0, 0, 0), (2, 2, 2))
TWO, FOUR = (0, 1), (0, 1, 2, 255)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "uint16", "int64", "uint64", "float16", "float64"])
def test_labels_of_the_classes_are_accepted(dtype: str) -> None:
    check_labels(np.array([0, 1, 1], dtype), TWO, "labels", BOX)
    if dtype not in ("bool", "int8"):
        check_labels(np.array([0, 255, 2], dtype), FOUR, "labels", BOX)


OUTSIDE: list[tuple[str, list[Any], tuple[int, ...], str]] = [
    ("uint64", [2**64 - 1, 2**53 + 1, 0, 2**53 + 1], TWO, r"labels 9007199254740993, 18446744073709551615 in .* 75 %"),
    ("uint8", [0, 1, 255, 1], TWO, r"labels 255 in .* among the 2 classes 0, 1: 25 %"),
    ("int16", [0, -1], TWO, "labels -1 in"),
    ("int64", [2**32, 2**32 + 1], TWO, "labels 4294967296, 4294967297 in"),
    ("float32", [0, 0.5, 1, 1], TWO, "labels 0.5 in"),
    ("float64", [0, np.nan], TWO, "labels nan in"),
    ("bool", [False, True], (0,), "labels 1 in"),
    ("uint8", [0, 3], FOUR, "labels 3 in .* among the 4 classes 0, 1, 2, 255: 50 %"),
    ("uint8", list(range(10)), TWO, r"and 3 more in"),
]


@pytest.mark.parametrize(("dtype", "voxels", "classes", "message"), OUTSIDE)
def test_labels_outside_the_classes_are_refused_with_examples_and_their_share(
    dtype: str, voxels: list[Any], classes: tuple[int, ...], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        check_labels(np.array(voxels, dtype), classes, "labels.zarr", BOX)


def config_of(tmp_path: Path, labels: Any, **keys: Any) -> DataConfig:
    volume, condition = write_array(tmp_path / "v.zarr", textured(labels.shape)), tmp_path / "labels.zarr"
    spec = VolumeConfig(path=str(volume), condition=ArrayConfig(path=str(write_array(condition, labels))))
    settings: dict[str, Any] = {"patch_size": (8, 16, 16), "patches_per_region": 4, "condition_classes": 2}
    return DataConfig(volumes=(spec,), **(settings | keys))


def test_instance_labels_are_refused_before_a_run_and_in_every_command(tmp_path: Path) -> None:
    labels = (textured((32, 64, 64)) + np.uint64(2**40)).astype("uint64")
    config = config_of(tmp_path, labels)
    data = prepare_data(0, config)
    inputs = InputConfig(condition=ArrayConfig(path=str(tmp_path / "labels.zarr")))
    with Inputs(inputs, config) as given, open_stream(data.job) as stream:
        assert given.condition is not None
        shown = [
            lambda: data.intensity_ranges(config),
            lambda: read_fixed_patches(data, config, 1),
            lambda: next(stream),
            lambda: given.read("condition", ((0, 0, 0), (8, 8, 8))),
        ]
        for act in shown:
            with pytest.raises(DataError, match=r"labels 1099511627\d+, .* in .*labels.zarr are not among"):
                act()


def test_a_rare_label_outside_the_classes_ends_the_run(tmp_path: Path) -> None:
    labels = textured((64, 96, 96)) % 2
    labels[58, 88, 88] = 7
    config = config_of(tmp_path, labels, max_quarantined=32, validation={"fraction": 0})
    data = prepare_data(0, config)
    data.intensity_ranges(config)  # a few patches show nothing
    with open_stream(data.job) as stream:
        with pytest.raises(
            DataError, match=r"labels 7 in .*labels.zarr are not among .* of the voxels in z \d+:6\d, y"
        ):
            list(itertools.islice(stream, 2000))
        assert not stream.quarantined
