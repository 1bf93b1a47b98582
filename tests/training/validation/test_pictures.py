"""Grids of pictures, and the curves below them, as pixels."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from vesuvius.training.validation.pictures import (
    BACKGROUND,
    GAP,
    LINE,
    MontageCell,
    Scale,
    draw_grid,
    orthogonal_slices,
    with_charts,
)
from vesuvius.training.validation.texture import Texture, measure_texture

ORANGE, BLUE = (255, 166, 43), (110, 198, 255)  # generated, real


def test_the_middle_slices_lie_as_the_faces_of_a_box() -> None:
    patch = np.full((2, 3, 5), -1.0)
    patch[1], patch[:, 1], patch[:, :, 2] = 0.0, 0.5, 1.0
    picture = orthogonal_slices(patch, Scale.of(None, 2))
    assert picture.shape == (2 * (3 + 2) + 2 * GAP, 2 * (5 + 2) + 2 * GAP)
    across_z, across_y, across_x = picture[:6, :10], picture[6 + GAP : 10 + GAP, :10], picture[:6, 10 + GAP : 14 + GAP]
    assert across_z[::2, ::2].tolist() == [
        [127, 127, 255, 127, 127],
        [191, 191, 255, 191, 191],
        [127, 127, 255, 127, 127],
    ]
    assert across_y[::2, ::2].tolist() == [[191, 191, 255, 191, 191]] * 2
    assert (across_x == 255).all()
    assert (picture == BACKGROUND).sum() == picture.size - across_z.size - across_y.size - across_x.size, (
        "nothing elsewhere"
    )


def test_voxels_that_are_no_cubes_are_drawn_in_proportion() -> None:
    patch = np.full((2, 3, 5), -1.0)
    patch[1], patch[:, 1], patch[:, :, 2] = 0.0, 0.5, 1.0
    scale = Scale.of((20.0, 8.0, 10.0), 2)
    picture = orthogonal_slices(patch, scale)
    height, width, depth = 2 * 3, round(2.5 * 5), 5 * 2
    assert picture.shape == (height + depth + 2 * GAP, width + depth + 2 * GAP)
    across_y = picture[height + GAP : -GAP, :width]
    assert across_y.tolist() == [[191] * 5 + [255] * 3 + [191] * 4] * 10
    assert Scale.of_patch((16, 64, 64), (20.0, 5.0, 5.0)).pixels_zyx == (8.0, 2.0, 2.0)


def test_a_voxel_size_of_the_wrong_unit_does_not_make_a_picture_of_gigabytes() -> None:
    scale = Scale.of_patch((64, 128, 128), (1000.0, 1.0, 1.0))
    assert scale.pixels_zyx == (16.0, 1.0, 1.0)
    assert scale.bar(128) == (100, "100 µm   (voxel 1000 x 1 x 1 µm)")


@pytest.mark.parametrize("count", [1, 7, 64])
def test_a_grid_shows_every_cell_once_and_is_roughly_square(count: int) -> None:
    cells = [MontageCell(str(number), np.full((100, 120), 100 + number, np.uint8)) for number in range(count)]
    picture = np.asarray(draw_grid(cells, "t", Scale.of(None, 1)))
    found = [int((picture == 100 + number).sum()) for number in range(count)]
    # a few pixels of the letters may be as intensity as a cell
    assert all(abs(n - 100 * 120) < 400 for n in found), found
    height, width = picture.shape
    assert 0.3 < (height - LINE) / width < 2


def texture(scale: float) -> Texture:
    return measure_texture(np.random.default_rng(0).normal(0, scale, (1, 8, 16, 16)).astype(np.float32))


def count(picture: NDArray[np.uint8], color: tuple[int, int, int]) -> tuple[int, int]:
    """Pixels of exactly this color in the left and the right half."""
    left, right = np.array_split((picture == color).all(-1), 2, axis=1)
    return int(left.sum()), int(right.sum())


def charts(**textures: Texture) -> NDArray[np.uint8]:
    return np.asarray(with_charts(Image.new("L", (800, 1)), textures, None))[1:]


@pytest.mark.long
@pytest.mark.filterwarnings("error")
def test_both_charts_show_both_curves_except_a_spectrum_without_power() -> None:
    picture = charts(real=texture(0.5), generated=texture(0.2))
    assert picture.shape == (300, 800, 3)
    assert picture.dtype == np.uint8
    assert all(number > 100 for color in (ORANGE, BLUE) for number in count(picture, color))
    in_legend = 50
    for value in (math.nan, 0.0):
        flat = measure_texture([np.full((8, 16, 16), value, np.float32)])
        missing = charts(real=texture(0.5), generated=flat)
        assert count(missing, ORANGE)[1] < in_legend
        assert all(number > in_legend for number in count(missing, BLUE))
    charts(real=flat, generated=flat)


@pytest.mark.parametrize(
    ("pixels", "size_um", "width", "bar"),
    [
        (2, None, 96, (40, "20 voxels")),
        (0.5, None, 96, (50, "100 voxels")),
        (1, (8.0, 8.0, 8.0), 100, (62, "500 µm   (voxel 8 µm)")),
        (2, (8.0, 4.0, 2.5), 1000, (800, "1 mm   (voxel 8 x 4 x 2.5 µm)")),
        (3, (2.4, 2.4, 2.4), 125, (125, "100 µm   (voxel 2.4 µm)")),  # 125 / 3 * 2.4 is just below 100
    ],
)
def test_a_scale_bar_has_the_length_along_x_that_its_label_states(
    pixels: float, size_um: tuple[float, float, float] | None, width: int, bar: tuple[int, str]
) -> None:
    """A program that took the size along z for x, or forgot the magnification, would draw another length."""
    scale = Scale.of(size_um, pixels)
    assert scale.bar(width) == bar
    grid = np.asarray(draw_grid([MontageCell("c", np.zeros((width, width), np.uint8))], "t", scale))
    assert (grid[-LINE + 8 : -LINE + 12, GAP : GAP + bar[0]] > 200).all()
    assert (grid[-LINE + 8, GAP + bar[0] :][:4] == BACKGROUND).all()
