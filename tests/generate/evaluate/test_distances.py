"""Distances of two sets of feature vectors: unbiased or with a known bias, and intervals that cover."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from vesuvius.generate.evaluate.distances import KernelDistance, frechet_distances, whitened

Floats = NDArray[np.float64]


def in_threes(rng: np.random.Generator, groups: int, shift: float = 0.0) -> Floats:
    """Three nearly equal rows a group, as overlapping patches have."""
    rows = rng.standard_normal((groups, 4)).repeat(3, axis=0) + 0.1 * rng.standard_normal((3 * groups, 4))
    return rows + shift


def kernel_distance(one: Floats, other: Floats) -> KernelDistance:
    group, others = np.arange(len(one)) // 3, np.arange(len(other)) // 3
    dependent = group[:, None] == group, others[:, None] == others, np.zeros((len(one), len(other)), bool)
    return KernelDistance(one, other, dependent)


@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_the_kernel_distance_is_unbiased_and_its_interval_covers_it_although_rows_come_in_threes(shift: float) -> None:
    """Pairs of a group would bias the mean; single rows, drawn again, would make the interval too narrow."""
    rng = np.random.default_rng(0)
    many = [rng.standard_normal((800, 4)) * 1.01**0.5 + k * shift for k in range(2)]
    truth = float(kernel_distance(*many)(np.ones((1, 800)))[0]) if shift else 0.0
    found, covered = [], 0
    for seed in range(50):
        rng = np.random.default_rng((1, seed))
        one, other = in_threes(rng, 30), in_threes(rng, 40, shift)
        distance = kernel_distance(one, other)
        found.append(distance(np.ones((1, len(one))))[0])
        low, high = distance.interval(np.arange(len(one)) // 3, np.arange(len(other)) // 3)
        covered += low <= truth <= high
    assert np.mean(found) == pytest.approx(truth, abs=3.3 * np.std(found) / 50**0.5 + 0.1 * truth)
    assert covered >= 43, "47.5 on average; fewer of 50 have a chance of 0.4 %"


def test_the_frechet_distance_of_many_rows_is_that_of_their_normal_distributions() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.standard_normal((20_000, 3)), rng.standard_normal((20_000, 3)) * (1, 2, 3) + (0.5, 0, 0)
    sides = np.ones((1, 20_000), bool)
    assert frechet_distances(one, sides, other)[0] == pytest.approx(0.25 + 1 + 4, rel=0.05)
    assert frechet_distances(one, sides, one)[0] == pytest.approx(0, abs=1e-6)
    assert np.isnan(frechet_distances(one[:5], sides[:, :5], other)).all(), "too few for a covariance"


def test_components_have_variance_one_and_features_that_never_vary_in_real_patches_count_nothing() -> None:
    rng = np.random.default_rng(0)
    real = rng.standard_normal((200, 5)) @ rng.standard_normal((5, 5))
    real = np.column_stack([real, np.full(200, -3.0), real[:, 0]])
    (found,) = whitened([real], real)
    assert found.shape == (200, 5)
    np.testing.assert_allclose(found.T @ found / 200, np.eye(5), atol=0.08)  # clipped
    moved = real.copy()
    moved[:, 5] = -2
    np.testing.assert_allclose(whitened([moved], real)[0], found, atol=1e-3)
    constant = np.ones((40, 3))
    assert whitened([constant], constant)[0].shape == (40, 0)
    nothing = np.zeros((40, 0))
    assert np.isnan(frechet_distances(nothing, np.ones((1, 40), bool), nothing)).all()


def test_the_kernel_distance_is_unknown_without_components_and_its_interval_with_few_groups() -> None:
    """Equal weights of one group would give an interval of width 0, and no components a distance of 0."""
    rows = np.random.default_rng(0).standard_normal((60, 4))
    distance, groups = kernel_distance(rows[:30], rows[30:]), np.arange(30) // 3
    assert np.isfinite(distance.interval(groups, groups)).all()
    assert np.isnan(distance.interval(groups, groups // 2)).all()
    nothing = kernel_distance(rows[:30, :0], rows[30:, :0])
    assert np.isnan(nothing(np.ones((1, 30)))).all()
    assert np.isnan(nothing.interval(groups, groups)).all()
