"""Pyramids of labels have no label that is not in the finest level; a volume of air alone can be opened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.conftest import write_array
from vesuvius.commands import volume
from vesuvius.config import ArrayConfig
from vesuvius.volume_tools.pyramid import downsample_mean, downsample_mode
from vesuvius.volumes.volume import open_volume

Voxels = np.ndarray[Any, Any]


def level(out: Path, number: int) -> Voxels:
    return np.asarray(zarr.open_group(out, mode="r")[str(number)][...])


def blobs(values: list[int], dtype: str = "u2", shape: tuple[int, int, int] = (40, 50, 60)) -> Voxels:
    """Cubes of 5^3 voxels of these values, with odd ends."""
    coarse = np.random.default_rng(1).choice(values, [-(-size // 5) for size in shape])
    voxels = coarse.repeat(5, 0).repeat(5, 1).repeat(5, 2)[tuple(map(slice, shape))]
    return np.ascontiguousarray(voxels.astype(dtype))


def make(kind: str, folder: Path, voxels: Voxels, *options: str) -> Path:
    count = len(list(folder.iterdir()))
    out = folder / f"out{count}.zarr"
    if kind == "copy":
        source = write_array(folder / f"source{count}.zarr", voxels, chunk=16)
    else:
        source = folder / "v.npy"
        np.save(source, voxels)
    assert volume.main([kind, str(source), str(out), *options]) == 0
    return out


@pytest.mark.parametrize("kind", ["import", "copy"])
def test_labels_keep_their_values_in_all_levels(tmp_path: Path, kind: str) -> None:
    voxels = blobs([2, 9, 40000])
    out = make(kind, tmp_path, voxels, "--labels", "--levels=4")
    finer = voxels
    for number in range(1, 4):
        finer = downsample_mode(finer)
        np.testing.assert_array_equal(level(out, number), finer)
        assert set(np.unique(finer)) <= {2, 9, 40000}
    out = make(kind, tmp_path, voxels, "--levels=2")
    np.testing.assert_array_equal(level(out, 1), downsample_mean(voxels))


@pytest.mark.parametrize("kind", ["import", "copy"])
@pytest.mark.parametrize("value", [0, 7])
def test_a_volume_of_one_value_can_be_opened_at_each_level(
    tmp_path: Path, kind: str, value: int, capsys: pytest.CaptureFixture[str]
) -> None:
    voxels = np.full((40, 50, 60), value, "u1")
    if kind == "copy":
        (tmp_path / "source.zarr").mkdir()
        array = zarr.create_array(
            tmp_path / "source.zarr", shape=(80, 50, 60), chunks=(40, 50, 60), dtype="u1", fill_value=value,
            overwrite=True,
        )  # fmt: skip
        array[40:] = value + 1
        command = ["copy", f"{tmp_path}/source.zarr", f"{tmp_path}/copy.zarr", "--size=40,50,60", "--levels=2"]
        assert volume.main(command) == 0
        out = tmp_path / "copy.zarr"
    else:
        out = make(kind, tmp_path, voxels, "--levels=2")
    assert ("all voxels are" in capsys.readouterr().err) == (kind == "copy" or value == 0)
    for number in range(2):
        assert (open_volume(ArrayConfig(path=str(out), level=number))[:, :, :] == value).all()
    assert sum(len(files) for _, _, files in os.walk(out)) < 12
