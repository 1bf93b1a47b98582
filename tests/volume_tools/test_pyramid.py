"""Coarser levels: the mean of 2x2x2 voxels, in every dtype and at odd ends."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from vesuvius.volume_tools.pyramid import halve, level_shapes


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("shape", [(4, 6, 8), (5, 3, 7), (1, 2, 1)])
def test_each_voxel_is_the_mean_of_those_that_exist(dtype: str, shape: tuple[int, int, int]) -> None:
    most = {"uint8": 256, "uint16": 65536, "float32": 1000}[dtype]
    voxels = np.random.default_rng(0).integers(0, most, shape).astype(dtype)
    voxels[:1] = most - 1  # as large as can be: a sum that overflows shows
    halved = halve(voxels)
    assert halved.dtype == voxels.dtype
    assert [halved.shape] == level_shapes(shape, 2)[1:]
    for z, y, x in itertools.product(*map(range, halved.shape)):
        mean = voxels[2 * z : 2 * z + 2, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].astype(np.float64).mean()
        # float32: eight whole numbers below 1000 add up exactly, so the one division is all that rounds.
        assert halved[z, y, x] == (np.float32(mean) if dtype == "float32" else np.floor(mean + 0.5))


def test_shapes_are_halved_and_rounded_up() -> None:
    assert level_shapes((5, 8, 1), 3) == [(5, 8, 1), (3, 4, 1), (2, 2, 1)]
