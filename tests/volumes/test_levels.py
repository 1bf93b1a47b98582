"""A group that is no image: the message names what could be chosen, as it is to be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.conftest import textured, write_array
from tests.support.chunk_server import ChunkServer
from tests.volumes.test_axes import multiscale
from vesuvius.config import ArrayConfig, StoreConfig
from vesuvius.errors import DataError
from vesuvius.volumes.volume import open_volume


def write_image(path: Path, zarr_format: int = 2) -> None:
    version = "0.4" if zarr_format == 2 else "0.5"
    zarr.create_group(str(path), zarr_format=zarr_format, attributes=multiscale("zyx", version))
    write_array(path / "0", textured((8, 8, 8)), chunk=8, zarr_format=zarr_format)


def write_collection(path: Path, images: int = 3, series: list[str] | None = None, zarr_format: int = 2) -> None:
    """As bioformats2raw does."""
    layout: dict[str, Any] = {"bioformats2raw.layout": 3}
    listed = {} if series is None else {"series": series}
    if zarr_format == 3:
        layout, listed = ({"ome": {"version": "0.5"} | attributes} for attributes in (layout, listed))
    zarr.create_group(str(path), zarr_format=zarr_format, attributes=layout)
    zarr.create_group(str(path / "OME"), zarr_format=zarr_format, attributes=listed)
    (path / "OME" / "METADATA.ome.xml").write_text("<OME/>")
    for number in range(images):
        write_image(path / str(number), zarr_format)


def write_group_of_arrays(path: Path) -> None:
    zarr.create_group(str(path), zarr_format=3)
    for name in ("scan", "labels"):
        write_array(path / name, textured((8, 8, 8)), chunk=8, zarr_format=3)
    write_array(path / "positions", np.zeros(3), chunk=3, zarr_format=3)
    zarr.create_group(str(path / "notes"), zarr_format=3)


def write_nested(path: Path) -> None:
    zarr.create_group(str(path), zarr_format=2)
    for name in ("a", "b"):
        zarr.create_group(str(path / name), zarr_format=2)


GROUPS: dict[str, tuple[Callable[[Path], None], str]] = {
    "collection": (write_collection, "a bioformats2raw collection of images; set path to {0} or {1} or {2}"),
    "collection, v3": (
        lambda path: write_collection(path, zarr_format=3),
        "a bioformats2raw collection of images; set path to {0} or {1} or {2}",
    ),
    "collection with a list": (
        lambda path: write_collection(path, series=["2", "0"]),
        "a bioformats2raw collection of images; set path to {2} or {0}",
    ),
    "arrays": (write_group_of_arrays, "a group without multiscales metadata; set path to {labels} or {scan}"),
    "groups": (write_nested, "a group without multiscales metadata; set path to {a} or {b}"),
    "empty": (lambda path: zarr.create_group(str(path)), "set path to an array or image in it: {NAME}"),  # type: ignore[dict-item, return-value]
}


def message_of(address: str) -> str:
    with pytest.raises(DataError) as refusal:
        open_volume(ArrayConfig(path=address), StoreConfig(retries=0))
    return str(refusal.value)


@pytest.mark.parametrize("kind", GROUPS)
def test_a_group_names_what_can_be_chosen_in_it(tmp_path: Path, kind: str) -> None:
    write_it, words = GROUPS[kind]
    path = tmp_path / "v.zarr"
    write_it(path)
    children = {name: str(path / name) for name in ("labels", "scan", "a", "b", "NAME")}
    expected = words.format(*(path / str(number) for number in range(3)), **children)
    assert message_of(f"{path}/") == f"a volume is an array or an OME-Zarr image; got {path}, which is " + (
        expected if ";" in expected else f"a group without multiscales metadata; {expected}"
    )


def test_what_is_named_can_be_opened(tmp_path: Path) -> None:
    write_collection(tmp_path / "v.zarr", 1)
    path = message_of(str(tmp_path / "v.zarr")).rpartition("set path to ")[2]
    volume = open_volume(ArrayConfig(path=path))
    np.testing.assert_array_equal(volume.read(((0, 0, 0), (8, 8, 8))), textured((8, 8, 8)))


@pytest.mark.parametrize("series", [None, ["0", "1"]], ids=["numbered", "listed"])
def test_a_collection_on_a_web_server_names_its_images(
    server: ChunkServer, tmp_path: Path, series: list[str] | None
) -> None:
    write_collection(tmp_path / "v.zarr", 2, series)
    url = server.url_of(tmp_path / "v.zarr")
    assert message_of(url).endswith(f"set path to {url}/0 or {url}/1")


def test_of_many_images_a_few_are_named(tmp_path: Path) -> None:
    write_collection(tmp_path / "v.zarr", 12)
    message = message_of(str(tmp_path / "v.zarr"))
    assert f"{tmp_path}/v.zarr/7 (and 4 more)" in message
    assert f"{tmp_path}/v.zarr/2 or {tmp_path}/v.zarr/3" in message, "by number, 10 and 11 last"
