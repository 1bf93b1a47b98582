"""The laws of an evaluation: what is alike comes out at the floor, and each defect moves the figure that is for it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.generate.evaluate.scrolls import PATCH, Voxels, patch_set, patches, scroll, search_in, within_chance
from vesuvius.generate.evaluate.figures import (
    Estimate,
    Figure,
    Judgement,
    _auc,
    _drawn,
    _folds,
    distance_estimate,
    estimate,
    judge,
)
from vesuvius.generate.evaluate.page import figure_table, plain, verdict
from vesuvius.generate.evaluate.patches import PatchSet, _cells, disjoint_sides

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
    sets = [patch_set(values) for values in (generated, held_out, beside, training)]
    return judge(*sets[:3], (sets[3], sets[2]), Search(), steps)


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
        "auc", "nearest",
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


def knows_by_heart(
    train: tuple[Voxels, Voxels], tests: tuple[Voxels, ...], **_: int
) -> tuple[NDArray[np.float64], ...]:
    """Scores of a classifier that finds the most similar patch of training, which is what overfitting comes to."""

    def unit(values: Voxels) -> Voxels:
        rows = values.reshape(len(values), -1)
        rows = rows - rows.mean(1, keepdims=True)
        return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))

    real, generated = map(unit, train)
    return tuple(((unit(t) @ real.T).max(1) - (unit(t) @ generated.T).max(1)).astype(float) for t in tests)


def overlapping(volume: Voxels, count: int, rng: np.random.Generator) -> PatchSet:
    starts = rng.integers(0, np.subtract(volume.shape, PATCH), (count, 3), endpoint=True)
    places = np.column_stack([np.zeros(count, int), starts])
    values = np.stack([volume[z : z + 8, y : y + 16, x : x + 16] for z, y, x in starts])
    return PatchSet(values, _cells(places, PATCH), places=places)


def test_the_auc_of_equal_sets_lies_around_a_half_though_their_patches_overlap() -> None:
    """Were voxels both in training and in the test, a classifier that knows them by heart would be above it."""
    found = []
    for seed in range(24):
        rng = np.random.default_rng(seed)
        real, drawn = (scroll(1000 + 2 * seed + k, (24, 64, 96), air=False) for k in (0, 1))
        every = overlapping(real, 160, rng)
        side = disjoint_sides(every.places, PATCH, len(every))
        training, beside = (every.rows(np.flatnonzero(side == k)[:40]) for k in (0, 1))
        found.append(_auc(beside, training, overlapping(drawn, 40, rng), steps=0, scores_of=knows_by_heart))
    found = [each for each in found if math.isfinite(each.value)]
    values = np.array([each.value for each in found])
    assert len(found) > 18
    assert abs(values.mean() - 0.5) < 3.3 * values.std() / math.sqrt(len(values))
    held = sum(each.low <= 0.5 <= each.high for each in found)
    assert within_chance(held, len(found), 0.95)


def test_distances_of_few_and_of_many_patches_are_the_same_but_for_chance() -> None:
    """A distance of two means grows with their scatter: 0 comes out, and a true distance whatever the numbers."""
    rng = np.random.default_rng(0)
    for true in (0.0, 1.0):
        for counts in ((10, 100), (100, 100)):
            squares = []
            for _ in range(60):
                sets = [rng.standard_normal((count, 20)) for count in counts]
                sets[0][:, 0] += true
                drawn = [[each[rng.integers(0, len(each), len(each))].mean(0) for each in sets] for _ in range(100)]
                far = [float(np.linalg.norm(a - b)) for a, b in drawn]
                squares.append(distance_estimate(float(np.linalg.norm(sets[0].mean(0) - sets[1].mean(0))), far))
            assert np.mean([each.value**2 for each in squares]) == pytest.approx(true**2, abs=0.35)
            assert np.mean([each.low <= true <= each.high for each in squares]) > 0.9


def test_what_cannot_be_measured_is_unknown_in_row_and_summary_alike() -> None:
    nan, known = Estimate(math.nan, math.nan, math.nan), Estimate(0.3, 0.2, 0.4)
    for figure in (
        Figure("planarity", "planarity", {}, nan, nan, p=math.nan),
        Figure("auc", "classifier AUC", {}, nan, known),
        Figure("auc", "classifier AUC", {}, known, nan),
        Figure("nearest", "nearest training place", {}, Estimate(math.inf, math.inf, math.inf), None),
    ):
        assert figure.beyond is None
        assert figure.reading == "unknown"
        assert f"Unknown: {figure.name}." in verdict(Judgement((figure,), {}, {}, {}), [])
    assert Judgement((), {}, {}, {"generated": math.nan, "held_out": 0.0}).memorised is None
    assert Judgement((), {}, {}, {"generated": 0.5, "held_out": math.nan}).memorised is None


def test_the_summary_says_of_each_figure_what_its_row_says() -> None:
    far, near, floor = Estimate(0.3, 0.2, 0.4), Estimate(-0.3, -0.4, -0.2), Estimate(0.1, 0.0, 0.15)
    figures = [
        Figure("a", "one", {}, far, floor),
        Figure("b", "two", {}, near, None),
        Figure("c", "three", {}, floor, floor),
        Figure("d", "four", {}, far, floor, p=0.5),
        Figure("e", "five", {}, far, floor, p=0.01),
        Figure("f", "six", {}, floor, Estimate(0.5, 0.4, 0.6)),  # nearer to held-out patches than training is
    ]
    said = verdict(Judgement(tuple(figures), {}, {}, {}), [])
    assert "Beyond the floor: one, five. Unlike held out: two." in said
    rows = {row[0]: row[1] for row in figure_table(figures).rows}
    assert rows == {"one": "beyond the floor", "two": "unlike held out", "three": "at the floor",
                    "four": "at the floor", "five": "beyond the floor", "six": "at the floor"}  # fmt: skip


def test_figures_are_plain_json_without_nan() -> None:
    import json

    found = judged(np.full((COUNT, 8, 16, 16), -3, np.float32))
    text = json.dumps(plain(found, []), allow_nan=False)
    assert json.loads(text)["figures"]["nearest"]["values"]["generated"]["value"] is None
