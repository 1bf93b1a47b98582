"""Levels whose scale and translation are compared with the shapes of their pyramid."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.conftest import textured, write_ome
from vesuvius.config import ArrayConfig, Triple
from vesuvius.errors import DataError
from vesuvius.volume_tools.info import describe_volume
from vesuvius.volumes.alignment import Alignment, align
from vesuvius.volumes.geometry import Geometry, contradictions
from vesuvius.volumes.volume import Volume, open_volume

FULL = (64, 48, 40)
UNITS = ("micrometer",) * 3
ROUND = (math.floor, math.ceil, round)


def pyramid(path: Path, scales: list[Any], steps: Triple = (2, 2, 2), shape: Triple = FULL, **options: Any) -> Path:
    """Levels of every `steps`-th voxel, with these scales."""
    z, y, x = steps
    levels = {str(n): textured(shape)[:: z**n, :: y**n, :: x**n] for n in range(len(scales))}
    return write_ome(path, levels, scales, chunk=16, **options)


def level_of(path: Path, level: int) -> Volume:
    return open_volume(ArrayConfig(path=str(path), level=level))


WHOLE = {"coordinateTransformations": [{"type": "scale", "scale": [3.0, 3.0, 3.0]}]}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "z is not halved in the metadata": ({"scales": [2, (2, 4, 4)]}, "is 1 x 2 x 2 times .* it is 2 x 2 x 2 times"),
    "three levels, all wrong along z": ({"scales": [2, (2, 4, 4), (2, 8, 8)]}, "is 1 x 2 x 2 times"),
    "only the last of three": ({"scales": [2, 4, 4], "level": 2}, "is 2 x 2 x 2 times .* it is 4 x 4 x 4 times"),
    "only the first of three": ({"scales": [5, 4, 8], "level": 0, "steps": (2, 2, 2)}, "is 0.8 x 0.8 x 0.8 times"),
    "halved in the metadata alone": ({"scales": [2, 4], "steps": (1, 2, 2)}, "is 2 x 2 x 2 .* it is 1 x 2 x 2 times"),
    "a scale of the pyramid": ({"scales": [2, (2, 4, 4)], "entry": WHOLE}, "is 1 x 2 x 2 times"),
    "OME-Zarr 0.5": ({"scales": [2, (2, 4, 4)], "version": "0.5"}, "is 1 x 2 x 2 times"),
    "no unit": ({"scales": [1, (1, 2, 2)], "unit": None}, "is 1 x 2 x 2 times"),
    "a translation in other units": ({"scales": [2, 4], "translations": {0: 0, 1: 80}}, "begins 40, 40, 40 voxels"),
    "a translation of one level": ({"scales": [2, 4], "translations": {0: (20, 0, 0)}}, "begins -10, 0, 0 voxels"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_level_that_contradicts_its_pyramid_is_aligned_with_nothing(tmp_path: Path, case: str) -> None:
    """As labels of another scan and of a level of their own pyramid, and as the image."""
    given_, reason = WRONG[case]
    level = given_.get("level", 1)
    path = pyramid(tmp_path / "wrong", **{key: value for key, value in given_.items() if key != "level"})
    labels = level_of(path, level)
    others = [
        level_of(pyramid(tmp_path / "scan", [2, 4, 8], shape=(40, 24, 20), unit=given_.get("unit", "micrometer")), 1)
    ]
    others.append(level_of(path, 1 - min(level, 1)))
    for other in others:
        for pair in ((other, labels), (labels, other)):
            with pytest.raises(DataError, match=reason) as refused:
                align(*pair, "the labels")
            assert "correct scale, unit and translation in the OME metadata" in str(refused.value)
    assert str(level) in describe_volume(ArrayConfig(path=str(path)), num_boxes=0).contradictory


def test_an_alignment_that_no_scale_decides_is_made_whatever_the_pyramid_says(tmp_path: Path) -> None:
    """The same grid twice, and a bare array: both follow from the shapes."""
    one, two = (level_of(pyramid(tmp_path / name, [2, (2, 4, 4)]), 1) for name in "ab")
    bare = open_volume(tmp_path / "a" / "1")
    same = Alignment(one.shape_zyx, one.shape_zyx)
    assert [align(*pair, "labels") for pair in ((one, two), (one, bare), (bare, one))] == [same] * 3


def test_one_wrong_level_does_not_refuse_the_others(tmp_path: Path) -> None:
    path = pyramid(tmp_path / "v", [2, 4, (8, 16, 16), 16])
    assert align(level_of(path, 0), level_of(path, 3), "labels").factors == (8, 8, 8)
    with pytest.raises(DataError, match="scale of level '2'"):
        align(level_of(path, 0), level_of(path, 2), "labels")


def test_an_anisotropic_pyramid_and_a_level_that_was_not_copied_are_aligned(tmp_path: Path) -> None:
    path = pyramid(tmp_path / "v", [(8, 2, 2), (8, 4, 4), (8, 8, 8)], steps=(1, 2, 2))
    assert align(level_of(path, 0), level_of(path, 2), "labels").factors == (1, 4, 4)
    other = pyramid(tmp_path / "alone", [2, (2, 4, 4)])
    (other / "0" / ".zarray").unlink()
    assert level_of(other, 1).contradictions == {}, "nothing to compare it with"


@st.composite
def levels(draw: st.DrawFn) -> dict[str, tuple[Triple, Geometry]]:
    """A pyramid of a common downsampling: per axis by 1, 2, 3 or 4, with any rounding, corners or centers."""
    shape = draw(st.tuples(*[st.integers(8, 70_000)] * 3))
    steps = draw(st.tuples(*[st.sampled_from((1, 2, 2, 2, 3, 4))] * 3))
    voxel = draw(st.tuples(*[st.floats(0.5, 20)] * 3))
    rounded, centerd = draw(st.sampled_from(ROUND)), draw(st.booleans())
    digits = draw(st.integers(4, 12))
    found: dict[str, tuple[Triple, Geometry]] = {}
    for level in range(draw(st.integers(2, 7))):
        scale: Any = tuple(float(f"{v * s**level:.{digits}g}") for v, s in zip(voxel, steps, strict=True))
        shift: Any = tuple(5 + (s**level - 1) / 2 * v * centerd for v, s in zip(voxel, steps, strict=True))
        found[str(level)] = shape, Geometry(scale, shift, UNITS, True)
        shape = tuple(max(rounded(n / s), 1) for n, s in zip(shape, steps, strict=True))
    return found


@given(levels())
def test_pyramids_of_any_downsampling_contradict_nothing(pyramid: dict[str, tuple[Triple, Geometry]]) -> None:
    assert contradictions(pyramid) == {}


@given(levels(), st.data())
def test_a_wrong_factor_along_one_axis_is_found(
    pyramid: dict[str, tuple[Triple, Geometry]], data: st.DataObject
) -> None:
    path, axis = data.draw(st.sampled_from(sorted(pyramid))), data.draw(st.integers(0, 2))
    factor = data.draw(st.sampled_from((0.25, 0.5, 1.5, 2, 3)))
    assume(min(shape[axis] for shape, _ in pyramid.values()) >= 16)  # one voxel fits nearly any factor
    shape, right = pyramid[path]
    scale: Any = tuple(s * factor if a == axis else s for a, s in enumerate(right.scale_zyx))
    pyramid[path] = shape, Geometry(scale, right.translation_zyx, UNITS, True)
    found = contradictions(pyramid)
    assert set(found) == ({path} if len(pyramid) > 2 else set(pyramid))
