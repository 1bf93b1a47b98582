"""A group that is no image: the message names what could be chosen, as it is to be written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr

from tests.conftest import textured, write_array
from tests.support.chunk_server import ChunkServer
from tests.volumes.test_axes import multiscale
from vesuvius.config import ArrayConfig, StoreConfig
from vesuvius.errors import DataError
from vesuvius.volumes.volume import open_volume


def write_collection(path: Path, images: int, zarr_format: int = 2) -> Path:
    """As bioformats2raw does."""
    layout = {"bioformats2raw.layout": 3}
    attributes = layout if zarr_format == 2 else {"ome": {"version": "0.5"} | layout}
    zarr.create_group(str(path), zarr_format=zarr_format, attributes=attributes)
    zarr.create_group(str(path / "OME"), zarr_format=zarr_format)
    for number in range(images):
        image = multiscale("zyx", "0.4" if zarr_format == 2 else "0.5")
        zarr.create_group(str(path / str(number)), zarr_format=zarr_format, attributes=image)
        write_array(path / str(number) / "0", textured((8, 8, 8)), chunk=8, zarr_format=zarr_format)
    return path


def message_of(address: str) -> str:
    with pytest.raises(DataError) as refusal:
        open_volume(ArrayConfig(path=address), StoreConfig())
    return str(refusal.value)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_collection_names_its_images_and_what_is_named_can_be_opened(tmp_path: Path, zarr_format: int) -> None:
    path = write_collection(tmp_path / "v.zarr", 12, zarr_format)
    message = message_of(f"{path}/")
    assert f"got {path}, which is a bioformats2raw collection of images without multiscales metadata" in message
    assert f"; set path to {path}/0 or {path}/1 or {path}/2 or" in message
    assert message.endswith(f"{path}/7 (and 4 more)"), "by number, 10 and 11 last"
    volume = open_volume(ArrayConfig(path=str(path / "0")))
    np.testing.assert_array_equal(volume.read(((0, 0, 0), (8, 8, 8))), textured((8, 8, 8)))


def test_a_group_names_the_arrays_in_it(tmp_path: Path) -> None:
    path = tmp_path / "v.zarr"
    zarr.create_group(str(path), zarr_format=3)
    assert message_of(str(path)).endswith(
        f"a group without multiscales metadata; set path to an array or image in it: {path}/NAME"
    )
    for name in ("scan", "labels"):
        write_array(path / name, textured((8, 8, 8)), chunk=8, zarr_format=3)
    assert message_of(str(path)).endswith(f"set path to {path}/labels or {path}/scan")


def test_where_nothing_lists_the_way_to_write_it_is_told(server: ChunkServer, tmp_path: Path) -> None:
    url = server.url_of(write_collection(tmp_path / "v.zarr", 2))
    assert message_of(url).endswith(f"set path to an array or image in it: {url}/NAME")
