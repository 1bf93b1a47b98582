"""Absent chunks: air if nothing was stored, damage if something was, the end of the run if the volume is gone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.conftest import textured, write_array
from tests.support.chunk_server import ChunkServer
from tests.volumes.test_volume import LAYOUTS
from vesuvius.config import ArrayConfig, StoreConfig
from vesuvius.errors import DataError
from vesuvius.volumes.errors import UnreadableChunkError
from vesuvius.volumes.occupancy import list_chunks
from vesuvius.volumes.volume import Volume, open_volume

SHAPE = (64, 64, 96)
WHOLE = ((0, 0, 0), SHAPE)
CHUNK = {"v2": "1/0/2", "v3": "c/1/0/2"}
CHUNK_BOX = ((32, 0, 64), (64, 32, 96))
FAST = StoreConfig(outage_minutes=0.01)
Address = Callable[[Path], str]


@pytest.fixture(params=["disk", "http"])
def address(request: pytest.FixtureRequest, server: ChunkServer) -> Address:
    return str if request.param == "disk" else server.url_of


def open_at(address: str, stored: Any = None) -> Volume:
    """`stored` is bool over the chunk grid, or a path to list."""
    listed = list_chunks(open_at(str(stored))) if isinstance(stored, Path) else stored
    volume = open_volume(address, FAST)
    volume.missing.listed = listed
    return volume


@pytest.mark.parametrize("layout", ["v2", "v3"])
def test_an_absent_chunk_that_was_listed_or_read_before_is_damaged(
    tmp_path: Path, address: Address, layout: str
) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE), **LAYOUTS[layout])
    listed, read = open_at(address(path), path), open_at(address(path))
    read.read(((40, 10, 70), (50, 20, 80)))
    (path / CHUNK[layout]).unlink()
    for volume, words in (
        (listed, "it is listed, but is now missing"),
        (read, "it was read before, but is now missing"),
    ):
        with pytest.raises(UnreadableChunkError, match=words) as caught:
            volume.read(WHOLE)
        assert (caught.value.chunk, caught.value.box) == ((1, 0, 2), CHUNK_BOX)


def test_chunks_that_were_never_stored_are_air(tmp_path: Path, address: Address) -> None:
    voxels = textured(SHAPE)
    voxels[32:, :32, 64:] = 0
    path = write_array(tmp_path / "v.zarr", voxels, compressors=None)
    assert not (path / "1/0/2").exists()
    volume = open_at(address(path), path)
    for _ in range(2):
        np.testing.assert_array_equal(volume.read(WHOLE), voxels)
    (path / "1/0/2").write_bytes(bytes(32**3))
    np.testing.assert_array_equal(open_at(address(path), np.ones((2, 2, 3), bool)).read(WHOLE), voxels)


def test_a_folder_or_broken_link_in_place_of_a_chunk_is_damage(tmp_path: Path) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE))
    volume = open_at(str(path))
    (path / "1/0/2").unlink()
    (path / "1/0/2").mkdir()
    with pytest.raises(UnreadableChunkError, match="is a folder, not a file") as caught:
        volume.read(WHOLE)
    assert (caught.value.chunk, caught.value.box) == ((1, 0, 2), CHUNK_BOX)
    (path / "1/0/2").rmdir()
    (path / "1/0/2").symlink_to("elsewhere")
    with pytest.raises(UnreadableChunkError, match="a broken link"):
        volume.read(WHOLE)


# ---- the volume as a whole


@pytest.mark.parametrize(("layout", "listed"), [("v2", False), ("v3", True), ("v3-sharded", False)])
def test_a_deleted_volume_is_gone_at_the_next_read(tmp_path: Path, address: Address, layout: str, listed: bool) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE), **LAYOUTS[layout])
    volume = open_at(address(path), np.ones((2, 2, 3), bool) if listed else None)
    shutil.rmtree(path)
    with pytest.raises(DataError, match=r"the volume is gone \(deleted, or its file system") as caught:
        volume.read(((0, 0, 0), (32, 32, 32)))
    assert not isinstance(caught.value, UnreadableChunkError)


def test_metadata_that_are_briefly_unavailable_are_an_outage(server: ChunkServer, tmp_path: Path) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE))
    (path / "0/0/0").unlink()
    volume = open_volume(ArrayConfig(path=server.url_of(path)), StoreConfig(outage_minutes=1))
    server.set_faults([{"path": ".zarray", "kind": "status", "times": 20}])
    assert not volume.read(((0, 0, 0), (32, 32, 32))).any()
    assert volume.source.stats.retries == 20


@pytest.mark.parametrize("layout", ["v2", "v3"])
def test_a_replaced_volume_is_detected_but_edited_attributes_are_ignored(tmp_path: Path, layout: str) -> None:
    path = write_array(tmp_path / "v.zarr", textured(SHAPE), **LAYOUTS[layout])
    (path / CHUNK[layout]).unlink()
    volume = open_at(str(path))
    zarr.open_array(str(path)).attrs["note"] = "edited while it is read"
    volume.read(CHUNK_BOX)
    shutil.rmtree(path)
    write_array(path, textured((96, 96, 96)), chunk=16, **LAYOUTS[layout])
    (path / CHUNK[layout]).unlink()
    volume.missing._due = 0.0
    with pytest.raises(DataError, match="it has been replaced"):
        volume.read(CHUNK_BOX)


# ---- chunks that are too short
