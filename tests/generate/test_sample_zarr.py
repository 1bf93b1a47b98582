"""Intensities, and directories that are there when they are whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vesuvius.errors import StorageError
from vesuvius.generate import sample_zarr
from vesuvius.generate.sample_zarr import atomic_directory, to_intensities
from vesuvius.loader.intensity import intensity_scales, normalized
from vesuvius.runlog.files import flush_to_disk
from vesuvius.stream.start.prepare import IntensityRange


def test_intensities_invert_the_normalization() -> None:
    for dtype in ("uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64"):
        intensities = np.array([0, 1, 53, 100, 144, 255], dtype)
        intensity = IntensityRange(53.0, 144.0)
        model = normalized(torch.from_numpy(intensities).view(1, -1), intensity_scales([intensity]))[0].numpy()
        back = to_intensities(model, intensity, np.dtype(dtype))
        assert back.dtype == dtype
        # float32 model values up to 4 are rounded by up to 2.4e-7, in three operations: 3e-5 of an intensity here
        np.testing.assert_allclose(back, intensities, rtol=0, atol=3e-5 if back.dtype.kind == "f" else 0)


FAR = np.array([-9.0, -1.0, 0.006, 0.9, 9.0], np.float32)


def test_integers_and_bool_are_rounded_and_clipped_but_floats_are_not() -> None:
    for dtype, expected in {
        "uint8": [0, 0, 101, 190, 255],
        "int8": [-128, 0, 101, 127, 127],
        "int16": [-800, 0, 101, 190, 1000],
        "uint64": [0, 0, 101, 190, 1000],
    }.items():
        assert to_intensities(FAR, IntensityRange(0.0, 200.0), np.dtype(dtype)).tolist() == expected
    assert to_intensities(FAR, IntensityRange(0.0, 1.0), np.dtype(bool)).tolist() == [False, False, True, True, True]
    intensities = to_intensities(FAR, IntensityRange(0.0, 200.0), np.dtype("float32"))
    np.testing.assert_allclose(intensities, [-800, 0, 100.6, 190, 1000], rtol=1e-6)


def test_values_beyond_the_dtype_neither_wrap_around_nor_become_infinite() -> None:
    for dtype in ("int32", "int64", "uint32", "uint64", "float16"):
        info: Any = np.finfo(dtype) if dtype.startswith("float") else np.iinfo(dtype)
        low, high = to_intensities(
            FAR[[0, -1]], IntensityRange(float(info.min), float(info.max)), np.dtype(dtype)
        ).tolist()
        assert low == info.min
        assert info.max * (1 - 2.0**-52) <= high <= info.max, "the largest 8-byte integer is no float64"


def test_an_error_keeps_existing_files_and_leaves_no_new_ones(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with atomic_directory(out) as staged:
        (staged / "a").write_text("old")
    assert (out / "a").read_text() == "old"
    with pytest.raises(KeyboardInterrupt), atomic_directory(out) as staged:  # noqa: PT012
        (staged / "a").write_text("new")
        raise KeyboardInterrupt
    assert (out / "a").read_text() == "old"
    with pytest.raises(StorageError), atomic_directory(out) as staged:
        (staged / "b").write_text("new")  # the other has appeared since
    assert (out / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_errors_of_the_system_come_with_a_remedy(tmp_path: Path) -> None:
    message = "Cannot write samples to .*No space.*; free some space or choose another folder"
    with pytest.raises(StorageError, match=message), atomic_directory(tmp_path / "out"):
        raise OSError(28, "No space left on device")


def test_everything_is_flushed_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[tuple[str, bool]] = []
    out = tmp_path / "out"

    def note(path: Path) -> None:
        flush_to_disk(path)
        flushed.append((path.name, out.exists()))

    monkeypatch.setattr(sample_zarr, "flush_to_disk", note)
    with atomic_directory(out) as staged:
        (staged / "array").mkdir()
        (staged / "array/chunk").write_text("voxels")
    assert sorted(flushed) == [("array", False), ("chunk", False), ("new", False), (tmp_path.name, True)]
