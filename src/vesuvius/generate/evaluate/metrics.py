"""Sets of patches -> metrics, each with its floor: the same metric with training patches instead of generated ones.

A perfect model reaches the floor.  A permutation test decides whether a metric differs from real: how often is it as
far if patches are swapped at random?  Patches that share voxels are swapped together.  A metric that cannot be measured
is NaN, with the reading "unknown".
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import AugmentConfig
from vesuvius.errors import ConfigError
from vesuvius.generate.evaluate.classifiers import area_under_curve, kernel_scores, patch_features, two_sample_scores
from vesuvius.generate.evaluate.copies import nearest_distances
from vesuvius.generate.evaluate.distances import KernelDistance, frechet_distances, whitened
from vesuvius.generate.evaluate.fields import FIELDS, chord_distances, figures, measure_field, otsu_threshold
from vesuvius.generate.evaluate.patches import PatchSet, RealPatches, share_voxels
from vesuvius.generate.evaluate.seams import find_seams, plane_changes
from vesuvius.predict.progress import one_thread
from vesuvius.training.validation.texture import (
    PatchTexture,
    Texture,
    combine_textures,
    correlation_distance,
    histogram_distance,
    measure_patch,
    spectrum_distance_db,
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Voxels = NDArray[np.float32]

LEVEL = 0.05
"""Significance level: how often some metric of a family differs for a perfect model."""
_EXCHANGES = 499
_LEAST_TEST = 8
_ENOUGH = 256  # samples that a classifier needs, roughly, to learn their defects
COPIES = "copies"
_NEAR = 0.5


def _difference(key: str) -> Callable[[Texture, Texture], float]:
    return lambda one, other: abs(float(getattr(one, key)) - float(getattr(other, key)))


_TEXTURES: dict[str, tuple[str, Callable[[Texture, Texture], float]]] = {
    "air": ("share of air", _difference("air")),
    "means_std": ("std of patch means", _difference("means_std")),
    "planarity": ("planarity", _difference("planarity")),
    "histogram_distance": ("histogram distance", histogram_distance),
    "spectrum_distance_db": ("spectrum distance, dB", spectrum_distance_db),
    "correlation_distance": ("correlation distance", correlation_distance),
}


@dataclass(frozen=True)
class Metric:
    """One row of the table; NaN = unknown."""

    key: str
    name: str
    values: dict[str, float]  # of `generated`, `held_out` and `training`, if the metric has a value per set
    distance: float  # from generated to held-out patches
    floor: float | None  # from training to held-out patches; None = generated and held-out are compared directly
    p: float  # how often the metric, or another of its family, is as far by chance
    note: str = ""
    interval: tuple[float, float] | None = None  # of the distance, 95 %

    @property
    def differs(self) -> bool | None:
        """Whether the distance is significant; None = unknown."""
        return None if math.isnan(self.p) else self.p < LEVEL

    @property
    def reading(self) -> str:
        return {None: "unknown", True: "differs from real", False: "does not differ from real"}[self.differs]


@dataclass(frozen=True, eq=False)
class Comparison:
    metrics: tuple[Metric, ...]
    textures: dict[str, Texture]  # of each set


def compare(
    generated: PatchSet,
    real: RealPatches,
    augment: AugmentConfig,
    classifier_steps: Sequence[int],
    volume: Any = None,
    *,
    from_anywhere: bool = False,
) -> Comparison:
    """Measure all metrics; copies are searched in the symmetries of `augment`, and seams in a generated `volume`.

    The classifiers learn real patches from the first of `real.sides` and are tested on the second: held-out patches may
    show other structures, so that the AUC of a perfect model would not be 0.5.  Samples with held-out conditions are
    tested against held-out patches; those with conditions `from_anywhere` must differ from both.  Raises ConfigError if
    the volume contains NaN.
    """
    held_out = real.held_out
    equal = np.arange(min(len(real.training), len(generated)))  # the floor of biased distances depends on the number
    sets = {"generated": generated, "held_out": held_out, "training": real.training.rows(equal)}
    every = sets | {"side 0": real.sides[0], "side 1": real.sides[1]}
    tested = ["held_out"] if generated.is_conditional else ["side 1", *["held_out"] * from_anywhere]
    test_real = [every[name] for name in tested]
    seams = [] if volume is None else [_seams(volume, max(real.searched, key=np.size))]  # first, as it may raise
    # One thread per core with its own small tensors is twice as fast as torch's threads.
    with one_thread():
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            nearest = [
                pool.submit(nearest_distances, real.searched, each.values, augment) for each in (generated, held_out)
            ]
            measured = {name: pool.map(measure_patch, each.values) for name, each in sets.items()}
            described = {name: pool.map(patch_features, each.values) for name, each in every.items()}
            threshold = otsu_threshold(np.concatenate([side.values[:, ::2, ::2, ::2] for side in real.sides]))
            structure = {
                name: pool.map(partial(measure_field, threshold=threshold), each.values) for name, each in sets.items()
            }
            train = partial(two_sample_scores, efforts=classifier_steps)
            named = [(f"auc_{steps}" if n else "auc", f"classifier AUC at {steps} steps")
                     for n, steps in enumerate(classifier_steps)]  # fmt: skip
            shown = [each.values for each in (real.sides[0], generated, *test_real)]
            aucs = classifier_auc(test_real, generated, shown, train, named, pool.map)
            features = {name: np.stack(list(each)) for name, each in described.items()}
            parts = {name: list(each) for name, each in measured.items()}
        shown = [features[name] for name in ("side 0", "generated", *tested)]
        named = [("features_auc", "AUC of fixed features")]
        aucs += classifier_auc(test_real, generated, shown, kernel_scores, named)
        metrics = _textures(parts, generated.groups(), sets["training"].groups())
        metrics += _fields(sets, {name: np.stack(list(each)) for name, each in structure.items()})
        metrics += _feature_distances(sets, features)
    copies = _copies(nearest[0].result(), nearest[1].result(), generated.groups(), held_out.groups())
    return Comparison((*metrics, *seams, *aucs, copies), {name: combine_textures(each) for name, each in parts.items()})


def permutations(one: Ints, other: Ints) -> Iterator[NDArray[np.bool_]]:
    """Swap the groups of two sets at random, with as many patches on each side as before, or nearly.

    Distances are larger for fewer patches, so sides of other sizes could not be compared.  `one` and `other` have the
    group of each patch.  Yields which patches are on the first side, bool [len(one) + len(other)]; nothing if there
    are too few groups for significance at `LEVEL`.
    """
    first = np.unique(one, return_inverse=True)[1]
    count = int(first.max()) + 1
    group = np.concatenate([first, np.unique(other, return_inverse=True)[1] + count])
    total, rng = int(group.max()) + 1, np.random.default_rng(0)
    if math.comb(total, count) * LEVEL > 2:
        sizes = np.bincount(group)
        for _ in range(_EXCHANGES):
            order = rng.permutation(total)
            enough = int(abs(np.cumsum(sizes[order]) - len(one)).argmin()) + 1
            yield np.argsort(order)[group] < enough


def family_p(found: Sequence[float] | Floats, by_chance: Sequence[Sequence[float]] | Floats) -> list[float]:
    """Return for each of several metrics how often, by chance, *any* of them is as unlikely; NaN if unknown.

    `by_chance` has the values of each permutation.  The larger a value, the less likely: its rank among all
    permutations, so that metrics count alike.  Equal sets have a value below `LEVEL` in 5 % of all families.  Source:
    Westfall & Young 1993, the step of min P.  Pure.
    """
    table = np.array([found, *by_chance], np.float64).reshape(-1, len(found))
    finite = np.isfinite(table)
    known = finite[0] & (2 * finite[1:].sum(0) >= _EXCHANGES)
    chances = np.ones_like(table)
    for column in np.flatnonzero(known):
        rows = finite[:, column]
        values = table[rows, column]
        chances[rows, column] = 1 - np.searchsorted(np.sort(values), values) / len(values)
    smallest = chances.min(1)
    chance = (smallest <= chances[0][:, None] + 1e-9).mean(1)
    return [float(p) for p in np.where(known, chance, math.nan)]


def _sides(one: Ints, other: Ints) -> NDArray[np.bool_]:
    """Return which patches of both sets are on the first side, [T, N]: as they are, then in each permutation."""
    return np.stack([np.arange(len(one) + len(other)) < len(one), *permutations(one, other)])


def _family(
    named: Mapping[str, str], far: tuple[Floats, Floats], values: dict[str, dict[str, float]], notes: Mapping[str, str]
) -> list[Metric]:
    """Return the metrics of a family; `far` has their distances from held-out patches for both sides, each [T, M]."""
    chances = family_p((far[0] - far[1])[0], (far[0] - far[1])[1:])
    return [
        Metric(key, name, values.get(key, {}), float(distance), float(floor), p, notes.get(key, ""))
        for (key, name), distance, floor, p in zip(named.items(), far[0][0], far[1][0], chances, strict=True)
    ]


def _textures(parts: dict[str, list[PatchTexture]], generated: Ints, training: Ints) -> list[Metric]:
    """Return the texture metrics; `generated` and `training` are the groups of these patches."""
    whole = {name: combine_textures(each) for name, each in parts.items()}
    pooled, sides = [*parts["generated"], *parts["training"]], _sides(generated, training)

    def far(rows: NDArray[np.bool_]) -> list[float]:
        texture = combine_textures([pooled[row] for row in np.flatnonzero(rows)])
        return [distance(texture, whole["held_out"]) for _, distance in _TEXTURES.values()]

    values = {
        key: {of: float(getattr(each, key)) for of, each in whole.items()}
        for key in _TEXTURES
        if hasattr(whole["held_out"], key)
    }
    names = {key: name for key, (name, _) in _TEXTURES.items()}
    return _family(names, (np.array([*map(far, sides)]), np.array([*map(far, ~sides)])), values, {})


def _fields(sets: dict[str, PatchSet], sums: dict[str, Floats]) -> list[Metric]:
    """Return the metrics of material and pores; `sums` are those of each patch, by `measure_field`."""
    sides = _sides(sets["generated"].groups(), sets["training"].groups())
    real, pooled = sums["held_out"].sum(0), np.concatenate([sums["generated"], sums["training"]])
    of_sides, of_real = [figures(each @ pooled) for each in (1.0 * sides, 1.0 * ~sides)], figures(real[None])
    shape = sets["generated"].values.shape[1:]
    one, other = (
        np.stack(
            [*(abs(found[key] - of_real[key]) for key in FIELDS), chord_distances(1.0 * side @ pooled, real, shape)], 1
        )
        for found, side in zip(of_sides, (sides, ~sides), strict=True)
    )
    each = {"generated": of_sides[0], "held_out": of_real, "training": of_sides[1]}
    values = {key: {of: float(found[key][0]) for of, found in each.items()} for key in FIELDS}
    return _family(FIELDS | {"chord_distance": "chord length distance"}, (one, other), values, {})


def _seams(volume: Any, training: Voxels) -> Metric:
    """Return whether planes of a regular grid differ more from the next ones than those of a training volume do."""
    with np.errstate(invalid="ignore", over="ignore"):
        changes = plane_changes(volume)
    if not np.isfinite(np.concatenate(changes)).all():
        raise ConfigError("The generated volume contains NaN or infinity; generate a new one, or replace them")
    found, real = find_seams(changes), find_seams(plane_changes(training))
    scores = found.scores - real.scores
    (p,) = family_p([scores[0] if found.ratio > 0 else math.nan], scores[1:, None])
    values = {"generated": found.ratio, "training": real.ratio}
    note = f"every {found.period} voxels along {'zyx'[found.axis]}" if p < LEVEL else ""
    note = "flat, or too few planes" if math.isnan(p) else note
    return Metric("seams", "change at seams", values, found.ratio - 1, real.ratio - 1, p, note)


def _feature_distances(sets: dict[str, PatchSet], features: dict[str, Floats]) -> list[Metric]:
    """Return KID and Frechet distance of fixed features, in components of the training patches of both sides."""
    reference = np.concatenate([features["side 0"], features["side 1"]])
    generated, held_out, training = whitened([features[name] for name in sets], reference)
    pooled, count, real = np.concatenate([generated, training]), len(generated), sets["held_out"]
    within = np.zeros((len(pooled), len(pooled)), np.bool_)
    within[:count, :count] = share_voxels(sets["generated"], sets["generated"])
    within[count:, count:] = share_voxels(sets["training"], sets["training"])
    across = np.concatenate([share_voxels(sets[name], real) for name in ("generated", "training")])
    kid = KernelDistance(pooled, held_out, (within, share_voxels(real, real), across))
    sides = _sides(sets["generated"].groups(), sets["training"].groups())
    one, other = (np.stack([kid(1.0 * each), frechet_distances(pooled, each, held_out)], 1) for each in (sides, ~sides))
    low, high = kid.interval(sets["generated"].groups(), real.groups())
    names = {"kid": "kernel distance (KID)", "frechet": "Frechet distance"}
    notes = {"kid": f"95 % {low:.2g} to {high:.2g}" if low <= high else "too few disjoint patches for an interval"}
    first, frechet = _family(names, (one, other), {}, notes)
    few = f"too few patches: at least {2 * held_out.shape[1]} of each set are needed" if math.isnan(frechet.p) else ""
    return [replace(first, interval=(low, high)), replace(frechet, note=few)]


def classifier_auc(
    reals: Sequence[PatchSet],
    other: PatchSet,
    shown: Sequence[NDArray[Any]],
    scores: Callable[[tuple[NDArray[Any], NDArray[Any]], tuple[NDArray[Any], ...]], tuple[Floats, ...]],
    named: Sequence[tuple[str, str]],
    run: Callable[..., Iterable[Any]] = map,
) -> list[Metric]:
    """Train two classifiers, each on one side of `other`, and test each on the other side and on patches of `reals`.

    An AUC is the mean of both; p is the smaller one, corrected for two tests.  Of several `reals` the set that is least
    unlike `other` counts.  NaN if `other` has no two sides that share no voxel.  `shown` is the classifier's input:
    real patches to train on, which share no voxel with `reals`, then `other` and `reals`.  `scores` trains on real and
    other patches and scores how real each test patch looks: [N], or [efforts, N] for a family of metrics.  `named` are
    their keys and names.
    """
    areas, chances, tests = [], [], folds(other, reals)
    trains = [(shown[0], shown[1][train]) for train, _, _ in tests]
    inputs = [(*(s[r] for s, r in zip(shown[2:], rows, strict=True)), shown[1][test]) for _, test, rows in tests]
    for (_, test, rows), found in zip(tests, run(scores, trains, inputs), strict=True):
        *others, drawn = map(np.atleast_2d, found)
        for real, chosen, each in zip(reals, rows, others, strict=True):
            # Wider groups, because overlapping patches on both sides of a border have similar scores: of equal sets cut
            # from two volumes, 3 % differ significantly with groups of three patches, 8 % with groups of two.
            groups = real.groups(3)[chosen], other.groups(3)[test]
            pooled = np.concatenate([each, drawn], 1)
            by_chance = [[area_under_curve(p[side], p[~side]) for p in pooled] for side in permutations(*groups)]
            areas.append([area_under_curve(*pair) for pair in zip(each, drawn, strict=True)])
            chances.append(family_p(areas[-1], by_chance))
    # [folds, reals, efforts]
    area, chance = (np.reshape(each, (len(tests), len(reals), len(named))) for each in (areas, chances))
    metrics, weak = [], "" if len(other) >= _ENOUGH else f", {len(other)} samples: weak test"
    for column, (key, name) in enumerate(named):
        mean = float(area[:, :, column].mean(0).min()) if tests else math.nan
        known = [p for p in chance[:, :, column].max(1) if math.isfinite(p)]
        note = f"a lower bound{weak}" if known else "too few disjoint patches"
        p = min(1.0, len(known) * float(min(known))) if known else math.nan
        metrics.append(Metric(key, name, {}, mean, 0.5, p, note))
    return metrics


def folds(other: PatchSet, reals: Sequence[PatchSet]) -> list[tuple[Ints, Ints, list[Ints]]]:
    """Return rows of `other` to train on, rows of `other` to test on, and rows of each of `reals`, for each fold.

    Test rows, also real ones, share no voxel with training rows: a patch generated from held-out labels shows the same
    structures as the real patch.
    """
    found = []
    for k in (0, 1):
        train, test = np.flatnonzero(other.side == k), np.flatnonzero(other.side == 1 - k)
        rows = [np.flatnonzero(~share_voxels(real, other.rows(train)).any(1)) for real in reals]
        if min(map(len, (train, test, *rows))) >= _LEAST_TEST:
            found.append((train, test, rows))
    return found


def _copies(generated: Floats, held_out: Floats, groups: Ints, held_out_groups: Ints) -> Metric:
    """Return the share of patches nearer to training voxels than half the 5th percentile of held-out patches."""
    known, pooled = held_out[np.isfinite(held_out)], np.concatenate([generated, held_out])
    limit = _NEAR * float(np.quantile(known, 0.05)) if len(known) else math.nan

    def share(found: Floats) -> float:
        textured = found[np.isfinite(found)]
        return float((textured < limit).mean()) if len(textured) and len(known) else math.nan

    values = {"generated": share(generated), "held_out": share(held_out)}
    distance = values["generated"] - values["held_out"]
    by_chance = [[share(pooled[s]) - share(pooled[~s])] for s in permutations(groups, held_out_groups)]
    (p,) = family_p([distance], by_chance)
    return Metric(COPIES, "share of copies", values, distance, None, p)
