"""Equal sets do not differ, and each defect moves its metric."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from vesuvius.config import AugmentConfig
from vesuvius.generate.evaluate import copies
from vesuvius.generate.evaluate import metrics as module
from vesuvius.generate.evaluate.classifiers import kernel_scores, patch_features
from vesuvius.generate.evaluate.copies import nearest_distances
from vesuvius.generate.evaluate.distances import frechet_distances
from vesuvius.generate.evaluate.evaluate import evaluation_page, metric_table, plain, verdict
from vesuvius.generate.evaluate.fields import FIELDS, measure_field
from vesuvius.generate.evaluate.metrics import (
    Comparison,
    Metric,
    classifier_auc,
    compare,
    family_p,
    folds,
    permutations,
)
from vesuvius.generate.evaluate.patches import PatchSet, RealPatches, disjoint_sides
from vesuvius.training.validation.texture import measure_patch

PATCH = (8, 16, 16)

Voxels = NDArray[np.float32]


def scroll(seed: int, shape: tuple[int, int, int] = (40, 64, 64), *, air: bool = True) -> Voxels:
    """Model values; about a fifth of the voxels are air, at -3."""
    rng = np.random.default_rng(seed)
    squares = sum(np.meshgrid(*[np.fft.fftfreq(size) ** 2 for size in shape], indexing="ij"))

    def field(length: float) -> Voxels:
        power = np.exp(-squares * (2 * np.pi * length) ** 2 / 2)
        values = np.fft.ifftn(np.fft.fftn(rng.standard_normal(shape)) * power).real
        return (values / values.std()).astype(np.float32)

    values = 0.5 * field(1.5) + 0.1 * rng.standard_normal(shape)
    return np.where(air & (field(4.0) < -0.8), -3.0, values).astype(np.float32)


def patches(volume: Voxels, count: int, seed: int) -> Voxels:
    """Cut at random places."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, np.subtract(volume.shape, PATCH), (count, 3), endpoint=True)
    return np.stack([volume[z : z + 8, y : y + 16, x : x + 16] for z, y, x in starts])


def patch_set(values: Voxels) -> PatchSet:
    return PatchSet(values, side=np.arange(len(values)) % 2)


def within_chance(hits: int, trials: int, rate: float) -> bool:
    """Whether a count of hits lies where a binomial distribution of this rate has 99.9 % of its counts."""
    chances = [math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(trials + 1)]
    return min(sum(chances[: hits + 1]), sum(chances[hits:])) > 0.0005


COUNT = 32
SHAPE = (40, 72, 72)
TRAINED, UNSEEN, THIRD = (scroll(seed, SHAPE) for seed in (0, 1, 5))
ALONE = scroll(0, (24, 48, 48))
SOUGHT: dict[bytes, NDArray[np.float64]] = {}


def judged(generated: Voxels, steps: int = 2) -> Comparison:
    held_out, training, second = patches(UNSEEN, COUNT, 2), patches(TRAINED, COUNT, 3), patches(TRAINED, COUNT, 4)
    drawn, test_real, others, train_real = (patch_set(values) for values in (generated, held_out, second, training))
    real = RealPatches(test_real, others, (train_real, others), [TRAINED], TRAINED.size)

    def once(regions: list[Voxels], sought: Voxels, augment: AugmentConfig) -> NDArray[np.float64]:
        """The held-out patches are those of each comparison, and a search takes half a second."""
        if (key := sought.tobytes()) not in SOUGHT:
            SOUGHT[key] = nearest_distances(regions, sought, augment)
        return SOUGHT[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "_POSITIONS", 2**15)  # a quarter of a second instead of five
        patch.setattr(module, "nearest_distances", once)
        return compare(drawn, real, AugmentConfig(), (steps, steps + 1))


def metrics(comparison: Comparison) -> dict[str, Metric]:
    return {metric.key: metric for metric in comparison.metrics}


@pytest.mark.long
def test_samples_of_the_same_kind_are_at_the_floor_in_every_metric() -> None:
    found = judged(patches(THIRD, COUNT, 5), steps=15)
    assert not any(metric.differs for metric in found.metrics), verdict(found)
    assert metrics(found)["auc"].distance == pytest.approx(0.5, abs=0.2)
    assert set(metrics(found)) == {
        "air", "means_std", "planarity", "histogram_distance", "spectrum_distance_db", "correlation_distance",
        "kid", "frechet", "auc", "auc_16", *FIELDS, "chord_distance", "features_auc", "copies",
    }  # fmt: skip


@pytest.fixture(scope="module")
def twenty_copies() -> tuple[Comparison, list[int]]:
    """20 turned training patches as generated ones, and of how many patches each Frechet distance was."""
    sizes = []

    def counted(pooled: NDArray[np.float64], sides: NDArray[np.bool_], others: NDArray[np.float64]) -> object:
        sizes.append(int(sides[0].sum()))
        return frechet_distances(pooled, sides, others)

    turned = [np.rot90(each[::-1], number % 4, (1, 2)) for number, each in enumerate(patches(TRAINED, 20, 6))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "frechet_distances", counted)
        return judged(np.stack(turned)), sizes


def test_the_floor_is_that_of_as_many_training_patches_as_were_generated(
    twenty_copies: tuple[Comparison, list[int]],
) -> None:
    """The Frechet distance of fewer patches is larger, so the floor of more patches would be too low."""
    assert twenty_copies[1] == [20, 20]
    frechet = metrics(twenty_copies[0])["frechet"]
    assert (frechet.reading, frechet.note[:16]) == ("unknown", "too few patches:"), "of 16 components"


def test_only_copies_of_training_patches_are_called_memorized(twenty_copies: tuple[Comparison, list[int]]) -> None:
    found, _ = twenty_copies
    copied = metrics(found)["copies"]
    assert copied.differs
    assert copied.values["generated"] > 0.7
    assert copied.values["held_out"] < 0.1
    assert "Memorized" in verdict(found)
    assert not metrics(found)["histogram_distance"].differs


@pytest.mark.long
def test_samples_without_air_are_far_from_the_floor_in_air() -> None:
    found = metrics(judged(patches(scroll(5, SHAPE, air=False), COUNT, 8)))
    assert found["air"].differs
    assert found["air"].values["generated"] < 0.01
    assert found["histogram_distance"].differs


@pytest.mark.long
def test_blurred_samples_are_detected_by_spectrum_and_classifier() -> None:
    sharp = patches(THIRD, COUNT, 9)
    blurred = sum(np.roll(sharp, shift, axis) for axis in (2, 3) for shift in (-1, 0, 1)) / 6
    found = metrics(judged(blurred.astype(np.float32), steps=40))
    assert found["spectrum_distance_db"].differs
    for key in ("auc", "features_auc"):
        assert found[key].distance > 0.8
        assert found[key].differs


def test_independent_patches_against_real_ones_in_groups_differ_as_often_as_the_level_says() -> None:
    """Sides with other numbers of patches would have other distances, which grow as patches get fewer."""
    told, rng = 0, np.random.default_rng(4)
    groups = np.arange(48), rng.integers(16, size=48)
    sides = np.stack([np.arange(96) < 48, *permutations(*groups)])
    for _ in range(100):
        shared = rng.standard_normal((16, 3))[groups[1]]
        values = np.concatenate([rng.standard_normal((48, 3)), 0.6 * shared + 0.8 * rng.standard_normal((48, 3))])
        far = [abs(1.0 * each @ values) / each.sum(1)[:, None] for each in (sides, ~sides)]
        difference = far[0] - far[1]
        told += min(family_p(difference[0], difference[1:])) < 0.05
    assert told < 12, "of 100; 55 with as many groups instead of patches"


def test_some_metric_of_a_family_differs_at_the_nominal_rate_for_grouped_patches() -> None:
    """Three moments of 30 and 20 groups of three patches that are alike.

    Were patches swapped one by one, or each metric judged alone, far more than 5 % of the families would differ.
    """
    told, singly = 0, 0
    for seed in range(100):
        groups = [np.arange(30).repeat(3), np.arange(20).repeat(3)]
        rngs = [np.random.default_rng((seed, k)) for k in range(2)]
        pooled = np.concatenate([rng.standard_normal(g.max() + 1)[g] for rng, g in zip(rngs, groups, strict=True)])
        moments = np.stack([pooled, pooled**2, pooled**3], 1)
        sides = np.array([np.arange(150) < 90, *permutations(*groups)])
        far = abs(sides @ moments / sides.sum(1)[:, None] - ~sides @ moments / (~sides).sum(1)[:, None])
        told += min(family_p(far[0], far[1:])) < 0.05
        singly += min(family_p([row[0]], [[value] for value in row[1:]])[0] for row in far.T) < 0.05
    assert within_chance(told, 100, 0.05)
    assert singly > 1.5 * told
    clear = family_p([5.0, 0.0, math.nan], [[1.0, value, 1.0] for value in np.linspace(-1, 1, 499)])
    assert clear[0] < 0.05 < clear[1]
    assert math.isnan(clear[2]), "an unknown metric costs the others nothing"


def test_samples_with_held_out_conditions_are_tested_on_unseen_locations() -> None:
    rng = np.random.default_rng(0)
    every = overlapping(np.zeros((24, 64, 192), np.float32), 80, rng)
    shown, held_out = every.rows(range(40)), every.rows(range(40, 80))
    assert shown.is_conditional
    shown = replace(shown, side=disjoint_sides(shown.locations, PATCH, 40))
    found = folds(shown, [held_out])
    assert len(found) == 2
    for train, test, (real,) in found:
        assert shown.locations is not None
        assert held_out.locations is not None
        for rows, places in ((test, shown.locations), (real, held_out.locations)):
            apart = abs(shown.locations[train][:, None] - places[rows][None]) >= (1, *PATCH)
            assert apart.any(2).all()
    free = patch_set(np.zeros((40, *PATCH), np.float32))
    assert [(len(a), len(b), len(c), len(set(a) & set(b))) for a, b, (c,) in folds(free, [held_out])] == [
        (20, 20, 40, 0)
    ] * 2


def test_samples_from_anywhere_differ_only_if_they_differ_from_training_and_from_held_out_patches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Held-out structures are others: against training patches alone, real ones would differ."""
    monkeypatch.setattr(module, "_EXCHANGES", 99)
    rng, blank = np.random.default_rng(0), patch_set(np.zeros((64, *PATCH), np.float32))
    trained, side_1, held_out = (rng.normal(mean, size=(64, 1)) for mean in (0, 0, 2))
    found = {}
    for name, mean in {"training": 0, "held out": 2, "defect": 5}.items():
        drawn = rng.normal(mean, size=(64, 1))
        for reals in ([side_1], [side_1, held_out]):
            shown = [trained, drawn, *reals]
            (metric,) = classifier_auc([blank] * len(reals), blank, shown, kernel_scores, [("auc", "")])
            found[name, len(reals)] = metric.differs
    assert [found[name, 2] for name in ("training", "held out", "defect")] == [False, False, True]
    assert found["held out", 1], "the classifier sees the other structures"


def knows_by_heart(train: tuple[Voxels, Voxels], tests: tuple[Voxels, ...]) -> tuple[NDArray[np.float64], ...]:
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
    return PatchSet(values, places, disjoint_sides(places, PATCH, count))


@pytest.mark.long
def test_the_auc_of_equal_sets_is_about_a_half_even_if_patches_overlap() -> None:
    """Were voxels both in training and in the test, a classifier that knows them by heart would be above it."""
    found = []
    for seed in range(16):
        rng = np.random.default_rng(seed)
        real, drawn = (scroll(1000 + 2 * seed + k, (24, 64, 96), air=False) for k in (0, 1))
        every = overlapping(real, 160, rng)
        side = disjoint_sides(every.locations, PATCH, len(every))
        training, second = (every.rows(np.flatnonzero(side == k)[:40]) for k in (0, 1))
        other = overlapping(drawn, 40, rng)
        other = replace(other, locations=other.locations - (1, 0, 0, 0))
        shown = [each.values for each in (training, other, second)]
        found += classifier_auc([second], other, shown, knows_by_heart, [("auc", "")])
    found = [each for each in found if math.isfinite(each.distance)]
    values = np.array([each.distance for each in found])
    assert len(found) > 12
    assert abs(values.mean() - 0.5) < 3.3 * values.std() / math.sqrt(len(values))
    assert sum(each.p < 0.05 for each in found) <= 3, "at most 5 %, within chance"


@pytest.mark.long
def test_a_perfect_model_fails_some_metric_of_a_family_in_five_percent_of_all_tables() -> None:
    """Overlapping patches of three volumes of one kind, as generated, held-out and training ones.

    Families are judged by one p each: were a metric judged alone, or overlapping patches swapped one by one, a family
    of eight would fail far more often.
    """
    told = dict.fromkeys(("texture", "fields", "distances"), 0)
    for seed in range(30):
        rng = np.random.default_rng(seed)
        volumes = [scroll(2000 + 4 * seed + k, (32, 64, 64)) for k in range(4)]
        held_out, training, drawn, other = (overlapping(volume, 48, rng) for volume in volumes)
        sets = {"generated": drawn, "held_out": held_out, "training": training}
        parts = {name: [measure_patch(patch) for patch in each.values] for name, each in sets.items()}
        sums = {name: np.stack([measure_field(p, -1.5) for p in each.values]) for name, each in sets.items()}
        every = sets | {"side 0": training, "side 1": other}
        features = {name: np.stack([patch_features(p) for p in each.values]) for name, each in every.items()}
        tables = (
            module._textures(parts, drawn.groups(), training.groups()),
            module._fields(sets, sums),
            module._feature_distances(sets, features),
        )
        for name, table in zip(told, tables, strict=True):
            assert all(metric.differs is not None for metric in table)
            told[name] += any(metric.differs for metric in table)
    assert all(within_chance(count, 30, 0.05) for count in told.values()), told


def test_an_unbiased_distance_has_no_bar_because_its_floor_may_be_zero() -> None:
    biased, unbiased = (Metric(key, key, {}, 0.01, 1e-5, 0.5, "", interval)
                        for key, interval in (("frechet", None), ("kid", (0.0, 0.02))))  # fmt: skip
    page = evaluation_page("run", "", {}, Comparison((biased, unbiased, replace(unbiased, key="copies")), {}), [])
    assert page.bars is not None
    assert [bar.label for bar in page.bars.bars] == ["frechet"]


def test_summary_and_table_agree_on_every_metric() -> None:
    unknown = Metric("copies", "copies", {}, math.nan, math.nan, math.nan)
    assert verdict(Comparison((unknown,), {})).startswith("No metric could be measured")
    metrics = [
        Metric("a", "one", {}, 0.3, 0.1, 0.01),
        Metric("b", "two", {}, -0.3, None, 0.01),
        Metric("c", "three", {}, 0.1, 0.1, 0.5, "too few"),
        Metric("d", "four", {}, math.nan, math.nan, math.nan),
        Metric("copies", "five", {}, 0.3, None, 0.5),
    ]
    said = verdict(Comparison(tuple(metrics), {}))
    assert said.startswith("Generated patches fail 2 of 4 metrics: one, two (unknown: four).")
    assert said.endswith("No sign of memorization in the training voxels that were searched.")
    assert [row[1] for row in metric_table(metrics).rows] == [
        "✗ differs", "✗ differs", "✓ no difference; too few", "? unknown",
        "✓ no difference"
    ]  # fmt: skip


@pytest.mark.long
def test_patches_without_texture_are_unknown_and_metrics_are_plain_json() -> None:
    found = judged(np.full((COUNT, 8, 16, 16), -3, np.float32))
    text = json.dumps(plain(found), allow_nan=False)
    assert json.loads(text)["figures"]["copies"]["values"]["generated"] is None
    assert metrics(found)["copies"].reading == "unknown"
    assert "memorized is unknown" in verdict(found)
    assert math.isnan(family_p([math.nan], [[0.0]] * 499)[0])
    assert math.isnan(family_p([0.0], [[math.nan]] * 499)[0])
    assert math.isnan(family_p([0.0], [])[0])


# Copies of training voxels are found wherever they are from and however they are turned; other patches are far.


def test_a_copy_is_found_at_any_position_brightness_and_contrast() -> None:
    """A search at some places alone, or of intensities as they are, would miss most of them."""
    trained = scroll(0, (24, 48, 48), air=False)
    distances = nearest_distances([trained], 0.4 * patches(trained, 24, 1) + 0.3, AugmentConfig())
    assert np.mean(distances < 0.02) > 0.9, "air is clipped, so a little is left"


@pytest.mark.parametrize(("flips", "turns"), [((), 0), ((0,), 1), ((1, 2), 3), ((0, 2), 2)])
def test_copies_are_found_only_in_the_symmetries_of_training(flips: tuple[int, ...], turns: int) -> None:
    turned = np.stack([np.rot90(np.flip(patch, flips), turns, (1, 2)) for patch in patches(ALONE, 8, 2)])
    assert np.mean(nearest_distances([ALONE], turned, AugmentConfig()) < 1e-3) > 0.8
    plain = nearest_distances([ALONE], turned, AugmentConfig(flip=False, rot90=False))
    assert (np.nanmedian(plain) < 1e-3) == (not flips and not turns)


def test_patches_of_another_volume_are_far_and_those_without_texture_unknown() -> None:
    other = np.stack([*patches(scroll(9, air=False), 16, 3), np.full((8, 16, 16), -3, np.float32)])
    distances = nearest_distances([scroll(0, (24, 48, 48), air=False)], other, AugmentConfig())
    assert distances[:-1].min() > 0.3
    assert np.isnan(distances[-1])
