"""Classifiers tell what differs, whatever it is, and do not tell what does not."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from vesuvius.generate.evaluate.classifiers import (
    Patches,
    area_under_curve,
    kernel_scores,
    patch_features,
    two_sample_scores,
)


def two_sample_auc(real: tuple[Patches, Patches], generated: tuple[Patches, Patches], *efforts: int) -> list[float]:
    """Trained on the first of each pair, tested on the second after each effort."""
    scores = two_sample_scores((real[0], generated[0]), (real[1], generated[1]), efforts=efforts)
    return [area_under_curve(*each) for each in zip(*scores, strict=True)]


def test_the_auc_is_the_share_of_pairs_in_order() -> None:
    assert area_under_curve(np.array([3.0, 2.0]), np.array([1.0, 0.0])) == 1
    assert area_under_curve(np.array([0.0, 1.0]), np.array([2.0, 3.0])) == 0
    assert area_under_curve(np.array([1.0, 3.0]), np.array([2.0])) == 0.5
    assert area_under_curve(np.ones(5), np.ones(7)) == 0.5


def textures(count: int, seed: int, *, phases: bool) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Stripes of a random phase, or noise of just their power spectrum: equal to second order in every way."""
    rng = np.random.default_rng(seed)
    x = np.arange(16)
    wave = np.sin(2 * np.pi * (x / 8 + rng.random((count, 1, 1, 1)))) * np.ones((1, 8, 16, 1))
    if not phases:
        return (wave + 0.1 * rng.standard_normal(wave.shape)).astype(np.float32)
    sines = math.sqrt(0.5) * (
        rng.standard_normal((2, count, 1, 1, 1))
        * np.stack([np.sin(np.pi * x / 4), np.cos(np.pi * x / 4)])[:, None, None, None]
    )
    mixed = sines.sum(0) * np.ones((1, 8, 16, 1))
    return (mixed + 0.1 * rng.standard_normal(mixed.shape)).astype(np.float32)


def test_a_difference_beyond_mean_variance_and_spectrum_is_detected() -> None:
    real = textures(64, 0, phases=False), textures(48, 1, phases=False)
    generated = textures(64, 2, phases=True), textures(48, 3, phases=True)
    assert two_sample_auc(real, generated, 80)[0] > 0.8


def test_scores_are_reproducible_without_the_global_generator_whatever_efforts_follow() -> None:
    """One after the other, and in two threads at a time."""
    pair, other = (textures(8, 0, phases=False),) * 2, (textures(8, 1, phases=True),) * 2
    state = torch.random.get_rng_state()
    alone, *both = (
        two_sample_auc(pair, other, 3),
        *ThreadPoolExecutor(2).map(lambda _: two_sample_auc(pair, other, 3, 5), range(2)),
    )
    assert both[0] == both[1]
    assert both[0][:1] == alone
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.long
def test_large_patches_are_seen_in_detail_and_in_full() -> None:
    """Patches of 32^3 are seen 20^3 voxels at a time, and in a lower resolution."""
    rng = np.random.default_rng(0)

    def noise(count: int) -> Patches:
        return rng.standard_normal((count, 32, 32, 32)).astype(np.float32)

    def smooth(count: int) -> Patches:
        white = noise(count)
        return ((white + np.roll(white, 1, 3)) / math.sqrt(2)).astype(np.float32)

    def split(count: int) -> Patches:
        """One part is brighter than the other, at a random place: within 20^3 voxels it seldom shows."""
        ends = rng.integers(12, 20, count)
        step = (np.arange(32) < ends[:, None]).astype(np.float32)[:, :, None, None]
        return noise(count) + 0.3 * (step - step.mean(1, keepdims=True))

    for other in (smooth, split):
        assert two_sample_auc((noise(16), noise(12)), (other(16), other(12)), 40)[0] > 0.8, other.__name__


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
