"""A classifier tells what differs, whatever it is, and does not tell what does not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vesuvius.generate.evaluate.classifiers import Patches, area_under_curve, two_sample_scores


def two_sample_auc(real: tuple[Patches, Patches], generated: tuple[Patches, Patches], **options: int) -> float:
    """Trained on the first of each pair, tested on the second."""
    scores = two_sample_scores((real[0], generated[0]), (real[1], generated[1]), **options)
    return area_under_curve(*scores)


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
    assert two_sample_auc(real, generated, steps=80) > 0.8


def test_scores_are_reproducible_without_the_global_generator() -> None:
    pair, other = (textures(8, 0, phases=False),) * 2, (textures(8, 1, phases=True),) * 2
    state = torch.random.get_rng_state()
    assert two_sample_auc(pair, other, steps=3) == two_sample_auc(pair, other, steps=3)
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
        assert two_sample_auc((noise(16), noise(12)), (other(16), other(12)), steps=40) > 0.8, other.__name__
