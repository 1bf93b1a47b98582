"""Sizes, positions and units of voxels, compared with matrices computed from the metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tests.conftest import textured, write_array
from tests.volumes.test_axes import axis, multiscale, ome_06, sequence
from vesuvius.config import ArrayConfig
from vesuvius.volumes.geometry import Geometry, space_of, unit_name
from vesuvius.volumes.volume import open_volume


def geometry_of(path: Path, attributes: dict[str, Any], shape: tuple[int, ...] = (8, 9, 10)) -> Geometry | None:
    zarr.create_group(str(path), zarr_format=2, attributes=attributes)
    write_array(path / "0", textured(shape), chunk=4)
    return open_volume(ArrayConfig(path=str(path), select=(0,) * (len(shape) - 3))).geometry


def scale(*values: float) -> dict[str, Any]:
    return {"type": "scale", "scale": list(values)}


def translation(*values: float) -> dict[str, Any]:
    return {"type": "translation", "translation": list(values)}


def test_scale_and_translation_of_level_and_pyramid_are_applied_in_order(tmp_path: Path) -> None:
    level = {"path": "0", "coordinateTransformations": [scale(2.4, 2.4, 2.4), translation(1, 2, 3)]}
    pyramid = [scale(10, 10, 2), translation(0, 0, 5)]
    attributes = multiscale("zyx", "0.4", datasets=[level], coordinateTransformations=pyramid)
    found = geometry_of(tmp_path / "v.zarr", attributes)
    assert found == Geometry((24, 24, 4.8), (10, 20, 11), ("micrometer",) * 3)


ZYX = [axis("z", "nanometer"), axis("y", "micrometer"), axis("x", "millimeter")]
XYZ = [*reversed(ZYX)]
UNITS = ("nanometer", "micrometer", "millimeter")
OF_06: dict[str, tuple[dict[str, Any], list[dict[str, Any]], Geometry]] = {
    "anisotropic scale": (scale(1, 2, 3), ZYX, Geometry((1, 2, 3), (0, 0, 0), UNITS)),
    "stored x, y, z": (scale(1, 2, 3), XYZ, Geometry((3, 2, 1), (0, 0, 0), UNITS)),
    "identity": ({"type": "identity"}, ZYX, Geometry((1, 1, 1), (0, 0, 0), UNITS)),
    "sequence": (sequence(scale(1, 2, 3), translation(10, 20, 30)), ZYX, Geometry((1, 2, 3), (10, 20, 30), UNITS)),
    "sequence the other way": (
        sequence(translation(10, 20, 30), scale(1, 2, 3)),
        ZYX,
        Geometry((1, 2, 3), (10, 40, 90), UNITS),
    ),
    "sequence in a sequence": (
        sequence(scale(1, 2, 3), sequence(scale(2, 2, 2), translation(1, 1, 1))),
        ZYX,
        Geometry((2, 4, 6), (1, 1, 1), UNITS),
    ),
}


@pytest.mark.parametrize("kind", OF_06)
def test_transformations_of_0_6_give_size_position_and_unit(tmp_path: Path, kind: str) -> None:
    transform, axes, expected = OF_06[kind]
    found = geometry_of(tmp_path / "v.zarr", ome_06(transform, systems={"physical": axes}))
    assert found == expected
    assert found.voxel_size_um is not None
    micrometers = np.abs(expected.scale_zyx) * (1e-3, 1, 1e3)
    np.testing.assert_allclose(found.voxel_size_um, micrometers, rtol=1e-12)  # one product each


def test_a_further_coordinate_system_of_0_6_does_not_move_the_voxels(tmp_path: Path) -> None:
    """Registration maps the image's own system to another; the voxels follow z, y, x of the first."""
    atlas = {
        "type": "rotation",
        "rotation": [[1.0, 0.0, 0.0], [0.0, 0.8, -0.6], [0.0, 0.6, 0.8]],
        "input": {"name": "intrinsic"},
        "output": {"name": "atlas"},
    }
    attributes = ome_06(scale(1, 2, 3), systems={"intrinsic": ZYX, "atlas": XYZ}, coordinateTransformations=[atlas])
    assert geometry_of(tmp_path / "v.zarr", attributes) == Geometry((1, 2, 3), (0, 0, 0), UNITS)


def test_axes_other_than_zyx_do_not_affect_the_geometry(tmp_path: Path) -> None:
    level = {"path": "0", "coordinateTransformations": [scale(1, 3, 7, 2), translation(30, 99, 20, 10)]}
    attributes = multiscale("xcyz", "0.4", datasets=[level])
    found = geometry_of(tmp_path / "v.zarr", attributes, (8, 2, 9, 10))
    assert found == Geometry((2, 7, 1), (10, 20, 30), ("micrometer",) * 3)


@pytest.mark.parametrize(
    "transforms",
    [
        [],
        [translation(1, 2, 3)],
        [scale(1, 2)],
        [{"type": "scale", "path": "scale"}],
        [{"type": "scale", "scale": "a"}],
    ],
    ids=["none", "no scale", "too few", "in an array of its own", "text"],
)
def test_a_volume_opens_with_a_missing_or_malformed_scale(tmp_path: Path, transforms: list[dict[str, Any]]) -> None:
    attributes = multiscale("zyx", "0.4", datasets=[{"path": "0", "coordinateTransformations": transforms}])
    assert geometry_of(tmp_path / "v.zarr", attributes) is None


def test_units_of_length_are_converted_and_others_are_unknown() -> None:
    meters = {"angstrom": 1e-10, "nanometer": 1e-9, "nm": 1e-9, "micrometer": 1e-6, "\u00b5m": 1e-6, "millimeter": 1e-3}
    for unit, length in meters.items():
        found = Geometry((2.0, 3.0, 4.0), (0, 0, 0), (unit,) * 3).voxel_size_um
        np.testing.assert_allclose(found, np.array([2.0, 3.0, 4.0]) * length * 1e6, rtol=1e-12, err_msg=unit)
    for unknown in (None, "second", "pixel"):
        assert Geometry((1, 1, 1), (0, 0, 0), ("micrometer", "micrometer", unknown)).voxel_size_um is None


def test_every_unit_of_length_of_the_specification_is_read_however_it_is_written() -> None:
    prefixes = "yocto zepto atto femto pico nano micro milli centi deci hecto kilo mega giga tera peta exa zetta yotta"
    named = ["meter", "angstrom", "inch", "foot", "yard", "mile", "parsec"]
    named += [f"{prefix}meter" for prefix in prefixes.split()]
    assert [unit_name(name) for name in named] == named
    assert all(unit_name(f" {name.capitalize()}s") == name for name in named)
    written = {"\u00c5": "angstrom", "nm": "nanometer", "um": "micrometer", "\u03bcm": "micrometer", "mm": "millimeter"}
    written |= {"Mm": "megameter", "millimetre": "millimeter", "in": "inch"}
    assert {text: unit_name(text) for text in written} == written
    assert [unit_name(other) for other in (None, "", "second", "pixel", 3, ["nm"], {})] == [None] * 7
    axes = [
        {"name": name, "type": "space", "unit": unit}
        for name, unit in zip("zyx", ("um", "\u00c5", ["nm"]), strict=True)
    ]
    space = space_of({"axes": axes}, {}, 3, "v")
    assert space.units == ("micrometer", "angstrom", None)
