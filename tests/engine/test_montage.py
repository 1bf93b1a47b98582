"""Grids of pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vesuvius.engine.montage import GAP, HEADING, Cell, magnification, orthogonal_slices, write_grid


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
    assert picture.sum() == across_z.sum() + across_y.sum() + across_x.sum(), "nothing elsewhere"


def test_the_slice_across_x_lies_beside_its_rows() -> None:
    patch = np.full((2, 3, 4), -1.0)
    patch[1, 2, 2] = 1.0
    picture = orthogonal_slices(patch, 1)
    assert np.argwhere(picture).tolist() == [[2, 2], [2, 4 + GAP + 1]]


@pytest.mark.parametrize(
    ("shape", "factor"), [((8, 16, 16), 6), ((72, 136, 136), 1), ((96, 96, 96), 1), ((4, 95, 4), 2)]
)
def test_small_patches_are_enlarged(shape: tuple[int, int, int], factor: int) -> None:
    assert magnification(shape) == factor


@pytest.mark.parametrize("count", [1, 7, 64])
def test_a_grid_shows_every_cell_once_and_is_no_ribbon(tmp_path: Path, count: int) -> None:
    cells = [Cell(str(number), np.full((100, 120), 100 + number, np.uint8)) for number in range(count)]
    write_grid(tmp_path / "grid.png", cells, "t")
    picture = np.asarray(Image.open(tmp_path / "grid.png"))
    found = [int((picture == 100 + number).sum()) for number in range(count)]
    # a few pixels of the letters may be as grey as a cell
    assert all(abs(n - 100 * 120) < 200 for n in found), found
    height, width = picture.shape
    assert 0.3 < (height - HEADING) / width < 2
