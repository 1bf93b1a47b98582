"""The laws of an evaluation: what is alike comes out at the floor, and each defect moves the figure that is for it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.generate.evaluate.scrolls import Voxels, patch_set, patches, scroll, search_in
from vesuvius.generate.evaluate.diversity import ms_ssim, scales_of
from vesuvius.generate.evaluate.figures import Figure, Judgement, _drawn, _folds, estimate, judge
from vesuvius.generate.evaluate.page import plain, verdict
from vesuvius.generate.evaluate.patches import PatchSet

COUNT = 32
SHAPE = (40, 72, 72)
TRAINED, UNSEEN, THIRD = (scroll(seed, SHAPE) for seed in (0, 1, 5))
with pytest.MonkeyPatch.context() as coarser:  # a quarter of a second instead of five
    coarser.setattr("vesuvius.generate.evaluate.memorisation._PLACES", 2**15)
    SEARCH = search_in(TRAINED)


@functools.cache
def held_out_distances() -> NDArray[np.float64]:
    """Those of each judgement: a search takes half a second."""
    return SEARCH.distances(list(patches(UNSEEN, COUNT, 2)))


class Search:
    """`SEARCH`, which looks for the held-out patches once."""

    def distances(self, sought: Sequence[Voxels]) -> NDArray[np.float64]:
        known = np.array_equal(np.stack(sought), patches(UNSEEN, COUNT, 2))
        return held_out_distances() if known else SEARCH.distances(sought)


def judged(generated: Voxels, steps: int = 2) -> Judgement:
    held_out, training, beside = patches(UNSEEN, COUNT, 2), patches(TRAINED, COUNT, 3), patches(TRAINED, COUNT, 4)
    return judge(*map(patch_set, (generated, held_out, training, beside)), Search(), steps)


def figures(judgement: Judgement) -> dict[str, Figure]:
    return {figure.key: figure for figure in judgement.figures}


def test_samples_of_the_same_kind_are_at_the_floor_in_every_figure() -> None:
    found = judged(patches(THIRD, COUNT, 5), steps=40)
    assert not any(figure.beyond for figure in found.figures), verdict(found, [])
    auc = figures(found)["auc"]
    assert auc.distance.value == pytest.approx(0.5, abs=0.2)
    assert auc.floor is not None
    assert auc.floor.value == pytest.approx(0.5, abs=0.2)
    assert not found.memorised
    assert set(figures(found)) == {
        "air", "means_std", "planarity", "histogram_distance", "spectrum_distance_db", "correlation_distance",
        "ms_ssim", "auc", "nearest",
    }  # fmt: skip


@pytest.mark.parametrize("turned", [True, pytest.param(False, marks=pytest.mark.long)])
def test_copies_of_training_patches_are_called_memorised_and_nothing_else(turned: bool) -> None:
    copies = patches(TRAINED, COUNT, 6)
    if turned:
        copies = np.stack([np.rot90(patch[::-1], number % 4, (1, 2)) for number, patch in enumerate(copies)])
    found = judged(copies)
    assert found.memorised
    assert found.copies["generated"] > 0.7
    assert found.copies["held_out"] < 0.1
    nearest = figures(found)["nearest"]
    assert nearest.values["generated"].value < 0.1 * nearest.values["held_out"].low
    assert "Memorised" in verdict(found, [])
    assert not figures(found)["histogram_distance"].beyond


def test_a_few_patches_again_and_again_are_not_diverse() -> None:
    few = patches(THIRD, 2, 7)
    found = judged(np.concatenate([few] * (COUNT // 2)))
    alike = figures(found)["ms_ssim"]
    assert alike.beyond
    assert alike.distance.low > 0
    assert "less diverse" in verdict(found, [])


def test_samples_without_air_are_far_from_the_floor_in_air() -> None:
    found = figures(judged(patches(scroll(5, SHAPE, air=False), COUNT, 8)))
    assert found["air"].beyond
    assert found["air"].distance.high < -0.05
    assert found["air"].values["generated"].value < 0.01
    assert found["histogram_distance"].beyond
    assert not found["means_std"].values["held_out"].low <= 0


def test_blurred_samples_are_told_by_spectrum_and_classifier() -> None:
    sharp = patches(THIRD, COUNT, 9)
    blurred = sum(np.roll(sharp, shift, axis) for axis in (2, 3) for shift in (-1, 0, 1)) / 6
    found = figures(judged(blurred.astype(np.float32), steps=40))
    assert found["spectrum_distance_db"].beyond
    assert found["auc"].distance.value > 0.8


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Of the mean of 30 normal numbers: 95 % with groups of one, and also where each number is there three times."""
    for copies in (1, 3):
        held, groups = 0, np.arange(30).repeat(copies)
        weights = np.stack([_drawn(groups, n) for n in range(200)])
        weights = weights / weights.sum(1, keepdims=True)
        for seed in range(300):
            numbers = np.random.default_rng(seed).standard_normal(30).repeat(copies)
            found = estimate(float(numbers.mean()), list(weights @ numbers))
            held += found.low <= 0 <= found.high
        assert 0.88 < held / 300 < 0.98


def test_samples_under_held_out_conditions_are_tested_on_the_other_half_of_those_voxels() -> None:
    values = np.zeros((40, 8, 16, 16), np.float32)
    halves = np.array([0, 1, -1, 1] * 10)
    conditional, held_out = (replace(patch_set(values), half=half) for half in (halves, halves[::-1]))
    for train, test, real in _folds(conditional, held_out):
        assert len({halves[train][0], -1, halves[test][0]}) == 3
        assert len(set(halves[train])) == len(set(halves[test])) == 1
        assert set(halves[::-1][real]) == set(halves[test])
    free = PatchSet(values, np.arange(40))
    assert [(len(a), len(b), len(c), len(set(a) & set(b))) for a, b, c in _folds(free, held_out)] == [
        (20, 20, 40, 0)
    ] * 2


def test_similarity_is_1_for_equal_patches_and_falls_with_noise_to_0_for_strangers() -> None:
    patch, stranger = patches(scroll(5, air=False), 2, 0)
    noise = np.random.default_rng(0).standard_normal(patch.shape).astype(np.float32)

    def similar(one: Voxels, other: Voxels) -> float:
        return ms_ssim(scales_of(one), scales_of(other))

    alike = [similar(patch, patch + share * noise) for share in (0, 0.1, 0.5, 2)]
    assert alike[0] == pytest.approx(1, abs=1e-5)
    assert alike == sorted(alike, reverse=True)
    assert similar(patch, stranger) < 0.4 < alike[1]
    large = np.kron(patch, np.ones((5, 5, 5), np.float32))
    assert similar(large, large) > 0.99 > similar(large, -large)


def test_figures_are_plain_json_without_nan() -> None:
    import json

    found = judged(np.full((COUNT, 8, 16, 16), -3, np.float32))
    text = json.dumps(plain(found, []), allow_nan=False)
    assert json.loads(text)["figures"]["nearest"]["values"]["generated"]["value"] is None
