"""The controls of the label benchmark are fair: warped copies keep the noise, and the upper bound sees no air."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[3] / "tools" / "bench"), *sys.path])
    import synthetic_labels

    return synthetic_labels


def test_warped_copies_keep_the_noise_of_the_scan(bench: Any) -> None:
    """Interpolation alone removes most of it: a standard deviation of 0.55 of the original."""
    rng = np.random.default_rng(0)
    spread = []
    for _ in range(4):
        scan = np.rint(100 + bench.NOISE * rng.standard_normal(bench.BOX)).astype(np.uint8)
        labels = (scan > 100).astype(np.uint8)
        warped, moved = bench.warp([scan, labels], rng)
        spread.append(warped.std() / scan.std())
        assert set(np.unique(moved)) == {0, 1}, "labels get no noise"
    assert np.mean(spread) == pytest.approx(1, abs=0.03)


def test_patches_with_labels_everywhere_hold_no_air(bench: Any, tmp_path: Path) -> None:
    (volume,) = bench.entries(tmp_path / "n4", "all")
    assert (volume.mask.path, volume.min_foreground) == (str(tmp_path / "scan.zarr"), 0.99)
