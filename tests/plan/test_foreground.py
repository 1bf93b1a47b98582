"""The foreground map: equal to counting voxels, at every position of every region, exactly."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vesuvius.config import Triple
from vesuvius.plan.foreground import ForegroundMap

Intervals = tuple[tuple[int, int], ...]
Voxels = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """A map, a patch that fits, and regions as they may lie."""

    map: ForegroundMap
    patch: Triple
    intervals: tuple[Intervals, Intervals, Intervals]

    def regions(self) -> list[tuple[Triple, Triple]]:
        """All regions, x counted first."""
        return [((z0, y0, x0), (z1, y1, x1)) for (z0, z1), (y0, y1), (x0, x1) in product(*self.intervals)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Cells from 1 voxel to more than a region; regions start and end anywhere."""
    axes = []
    for _ in range(3):
        size = draw(st.integers(1, 12))
        patch = draw(st.integers(1, min(size, 6)))
        starts = draw(st.lists(st.integers(0, size - patch), min_size=1, max_size=3, unique=True))
        intervals = tuple((lo, draw(st.integers(lo + patch, size))) for lo in sorted(starts))
        axes.append((size, patch, draw(st.integers(1, 14)), intervals))
    shape, patch_zyx, cell, intervals_zyx = zip(*axes, strict=True)
    return Case(a_map(shape, cell, draw(st.integers(0, 2**32)), draw(st.floats(0, 1))), patch_zyx, intervals_zyx)


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


def of_region(fractions: Voxels, region: tuple[Triple, Triple], patch: Triple) -> Voxels:
    """The part of `all_fractions` for the positions inside the region."""
    return fractions[tuple(slice(lo, hi - p + 1) for lo, hi, p in zip(*region, patch, strict=True))]


def some_minimum(fractions: Voxels, any_minimum: float, attained: bool) -> float:
    """`any_minimum`, or the fraction nearest to it that some patch has to the last bit."""
    if not attained or not fractions.any():
        return any_minimum
    there = np.unique(fractions[fractions > 0])
    return float(there[np.abs(there - any_minimum).argmin()])


minima = st.floats(0.001, 1)


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_patch_fraction_equals_the_mean_over_the_voxels(case: Case) -> None:
    fractions = all_fractions(case.map, case.patch)
    for (z, y, x), fraction in np.ndenumerate(fractions):
        assert case.map.patch_fraction((z, y, x), case.patch) == fraction


@settings(max_examples=400, deadline=None)
@given(case=cases(), any_minimum=minima, attained=st.booleans(), above=st.booleans())
def test_a_region_is_eligible_if_and_only_if_one_of_its_positions_is(
    case: Case, any_minimum: float, attained: bool, above: bool
) -> None:
    fractions = all_fractions(case.map, case.patch)
    minimum = some_minimum(fractions, any_minimum, attained)
    if above:
        minimum = min(1.0, float(np.nextafter(minimum, 2)))
    best = [of_region(fractions, region, case.patch).max() for region in case.regions()]
    eligible = case.map.eligible_regions(case.intervals, case.patch, minimum)
    assert eligible.dtype == np.uint32
    assert eligible.tolist() == [number for number, fraction in enumerate(best) if fraction >= minimum]


def test_regions_of_more_than_one_batch_are_all_evaluated() -> None:
    foreground = a_map((7, 90, 90), (3, 3, 3), seed=5, full=0.3)
    along = tuple((lo, lo + 7) for lo in range(0, 84, 2))  # 42 x 42 regions per interval of z; a batch holds some 500
    case = Case(foreground, (4, 4, 4), (((0, 6), (1, 7)), along, along))
    fractions = all_fractions(foreground, case.patch)
    best = np.array([of_region(fractions, region, case.patch).max() for region in case.regions()])
    for minimum in (0.5, 0.7, 0.9):
        expected = np.flatnonzero(best >= minimum)
        assert 50 < expected.size < best.size - 50
        np.testing.assert_array_equal(foreground.eligible_regions(case.intervals, case.patch, minimum), expected)


@settings(max_examples=50, deadline=None)
@given(case=cases(), minimum=minima)
def test_a_full_volume_is_all_eligible_and_an_empty_one_not_at_all(case: Case, minimum: float) -> None:
    full = ForegroundMap(np.full_like(case.map.fraction, 255), case.map.cell_zyx, case.map.shape_zyx)
    empty = ForegroundMap(np.zeros_like(case.map.fraction), case.map.cell_zyx, case.map.shape_zyx)
    everything = list(range(len(case.regions())))
    assert full.eligible_regions(case.intervals, case.patch, 1.0).tolist() == everything
    assert full.eligible_regions(case.intervals, case.patch, minimum).tolist() == everything
    assert empty.eligible_regions(case.intervals, case.patch, minimum).size == 0


def test_exactly_a_tenth_is_a_tenth() -> None:
    # As a float, 0.1 lies above 1/10: with ceil(0.1 x 255 x 10) no patch of one full voxel in ten would do.
    fraction = np.zeros((1, 1, 10), np.uint8)
    fraction[0, 0, 4] = 255
    foreground = ForegroundMap(fraction, (1, 1, 1), (1, 1, 10))
    assert foreground.patch_fraction((0, 0, 0), (1, 1, 10)) == 0.1
    assert foreground.eligible_regions((((0, 1),), ((0, 1),), ((0, 10),)), (1, 1, 10), 0.1).tolist() == [0]


@settings(max_examples=200, deadline=None)
@given(case=cases(), any_minimum=minima, attained=st.booleans(), seed=st.integers(0, 2**32))
def test_a_drawn_start_lies_inside_its_region_and_suffices_where_the_region_is_eligible(
    case: Case, any_minimum: float, attained: bool, seed: int
) -> None:
    fractions = all_fractions(case.map, case.patch)
    minimum = some_minimum(fractions, any_minimum, attained)
    regions = case.regions()
    eligible = set(case.map.eligible_regions(case.intervals, case.patch, minimum).tolist())
    for number, region in enumerate(regions):
        start = case.map.draw_start(np.random.default_rng(seed), region, case.patch, minimum)
        assert all(type(s) is int for s in start)
        assert all(lo <= s <= hi - p for lo, hi, s, p in zip(*region, start, case.patch, strict=True))
        if number in eligible:
            assert case.map.patch_fraction(start, case.patch) >= minimum
            assert fractions[start] >= minimum


@pytest.mark.parametrize("block", [(1, 2, 3), (0, 0, 0), (3, 3, 3)])
def test_the_only_position_of_a_large_region_is_found(block: Triple) -> None:
    fraction = np.zeros((4, 4, 4), np.uint8)
    fraction[block] = 255
    foreground = ForegroundMap(fraction, (16, 16, 16), (64, 64, 64))
    region: tuple[Triple, Triple] = ((0, 0, 0), (64, 64, 64))
    for seed in range(5):  # 64 draws hit one of 49^3 positions once in 1800 seeds
        start = foreground.draw_start(np.random.default_rng(seed), region, (16, 16, 16), 1.0)
        assert start == tuple(16 * b for b in block)


def test_starts_are_drawn_evenly_from_all_positions_that_suffice() -> None:
    fraction = np.zeros((2, 3, 3), np.uint8)
    fraction[:, 1, 1:], fraction[1, 2, 1] = 255, 200
    foreground = ForegroundMap(fraction, (4, 3, 3), (7, 8, 9))
    region, patch, minimum = ((1, 1, 2), (7, 8, 9)), (2, 3, 3), 2 / 3
    inside = of_region(all_fractions(foreground, patch), region, patch)
    valid = {(z + 1, y + 1, x + 2) for z, y, x in np.argwhere(inside >= minimum).tolist()}
    assert 20 < len(valid) < 0.6 * inside.size
    assert (inside == minimum).any()
    rng = np.random.default_rng(0)
    counts = dict.fromkeys(valid, 0)
    for _ in range(200 * len(valid)):
        counts[foreground.draw_start(rng, region, patch, minimum)] += 1
    # 5 standard deviations of a count of mean 200; a seeded draw, so it cannot fail by chance.
    assert max(abs(count - 200) for count in counts.values()) < 5 * 200**0.5


def test_the_same_seed_draws_the_same_start() -> None:
    foreground = a_map((40, 50, 60), (8, 8, 8), seed=1, full=0.4)
    region: tuple[Triple, Triple] = ((3, 5, 7), (40, 50, 60))

    def starts(seed: int) -> list[Triple]:
        rng = np.random.default_rng((seed, 3, 17))
        return [foreground.draw_start(rng, region, (12, 12, 12), 0.4) for _ in range(5)]

    assert starts(0) == starts(0) != starts(1)
    assert starts(0)[:2] == [(10, 35, 39), (12, 28, 19)]


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


def test_what_does_not_fit_is_refused() -> None:
    foreground = ForegroundMap(np.zeros((1, 1, 2), np.uint8), (8, 8, 8), (8, 8, 12))
    with pytest.raises(ValueError, match=r"must be uint8 \(1, 1, 2\); got uint8 \(1, 1, 1\)"):
        ForegroundMap(np.zeros((1, 1, 1), np.uint8), (8, 8, 8), (8, 8, 12))
    with pytest.raises(ValueError, match="must be uint8"):
        ForegroundMap(np.zeros((1, 1, 2), np.float32), (8, 8, 8), (8, 8, 12))
    for start in ((0, 0, 9), (-1, 0, 0)):
        with pytest.raises(ValueError, match="inside the volume"):
            foreground.patch_fraction(start, (4, 4, 4))
    for interval in ((0, 13), (-1, 8), (3, 6)):
        with pytest.raises(ValueError, match="inside the volume and hold a patch"):
            foreground.eligible_regions((((0, 8),), ((0, 8),), (interval,)), (4, 4, 4), 0.5)
    for minimum in (0.0, 1.01, float("nan")):
        with pytest.raises(ValueError, match="min_fraction"):
            foreground.eligible_regions((((0, 8),), ((0, 8),), ((0, 8),)), (4, 4, 4), minimum)


LARGE = """
import resource
import numpy as np
from vesuvius.plan.foreground import ForegroundMap

shape = (75784, 32693, 32693)
fraction = np.zeros((593, 256, 256), np.uint8)
y, x = np.mgrid[:256, :256].astype(np.float32)
for z in range(593):  # an ellipse of a quarter of the plane that wanders, turns and breathes
    t = z / 593
    a, cy, cx = 74 + 12 * np.sin(5 * t), y - 128 - 25 * np.sin(9 * t), x - 128 - 30 * np.cos(7 * t)
    u, v = cy * np.cos(6 * t) + cx * np.sin(6 * t), cx * np.cos(6 * t) - cy * np.sin(6 * t)
    fraction[z][(u / a) ** 2 + (v * a / 5215) ** 2 < 1] = 255
foreground = ForegroundMap(fraction, (128, 128, 128), shape)
intervals = [[(lo, min(lo + 256, size)) for lo in range(0, size - 136, 128)] for size in shape]
eligible = foreground.eligible_regions(intervals, (72, 136, 136), 0.5)
print(eligible.size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.long
def test_the_map_of_the_largest_scroll_needs_little_memory() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True)
    eligible, peak_kib = (int(word) for word in done.stdout.split())
    assert 9e6 < eligible < 11e6
    assert peak_kib * 1024 < 1.5e9
