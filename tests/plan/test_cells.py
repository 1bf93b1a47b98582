"""Cells: each start belongs to one, a walk gives each the length that it owns, and regions are cheap to read."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.layouts import BIG, LAYOUTS, Layout, planned
from vesuvius.config import Triple, ValidationConfig
from vesuvius.errors import DataError
from vesuvius.plan.cells import AxisCells, Cells, lay_cells, region_of
from vesuvius.plan.make_plan import split_volume

sizes = st.tuples(*[st.integers(1, 14)] * 3)


@given(train=sizes, first=sizes, patch=st.tuples(*[st.integers(1, 5)] * 3), chunk=sizes, wanted=st.integers(1, 9))
def test_positions_enumerate_each_start_once(
    train: Triple, first: Triple, patch: Triple, chunk: Triple, wanted: int
) -> None:
    stop = tuple(f + t + p for f, t, p in zip(first, train, patch, strict=True))
    cells = lay_cells((first, (stop[0], stop[1], stop[2])), patch, chunk, 600, wanted, 128)
    phases = cells.draw_phases(np.random.default_rng(sum(train)))
    share = np.zeros([t + 1 for t in train])
    for position in range(cells.num_starts):
        lo, hi = cells.cell_at(position, phases)
        assert cells.cell_of(lo, phases) == (lo, hi)
        within = [slice(a - f, b - f) for a, b, f in zip(lo, hi, first, strict=True)]
        share[tuple(within)] += 1 / math.prod(b - a for a, b in zip(lo, hi, strict=True))
    np.testing.assert_allclose(share, 1, rtol=1e-9, err_msg="every start is equally likely, none is left out")


@pytest.mark.parametrize(
    ("name", "region", "chunks"),
    [
        ("u8", (199, 391, 391), (2, 4, 4)),
        ("chunks of 64^3", (199, 391, 391), (4, 7, 7)),
        ("4096^3, 64^3", (191, 191, 191), (2, 2, 2)),
    ],
)
def test_regions_touch_as_few_chunks_as_their_size_allows(name: str, region: Triple, chunks: Triple) -> None:
    layout = LAYOUTS[name]
    cells = planned(layout).cells
    assert cells.region_zyx(layout.patch) == region
    rng, touched = np.random.default_rng(0), set()
    for _ in range(200):
        phases = cells.draw_phases(rng)
        cell = cells.cell_at(int(rng.integers(cells.num_starts)), phases)
        lo, hi = region_of(cell, layout.patch)
        touched.add(tuple((b - 1) // c - a // c + 1 for a, b, c in zip(lo, hi, layout.chunk, strict=True)))
    assert max(touched) == chunks, "and no more in any pass"


def test_decoded_voxels_equal_the_mean_over_all_starts() -> None:
    layout = Layout((40, 50, 60), (5, 7, 9), (8, 16, 10))
    axes = (AxisCells(3, 30, 8, (0, 1, 2)), AxisCells(0, 44, 16, (4,)), AxisCells(1, 50, 11, tuple(range(11))))
    total = []
    for axis, patch, chunk in zip(axes, layout.patch, layout.chunk, strict=True):
        lengths = []
        for phase in axis.phases:
            for start in range(axis.first, axis.first + axis.count):
                lo, hi = axis.cell_of(start, phase)
                lengths.append(chunk * len({voxel // chunk for voxel in range(lo, hi + patch - 1)}))
        total.append(np.mean(lengths))
    assert Cells(axes).decoded_voxels(layout.patch, layout.chunk) == pytest.approx(math.prod(total))


def test_regions_fit_into_memory_and_small_volumes_have_enough_cells() -> None:
    for layout in LAYOUTS.values():
        cells = planned(layout).cells
        item = np.dtype(layout.dtype).itemsize
        least = item * math.prod(5 * size // 4 for size in layout.patch)
        assert item * math.prod(cells.region_zyx(layout.patch)) <= max(2**30 // 32, least)
        assert cells.num_starts >= 32 * cells.largest or cells.largest_zyx == (1, 1, 1)
        if layout.shape == BIG:
            assert all(cell >= patch / 5 for cell, patch in zip(cells.largest_zyx, layout.patch, strict=True))


# ---- what is held out

patches = st.tuples(*[st.integers(1, 40)] * 3)


@given(shape=st.tuples(*[st.integers(1, 200)] * 3), patch=patches, fraction=st.floats(0, 0.6), guard=st.floats(0, 2))
def test_training_gap_and_validation_never_overlap(
    shape: tuple[int, int, int], patch: tuple[int, int, int], fraction: float, guard: float
) -> None:
    config = ValidationConfig(fraction=fraction, gap=guard)
    try:
        split = split_volume("v", shape, patch, config)
    except DataError:
        return
    train = np.array(split.train)
    assert (train[1] - train[0] >= patch).all(), "a training patch fits"
    if fraction == 0:
        assert split.validation is None
        return
    validation = np.array(split.validation)
    assert (validation[1] - validation[0] >= patch).all(), "a validation patch fits"
    gap = validation[0] - train[1]
    axis = int(np.argmax(gap))
    assert gap[axis] >= guard * patch[axis]
    assert validation[1][axis] - validation[0][axis] >= fraction * shape[axis]
    assert (validation[1] == shape).all()


def test_the_slab_lies_across_the_axis_that_is_longest_in_patches() -> None:
    split = split_volume("v", (256, 512, 512), (72, 136, 136), ValidationConfig(fraction=0.05, gap=1.0))
    assert split.validation == ((0, 376, 0), (256, 512, 512)), "one patch, which is more than 5 % of 512"
    assert split.train == ((0, 0, 0), (256, 240, 512)), "and a gap of one patch before it"


@pytest.mark.parametrize(
    ("shape", "patch", "message"),
    [
        ((96, 512, 512), (128, 128, 128), r"patch_size \(128, 128, 128\) does not fit into \(96, 512"),
        ((72, 200, 200), (72, 136, 136), r"136 \+ 136 \+ 136 voxels along y, but v has 200; reduce"),
    ],
)
def test_a_volume_that_is_too_small_is_refused_with_the_required_size(
    shape: tuple[int, int, int], patch: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        split_volume("v", shape, patch, ValidationConfig())
