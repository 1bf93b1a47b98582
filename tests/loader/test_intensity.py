"""Model values of every stored dtype, against exact fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.loader.test_device import on_each_device
from vesuvius.loader.intensity import intensity_scales, normalized
from vesuvius.stream.start.prepare import IntensityRange

# Low and high: all of a dtype, and little of it far from 0, where a rounding before low is subtracted loses the range.
RANGES: list[tuple[str, float, float]] = [
    ("uint8", 0.5, 254.25),
    ("int8", -128, 127),
    ("int16", 32000, 32010),
    ("uint16", 65000, 65010),
    ("uint16", 65000.3, 65010.3),  # float32 rounds low by 0.003
    ("int32", -(2.0**31), 2.0**31 - 1),
    ("int32", -(2**30) - 1000.75, -(2**30) + 0.25),
    ("uint32", 2**32 - 2000, 2**32 - 1000),
    ("int64", -(2.0**63), 2.0**63),
    ("int64", 2**52, 2**52 + 1000),
    ("uint64", 0, 2.0**64),
    ("float16", -2.5, 1000.0),
    ("float32", -1e-3, 2e-3),
    ("float32", 2.0**30, 2.0**30 + 1024),
    ("float64", 1e12, 1e12 + 0.125),
]


def voxels_in(dtype: str, low: float, high: float) -> NDArray[np.generic]:
    """64 values from low to high and a little beyond on either side, as far as the dtype goes."""
    steps = [Fraction(low) + (Fraction(high) - Fraction(low)) * Fraction(n, 59) for n in range(-2, 62)]
    if dtype.startswith("float"):
        return np.array([float(value) for value in steps], dtype)
    ends = (0, 1) if dtype == "bool" else (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    return np.array([min(max(round(value), ends[0]), ends[1]) for value in steps], dtype)


@on_each_device
@pytest.mark.parametrize(("dtype", "low", "high"), RANGES)
def test_model_values_are_exact_up_to_float32(dtype: str, low: float, high: float, device: torch.device) -> None:
    stored = voxels_in(dtype, low, high)
    assert len(set(stored.tolist())) >= min(64, high - low) / 4 or dtype.startswith("float"), "the range is covered"
    expected = [(Fraction(v.item()) - Fraction(low)) * 2 / (Fraction(high) - Fraction(low)) - 1 for v in stored]
    raw = torch.from_numpy(stored.reshape(1, 1, 4, 4, 4)).to(device)
    found = normalized(raw, intensity_scales([IntensityRange(low, high)]))
    assert found.dtype == torch.float32
    assert found.shape == raw.shape
    # Values up to 2 (before -1), rounded in 4 operations by up to 2^-24 of that each.
    np.testing.assert_allclose(found.cpu().numpy().ravel(), [float(v) for v in expected], rtol=0, atol=8 * 2.0**-24)


def test_normalizing_does_not_change_its_input() -> None:
    for dtype in ("uint8", "float32", "float64", "int64"):
        raw = torch.arange(8).to(torch.from_numpy(np.empty(0, dtype)).dtype).view(1, 1, 2, 2, 2)
        before = raw.clone()
        normalized(raw, intensity_scales([IntensityRange(3, 5)]))
        assert torch.equal(raw, before)
