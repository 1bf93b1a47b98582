"""Pictures of patches: orthogonal slices side by side, in rows and grids, as PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

UInt8 = NDArray[np.uint8]

GAP, HEADING = 4, 16
_SMALLEST_SIDE = 96
_LETTER = 8  # width of a letter, rounded up
_WIDTH_TO_HEIGHT = 1.5  # of a grid, about


def magnification(shape_zyx: Sequence[int]) -> int:
    """By which whole factor a patch is enlarged for its slices to be seen.  Pure."""
    return max(1, -(-_SMALLEST_SIDE // max(shape_zyx)))


def orthogonal_slices(patch: NDArray[Any], scale: int) -> UInt8:
    """The middle slices of a patch [Z, Y, X] as three faces of a box, each pixel `scale` wide.  Pure.

    Across z top left, across y below it (both with x to the right), across x on its right (z to the right).  -1 is
    black and +1 white.  A gap lies right of and below each slice.
    """
    z, y, x = (size // 2 for size in patch.shape)
    depth, height, width = (size * scale + GAP for size in patch.shape)
    picture = np.zeros((height + depth, width + depth), np.uint8)
    for top, left, face in ((0, 0, patch[z]), (height, 0, patch[:, y]), (0, width, patch[:, :, x].T)):
        grey = np.clip((face + 1) * 127.5, 0, 255).astype(np.uint8).repeat(scale, 0).repeat(scale, 1)
        picture[top : top + grey.shape[0], left : left + grey.shape[1]] = grey
    return picture


@dataclass(frozen=True)
class Cell:
    """One picture of a grid and the line above it."""

    caption: str
    picture: UInt8


def write_grid(path: Path, cells: Sequence[Cell], title: str) -> None:
    """Write a PNG of cells of one size, in rows, below a title.  Raises OSError."""
    height, width = cells[0].picture.shape
    height, width = height + HEADING, max(width, _LETTER * max(len(cell.caption) for cell in cells)) + 3 * GAP
    columns = min(len(cells), math.ceil(math.sqrt(_WIDTH_TO_HEIGHT * len(cells) * height / width)))
    rows = -(-len(cells) // columns)
    image = Image.new("L", (max(columns * width, _LETTER * len(title)), HEADING + rows * height))
    draw = ImageDraw.Draw(image)
    draw.text((GAP, 2), title, fill=255)
    for number, cell in enumerate(cells):
        left, top = number % columns * width, HEADING + number // columns * height
        draw.text((left + GAP, top + 2), cell.caption, fill=255)
        image.paste(Image.fromarray(cell.picture), (left, top + HEADING))
    image.save(path, format="PNG")
