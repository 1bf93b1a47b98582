"""Quantiles against numpy's."""

from __future__ import annotations

import numpy as np
import pytest

from vesuvius.monitor.quantile import quantile


def test_quantiles_are_those_of_numpy() -> None:
    values = np.random.default_rng(0).random(37).tolist()
    for share in (0.0, 0.05, 0.5, 0.95, 1.0):
        assert quantile(values, share) == pytest.approx(np.quantile(values, share), rel=1e-12)
    assert quantile([3.0], 0.95) == 3.0
