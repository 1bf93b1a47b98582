"""Faces of tiles show where tiles do not fit, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from tests.generate.evaluate.scrolls import scroll, within_chance
from vesuvius.generate.evaluate.seams import LEVEL, Seam, face_planes, plane_differences, seam_statistics
from vesuvius.generate.volume.tiling import axis_starts
from vesuvius.volumes.box import Box, slices

SHAPE, PATCH = (40, 64, 64), 16


def seams_of(volume: np.ndarray, overlap: float = 0.0, patch: int = PATCH) -> dict[str, Seam]:
    starts = [axis_starts(max(size, patch), patch, overlap) for size in volume.shape]
    faces = [face_planes(each, patch) for each in starts]
    found = seam_statistics(plane_differences(lambda box: volume[slices(box)], volume.shape), faces)  # type: ignore[arg-type]
    return {seam.axis: seam for seam in found}


def test_tiles_side_by_side_show_and_a_volume_of_one_piece_does_not() -> None:
    whole, other = scroll(0, SHAPE, air=False), scroll(1, SHAPE, air=False)
    tiled = np.empty_like(whole)
    for z in range(0, 40, 8):
        for y in range(0, 64, 16):
            for x in range(0, 64, 16):
                cut = np.random.default_rng((z, y, x)).integers(0, (32, 48, 48))
                piece = other[tuple(slice(lo, hi) for lo, hi in zip(cut, np.add(cut, (8, 16, 16)), strict=True))]
                tiled[z : z + 8, y : y + 16, x : x + 16] = piece
    shown, plain = seams_of(tiled), seams_of(whole)
    for axis in "yx":
        assert shown[axis].value > 1.5
        assert shown[axis].shows
        assert plain[axis].value == pytest.approx(1, abs=0.15)
        assert plain[axis].shows is False


@pytest.mark.parametrize(
    ("patch", "overlap", "sizes"), [(16, 0.5, range(60, 116, 5)), (8, 0.5, range(61, 90, 3)), (16, 0.0, (96, 112, 128))]
)
def test_in_noise_faces_show_as_rarely_as_is_said_whatever_the_size_and_the_spacing(
    patch: int, overlap: float, sizes: Sequence[int]
) -> None:
    """Sizes that tiles do not divide have faces side by side (spacing 1)."""
    rng, trials, shown = np.random.default_rng(2), 0, 0
    for size in sizes:
        for _ in range(400 // len(sizes)):
            noise = rng.standard_normal((6, size, 6)).astype(np.float32)
            seam = seams_of(noise, overlap, patch)["y"] if size > patch else None
            assert seam is not None
            assert seam.shows is not None
            trials, shown = trials + 1, shown + seam.shows
    assert within_chance(shown, trials, LEVEL)


def test_axes_are_judged_together_so_that_a_page_is_wrong_as_rarely_as_is_said() -> None:
    rng = np.random.default_rng(3)
    pages = [seams_of(rng.standard_normal((48, 64, 56)).astype(np.float32), 0.5) for _ in range(200)]
    assert within_chance(sum(any(seam.shows for seam in page.values()) for page in pages), len(pages), LEVEL)


@pytest.mark.parametrize("overlap", [0.0, 0.5])
def test_weak_seams_are_found_also_where_contrast_changes_along_the_volume(overlap: float) -> None:
    """Steps of 0.4 standard deviations, of either sign, at each face."""
    found = false = 0
    for seed in range(20):
        volume = scroll(seed, (24, 96, 24), air=False) * np.linspace(0.3, 1.5, 96, dtype=np.float32)[:, None]
        false += bool(seams_of(volume, overlap)["y"].shows)
        for plane in face_planes(axis_starts(96, PATCH, overlap), PATCH):
            step = np.random.default_rng((seed, plane)).choice([-0.4, 0.4]) * volume[:, plane].std()
            volume[:, plane:] += np.float32(step)
        found += bool(seams_of(volume, overlap)["y"].shows)
    assert found >= 18
    assert false <= 3, "of 20, at a level of 5 %"


@pytest.mark.parametrize(
    "volume",
    [
        np.zeros((32, 64, 64), np.float32),
        np.full((32, 64, 64), np.nan, np.float32),
        np.random.default_rng(0).standard_normal((18, 18, 18)).astype(np.float32),
    ],
    ids=["constant", "NaN", "too small"],
)
def test_what_cannot_be_judged_is_unknown(volume: np.ndarray) -> None:
    for seam in seams_of(volume).values():
        assert seam.shows is None
        assert math.isnan(seam.p)
        assert seam.reading == "unknown"
    assert seams_of(np.random.default_rng(0).standard_normal((64, 18, 64)), 0.0, 2)["z"].shows is None, "no other plane"


def test_planes_that_are_not_known_do_not_decide() -> None:
    """Blocks of NaN beside faces: their planes are judged by the rest."""
    volume = np.random.default_rng(1).standard_normal((8, 96, 64)).astype(np.float32)
    volume[:, 30:34, :32] = np.nan
    with_gap = seams_of(volume, 0.5)["y"]
    assert with_gap.shows is False
    volume[:, 30:34] = np.nan
    assert seams_of(volume, 0.5)["y"].shows is False


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
    assert "z" not in seams_of(scroll(0, (16, 64, 64)))
