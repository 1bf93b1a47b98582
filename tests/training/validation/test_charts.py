"""The curves of a preview, as pixels."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from vesuvius.training.validation.charts import draw_charts
from vesuvius.training.validation.texture import Texture, measure_texture

ORANGE, BLUE = (255, 166, 43), (110, 198, 255)  # generated, real


def texture(scale: float) -> Texture:
    return measure_texture(np.random.default_rng(0).normal(0, scale, (1, 8, 16, 16)).astype(np.float32))


def count(picture: NDArray[np.uint8], colour: tuple[int, int, int]) -> tuple[int, int]:
    """Pixels of exactly this colour in the left and the right half."""
    left, right = np.array_split((picture == colour).all(-1), 2, axis=1)
    return int(left.sum()), int(right.sum())


@pytest.mark.parametrize("width", [800, 1601])
def test_both_charts_show_both_curves_at_the_width_asked_for(width: int) -> None:
    picture = draw_charts(width, texture(0.2), texture(0.5))
    assert picture.shape == (300, width, 3)
    assert picture.dtype == np.uint8
    assert all(number > 100 for colour in (ORANGE, BLUE) for number in count(picture, colour))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [math.nan, 0.0])
def test_a_spectrum_without_power_is_missing_and_the_other_is_there(value: float) -> None:
    flat = measure_texture([np.full((8, 16, 16), value, np.float32)])
    shown, missing = draw_charts(800, texture(0.2), texture(0.5)), draw_charts(800, flat, texture(0.5))
    in_legend = 50
    assert count(missing, ORANGE)[1] < in_legend
    assert all(number > in_legend for number in (*count(shown, ORANGE), *count(missing, BLUE)))
    draw_charts(800, flat, flat)
