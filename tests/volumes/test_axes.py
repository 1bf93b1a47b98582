"""Axis order: every way to name z, y and x gives the same voxels, or is refused.

The voxels differ along all axes, and no two axes have the same length or chunk, so that none passes for another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from numcodecs import Delta

from tests.conftest import textured, write_array
from tests.support.chunk_server import ChunkServer
from vesuvius.config import ArrayConfig, StoreConfig
from vesuvius.errors import DataError
from vesuvius.volumes.occupancy import list_chunks
from vesuvius.volumes.volume import Volume, open_volume

SIZES = {"z": 20, "y": 24, "x": 28, "c": 2, "t": 3}
CHUNKS = {"z": 8, "y": 6, "x": 7, "c": 1, "t": 2}
SHARDS = {"z": 16, "y": 12, "x": 14, "c": 1, "t": 2}
BOX = ((3, 5, 6), (18, 24, 20))


def voxels_of(order: str) -> np.ndarray[Any, Any]:
    """Stored voxels, with all axes in `order`."""
    return textured(tuple(SIZES[letter] for letter in order))


def as_zyx(stored: np.ndarray[Any, Any], order: str, **select: int) -> np.ndarray[Any, Any]:
    """The expected voxels by numpy: other axes selected, the rest in z, y, x."""
    others = [letter for letter in order if letter not in "zyx"]
    return np.einsum(f"{order}->{''.join(others)}zyx", stored)[tuple(select[letter] for letter in others)]


def write(path: Path, order: str, names: list[str | None] | None = None, **options: Any) -> np.ndarray[Any, Any]:
    """Write an array with axes in `order` and dimension_names `names`."""
    stored = voxels_of(order)
    if options.pop("sharded", False):
        options["shards"] = tuple(SHARDS[letter] for letter in order)
    if options.setdefault("zarr_format", 3) == 2:
        options |= {"chunk_key_encoding": {"name": "v2", "separator": "."}, "compressors": "auto"}
    write_array(path, stored, tuple(CHUNKS[letter] for letter in order), dimension_names=names, **options)
    return stored


def axis(name: str, unit: str | None = "micrometer") -> dict[str, Any]:
    if name.lower() in "zyx":
        return {"name": name, "type": "space"} | ({"unit": unit} if unit else {})
    return {"name": name, "type": "channel"}


def ome_06(*transforms: dict[str, Any], systems: dict[str, list[dict[str, Any]]], **entry: Any) -> dict[str, Any]:
    """OME-Zarr 0.6: `transforms` lead from array "0" to the first of the coordinate systems."""
    name = next(iter(systems))
    placed = [transform | {"input": {"path": "0"}, "output": {"name": name}} for transform in transforms]
    return {
        "ome": {
            "version": "0.6",
            "multiscales": [
                {
                    "name": "image",
                    "coordinateSystems": [{"name": name, "axes": axes} for name, axes in systems.items()],
                    "datasets": [{"path": "0", "coordinateTransformations": placed}],
                }
                | entry
            ],
        }
    }


def multiscale(order: str, version: str, **entry: Any) -> dict[str, Any]:
    """OME-Zarr up to 0.5."""
    scale = {"type": "scale", "scale": [2.0] * len(order)}
    found: dict[str, Any] = {
        "axes": [axis(letter) for letter in order],
        "datasets": [{"path": "0", "coordinateTransformations": [scale]}],
    } | entry
    if version == "0.5":
        return {"ome": {"version": version, "multiscales": [found]}}
    return {"multiscales": [found | {"version": version}]}


def write_group(path: Path, order: str, attributes: dict[str, Any], **options: Any) -> np.ndarray[Any, Any]:
    zarr.create_group(str(path), zarr_format=options.get("zarr_format", 3), attributes=attributes)
    return write(path / "0", order, **options)


def open_at(path: Path | str, select: tuple[int, ...] = ()) -> Volume:
    return open_volume(ArrayConfig(path=str(path), select=select), StoreConfig())


def metadata(said_by: str, order: str) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Attributes of the group (None: a bare array) and options of the array."""
    scale = {"type": "scale", "scale": [2.0] * len(order)}
    match said_by:
        case "0.4":
            return multiscale(order, "0.4"), {"zarr_format": 2}
        case "0.3":
            return {"multiscales": [{"axes": list(order), "datasets": [{"path": "0"}]}]}, {"zarr_format": 2}
        case "0.5":
            return multiscale(order.upper(), "0.5"), {"names": list(order)}
        case "0.6":
            return ome_06(scale, systems={"physical": [axis(letter) for letter in order]}), {}
        case "dimension_names":
            return None, {"names": list(order.upper())}
        case "dimension_names of a group's array":
            return {"multiscales": [{"version": "0.2", "datasets": [{"path": "0"}]}]}, {"names": list(order)}
    assert said_by == "xarray"
    return None, {"zarr_format": 2, "attributes": {"_ARRAY_DIMENSIONS": list(order)}}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "said_by", ["0.3", "0.4", "0.5", "0.6", "dimension_names", "dimension_names of a group's array", "xarray"]
)
def test_any_order_of_the_axes_is_read_as_zyx(tmp_path: Path, said_by: str) -> None:
    for order in ["zyx", "xyz", "yzx", "zcyx", "xtyzc"]:
        attributes, options = metadata(said_by, order)
        path = tmp_path / f"{order}.zarr"
        stored = (
            write(path, order, **options) if attributes is None else write_group(path, order, attributes, **options)
        )
        fixed = {letter: SIZES[letter] - 1 for letter in order if letter not in "zyx"}
        volume = open_at(path, tuple(fixed.values()))
        assert volume.shape_zyx == (20, 24, 28)
        assert volume.chunk_zyx == (8, 6, 7)
        expected = as_zyx(stored, order, **fixed)
        np.testing.assert_array_equal(volume.read(((0, 0, 0), volume.shape_zyx)), expected, err_msg=order)
        out = np.zeros((15, 19, 14), np.uint8)
        assert volume.read(BOX, out) is out
        np.testing.assert_array_equal(out, expected[3:18, 5:24, 6:20], err_msg=order)


@pytest.mark.parametrize(("order", "kind"), [("yxz", "filtered"), ("yxz", "sharded"), ("xczty", "sharded")])
def test_every_layout_is_read_with_permuted_and_interleaved_axes(
    server: ChunkServer, tmp_path: Path, order: str, kind: str
) -> None:
    options: dict[str, Any] = {"sharded": True, "names": list(order)}
    if kind != "sharded":
        options = {"zarr_format": 2, "attributes": {"_ARRAY_DIMENSIONS": list(order)}}
    if kind == "filtered":
        options["filters"] = [Delta(dtype="u1")]
    stored = write(tmp_path / "v.zarr", order, **options)
    fixed = {letter: 1 for letter in order if letter not in "zyx"}
    for address in (tmp_path / "v.zarr", server.url_of(tmp_path / "v.zarr")):
        volume = open_at(address, tuple(fixed.values()))
        volume.stage(BOX)
        np.testing.assert_array_equal(volume.read(BOX), as_zyx(stored, order, **fixed)[3:18, 5:24, 6:20])
        volume.close()


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("order", ["xyz", "xczty"])
def test_the_occupancy_of_a_permuted_volume_is_in_zyx(tmp_path: Path, order: str, sharded: bool) -> None:
    path = tmp_path / "v.zarr"
    write(path, order, names=list(order), sharded=sharded)
    array = zarr.open_array(str(path), mode="a")
    absent = {"z": slice(8, 16), "y": slice(18, 24), "x": slice(0, 7)}  # chunk (1, 3, 0)
    array[tuple(absent.get(letter, slice(1, 2)) for letter in order)] = 0
    occupancy = list_chunks(open_at(path, (1,) * (len(order) - 3)))
    assert occupancy.shape == (3, 4, 4)
    if "t" in order:  # a chunk contains both time points, one of them not empty
        assert occupancy.all()
    else:
        assert np.argwhere(~occupancy).tolist() == [[1, 3, 0]]
    if len(order) > 3:
        assert list_chunks(open_at(path, (0,) * (len(order) - 3))).all()


def test_an_unreadable_chunk_of_a_permuted_volume_is_reported_in_zyx(tmp_path: Path) -> None:
    write(tmp_path / "v.zarr", "xyz", names=["x", "y", "z"])
    (tmp_path / "v.zarr/c/3/2/1").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"chunk \[1, 2, 3\]"):
        open_at(tmp_path / "v.zarr").read(((8, 12, 21), (16, 18, 28)))


def test_without_names_the_last_three_axes_are_zyx_except_trailing_channels(tmp_path: Path) -> None:
    all_names: tuple[list[str | None] | None, ...] = (None, [None] * 4, ["dim_0", "dim_1", "dim_2", "dim_3"])
    for number, names in enumerate(all_names):
        stored = write(tmp_path / f"{number}.zarr", "czyx", names=names)
        np.testing.assert_array_equal(open_at(tmp_path / f"{number}.zarr", (1,)).read(BOX), stored[1, 3:18, 5:24, 6:20])
    stored = write(tmp_path / "v.zarr", "zyxc")
    assert stored.shape[-1] <= 4
    np.testing.assert_array_equal(open_at(tmp_path / "v.zarr", (1,)).read(BOX), stored[3:18, 5:24, 6:20, 1])


@pytest.mark.parametrize("names", [["width", "height", "depth"], ["Width", "y", "DEPTH"]])
def test_width_height_and_depth_are_x_y_and_z(tmp_path: Path, names: list[str]) -> None:
    stored = write(tmp_path / "v.zarr", "xyz", names=list(names))
    np.testing.assert_array_equal(open_at(tmp_path / "v.zarr").read(BOX), stored.transpose(2, 1, 0)[3:18, 5:24, 6:20])


def test_select_has_an_index_per_other_axis_in_stored_order(tmp_path: Path) -> None:
    stored = write(tmp_path / "v.zarr", "tzcyx", names=list("tzcyx"))
    np.testing.assert_array_equal(open_at(tmp_path / "v.zarr", (2, 0)).read(BOX), stored[2, 3:18, 0, 5:24, 6:20])
    with pytest.raises(DataError, match=r"select=\[1, 2\] does not fit axes t, z, c, y, x of shape .*; set"):
        open_at(tmp_path / "v.zarr", (1, 2))
    with pytest.raises(DataError, match=r"select=\[\] does not fit axes t, z, c, y, x .*; set .* to 2 indices"):
        open_at(tmp_path / "v.zarr")


ROTATION = {"type": "rotation", "rotation": [[1.0, 0.0, 0.0], [0.0, 0.8, -0.6], [0.0, 0.6, 0.8]]}
SCALE = {"type": "scale", "scale": [2.0, 2.0, 2.0]}
ZYX = {"physical": [axis(letter) for letter in "zyx"]}


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "transformations": list(parts)}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    **{
        kind: (ome_06({"type": kind, kind: value}, systems=ZYX), f"there is a transformation of type '{kind}'")
        for kind, value in {
            "rotation": [[1.0, 0.0, 0.0], [0.0, 0.8, -0.6], [0.0, 0.6, 0.8]],
            "affine": [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]],
            "mapAxis": [2, 1, 0],
            "byDimension": [],
            "displacements": "field",
        }.items()
    },
    "rotation of 0.4": (multiscale("zyx", "0.4", coordinateTransformations=[ROTATION]), "type 'rotation'"),
    "no x": (multiscale("zyt", "0.4"), "once each, not axes z, y, t of shape"),
    "no names of space in 0.6": (
        ome_06(SCALE, systems={"array": [{"name": f"dim_{n}"} for n in range(3)]}),
        "once each, not axes dim_0, dim_1, dim_2",
    ),
    "fewer axes than the array has": (multiscale("yx", "0.4"), "ValueError: 2 axes for an array of 3"),
    "a coordinate system that is not there": (
        {"ome": {"multiscales": [{"coordinateSystems": [], "datasets": [{"path": "0"}]}]}},
        "Cannot read the multiscales metadata of",
    ),
    "a negative scale": (
        ome_06({"type": "scale", "scale": [2.0, -2.0, 2.0]}, systems=ZYX),
        r"the scale \[2.0, -2.0, 2.0\] of z, y, x is not positive",
    ),
    "a scale of 0 in 0.4": (
        multiscale("zyx", "0.4", coordinateTransformations=[{"type": "scale", "scale": [0, 1, 1]}]),
        r"the scale \[0.0, 2.0, 2.0\] of z, y, x is not positive",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_axes_are_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    attributes, words = REFUSED[kind]
    write_group(tmp_path / "v.zarr", "zyx", attributes)
    with pytest.raises(DataError, match=words) as refusal:
        open_at(tmp_path / "v.zarr")
    text = str(refusal.value)
    assert "\n" not in text
    assert str(tmp_path / "v.zarr") in text
    assert "; " in text, "a remedy"


def test_contradictory_axis_names_of_group_and_array_are_refused(tmp_path: Path) -> None:
    write_group(tmp_path / "v.zarr", "zyx", multiscale("zyx", "0.5"), names=["x", "y", "z"])
    with pytest.raises(
        DataError, match=r"metadata \(z, y, x\) and the dimension_names of the array \(x, y, z\) disagree"
    ):
        open_at(tmp_path / "v.zarr")
    stored = write_group(tmp_path / "own.zarr", "zyx", multiscale("zyx", "0.5"), names=["slice", "y", "x"])
    np.testing.assert_array_equal(open_at(tmp_path / "own.zarr").read(BOX), stored[3:18, 5:24, 6:20])
