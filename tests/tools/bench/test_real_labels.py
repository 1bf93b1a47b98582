"""Figures of the study of pairs: bits of splits and merges counted by hand, and fused bodies by their gap."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import ndimage

from tests.conftest import REPOSITORY, write_array


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(REPOSITORY / "tools" / "bench"), *sys.path])
    import real_labels

    return real_labels


def test_splits_and_merges_are_bits_and_the_background_counts_for_neither(bench: Any) -> None:
    truth = np.repeat([1, 2, 3, 0], 8).reshape(1, 4, 8)
    halved, joined = truth.copy(), truth.copy()
    halved[0, 0, 4:] = 9  # a third of the voxels: one more bit
    joined[truth == 2] = 1  # two thirds of the voxels: one more bit
    other = np.where(truth == 0, 7, truth)
    assert bench.fibsem.variation_of_information(truth, other) == pytest.approx((0, 0), abs=1e-12)
    assert bench.fibsem.variation_of_information(truth, halved) == pytest.approx((1 / 3, 0), abs=1e-12)
    assert bench.fibsem.variation_of_information(truth, joined) == pytest.approx((0, 2 / 3), abs=1e-12)
    assert bench.fibsem.adapted_rand_error(truth, other) == pytest.approx(0, abs=1e-12)
    assert bench.fibsem.adapted_rand_error(truth, joined) == pytest.approx(1 - 2 * 3 / (3 + 5))


def test_fused_bodies_are_counted_at_the_gap_of_their_nearest_approach(bench: Any) -> None:
    truth = np.zeros((4, 4, 20), np.int32)
    for body, x in ((1, 0), (2, 3), (3, 8), (4, 18)):  # gaps of 0, 2 and 7 voxels
        truth[..., x : x + 3] = body
    found = truth.copy()
    found[truth == 3] = 2
    found[0, 0, truth[0, 0] == 1] = 2  # few voxels: not fused
    assert bench.fibsem.fusions(truth, found, 3) == [(0, 1), (0, 0), (1, 1), (0, 0)]
    truth[0, 0, 7] = 5  # a speck, all of it boundary, does not count
    walls = bench.classes_of(truth) > 0
    assert bench.fibsem.fusions(truth, ndimage.label(~walls)[0], 3) == [(0, 1), (0, 0), (0, 1), (0, 0)], "true walls"
    assert bench.fibsem.fusions(truth, np.zeros_like(truth), 3) == [(0, 1), (0, 0), (0, 1), (0, 0)], "nothing is found"


def test_the_parts_of_the_volume_are_a_patch_apart(bench: Any) -> None:
    train, validation, test = bench.parts(250).values()
    assert (train.start, test.stop) == (0, 250)
    assert validation.start - train.stop == test.start - validation.stop == bench.PATCH


def test_what_the_study_cannot_use_is_refused_with_its_shape(bench: Any, tmp_path: Path) -> None:
    scan = write_array(tmp_path / "scan.zarr", np.ones((80, 40, 40), np.uint8))
    arguments = argparse.Namespace(scan=scan, split="z")
    for name, ids in (("cut", np.ones((80, 40, 39), np.uint8)), ("large", np.full((80, 40, 40), 2**32 + 1))):
        arguments.bodies = write_array(tmp_path / f"{name}.zarr", ids)
        with pytest.raises(SystemExit, match=r"are not ids below 2\^31 in the voxels of a scan: "):
            bench.Study(arguments, tmp_path)
    with pytest.raises(SystemExit, match=r"boxes of 32\^3 voxels were found in"):
        bench.choose_boxes(np.ones((80, 40, 31), np.bool_), 32, 1)
