"""Chunks that are stored under another key encoding than the metadata say are never air."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

from tests.conftest import STORED_AIR, textured, write_array
from tests.support.odd_server import objects_of, serving
from tests.support.s3 import upload
from vesuvius.config import ArrayConfig, StoreConfig
from vesuvius.errors import DataError
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
                opened(address)


def test_a_listing_finds_a_single_chunk_under_another_key_encoding(tmp_path: Path, s3: Any) -> None:
    """1 of 1728 chunks, which a few probes would miss."""
    voxels = np.zeros((96, 96, 96), "u1")
    voxels[90, 3, 50] = 7
    path = write_array(tmp_path / "v.zarr", voxels, 8)
    rename(path, ".")
    with pytest.raises(DataError, match=r"1 chunks .*are stored like 0/0/0 instead of 0\.0\.0"):
        opened(upload(s3, path, "public", tmp_path.name))


@pytest.mark.parametrize(("zarr_format", "stored", "named"), [(2, "/", "."), (3, "/", "c.")])
def test_a_mixture_of_two_key_encodings_is_refused_not_read_with_holes(
    tmp_path: Path, zarr_format: int, stored: str, named: str
) -> None:
    """Even if almost nothing is stored under the right one, such as a single chunk added by another tool."""
    path = written(tmp_path / "v.zarr", zarr_format, stored)
    rename(path, named)
    other = written(tmp_path / "w.zarr", zarr_format, named)
    key = next(key for key in objects_of(other) if key.endswith(("1/1/2", "1.1.2")))  # the middle
    (path / key[1:]).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(other / key[1:], path / key[1:])
    with pytest.raises(DataError, match=r"under another key encoding than its metadata say: 35 chunks are stored like"):
        opened(path)
    with serving(objects_of(path, "/v")) as address, pytest.raises(DataError, match="under another key encoding"):
        opened(f"{address}/v")


def move(path: Path, places: list[str]) -> None:
    """Give chunks of a nested array flat keys."""
    for place in places:
        (path / place).rename(path / place.replace("/", "."))


@pytest.mark.parametrize(("kind", "moved"), [("http", 1), ("http", 35), ("s3", 18)])
def test_every_chunk_of_a_small_remote_volume_is_checked(tmp_path: Path, kind: str, moved: int, s3: Any) -> None:
    """Even if a random sample would miss the moved chunks."""
    path = written(tmp_path / "v.zarr", 2, "/")
    chunks = sorted(key[1:] for key in objects_of(path) if key.count("/") == 3)
    move(path, [chunk for chunk in chunks if chunk != "1/1/1"][:moved])
    with (
        serving(objects_of(path, "/v")) as web,
        pytest.raises(DataError, match=rf": {moved} chunks are stored like 0\.0\.0"),
    ):
        opened(f"{web}/v" if kind == "http" else upload(s3, path, "public", tmp_path.name))


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
        move(path, [moved])
        objects["/v/" + moved.replace("/", ".")] = objects.pop("/v/" + moved)
        with pytest.raises(
            DataError, match=rf"two key encodings: {moved} is absent, but {moved.replace('/', '.')} exists"
        ):
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
        opened(path)


@pytest.mark.parametrize(("zarr_format", "kind"), [(2, "disk"), (3, "http"), (2, "s3")])
def test_an_array_without_a_single_chunk_is_refused(tmp_path: Path, zarr_format: int, kind: str, s3: Any) -> None:
    path = written(tmp_path / "v.zarr", zarr_format, "/", np.zeros_like(VOXELS))
    (path / "0/1").mkdir(parents=True)  # folders left without files by a copy
    (path / "9").mkdir()
    (path / "9.9.9").touch()  # no chunk of this array
    with serving(objects_of(path, "/v")) as web:
        address = {"disk": str, "http": lambda _: f"{web}/v", "s3": lambda p: upload(s3, p, "public", tmp_path.name)}
        with pytest.raises(DataError, match=r"No chunk of .* is stored \(0 of 36, .*; correct path, level or"):
            opened(address[kind](path))
    path = written(tmp_path / "w.zarr", zarr_format, "/", np.zeros_like(VOXELS), **STORED_AIR)
    for file in path.glob("[0-9]/*/*"):
        if file != path / "0/2/3":
            file.unlink()
    assert not whole(path).any(), "one stored chunk is enough"


def test_a_few_chunks_under_another_key_encoding_among_many_are_refused(tmp_path: Path) -> None:
    """More files under the right encoding than fit a page of a listing, and enough air to use up all key checks."""
    path = write_array(tmp_path / "v", np.ones((48, 48, 48), np.uint8), 4, zarr_format=2)
    for index in itertools.product(range(12), repeat=3):
        (path / "/".join(map(str, index))).rename(path / ".".join(map(str, index)))
    for folder in path.glob("[0-9]*/"):
        if folder.is_dir():
            shutil.rmtree(folder)
    rename(path, ".")
    for y, x in itertools.product(range(12), repeat=2):
        for z in (9, 10):
            (path / f"{z}.{y}.{x}").unlink()
        (path / f"11/{y}").mkdir(parents=True, exist_ok=True)
        (path / f"11.{y}.{x}").rename(path / f"11/{y}/{x}")
    with pytest.raises(DataError, match="stored under another key encoding"):
        opened(path)


@pytest.mark.parametrize("kind", ["disk", "http"])
def test_shards_without_chunks_count_as_empty(tmp_path: Path, kind: str) -> None:
    air = np.zeros_like(VOXELS)
    path, full = (
        write_array(tmp_path / name, air, 8, zarr_format=3, shards=(16,) * 3, **STORED_AIR) for name in ("v", "w")
    )
    index = b"\xff" * 16 * 8
    for file in (path / "c").glob("*/*/*"):
        file.write_bytes(index + google_crc32c.value(index).to_bytes(4, "little"))
    with serving(objects_of(path, "/v")) as web, pytest.raises(DataError, match=r"No chunk of .* is stored"):
        opened(path if kind == "disk" else f"{web}/v")
    (path / "c/2/1/3").write_bytes((full / "c/2/1/3").read_bytes())
    with serving(objects_of(path, "/v")) as web:
        assert not whole(path if kind == "disk" else f"{web}/v").any(), "one stored chunk is enough"


def test_unknown_absence_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    voxels = np.zeros((96, 96, 96), "u1")
    voxels[90, 3, 50] = 7
    path = write_array(tmp_path / "v.zarr", voxels, 8)
    with serving(objects_of(path, "/v")) as address:
        volume = opened(f"{address}/v")
        np.testing.assert_array_equal(volume.read(((80, 0, 40), (96, 8, 56))), voxels[80:, :8, 40:56])
        volume.close()
    assert "none of 64 random chunks (of 1728) is stored" in caplog.text


def test_opening_a_healthy_remote_volume_takes_one_round_of_requests(tmp_path: Path) -> None:
    path, asked = write_array(tmp_path / "v.zarr", VOXELS, 8), list[str]()
    with serving(objects_of(path, "/v"), asked=asked) as address:
        opened(f"{address}/v").close()
    assert len(asked) == 4 + 8, "metadata, and a probe"
