"""Weights of tiles make a mean at each voxel; which tiles overlap is compared with a search through all."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from monai.data.utils import compute_importance_map, dense_patch_slices
from monai.inferers.utils import _get_scan_interval

from vesuvius.errors import ConfigError
from vesuvius.predict.tiling import Tiling, Window, even_tiling, overhang, sliding_tiling, tile_starts
from vesuvius.volumes.box import intersection, shape_of, slices

WINDOWS: tuple[Window, ...] = ("gaussian", "linear", "constant", "crop")


@st.composite
def even_tilings(draw: st.DrawFn) -> Tiling:
    patch = draw(st.tuples(*[st.integers(1, 6)] * 3))
    shape = tuple(p + draw(st.integers(0, 13)) for p in patch)
    return even_tiling(shape, patch, draw(st.sampled_from([0.0, 0.25, 0.5, 0.75])))  # type: ignore[arg-type]


@st.composite
def tilings(draw: st.DrawFn) -> Tiling:
    """Any tiling; those of `sliding_tiling` may overhang the volume."""
    if draw(st.booleans()):
        return draw(even_tilings())
    multiple = draw(st.sampled_from([1, 1, 2, 4]))
    patch = tuple(multiple * draw(st.integers(1, 6)) for _ in range(3))
    shape = draw(st.tuples(*[st.integers(1, 19)] * 3))
    overlap, window = draw(st.sampled_from([0.0, 0.25, 0.5, 0.75])), draw(st.sampled_from(WINDOWS))
    return sliding_tiling(shape, patch, overlap, window, multiple)  # type: ignore[arg-type]


@given(tilings())
def test_the_weights_of_all_tiles_make_a_mean_at_each_voxel(tiling: Tiling) -> None:
    inside = ((0, 0, 0), tiling.shape_zyx)
    total, weights = np.zeros((2, *tiling.shape_zyx), np.float32), np.zeros(tiling.shape_zyx, np.float32)
    for tile in range(tiling.tiles):
        box = tiling.tile_box(tile)
        assert shape_of(box) == tiling.patch_zyx
        values = np.stack([np.full(tiling.patch_zyx, value, np.float32) for value in (3, -5)])
        tiling.add_tile(tile, values, inside, total, weights)
        weight = tiling.weight(tile, box)
        assert (weight >= 0).all() if tiling.window == "crop" else (weight > 0).all()
        assert (weight >= 1e-3).all() or tiling.window != "gaussian"
    assert tiling.window == "gaussian" or np.allclose(weights, 1, atol=1e-6)
    np.testing.assert_allclose(total[0] / weights, 3, rtol=1e-5)
    np.testing.assert_allclose(total[1] / weights, -5, rtol=1e-5)


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


@given(st.tuples(*[st.integers(1, 40)] * 3), st.tuples(*[st.integers(1, 12)] * 3), st.floats(0, 0.99))
def test_sliding_tiles_are_those_of_monai(
    shape: tuple[int, int, int], patch: tuple[int, int, int], overlap: float
) -> None:
    padded = [max(size, p) for size, p in zip(shape, patch, strict=True)]
    before = [(b - size) // 2 for size, b in zip(shape, padded, strict=True)]
    found = dense_patch_slices(padded, patch, _get_scan_interval(padded, patch, 3, (overlap,) * 3))
    tiling = sliding_tiling(shape, patch, overlap)
    expected = [tuple(each.start - b for each, b in zip(cut, before, strict=True)) for cut in found]
    assert sorted(tiling.tile_box(tile)[0] for tile in range(tiling.tiles)) == sorted(set(expected))


@pytest.mark.parametrize("patch", [(8, 16, 12), (5, 7, 1), (2, 2, 3)])
def test_gaussian_weights_are_those_of_monai(patch: tuple[int, int, int]) -> None:
    expected = compute_importance_map(patch, mode="gaussian", sigma_scale=0.125, device="cpu", dtype=torch.float32)
    tiling = sliding_tiling((20, 20, 20), patch, 0.5)
    np.testing.assert_allclose(tiling.weight(3, tiling.tile_box(3)), expected.numpy(), rtol=1e-5)


@given(st.integers(1, 60), st.integers(1, 5), st.sampled_from([2, 4]), st.sampled_from([0.0, 0.3, 0.6]))
def test_tiles_of_an_output_at_another_resolution_cover_it(size: int, patch: int, by: int, overlap: float) -> None:
    tiling = sliding_tiling((1, 1, size), (by, by, patch * by), overlap, multiple=by)
    coarse = tiling.scaled(Fraction(1, by), 8)
    assert coarse.shape_zyx == (1, 1, -(-size // by)), "a voxel at the end that is cut counts"
    assert coarse.patch_zyx == (1, 1, patch)
    assert [start * by for start in coarse.starts[2]] == list(tiling.starts[2])
    assert {x for start in coarse.starts[2] for x in range(start, start + patch)} >= set(range(coarse.shape_zyx[2]))
    fine = sliding_tiling((1, 1, size), (1, 1, patch), overlap).scaled(Fraction(by), 8)
    assert fine.shape_zyx == (by, by, by * size)


def test_weights_are_largest_in_the_middle_of_a_tile_and_smallest_at_its_faces() -> None:
    shares = even_tiling((1, 1, 24), (1, 1, 8), 0.5).axis_weights[2][2]  # from 8, with a neighbor at either side
    window = np.sin(np.pi * (np.arange(8) + 0.5) / 8) ** 4
    np.testing.assert_allclose(shares, window / (window + np.roll(window, 4)), atol=1e-12)
    assert shares[0] < 0.002
    assert shares[3] > 0.99


def test_cropped_tiles_give_each_voxel_to_the_nearest_center() -> None:
    tiling = sliding_tiling((1, 1, 13), (1, 1, 6), 0.5, "crop")
    assert tiling.starts[2] == (0, 3, 6, 7)
    weights = np.zeros((4, 13))
    for tile, (start, window) in enumerate(zip(tiling.starts[2], tiling.axis_weights[2], strict=True)):
        weights[tile, start : start + 6] = window
    centers = [start + 3 for start in tiling.starts[2]]
    distances = [[abs(v + 0.5 - center) for center in centers] for v in range(13)]
    assert weights.sum(0).tolist() == [1] * 13
    assert weights.argmax(0).tolist() == [each.index(min(each)) for each in distances]


def test_a_box_is_read_where_it_is_inside_and_padded_elsewhere() -> None:
    voxels = np.arange(3 * 4 * 5).reshape(3, 4, 5)
    box = ((-2, 1, 3), (4, 3, 9))
    inner, widths = overhang(box, voxels.shape)
    assert inner == intersection(box, ((0, 0, 0), voxels.shape))
    padded = np.pad(voxels[slices(inner)], widths, mode="edge")
    z, y, x = (np.arange(lo, hi).clip(0, size - 1) for lo, hi, size in zip(*box, voxels.shape, strict=True))
    np.testing.assert_array_equal(padded, voxels[np.ix_(z, y, x)])


def test_tiles_that_cannot_cover_a_volume_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"A volume of 4x8x8 is smaller than a training patch \(8x8x8\)"):
        even_tiling((4, 8, 8), (8, 8, 8), 0.5)
    with pytest.raises(ConfigError, match="has an axis above 10000000 voxels"):  # whose tiles would fill the memory
        even_tiling((8, 8, 10**13), (8, 8, 8), 0.5)
    with pytest.raises(ConfigError, match=r"--overlap 0\.9 is not between 0 and 0\.75"):
        even_tiling((8, 8, 8), (8, 8, 8), 0.9)
    with pytest.raises(ConfigError, match="overlap 1 is not at least 0 and below 1"):
        sliding_tiling((8, 8, 8), (8, 8, 8), 1)
