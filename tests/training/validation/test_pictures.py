"""Grids of pictures, and the curves below them, as pixels."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from vesuvius.training.validation.pictures import (
    GAP,
    HEADING,
    PAPER,
    MontageCell,
    draw_charts,
    draw_grid,
    magnification,
    orthogonal_slices,
)
from vesuvius.training.validation.texture import Texture, measure_texture

ORANGE, BLUE = (255, 166, 43), (110, 198, 255)  # generated, real


def test_the_middle_slices_lie_as_the_faces_of_a_box() -> None:
    patch = np.full((2, 3, 5), -1.0)
    patch[1], patch[:, 1], patch[:, :, 2] = 0.0, 0.5, 1.0
    picture = orthogonal_slices(patch, 2)
    assert picture.shape == (2 * (3 + 2) + 2 * GAP, 2 * (5 + 2) + 2 * GAP)
    across_z, across_y, across_x = picture[:6, :10], picture[6 + GAP : 10 + GAP, :10], picture[:6, 10 + GAP : 14 + GAP]
    assert across_z[::2, ::2].tolist() == [
        [127, 127, 255, 127, 127],
        [191, 191, 255, 191, 191],
        [127, 127, 255, 127, 127],
    ]
    assert across_y[::2, ::2].tolist() == [[191, 191, 255, 191, 191]] * 2
    assert (across_x == 255).all()
    assert (picture == PAPER).sum() == picture.size - across_z.size - across_y.size - across_x.size, "nothing elsewhere"


@pytest.mark.parametrize(
    ("shape", "factor"), [((8, 16, 16), 6), ((72, 136, 136), 1), ((96, 96, 96), 1), ((4, 95, 4), 2)]
)
def test_small_patches_are_enlarged(shape: tuple[int, int, int], factor: int) -> None:
    assert magnification(shape) == factor


@pytest.mark.parametrize("count", [1, 7, 64])
def test_a_grid_shows_every_cell_once_and_is_no_ribbon(count: int) -> None:
    cells = [MontageCell(str(number), np.full((100, 120), 100 + number, np.uint8)) for number in range(count)]
    picture = np.asarray(draw_grid(cells, "t"))
    found = [int((picture == 100 + number).sum()) for number in range(count)]
    # a few pixels of the letters may be as grey as a cell
    assert all(abs(n - 100 * 120) < 200 for n in found), found
    height, width = picture.shape
    assert 0.3 < (height - HEADING) / width < 2


@pytest.mark.parametrize(("letter", "columns"), [("W", 3), ("i", 12)])
def test_no_text_is_cut_or_runs_into_the_next_at_any_width(letter: str, columns: int) -> None:
    """`W` is the widest letter: room by the count of letters would cut it off."""
    title, caption = 60 * letter, 20 * letter
    cells = [MontageCell(caption, np.zeros((20, 30), np.uint8))] * columns
    picture = np.asarray(draw_grid(cells, title, columns))
    lit = [int((whole_text(text) > PAPER).sum()) for text in (title, caption)]
    heading, captions = picture[:HEADING], picture[HEADING : 2 * HEADING]
    assert (heading > PAPER).sum() == lit[0]
    assert (captions > PAPER).sum() == columns * lit[1], "none is drawn over another"
    assert (heading[:, -GAP:] == PAPER).all()
    assert narrowest_gap(captions) >= 2 * GAP, "between captions"


def whole_text(text: str) -> NDArray[np.uint8]:
    image = Image.new("L", (2000, HEADING), PAPER)
    ImageDraw.Draw(image).text((GAP, 2), text, fill=255)
    return np.asarray(image)


def narrowest_gap(strip: NDArray[np.uint8]) -> int:
    """Pixels between two captions; letters of one have less than `GAP` between them."""
    lit = np.flatnonzero((strip > PAPER).any(0))
    gaps = np.diff(lit) - 1
    return int(gaps[gaps > GAP].min())


def texture(scale: float) -> Texture:
    return measure_texture(np.random.default_rng(0).normal(0, scale, (1, 8, 16, 16)).astype(np.float32))


def count(picture: NDArray[np.uint8], colour: tuple[int, int, int]) -> tuple[int, int]:
    """Pixels of exactly this colour in the left and the right half."""
    left, right = np.array_split((picture == colour).all(-1), 2, axis=1)
    return int(left.sum()), int(right.sum())


@pytest.mark.filterwarnings("error")
def test_both_charts_show_both_curves_but_for_a_spectrum_without_power() -> None:
    picture = draw_charts(800, texture(0.2), texture(0.5))
    assert picture.shape == (300, 800, 3)
    assert picture.dtype == np.uint8
    assert all(number > 100 for colour in (ORANGE, BLUE) for number in count(picture, colour))
    in_legend = 50
    for value in (math.nan, 0.0):
        flat = measure_texture([np.full((8, 16, 16), value, np.float32)])
        missing = draw_charts(800, flat, texture(0.5))
        assert count(missing, ORANGE)[1] < in_legend
        assert all(number > in_legend for number in count(missing, BLUE))
    draw_charts(800, flat, flat)
