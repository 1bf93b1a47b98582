"""The controls of the label benchmark are fair: warped copies keep the noise, the upper bound sees no air, no test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr


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


def test_patches_with_labels_everywhere_hold_no_air_and_nothing_of_the_test(bench: Any, tmp_path: Path) -> None:
    bench.make_volumes(tmp_path)
    scan, mask = (zarr.open_array(tmp_path / name, mode="r")[:] for name in ("scan.zarr", "not_tested.zarr"))
    labelled, tested = np.zeros(scan.shape, bool), np.zeros(scan.shape, bool)
    boxes = bench.choose_boxes(scan)
    for number, box in enumerate(boxes):
        (labelled if number < max(bench.COUNTS) else tested)[box] = True
    assert np.array_equal(mask == 0, tested | (scan == 0))
    assert not (labelled & tested).any()
    assert len(boxes) == max(bench.COUNTS) + bench.TESTS
    (volume,) = bench.entries(tmp_path / "n4", "all")
    assert (volume.mask.path, volume.min_foreground) == (str(tmp_path / "not_tested.zarr"), 0.99)
