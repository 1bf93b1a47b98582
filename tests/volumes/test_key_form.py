"""Chunks that are stored under another key encoding than the metadata say are never air."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import STORED_AIR, textured, write_array
from tests.support.odd_server import objects_of, serving
from tests.support.s3 import upload
from vesuvius.config import ArrayConfig, StoreConfig
from vesuvius.errors import DataError
from vesuvius.volumes.errors import OutageError
from vesuvius.volumes.occupancy import list_chunks
from vesuvius.volumes.volume import Volume, open_volume

VOXELS = textured((40, 48, 56))
FORMS = {"c/": ("default", "/"), "c.": ("default", "."), "/": ("v2", "/"), ".": ("v2", ".")}
WRONG = [(2, "/", "."), (2, ".", "/"), (3, "c/", "c."), (3, "c.", "/"), (3, "/", "."), (3, ".", "c/")]


def rename(path: Path, form: str) -> None:
    """Set another key encoding in the metadata than that of the files."""
    name, separator = FORMS[form]
    file = path / ("zarr.json" if (path / "zarr.json").exists() else ".zarray")
    metadata = json.loads(file.read_bytes())
    if file.name == ".zarray":
        metadata["dimension_separator"] = separator
        if separator == ".":
            del metadata["dimension_separator"]  # as old writers did
    else:
        metadata["chunk_key_encoding"] = {"name": name, "configuration": {"separator": separator}}
    file.write_text(json.dumps(metadata))


def written(path: Path, zarr_format: int, form: str, voxels: Any = VOXELS, **options: Any) -> Path:
    """Write an array with a key encoding."""
    encoding = dict(zip(("name", "separator"), FORMS[form], strict=True))
    return write_array(path, voxels, 16, zarr_format=zarr_format, chunk_key_encoding=encoding, **options)


def opened(address: str | Path, **options: Any) -> Volume:
    return open_volume(ArrayConfig(path=str(address), **options), StoreConfig(outage_minutes=0.01))


def whole(address: str | Path, **options: Any) -> Any:
    volume = opened(address, **options)
    try:
        return volume.read(((0, 0, 0), volume.shape_zyx))
    finally:
        volume.close()


@pytest.mark.parametrize(("zarr_format", "stored", "named"), WRONG)
def test_chunks_under_another_key_encoding_are_refused_with_the_correction(
    tmp_path: Path, zarr_format: int, stored: str, named: str
) -> None:
    path = written(tmp_path / "v.zarr", zarr_format, stored)
    rename(path, named)
    remedy = r"would be read as air; correct (dimension_separator in \.zarray|chunk_key_encoding in zarr\.json) to "
    with serving(objects_of(path, "/v"), head=405) as web:
        for address in (path, f"{web}/v"):
            with pytest.raises(DataError, match=rf"under another key encoding than its metadata say: .*{remedy}"):
                whole(address)


def test_a_listing_finds_a_single_chunk_under_another_key_encoding(tmp_path: Path) -> None:
    """1 of 1728 chunks, found when the first absent one is read."""
    voxels = np.zeros((96, 96, 96), "u1")
    voxels[90, 3, 50] = 7
    path = write_array(tmp_path / "v.zarr", voxels, 8)
    rename(path, ".")
    with pytest.raises(DataError, match=r": 0\.0\.0 is absent, but 11/0/6 exists"):
        whole(path)


def test_a_mixture_of_two_key_encodings_is_refused_not_read_with_holes(tmp_path: Path) -> None:
    """A single chunk is stored under the right one, as added by another tool."""
    path = written(tmp_path / "v.zarr", 2, "/")
    rename(path, ".")
    shutil.copyfile(path / "1/1/2", path / "1.1.2")
    with serving(objects_of(path, "/v")) as web:
        for address in (path, f"{web}/v"):
            with pytest.raises(DataError, match=r": 0\.0\.0 is absent, but 0/0/0 exists and would be read as air"):
                whole(address)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "shards"), [("disk", None), ("http", None), ("http", (16, 16, 16))])
def test_a_chunk_under_another_key_is_not_read_as_air(tmp_path: Path, kind: str, shards: Any) -> None:
    """Even if nothing was wrong when the volume was opened; an absent chunk of an existing shard is air."""
    voxels = VOXELS.copy()
    voxels[:8, :8, :8] = voxels[16:32, 16:32, :16] = 0
    encoding = {"name": "v2", "separator": "/"}
    path = write_array(tmp_path / "v.zarr", voxels, 8, zarr_format=3, shards=shards, chunk_key_encoding=encoding)
    with serving(objects := objects_of(path, "/v")) as web:
        address = str(path) if kind == "disk" else f"{web}/v"
        volume = opened(address)
        np.testing.assert_array_equal(volume.read(((0, 0, 0), VOXELS.shape)), voxels)
        volume.close()
        volume = opened(address)
        moved = max(path.glob("2/*/*")).relative_to(path).as_posix()
        (path / moved).rename(path / moved.replace("/", "."))  # a flat key
        objects["/v/" + moved.replace("/", ".")] = objects.pop("/v/" + moved)
        with pytest.raises(DataError, match=rf"{moved} is absent, but {moved.replace('/', '.')} exists"):
            volume.read(((0, 0, 0), VOXELS.shape))
        volume.close()


def test_a_stray_copy_of_a_chunk_under_another_key_is_harmless(tmp_path: Path) -> None:
    path = written(tmp_path / "v.zarr", 2, "/")
    shutil.copyfile(path / "0/0/0", path / "0.0.0")
    np.testing.assert_array_equal(whole(path), VOXELS)


OTHER_NAMES = {
    "a suffix": lambda z, y, x: f"{z}.{y}.{x}.gz",
    "zeros in front": lambda z, y, x: f"{z:03}.{y:03}.{x:03}",
    "two kinds": lambda z, y, x: f"{z}/{y}.{x}",
    "a folder of their own": lambda z, y, x: f"chunks/{z}/{y}/{x}",
}


@pytest.mark.parametrize(("names", "named"), [*((names, "/") for names in OTHER_NAMES), ("a suffix", ".")])
def test_names_that_zarr_ignores_are_not_chunks(tmp_path: Path, names: str, named: str) -> None:
    path = written(tmp_path / "v.zarr", 2, ".")
    rename(path, named)
    for file in list(path.glob("[0-9]*")):
        target = path / OTHER_NAMES[names](*map(int, file.name.split(".")))
        target.parent.mkdir(parents=True, exist_ok=True)
        file.rename(target)
    with pytest.raises(DataError, match=r"No chunk of \S+ is stored"):
        whole(path)


@pytest.mark.parametrize(("zarr_format", "kind"), [(2, "disk"), (3, "s3")])
def test_an_array_without_a_single_chunk_is_refused(tmp_path: Path, zarr_format: int, kind: str, s3: Any) -> None:
    path = written(tmp_path / "v.zarr", zarr_format, "/", np.zeros_like(VOXELS))
    (path / "0/1").mkdir(parents=True)  # folders left without files by a copy
    (path / "9").mkdir()
    (path / "9.9.9").touch()  # no chunk of this array
    address = str(path) if kind == "disk" else upload(s3, path, "public", tmp_path.name)
    for read in (whole, lambda address: list_chunks(opened(address))):
        with pytest.raises(DataError, match=r"No chunk of .* is stored \(.*; correct path, level or select"):
            read(address)
    path = written(tmp_path / "w.zarr", zarr_format, "/", np.zeros_like(VOXELS), **STORED_AIR)
    for file in path.glob("[0-9]/*/*"):
        if file != path / "0/2/3":
            file.unlink()
    assert not whole(path).any(), "one stored chunk is enough"


def test_a_web_server_with_no_chunk_at_all_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It cannot be listed, so nothing proves that the volume is empty: a single chunk of 512 is still read."""
    voxels = np.zeros((64, 64, 64), "u1")
    voxels[60, 3, 50] = 7
    path = write_array(tmp_path / "v.zarr", voxels, 8)
    with serving(objects_of(path, "/v")) as address:
        np.testing.assert_array_equal(whole(f"{address}/v"), voxels)
    assert "none of 64 random chunks is stored; check path, level and select" in caplog.text


def test_an_outage_while_other_keys_are_looked_for_is_not_air(tmp_path: Path) -> None:
    path = written(tmp_path / "v.zarr", 2, "/")
    rename(path, ".")
    with serving(objects_of(path, "/v")) as address:
        volume = opened(f"{address}/v")

        def away(keys: list[str]) -> list[str]:
            raise OutageError("Cannot reach the store")

        volume.source.absent, absent = away, volume.source.absent  # type: ignore[method-assign]
        with pytest.raises(OutageError):
            volume.read(((0, 0, 0), VOXELS.shape))
        volume.source.absent = absent  # type: ignore[method-assign]
        with pytest.raises(DataError, match="would be read as air"):
            volume.read(((0, 0, 0), VOXELS.shape))
        volume.close()


def test_opening_a_healthy_remote_volume_takes_one_round_of_requests(tmp_path: Path) -> None:
    path, asked = write_array(tmp_path / "v.zarr", VOXELS, 8), list[str]()
    with serving(objects_of(path, "/v"), asked=asked) as address:
        opened(f"{address}/v").close()
    assert len(asked) == 4, "metadata alone"
