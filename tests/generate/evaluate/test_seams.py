"""Faces of tiles show where tiles do not fit, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from tests.generate.evaluate.scrolls import scroll
from vesuvius.generate.evaluate.seams import face_planes, plane_differences, seam_statistics
from vesuvius.generate.volume.tiling import axis_starts
from vesuvius.volumes.box import Box, slices

SHAPE, PATCH = (40, 64, 64), 16


def statistics(volume: np.ndarray, overlap: float = 0.0) -> dict[str, tuple[float, bool]]:
    starts = [axis_starts(size, PATCH, overlap) for size in volume.shape]
    faces = [face_planes(each, PATCH) for each in starts]
    found = seam_statistics(plane_differences(lambda box: volume[slices(box)], volume.shape), faces)  # type: ignore[arg-type]
    return {seam.axis: (seam.value, seam.shows) for seam in found}


def test_tiles_side_by_side_show_and_a_volume_of_one_piece_does_not() -> None:
    whole, other = scroll(0, SHAPE, air=False), scroll(1, SHAPE, air=False)
    tiled = np.empty_like(whole)
    for z in range(0, 40, 8):
        for y in range(0, 64, 16):
            for x in range(0, 64, 16):
                cut = np.random.default_rng((z, y, x)).integers(0, (32, 48, 48))
                piece = other[tuple(slice(lo, hi) for lo, hi in zip(cut, np.add(cut, (8, 16, 16)), strict=True))]
                tiled[z : z + 8, y : y + 16, x : x + 16] = piece
    shown, plain = statistics(tiled), statistics(whole)
    for axis in "yx":
        assert shown[axis][0] > 1.5
        assert shown[axis][1]
        assert plain[axis][0] == pytest.approx(1, abs=0.15)
        assert not plain[axis][1]


def test_the_statistic_is_a_ratio_of_mean_squares_over_all_voxels_however_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    volume = np.random.default_rng(0).integers(0, 255, (20, 36, 30)).astype(np.uint8)
    expected = [np.diff(volume.astype(float), axis=axis) ** 2 for axis in range(3)]
    monkeypatch.setattr("vesuvius.generate.evaluate.seams._BLOCK", 13)
    found = plane_differences(lambda box: volume[slices(box)], volume.shape)
    for axis in range(3):
        others = tuple(other for other in range(3) if other != axis)
        np.testing.assert_allclose(found[axis][1:], expected[axis].mean(others), rtol=1e-6)
        assert np.isnan(found[axis][0])


def test_of_a_very_large_volume_some_blocks_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vesuvius.generate.evaluate.seams._BLOCK", 8)
    monkeypatch.setattr("vesuvius.generate.evaluate.seams._MOST_BLOCKS", 40)
    volume, read = scroll(0, SHAPE), []

    def recording(box: Box) -> np.ndarray:
        read.append(box)
        return volume[slices(box)]

    found = plane_differences(recording, SHAPE)
    assert 20 <= len(read) <= 40
    assert all(np.isfinite(profile[1:]).mean() > 0.8 for profile in found)


def test_faces_are_where_tiles_begin_or_end_inside_the_volume() -> None:
    assert face_planes((0, 8, 16), 16) == (8, 16, 24)
    assert face_planes((0, 5), 8) == (5, 8)
    assert face_planes((0,), 8) == ()
    assert "z" not in statistics(scroll(0, (16, 64, 64)))
