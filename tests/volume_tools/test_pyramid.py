"""Coarser levels: the mean of 2x2x2 voxels, or their most frequent label, in every dtype and at odd ends."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from vesuvius.volume_tools.pyramid import Pyramid, downsample_mean, downsample_mode

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


@pytest.mark.parametrize("dtype", [*INTEGERS, "bool", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(4, 6, 8), (5, 3, 7), (1, 2, 1)])
def test_each_coarse_voxel_is_the_mean_of_existing_voxels(dtype: str, shape: tuple[int, int, int]) -> None:
    rng = np.random.default_rng(0)
    ends = (
        (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
        if dtype in INTEGERS
        else (0, 1 if dtype == "bool" else 999)
    )
    voxels = rng.integers(*ends, shape, dtype if dtype in INTEGERS else np.int64, endpoint=True).astype(dtype)
    voxels[:1] = ends[1]  # extreme values, to reveal an overflow
    voxels[-1:, :1] = ends[0]
    halved = downsample_mean(voxels)
    assert halved.dtype == voxels.dtype
    assert [halved.shape] == Pyramid(shape, (1, 1, 1), 2, 1).shapes[1:]
    for z, y, x in itertools.product(*map(range, halved.shape)):
        block = [Fraction(v.item()) for v in voxels[2 * z : 2 * z + 2, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].flat]
        mean = sum(block) / len(block)
        if dtype.startswith("float"):
            # Eight integers below 1000 add up exactly, so only the division and the cast round.
            assert halved[z, y, x] == np.float64(float(mean)).astype(dtype)
        else:
            assert int(halved[z, y, x]) == math.floor(mean + Fraction(1, 2))


def test_each_coarse_label_is_the_most_frequent_and_ties_go_to_the_largest() -> None:
    labels = np.random.default_rng(0).choice(np.array([0, 3, 60_000], np.uint16), (5, 6, 7))
    halved = downsample_mode(labels)
    assert (halved.dtype, halved.shape) == (np.uint16, (3, 3, 4))
    for z, y, x in np.ndindex(halved.shape):
        block = labels[2 * z : 2 * z + 2, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].ravel().tolist()
        assert halved[z, y, x] == max(block, key=lambda label: (block.count(label), label))


def test_shapes_are_halved_and_rounded_up() -> None:
    assert Pyramid((5, 8, 1), (1, 1, 1), 3, 1).shapes == [(5, 8, 1), (3, 4, 1), (2, 2, 1)]
