"""NaN and infinity are read as air or as a number, and are damage only with `data.nan=error`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.conftest import textured, write_array
from tests.stream.test_stream import collect, make_job, open_stream
from vesuvius.config import ArrayConfig, DataConfig, VolumeConfig
from vesuvius.errors import DataError
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.volume_tools.copy import CopyRequest, copy_box
from vesuvius.volume_tools.info import intensity_stats
from vesuvius.volume_tools.verify import verify_volume
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.volume import open_volume
from vesuvius.volumes.voxels import Nan

SHAPE = (64, 64, 96)
WHOLE = ((0, 0, 0), SHAPE)
BAD = (np.nan, np.inf, -np.inf)


def outside(shape: tuple[int, int, int] = SHAPE) -> np.ndarray:
    """Mask of the voxels outside a cylindrical field of view."""
    _, y, x = np.ogrid[: shape[0], : shape[1], : shape[2]]
    return np.broadcast_to((y - shape[1] / 2) ** 2 + (x - shape[2] / 2) ** 2 > 24**2, shape)


def write_ct(path: Path, dtype: str = "float32", **options: Any) -> np.ndarray:
    """Write and return voxels with NaN and infinity outside the field of view."""
    voxels = textured(SHAPE).astype(dtype)
    voxels[outside()] = np.resize(np.array(BAD, dtype), outside().sum())
    write_array(path, voxels, **options)
    return voxels


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", ["float16", "float32", ">f4"])
@pytest.mark.parametrize("nan", ["air", -1000.0])
@pytest.mark.parametrize("fill", [None, 7.0, np.nan, -np.inf])
def test_every_read_returns_finite_voxels(tmp_path: Path, dtype: str, nan: Nan, fill: float | None) -> None:
    voxels = write_ct(tmp_path / "v.zarr", dtype, **({} if fill is None else {"fill_value": fill}))
    (tmp_path / "v.zarr/0/0/0").unlink()
    air = fill if fill == 7.0 else 0.0
    instead = air if nan == "air" else -1000.0
    expected = np.where(outside(), instead, voxels)
    expected[:32, :32, :32] = instead if fill is not None and not np.isfinite(fill) else air
    volume = open_volume(tmp_path / "v.zarr", nan=nan)
    for box in (WHOLE, ((3, 5, 7), (50, 60, 90))):
        part = tuple(slice(*pair) for pair in zip(*box, strict=True))
        np.testing.assert_array_equal(volume.read(box), expected[part].astype(volume.dtype))
    inside = outside()[32:, 32:]
    assert not np.isin(volume.material(volume.read(((32, 32, 0), SHAPE))), (instead, air)).any()
    assert volume.nonfinite is not None
    assert volume.nonfinite.read_as == instead
    assert 0.1 < inside.mean() < 0.9


def test_nan_as_error_damages_the_whole_chunk(tmp_path: Path) -> None:
    """Regions that do not touch the NaN are refused too, so that the order of samples does not depend on readers."""
    voxels = textured(SHAPE, dtype="float32")
    voxels[40, 41, 42] = np.nan
    volume = open_volume(write_array(tmp_path / "v.zarr", voxels), nan="error")
    with pytest.raises(
        UnreadableChunkError, match=r"1 of 32768 voxels are NaN or infinite, and data\.nan=error"
    ) as caught:
        volume.read(((32, 32, 32), (34, 34, 34)))
    assert caught.value.box == ((32, 32, 32), (64, 64, 64))
    volume.read(((0, 0, 0), (32, 64, 96)))


def test_a_replacement_outside_the_dtype_is_refused(tmp_path: Path) -> None:
    write_ct(tmp_path / "v.zarr", "float16")
    with pytest.raises(DataError, match=r"data.nan=1e\+06 does not fit the float16 voxels"):
        open_volume(tmp_path / "v.zarr", nan=1e6)


def test_copies_keep_nan_and_verify_ignores_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    voxels = write_ct(tmp_path / "v.zarr", fill_value=np.nan)
    out = tmp_path / "copy.zarr"
    copy_box(CopyRequest(ArrayConfig(path=str(tmp_path / "v.zarr")), out))
    np.testing.assert_array_equal(zarr.open_array(str(out / "0"), mode="r")[...], voxels)
    assert not verify_volume(ArrayConfig(path=str(tmp_path / "v.zarr"))).broken


def test_a_stream_logs_the_share_of_nan_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    write_ct(tmp_path / "v.zarr")
    for _ in range(2):
        with open_stream(make_job(tmp_path / "v.zarr", nan=-5.0)) as stream:
            patches, _ = collect(stream, 24)
            assert stream.quarantined == []
    assert np.isfinite(patches).all()
    assert (patches == -5).any()
    (warning,) = [r.getMessage() for r in caplog.records if "NaN or infinity" in r.getMessage()]
    assert str(tmp_path / "v.zarr") in warning
    assert "% of the voxels read so far), read as -5; set data.nan" in warning


@pytest.mark.parametrize("nan", ["air", -1000.0])
def test_intensity_statistics_exclude_nan(tmp_path: Path, nan: Any) -> None:
    voxels = write_ct(tmp_path / "v.zarr")
    numbers = voxels[~outside()]
    config = DataConfig(volumes=(VolumeConfig(path=str(tmp_path / "v.zarr")),), patch_size=(8, 16, 16), nan=nan)
    (intensity,) = prepare_data(0, config).intensity_ranges(config).volumes
    assert numbers.min() <= intensity.low < intensity.high <= numbers.max()
    found = intensity_stats(open_volume(tmp_path / "v.zarr", nan=nan), None, 8)
    assert found.minimum is not None
    assert found.minimum >= numbers.min()


def test_nan_in_a_mask_or_level_is_not_foreground(tmp_path: Path) -> None:
    """Whatever replaces it elsewhere: data.nan=-1000 is not 0."""
    path = write_array(tmp_path / "v.zarr", textured(SHAPE))
    maps = []
    for name, bad in (("nan", np.nan), ("inf", np.inf), ("zero", 0.0)):
        mask = np.where(outside(), bad, 1).astype("float32")
        write_array(tmp_path / f"{name}.zarr", mask)
        spec = VolumeConfig(path=str(path), mask=ArrayConfig(path=str(tmp_path / f"{name}.zarr")))
        config = DataConfig(volumes=(spec,), patch_size=(8, 16, 16), min_foreground=0.3, nan=-1000.0)
        maps.append(prepare_data(0, config).plan.hash)
    assert len(set(maps)) == 1


def test_nan_in_labels_is_class_0(tmp_path: Path) -> None:
    labels = np.where(outside(), np.nan, 1).astype("float32")
    write_array(tmp_path / "v.zarr", textured(SHAPE))
    write_array(tmp_path / "labels.zarr", labels)
    spec = VolumeConfig(path=str(tmp_path / "v.zarr"), condition=ArrayConfig(path=str(tmp_path / "labels.zarr")))
    config = DataConfig(volumes=(spec,), patch_size=(8, 16, 16), condition_classes=2, nan=-1000.0)
    data = prepare_data(0, config)
    assert set(np.unique(data.read_patch(0, WHOLE, 1))) == {0.0, 1.0}
