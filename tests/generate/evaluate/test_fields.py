"""Figures of material and pores against bodies whose figures are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from vesuvius.generate.evaluate.fields import chord_distances, figures, measure_field, otsu_threshold
from vesuvius.volumes.voxels import euler_sum

Voxels = NDArray[np.float32]


def figures_of(*patches: Voxels, threshold: float = 0.0) -> dict[str, float]:
    sums = np.sum([measure_field(patch, threshold) for patch in patches], axis=0)
    return {key: float(values[0]) for key, values in figures(sums[None]).items()}


def distance_to_center(size: int) -> NDArray[np.float64]:
    return np.sqrt(sum((np.indices((size,) * 3) - size // 2) ** 2))


def test_the_euler_number_counts_parts_tunnels_and_cavities() -> None:
    radius, (z, y, x) = distance_to_center(21), np.indices((21,) * 3) - 10
    torus = (np.sqrt(y**2 + x**2) - 6) ** 2 + z**2 <= 6
    corner = np.zeros((21,) * 3, bool)
    corner[3, 3, 3] = corner[4, 4, 4] = True
    shapes = {
        "ball": (radius < 5, 1),
        "shell": ((radius < 8) & (radius > 4), 2),
        "torus": (torus, 0),
        "tips": (corner, 1),
    }
    assert {name: euler_sum(body) for name, (body, _) in shapes.items()} == {name: n for name, (_, n) in shapes.items()}
    ball = np.pad(radius < 5, ((0, 21), (0, 0), (0, 0)))
    ball[21:] = ball[:21]
    assert euler_sum(ball) == 2


@pytest.mark.parametrize("normal", [(0, 0, 1), (1, 0, 0), (1, 2, 2), (-3, 4, 1)])
@pytest.mark.parametrize(("thickness", "spacing"), [(5.0, 12.0), (9.0, 16.0)])
def test_sheets_have_their_thickness_and_spacing_in_every_direction(
    normal: tuple[int, int, int], thickness: float, spacing: float
) -> None:
    """Voxel faces of tilted sheets have up to 1.7 times the area of the sheet; noise makes faces that it has not."""
    along = np.tensordot(np.array(normal) / np.linalg.norm(normal), np.indices((48, 48, 48)), 1) + 0.3
    depth = thickness / 2 - abs(along % spacing - spacing / 2)  # below the surface; negative outside
    patch = np.clip(depth, -1, 1).astype(np.float32)
    found = figures_of(patch + np.random.default_rng(0).normal(0, 0.1, patch.shape).astype(np.float32))
    assert found["sheet_thickness"] == pytest.approx(thickness, rel=0.08)
    assert found["sheet_spacing"] == pytest.approx(spacing, rel=0.08)
    assert found["porosity"] == pytest.approx(1 - thickness / spacing, abs=0.04)


def test_mean_chords_do_not_depend_on_the_size_of_patches() -> None:
    """Cut chords counted as whole ones are shorter in small patches; those left out are the long ones."""
    rng = np.random.default_rng(0)
    lines = (rng.random((400, 400)) < 0.1).cumsum(1) % 2  # both phases change after 10 voxels on average
    volume = (np.broadcast_to(lines, (8, 400, 400)) - 0.5).astype(np.float32)
    volume = np.ascontiguousarray(volume.transpose(1, 0, 2))
    large, small = figures_of(volume), figures_of(*(volume[:, :, at : at + 8] for at in range(0, 400, 8)))
    assert small["chord_material"] == pytest.approx(large["chord_material"], rel=0.05)
    along = [measure_field(part, 0.0) for part in (volume, volume[:, :, ::-1])]
    assert chord_distances(along[0][None], along[1], volume.shape)[0] == pytest.approx(0, abs=1e-9)


def test_chord_distance_is_the_difference_of_constant_chords() -> None:
    stripes = [np.where(np.arange(48) // n % 2, 1.0, -1.0) * np.ones((8, 8, 1)) for n in (4, 6)]
    sums = [measure_field(each.astype(np.float32), 0.0) for each in stripes]
    assert chord_distances(sums[0][None], sums[1], (8, 8, 48))[0] == pytest.approx(2 / 3), "0 along z and y"


def test_the_threshold_lies_between_gaps_and_sheets_however_much_air_there_is() -> None:
    rng = np.random.default_rng(0)
    classes = [np.full(20_000, -3), rng.normal(-0.8, 0.1, 500), rng.normal(0.5, 0.2, 9500)]
    assert -0.5 < otsu_threshold(np.concatenate(classes).astype(np.float32)) < 0.2
    for flat in (np.ones(10), np.full(10, -3), np.full(10, np.nan)):
        assert math.isnan(otsu_threshold(flat.astype(np.float32)))


def test_one_phase_has_a_porosity_alone_and_patches_without_any_value_have_nothing() -> None:
    rng = np.random.default_rng(0)
    solid = 1 + 0.1 * rng.random((8, 16, 16)).astype(np.float32)
    found = figures_of(solid)
    assert found["porosity"] == 0
    assert [key for key, value in found.items() if not math.isnan(value)] == ["porosity", "border"]
    both = figures_of(solid, np.where(solid > 1.05, -1, 1).astype(np.float32))
    assert all(map(math.isfinite, both.values()))
    for patch, threshold in ((solid, math.nan), (np.where(solid > 1.05, np.nan, solid), 0.0)):
        assert all(map(math.isnan, figures_of(patch, threshold=threshold).values()))


def test_borders_that_change_more_than_the_inside_are_seen() -> None:
    rng = np.random.default_rng(0)
    patches = rng.standard_normal((20, 8, 16, 16)).astype(np.float32)
    assert figures_of(*patches)["border"] == pytest.approx(1, abs=0.05)
    patches[:, :, :, 0] *= 2
    assert figures_of(*patches)["border"] > 1.15
