"""Intensity ranges that are estimated from volumes of every dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import STORED_AIR, textured, write_array
from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.errors import DataError
from vesuvius.stream.start.prepare import IntensityRange, prepare_data

FAR = {"int16": -1000, "uint64": 2**45, "float64": 1e9}


def estimated(path: Path, voxels: np.ndarray[Any, Any], fill: Any = 0) -> IntensityRange:
    write_array(path, voxels, fill_value=fill, **STORED_AIR)
    config = DataConfig(volumes=(VolumeConfig(path=str(path)),), patch_size=(32, 64, 64), validation={"gap": 0})
    (intensity,) = prepare_data(0, config).intensity_ranges(config).volumes
    return intensity


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", FAR)
def test_a_range_far_from_zero_is_estimated_without_air(tmp_path: Path, dtype: str) -> None:
    """Intensities 1..199 above `FAR`; half of the volume is air, -1024 voxels below or 0."""
    far = FAR[dtype]
    voxels = textured((96, 96, 96)).astype(dtype) + np.array(far, dtype)
    air = -1024 if dtype == "int16" else 0
    voxels[:, ::2] = air
    intensity = estimated(tmp_path / "v.zarr", voxels, fill=air)
    # Of 199 equally likely intensities the 0.5th percentile is the first or second; the 99.5th mirrors it.
    assert intensity.low - far == pytest.approx(1.5, abs=0.6)
    assert intensity.high - far == pytest.approx(198.5, abs=0.6)


def test_small_and_large_patches_give_the_same_range(tmp_path: Path) -> None:
    """Intensities differ, and 16 patches of 8x16x16 see a few of 512 places; their chunks hold all."""
    voxels = np.kron(np.random.default_rng(0).normal(100, 25, (8, 8, 8)), np.ones((16, 16, 16))).clip(1, 254)
    path = write_array(tmp_path / "v.zarr", voxels.astype("uint8"), chunk=64)
    config = DataConfig(volumes=(VolumeConfig(path=str(path)),), patch_size=(8, 16, 16), validation={"fraction": 0})
    (intensity,) = prepare_data(0, config).intensity_ranges(config).volumes
    truth = np.percentile(voxels.astype("uint8"), (0.5, 99.5))
    assert [intensity.low, intensity.high] == pytest.approx(truth.tolist(), abs=3), (
        "patches alone are off by more than 10"
    )


def test_a_volume_of_air_or_one_intensity_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"All voxels in \d+ boxes of .*v.zarr equal its fill value"):
        estimated(tmp_path / "v.zarr", np.zeros((96, 96, 96), "uint8"))
    with pytest.raises(DataError, match=r"its values are 7 to 7"):
        estimated(tmp_path / "intensity.zarr", np.full((96, 96, 96), 7, "uint8"))


def test_intensity_ranges_do_not_depend_on_the_seed(tmp_path: Path) -> None:
    voxels = textured((96, 128, 128)) // np.linspace(1, 4, 96).astype(np.uint8)[:, None, None]
    config = DataConfig(
        volumes=(VolumeConfig(path=str(write_array(tmp_path / "v.zarr", voxels))),), patch_size=(8, 16, 16)
    )
    one, other = (prepare_data(seed, config) for seed in (0, 1))
    assert one.plan.hash != other.plan.hash
    assert one.intensity_ranges(config) == other.intensity_ranges(config)
