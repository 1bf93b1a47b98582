"""The measure of seams finds tiles that do not fit together, and only these."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vesuvius.generate.volume.tiling import Tiling
from vesuvius.volumes.box import slices


@pytest.fixture
def seams(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[3] / "tools" / "bench"), *sys.path])
    from volume_sampling import seams

    return seams


@pytest.mark.parametrize("overlap", [0.0, 0.25])
def test_seams_are_found_along_the_axis_that_has_them(seams: Any, overlap: float) -> None:
    """A brightness of its own for every other row of tiles, blended as estimates are."""
    noise = np.random.default_rng(0).normal(size=(2, 44, 44, 44))
    tiling = Tiling((44, 44, 44), (16, 16, 16), overlap)
    for axis in (1, 2, 3):  # a mean of three voxels along each
        noise = sum(np.roll(noise, shift, axis) for shift in (-1, 0, 1)) / np.sqrt(3)
    real, like = noise[0], noise[0] + noise[1] / 20
    assert all(abs(ratio - 1) < 0.05 for ratio in seams(like, real, tiling))
    for axis in range(3):
        planted = like.copy()
        for tile in range(tiling.tiles):
            box = tiling.tile_box(tile)
            odd = np.unravel_index(tile, tiling.tile_grid)[axis] % 2
            planted[slices(box)] += odd * tiling.weight(tile, box)
        found = seams(planted, real, tiling)
        assert found[axis] > 1.1
        assert all(abs(ratio - 1) < 0.05 for other, ratio in enumerate(found) if other != axis), found
