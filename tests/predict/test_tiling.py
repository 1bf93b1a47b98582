"""Tiles cover a volume and count 1 in all at each voxel; who overlaps whom is what a search through all says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vesuvius.errors import ConfigError
from vesuvius.predict.tiling import Tiling, tile_starts
from vesuvius.volumes.box import shape_of, slices

AXIS = st.tuples(st.integers(1, 6), st.integers(0, 13))


@st.composite
def tilings(draw: st.DrawFn) -> Tiling:
    axes = [draw(AXIS) for _ in range(3)]
    patch, more = zip(*axes, strict=True)
    shape = tuple(p + m for p, m in axes)
    del more
    return Tiling(shape, patch, draw(st.sampled_from([0.0, 0.25, 0.5, 0.75])))  # type: ignore[arg-type]


@given(tilings())
def test_weights_are_positive_and_sum_to_1_at_each_voxel(tiling: Tiling) -> None:
    total = np.zeros(tiling.shape_zyx, np.float64)
    for tile in range(tiling.tiles):
        box = tiling.tile_box(tile)
        assert shape_of(box) == tiling.patch_zyx
        weight = tiling.weight(tile, box)
        assert (weight > 0).all()
        total[slices(box)] += weight
    np.testing.assert_allclose(total, 1, atol=1e-6)


@given(tilings())
def test_tiles_and_blocks_that_share_a_voxel_with_a_box_are_found(tiling: Tiling) -> None:
    tiles = [tiling.tile_box(tile) for tile in range(tiling.tiles)]
    blocks = [tiling.block_box(block) for block in range(tiling.blocks)]
    assert sum(int(np.prod(shape_of(box))) for box in blocks) == np.prod(tiling.shape_zyx)
    (tiles_from, tiles_to), (blocks_from, blocks_to) = (np.array(boxes).swapaxes(0, 1) for boxes in (tiles, blocks))
    # shares[t, b]: whether tile t and block b share a voxel
    shares = (np.maximum(tiles_from[:, None], blocks_from) < np.minimum(tiles_to[:, None], blocks_to)).all(-1)
    assert [tiling.tiles_over(block) for block in blocks] == [list(np.flatnonzero(column)) for column in shares.T]
    assert [tiling.blocks_over(tile) for tile in tiles] == [list(np.flatnonzero(row)) for row in shares]


@given(st.integers(1, 20), st.integers(0, 60), st.floats(0, 0.75))
def test_tiles_are_evenly_spaced_with_at_least_the_requested_overlap(patch: int, more: int, overlap: float) -> None:
    starts = tile_starts(patch + more, patch, overlap)
    gaps = np.diff(starts)
    assert (starts[0], starts[-1]) == (0, more)
    assert len(gaps) == 0 or gaps.max() - gaps.min() <= 1
    assert len(gaps) == 0 or gaps.max() <= max(1, patch * (1 - overlap))
    assert len(gaps) == 0 or overlap == 0 or patch - gaps.max() >= min(4, patch // 2)


def test_weights_are_largest_in_the_middle_of_a_tile_and_smallest_at_its_faces() -> None:
    shares = Tiling((1, 1, 24), (1, 1, 8), 0.5).axis_weights[2][2]  # from 8, with a neighbor at either side
    window = np.sin(np.pi * (np.arange(8) + 0.5) / 8) ** 4
    np.testing.assert_allclose(shares, window / (window + np.roll(window, 4)), atol=1e-12)
    assert shares[0] < 0.002
    assert shares[3] > 0.99


def test_a_volume_that_tiles_cannot_cover_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"A volume of 4x8x8 is smaller than a training patch \(8x8x8\)"):
        Tiling((4, 8, 8), (8, 8, 8), 0.5).check()
    with pytest.raises(ConfigError, match=r"--overlap 0\.9 is not between 0 and 0\.75"):
        Tiling((8, 8, 8), (8, 8, 8), 0.9).check()
