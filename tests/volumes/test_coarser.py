"""A coarse array shown in fine voxels: those of `np.repeat`, cut or continued to the fine shape."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import textured
from vesuvius.volumes.box import slices
from vesuvius.volumes.coarser import Upsampling, factors_between
from vesuvius.volumes.errors import UnreadableChunkError

FACTORS = [
    ((96, 128, 128), (96, 128, 128), (1, 1, 1)),
    ((97, 128, 130), (49, 64, 65), (2, 2, 2)),
    ((97, 128, 130), (48, 64, 65), (2, 2, 2)),
    ((100, 1000, 1000), (4, 32, 32), (32, 32, 32)),  # sizes alone would also allow 21 to 33, and 31
    ((75784, 32693, 32693), (2369, 1022, 1022), (32, 32, 32)),
    ((75784, 32693, 32693), (2368, 1021, 1021), (32, 32, 32)),
    ((50, 1000, 1000), (50, 32, 32), (1, 32, 32)),
    ((90, 120, 60), (30, 40, 20), (3, 3, 3)),
    ((96, 128, 128), (96, 128, 120), None),
    ((96, 128, 128), (192, 256, 256), None),
]


@pytest.mark.parametrize(("fine", "coarse", "factors"), FACTORS)
def test_the_factor_between_two_levels_is_the_one_that_pyramids_have(fine: Any, coarse: Any, factors: Any) -> None:
    assert factors_between(fine, coarse) == factors


def repeated(coarse: np.ndarray[Any, Any], upsampling: Upsampling) -> np.ndarray[Any, Any]:
    """All fine voxels, by numpy alone."""
    for axis, (factor, size) in enumerate(zip(upsampling.factors, upsampling.fine_zyx, strict=True)):
        coarse = np.repeat(coarse, factor, axis)
        beyond = max(size - coarse.shape[axis], 0)
        coarse = np.pad(coarse, [(0, beyond * (a == axis)) for a in range(3)], mode="edge").take(range(size), axis)
    return coarse


@st.composite
def upsamplings(draw: st.DrawFn) -> Upsampling:
    """Of any factors; the coarse sizes rounded down or up."""
    factors, sizes = (draw(st.tuples(*[st.integers(1, most)] * 3)) for most in (4, 7))
    fine = tuple(max(1, f * size + draw(st.integers(1 - f, f - 1))) for f, size in zip(factors, sizes, strict=True))
    return Upsampling(fine, sizes, factors)  # type: ignore[arg-type]


@given(upsampling=upsamplings(), data=st.data())
def test_every_box_is_that_of_the_repeated_array(upsampling: Upsampling, data: st.DataObject) -> None:
    coarse = textured(upsampling.coarse_zyx, seed=1)
    asked = []

    def read(box: Any, out: Any) -> Any:
        asked.append(box)
        return coarse[slices(box)] if out is None else np.copyto(out, coarse[slices(box)]) or out

    ends = [sorted(data.draw(st.sets(st.integers(0, size), min_size=2, max_size=2))) for size in upsampling.fine_zyx]
    box: Any = tuple(zip(*ends, strict=True))
    expected = repeated(coarse, upsampling)[slices(box)]
    out = np.zeros_like(expected)
    assert upsampling.read(box, read, out) is out
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(upsampling.read(box, read), expected)
    needed = np.zeros(upsampling.coarse_zyx, bool)
    needed[slices(asked[0])] = True
    places = np.arange(needed.size).reshape(needed.shape)
    shown = np.unique(repeated(places, upsampling)[slices(box)])
    np.testing.assert_array_equal(np.flatnonzero(needed), shown, "no coarse voxel is read that is not shown")


@pytest.mark.parametrize("axis", range(3))
def test_every_interval_shows_the_coarse_voxels_and_beyond_them_the_last_one(axis: int) -> None:
    """The drawn boxes above seldom begin behind the first coarse voxel and end beyond the last one."""

    def along(here: int, elsewhere: int) -> Any:
        return tuple(here if a == axis else elsewhere for a in range(3))

    upsampling = Upsampling(along(11, 2), along(3, 2), along(3, 1))
    coarse = textured(upsampling.coarse_zyx, seed=1)
    expected = repeated(coarse, upsampling)
    for lo, hi in itertools.combinations(range(12), 2):
        ends = [(lo, hi) if a == axis else (0, 2) for a in range(3)]
        box: Any = tuple(zip(*ends, strict=True))
        np.testing.assert_array_equal(upsampling.read(box, lambda box, out: coarse[slices(box)]), expected[slices(box)])


@given(upsampling=upsamplings(), data=st.data())
def test_damage_is_all_fine_voxels_that_show_the_damaged_ones(upsampling: Upsampling, data: st.DataObject) -> None:
    ends = [sorted(data.draw(st.sets(st.integers(0, size), min_size=2, max_size=2))) for size in upsampling.coarse_zyx]
    damage: Any = tuple(zip(*ends, strict=True))
    marked = np.zeros(upsampling.coarse_zyx, bool)
    marked[slices(damage)] = True
    shown = np.zeros(upsampling.fine_zyx, bool)
    shown[slices(upsampling.fine_box(damage))] = True
    np.testing.assert_array_equal(shown, repeated(marked, upsampling))

    def torn(box: Any, out: Any) -> Any:
        raise UnreadableChunkError("coarse.zarr level 2", box, (1, 2, 3), damage, "torn")

    whole: Any = ((0, 0, 0), upsampling.fine_zyx)
    with pytest.raises(
        UnreadableChunkError, match=r"torn in volume coarse.zarr level 2, .* chunk \[1, 2, 3\]"
    ) as error:
        upsampling.read(whole, torn)
    assert error.value.box == (damage if upsampling.factors == (1, 1, 1) else upsampling.fine_box(damage))
