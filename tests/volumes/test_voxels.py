"""Percentiles of stored voxels, which numpy would compute in the voxels' own dtype."""

from __future__ import annotations

import numpy as np
import pytest

from vesuvius.volumes.voxels import percentiles

DTYPES = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_percentile_between_the_ends_of_the_dtype_does_not_overflow(dtype: str) -> None:
    limits = np.finfo(dtype) if dtype.startswith("float") else np.iinfo(dtype)
    least, most = (0.0, 1000.0) if dtype.startswith("float") else (limits.min, limits.max)
    (found,) = percentiles(np.array([least, most], dtype), [25])
    assert found == pytest.approx(0.75 * int(least) + 0.25 * int(most), rel=1e-6)


def test_float16_is_not_rounded_to_float16() -> None:
    (found,) = percentiles(np.array([1024, 1025], np.float16), [30])
    assert found == pytest.approx(1024.3, abs=1e-4)  # float32 rounding; float16 has steps of 1 there


def test_bool_has_percentiles() -> None:
    assert percentiles(np.array([False, True, True]), [0, 50, 100]) == (0.0, 1.0, 1.0)
