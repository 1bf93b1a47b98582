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
from vesuvius.errors import ConfigError
from vesuvius.volume_tools import importing
from vesuvius.volume_tools.copy import CopyStats
from vesuvius.volume_tools.importing import ImportRequest, import_volume
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
def test_labels_keep_their_values_in_all_levels(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    voxels = blobs([2, 9, 40000])
    out = make(kind, tmp_path, voxels, "--labels", "--levels=4")
    assert "look like labels" not in capsys.readouterr().err
    finer = voxels
    for number in range(1, 4):
        finer = downsample_mode(finer)
        np.testing.assert_array_equal(level(out, number), finer)
        assert set(np.unique(finer)) <= {2, 9, 40000}
    out = make(kind, tmp_path, voxels, "--levels=2")
    np.testing.assert_array_equal(level(out, 1), downsample_mean(voxels))
    assert "look like labels" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("voxels", "hinted"),
    [
        (blobs([0, 255], "u1"), True),
        (blobs([0, 1, 2, 3], "i4"), True),
        (blobs([0, 1], "u1"), False),  # the mean is the majority
        (np.full((40, 50, 60), 7, "u1"), False),
        (np.random.default_rng(0).integers(0, 255, (40, 50, 60), "u1"), False),
        (np.random.default_rng(0).normal(100, 2, (40, 50, 60)).astype("u1"), False),  # low contrast
        (np.pad(np.random.default_rng(0).integers(1, 255, (20, 20, 20), "u1"), 15), False),  # air around a scan
        (blobs([0, 1, 2, 3]).astype("f4"), False),
    ],
    ids=["mask", "classes", "0 and 1", "one value", "noise", "low contrast", "air", "float"],
)
def test_integers_that_look_like_labels_give_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], voxels: Voxels, hinted: bool
) -> None:
    make("import", tmp_path, voxels, "--levels=2")
    assert ("begin again with --labels" in capsys.readouterr().err) == hinted
    make("import", tmp_path, voxels, "--levels=1")
    assert "labels" not in capsys.readouterr().err, "no level is averaged"


@pytest.mark.parametrize("shape", [(2, 2, 2), (3, 5, 7), (1, 1, 4), (6, 1, 1)])
@pytest.mark.parametrize("dtype", ["bool", "u1", ">i4", "u8", "f4"])
def test_the_most_frequent_label_is_counted_exactly_with_many_labels(shape: tuple[int, ...], dtype: str) -> None:
    """The largest wins a tie.  With few and with many labels."""
    for most in (2, 4, 60000):
        labels = np.random.default_rng(most).integers(0, most, shape).astype(dtype)
        found = downsample_mode(labels)
        for z, y, x in np.ndindex(found.shape):
            block = labels[2 * z : 2 * z + 2, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].ravel().tolist()
            assert found[z, y, x] == max(block, key=lambda label: (block.count(label), label))


def test_a_resumed_import_does_not_mix_labels_and_averages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "_CHUNK", 16)
    np.save(tmp_path / "v.npy", blobs([2, 9]))
    request = ImportRequest(f"{tmp_path}/v.npy", tmp_path / "out.zarr", labels=True)

    def stop(figures: CopyStats, doing: str) -> None:
        if figures.written > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_volume(request, stop)
    with pytest.raises(ConfigError, match=r"labels false \(was true\)"):
        import_volume(ImportRequest(f"{tmp_path}/v.npy", tmp_path / "out.zarr"))
    import_volume(request)
    assert set(np.unique(level(tmp_path / "out.zarr", 1))) == {2, 9}


def test_a_volume_of_an_earlier_version_is_still_finished(tmp_path: Path) -> None:
    """Its record has no `labels`."""
    np.save(tmp_path / "v.npy", blobs([2, 9]))
    request = ImportRequest(f"{tmp_path}/v.npy", tmp_path / "out.zarr")
    import_volume(request)
    group = zarr.open_group(tmp_path / "out.zarr")
    record = dict(group.attrs["vesuvius_import"])
    del record["labels"]
    group.attrs["vesuvius_import"] = record
    assert import_volume(request)[1].before > 0
    with pytest.raises(ConfigError, match="labels true"):
        import_volume(ImportRequest(f"{tmp_path}/v.npy", tmp_path / "out.zarr", labels=True))


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
