"""The foreground map, and the starts that qualify: equal to counting voxels, exactly."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.layouts import patch_fraction
from vesuvius.config import Triple
from vesuvius.plan.foreground import QualifyingStarts, qualifying_starts, starts_within
from vesuvius.volumes.occupancy import ForegroundMap

Voxels = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """A map, a patch that fits, and a box of starts in cells of some size."""

    map: ForegroundMap
    patch: Triple
    first: Triple
    counts: Triple
    cells: Triple


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Map cells from 1 voxel to more than the volume; starts begin and end anywhere."""
    axes = []
    for _ in range(3):
        size = draw(st.integers(1, 12))
        patch = draw(st.integers(1, min(size, 6)))
        first = draw(st.integers(0, size - patch))
        count = draw(st.integers(1, size - patch - first + 1))
        axes.append((size, patch, draw(st.integers(1, 14)), first, count, draw(st.integers(1, 9))))
    shape, patch_zyx, cell, first_zyx, counts, cells = zip(*axes, strict=True)
    foreground = a_map(shape, cell, draw(st.integers(0, 2**32)), draw(st.floats(0, 1)))
    return Case(foreground, patch_zyx, first_zyx, counts, cells)


def a_map(shape: Triple, cell: Triple, seed: int, full: float) -> ForegroundMap:
    """A share `full` of the cells is 255; half of the others are 0, half anything."""
    rng = np.random.default_rng(seed)
    grid = [-(-size // edge) for size, edge in zip(shape, cell, strict=True)]
    fraction = rng.integers(0, 256, grid) * rng.integers(0, 2, grid)
    fraction[rng.random(grid) < full] = 255
    return ForegroundMap(fraction.astype(np.uint8), cell, shape)


def expanded(foreground: ForegroundMap) -> Voxels:
    """The map with one value per voxel."""
    voxels = foreground.fraction.astype(np.int64)
    for axis, (edge, size) in enumerate(zip(foreground.cell_zyx, foreground.shape_zyx, strict=True)):
        voxels = np.repeat(voxels, edge, axis).take(range(size), axis)
    return voxels


def all_fractions(foreground: ForegroundMap, patch: Triple) -> Voxels:
    """The mean of the voxels, 0..1, of the patch at every position of the volume."""
    windows = np.lib.stride_tricks.sliding_window_view(expanded(foreground), patch)
    return np.asarray(windows.sum((3, 4, 5)) / (255 * np.prod(patch)))


def some_minimum(fractions: Voxels, any_minimum: float, attained: bool) -> float:
    """`any_minimum`, or the fraction nearest to it that some patch has to the last bit."""
    if not attained or not fractions.any():
        return any_minimum
    there = np.unique(fractions[fractions > 0])
    return float(there[np.abs(there - any_minimum).argmin()])


minima = st.floats(0.001, 1)


@given(case=cases())
def test_patch_fraction_equals_the_mean_over_the_voxels(case: Case) -> None:
    fractions = all_fractions(case.map, case.patch)
    for (z, y, x), fraction in np.ndenumerate(fractions):
        assert patch_fraction(case.map, (z, y, x), case.patch) == fraction


def starts_that_qualify(case: Case, minimum: float) -> QualifyingStarts | None:
    """Of the box of starts that the case names."""
    stop = tuple(lo + n for lo, n in zip(case.first, case.counts, strict=True))
    return qualifying_starts(case.map, (case.first, (stop[0], stop[1], stop[2])), case.patch, minimum, case.cells)


def counted(case: Case, minimum: float) -> set[Triple]:
    """The starts that qualify, by counting voxels."""
    fractions = all_fractions(case.map, case.patch)
    boxes = [range(lo, lo + n) for lo, n in zip(case.first, case.counts, strict=True)]
    return {start for start in product(*boxes) if fractions[start] >= minimum}  # type: ignore[misc]


@given(case=cases(), any_minimum=minima, attained=st.booleans(), above=st.booleans(), refine=st.integers(0, 3))
def test_each_qualifying_start_has_exactly_one_position(
    case: Case, any_minimum: float, attained: bool, above: bool, refine: int
) -> None:
    """So a position drawn uniformly, and drawn again where it has no start, is a uniform start."""
    minimum = some_minimum(all_fractions(case.map, case.patch), any_minimum, attained)
    if above:
        minimum = min(1.0, float(np.nextafter(minimum, 2)))
    expected = counted(case, minimum)
    found = starts_that_qualify(case, minimum)
    if found is None:
        assert not expected
        return
    for _ in range(refine):
        found = found.refined()
    starts = [start for position in range(found.num_positions) if (start := found.at(position))]
    assert len(starts) == len(set(starts))
    assert set(starts) == expected


@pytest.mark.long
def test_a_single_bright_spot_in_the_largest_scroll_is_found() -> None:
    """Its blocks, refined, are more than 2^32."""
    fraction = np.zeros((593, 256, 256), np.uint8)
    fraction[300, 128, 128] = 255
    shape, patch = (75784, 32693, 32693), (72, 136, 136)
    foreground = ForegroundMap(fraction, (128, 128, 128), shape)
    stop = (shape[0] - 71, shape[1] - 135, shape[2] - 135)
    found = qualifying_starts(foreground, ((0, 0, 0), stop), patch, 0.85, (128, 128, 128))
    assert found is not None
    z, y, x = found.draw(np.random.default_rng(0))
    assert patch_fraction(foreground, (z, y, x), patch) >= 0.85


def test_a_threshold_of_one_tenth_includes_exactly_one_tenth() -> None:
    # As a float, 0.1 lies above 1/10: with ceil(0.1 x 255 x 10) no patch of one full voxel in ten would do.
    fraction = np.zeros((1, 1, 10), np.uint8)
    fraction[0, 0, 4] = 255
    foreground = ForegroundMap(fraction, (1, 1, 1), (1, 1, 10))
    assert patch_fraction(foreground, (0, 0, 0), (1, 1, 10)) == 0.1
    assert qualifying_starts(foreground, ((0, 0, 0), (1, 1, 1)), (1, 1, 10), 0.1, (1, 1, 1)) is not None


@pytest.mark.parametrize("block", [(1, 2, 3), (0, 0, 0), (3, 3, 3)])
def test_the_only_start_of_a_volume_is_found_without_a_long_search(block: Triple) -> None:
    fraction = np.zeros((4, 4, 4), np.uint8)
    fraction[block] = 255
    foreground = ForegroundMap(fraction, (16, 16, 16), (64, 64, 64))
    found = qualifying_starts(foreground, ((0, 0, 0), (49, 49, 49)), (16, 16, 16), 1.0, (16, 16, 16))
    assert found is not None
    assert found.num_positions < 50, "blocks were refined"
    assert found.draw(np.random.default_rng(0)) == tuple(16 * b for b in block)


def test_starts_in_a_cell_are_drawn_uniformly_from_those_that_qualify() -> None:
    fraction = np.zeros((2, 3, 3), np.uint8)
    fraction[:, 1, 1:], fraction[1, 2, 1] = 255, 200
    foreground, patch, minimum = ForegroundMap(fraction, (4, 3, 3), (7, 8, 9)), (2, 3, 3), 2 / 3
    found = qualifying_starts(foreground, ((0, 0, 0), (6, 6, 7)), patch, minimum, (4, 4, 4))
    assert found is not None
    cell = ((1, 1, 2), (6, 6, 7))
    inside = all_fractions(foreground, patch)[1:6, 1:6, 2:7]
    valid = {(z + 1, y + 1, x + 2) for z, y, x in np.argwhere(inside >= minimum).tolist()}
    assert 20 < len(valid) < 0.6 * inside.size
    assert (inside == minimum).any()
    rng = np.random.default_rng(0)
    counts = dict.fromkeys(valid, 0)
    within = starts_within(found, cell)
    assert within is not None
    for _ in range(50 * len(valid)):
        counts[within.draw(rng)] += 1
    # 5 standard deviations of a count of mean 50; a seeded draw, so it cannot fail by chance.
    assert max(abs(count - 50) for count in counts.values()) < 5 * 50**0.5
    assert starts_within(found, ((0, 0, 0), (1, 1, 1))) is None, "a cell without one"


def test_the_hash_changes_with_cells_their_size_and_the_shape_but_not_with_the_layout() -> None:
    fraction = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    changed = fraction.copy()
    changed[1, 2, 3] ^= 1
    maps = [
        ForegroundMap(fraction, (8, 8, 8), (16, 24, 32)),
        ForegroundMap(changed, (8, 8, 8), (16, 24, 32)),
        ForegroundMap(fraction, (8, 8, 9), (16, 24, 32)),
        ForegroundMap(fraction, (8, 8, 8), (16, 24, 31)),
    ]
    assert len({foreground.hash for foreground in maps}) == len(maps)
    assert maps[0].hash == "e16f75b145e1ed8d"
    assert ForegroundMap(np.asfortranarray(fraction), (8, 8, 8), (16, 24, 32)).hash == maps[0].hash
