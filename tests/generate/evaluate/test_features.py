"""Fixed features detect what a small CNN may miss; the closed-form classifier finds no difference in equal sets."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from vesuvius.generate.evaluate.classifiers import area_under_curve, kernel_scores, patch_features


def of_patches(patches: NDArray[np.float32]) -> NDArray[np.float64]:
    return np.stack([patch_features(patch) for patch in patches])


def auc(real: NDArray[np.float64], generated: NDArray[np.float64]) -> float:
    """Half of each to train on, half to test on."""
    return area_under_curve(*kernel_scores((real[::2], generated[::2]), (real[1::2], generated[1::2])))


def sheets(count: int, rng: np.random.Generator, crossed: bool = False) -> NDArray[np.float32]:
    """Waves of one direction each; crossed, the sum of two of half the power."""
    grid = np.stack(np.meshgrid(*(np.arange(size) for size in (8, 16, 16)), indexing="ij"))
    found = np.zeros((count, 8, 16, 16))
    for _ in range(2 if crossed else 1):
        normal = rng.standard_normal((count, 3))
        normal /= np.linalg.norm(normal, axis=1, keepdims=True)
        found += np.sin(np.tensordot(normal, grid, 1) * 0.7 + 2 * np.pi * rng.random((count, 1, 1, 1)))
    return (found / np.sqrt(2 if crossed else 1) + 0.1 * rng.standard_normal(found.shape)).astype(np.float32)


def test_equal_sets_of_different_sizes_have_an_auc_of_about_a_half() -> None:
    """A classifier that was tested on what it was solved for, or a kind that counted more, would not."""
    found = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        found.append(auc(rng.standard_normal((60, 12)), rng.standard_normal((30, 12))))
    assert np.mean(found) == pytest.approx(0.5, abs=3.3 * np.std(found) / np.sqrt(len(found)))


def test_a_difference_in_variance_alone_is_detected() -> None:
    """A linear classifier could not."""
    rng = np.random.default_rng(0)
    assert auc(rng.standard_normal((80, 4)), 2 * rng.standard_normal((80, 4))) > 0.75


def test_crossing_sheets_and_noisy_air_are_detected() -> None:
    rng = np.random.default_rng(0)
    real = sheets(64, rng)
    assert auc(of_patches(real), of_patches(sheets(64, rng, crossed=True))) > 0.8
    half_air = [np.where(np.arange(16) < 8, -2.0, sheets(64, rng)).astype(np.float32) for _ in range(2)]
    noisy = half_air[1] + 0.01 * rng.standard_normal(real.shape) * (half_air[1] == -2)
    assert auc(*map(of_patches, half_air)) == pytest.approx(0.5, abs=0.2)
    assert auc(of_patches(half_air[0]), of_patches(noisy.astype(np.float32))) > 0.8


def test_all_scales_of_large_patches_are_seen_and_flat_ones_have_finite_features() -> None:
    flat = np.full((2, 20, 33, 40), -2, np.float32)
    assert np.isfinite(of_patches(flat)).all()
    assert len(patch_features(flat[0])) == 9 + 6 * 4  # of 20, 10, 5 and 2 planes
