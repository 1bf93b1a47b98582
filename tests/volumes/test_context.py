"""Windows around patches in a coarser array, compared with numpy's padding and with exhaustive search."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import textured
from vesuvius.config import ArrayConfig, ConditionConfig, Triple
from vesuvius.errors import DataError
from vesuvius.loader.device import apply_symmetries
from vesuvius.plan.plan import Augmentation
from vesuvius.volumes.alignment import Alignment
from vesuvius.volumes.box import Box, box_at, intersects, shape_of, slices
from vesuvius.volumes.context import ContextAlignment, with_context
from vesuvius.volumes.errors import UnreadableChunkError

VOLUME: Triple = (24, 32, 40)


@st.composite
def contexts(draw: st.DrawFn) -> ContextAlignment:
    factor, (z, side) = draw(st.sampled_from([2, 3, 4])), draw(st.tuples(st.integers(1, 6), st.integers(1, 6)))
    offsets: Any = tuple(Fraction(draw(st.integers(-7, 0))) for _ in range(3))
    sizes: Any = tuple(-((offset - size) // factor) for size, offset in zip(VOLUME, offsets, strict=True))
    return ContextAlignment(VOLUME, sizes, (Fraction(factor),) * 3, offsets, patch_zyx=(z, side, side))


def starts(context: ContextAlignment) -> st.SearchStrategy[Triple]:
    return st.tuples(*(st.integers(0, size - patch) for size, patch in zip(VOLUME, context.patch_zyx, strict=True)))


def array_of(context: ContextAlignment) -> np.ndarray[Any, Any]:
    return textured(context.array_zyx)


@given(data=st.data(), context=contexts())
def test_a_window_lies_around_its_patch_and_repeats_the_last_voxel_beyond_the_array(
    data: st.DataObject, context: ContextAlignment
) -> None:
    start, array = data.draw(starts(context)), array_of(context)
    window = context.window(start)
    assert shape_of(window) == context.patch_zyx
    for axis, (factor, offset) in enumerate(zip(context.factors, context.offsets, strict=True)):
        centers = offset + factor * Fraction(window[0][axis] + window[1][axis], 2), start[axis]
        assert abs(centers[0] - centers[1] - Fraction(context.patch_zyx[axis], 2)) <= factor / 2
    wide = np.pad(array, 40, mode="edge")
    voxels = context.read(box_at(start, context.patch_zyx), lambda box, out: array[slices(box)])
    cover = context.cover(box_at(start, context.patch_zyx))
    np.testing.assert_array_equal(voxels, wide[slices(cover, (-40,) * 3)])
    assert voxels.size <= context.cover_voxels_max(context.patch_zyx)


@given(data=st.data(), context=contexts())
def test_rows_find_the_repeated_condition_in_the_window_in_every_augmentation(
    data: st.DataObject, context: ContextAlignment
) -> None:
    start, array = data.draw(starts(context)), array_of(context)
    flips, turns = data.draw(st.tuples(*[st.booleans()] * 3)), data.draw(st.integers(0, 3))
    box = box_at(start, context.patch_zyx)
    plain = Alignment(VOLUME, context.array_zyx, context.factors, context.offsets)
    voxels = context.read_array(context.window(start), lambda box, out: array[slices(box)])
    patches = (plain.read(box, lambda box, out: array[slices(box)]), voxels)
    repeated, window = (
        apply_symmetries(torch.from_numpy(each)[None].contiguous(), [Augmentation(flips, turns)])[0].numpy()
        for each in patches
    )
    np.testing.assert_array_equal(window[np.ix_(*context.rows(start, flips, turns))], repeated)


@given(data=st.data(), context=contexts())
def test_damage_covers_exactly_the_boxes_whose_windows_touch_it(data: st.DataObject, context: ContextAlignment) -> None:
    """Of every box: one that is read again would differ between readers, one that is not would be lost."""
    chunk: Triple = tuple(data.draw(st.integers(0, size - 1)) for size in context.array_zyx)  # type: ignore[assignment]
    broken = box_at(chunk, (1, 1, 1))

    def read(box: Box, out: Any) -> Any:
        if intersects(box, broken):
            raise UnreadableChunkError("array", box, chunk, broken, "torn")
        return array_of(context)[slices(box)]

    box, damaged = box_at(data.draw(starts(context)), context.patch_zyx), context.volume_box(broken)
    if not intersects(damaged, box):
        context.read(box, read)
        return
    with pytest.raises(UnreadableChunkError) as caught:
        context.read(box, read)
    assert caught.value.box == damaged


def test_a_context_of_another_factor_is_refused_with_both() -> None:
    found = Alignment((8, 8, 8), (4, 4, 4), (Fraction(2),) * 3)
    spec = ConditionConfig(path="coarse.zarr", context=4)
    with pytest.raises(DataError, match=r"context 4 of the condition .*coarse.zarr does not fit.* is 2x2x2 voxels"):
        with_context(found, spec, (2, 2, 2))
    assert with_context(found, ArrayConfig(path="coarse.zarr"), (2, 2, 2)) is found
