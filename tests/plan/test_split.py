"""The split: what is held out, and that no training patch comes near it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vesuvius.config import ValidationConfig
from vesuvius.errors import DataError
from vesuvius.plan.split import split_volume

sizes = st.tuples(*[st.integers(1, 40)] * 3)


@given(shape=st.tuples(*[st.integers(1, 200)] * 3), patch=sizes, fraction=st.floats(0, 0.6), guard=st.floats(0, 2))
def test_training_validation_and_guard_never_overlap(
    shape: tuple[int, int, int], patch: tuple[int, int, int], fraction: float, guard: float
) -> None:
    config = ValidationConfig(fraction=fraction, guard=guard)
    try:
        split = split_volume("v", shape, patch, config)
    except DataError:
        return
    train = np.array(split.train)
    assert (train[1] - train[0] >= patch).all(), "a training patch fits"
    if fraction == 0:
        assert split.validation is None
        return
    validation = np.array(split.validation)
    assert (validation[1] - validation[0] >= patch).all(), "a validation patch fits"
    gap = validation[0] - train[1]
    axis = int(np.argmax(gap))
    assert gap[axis] >= guard * patch[axis]
    assert validation[1][axis] - validation[0][axis] >= fraction * shape[axis]
    assert (validation[1] == shape).all()


def test_the_slab_lies_across_the_axis_that_is_longest_in_patches() -> None:
    split = split_volume("v", (256, 512, 512), (72, 136, 136), ValidationConfig(fraction=0.05, guard=1.0))
    assert split.validation == ((0, 376, 0), (256, 512, 512)), "one patch, which is more than 5 % of 512"
    assert split.train == ((0, 0, 0), (256, 240, 512)), "and a gap of one patch before it"


@pytest.mark.parametrize(
    ("shape", "patch", "message"),
    [
        ((96, 512, 512), (128, 128, 128), r"patch_size \(128, 128, 128\) does not fit into \(96, 512"),
        ((72, 200, 200), (72, 136, 136), r"along y; got 136 \+ 136 \+ 136 voxels in 200 of v; reduce"),
    ],
)
def test_a_volume_that_is_too_small_is_refused_with_the_numbers(
    shape: tuple[int, int, int], patch: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        split_volume("v", shape, patch, ValidationConfig())
