"""Sets of patches -> metrics, each with its floor: the same metric with training patches instead of generated ones.

A perfect model reaches the floor.  A permutation test decides whether a metric differs from real: how often is it as
far if patches are swapped at random?  Patches that share voxels are swapped together.  A metric that cannot be measured
is NaN, with the reading "unknown".
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import avg_pool3d

from vesuvius.config import AugmentConfig
from vesuvius.generate.evaluate.classifiers import area_under_curve, kernel_scores, patch_features, two_sample_scores
from vesuvius.generate.evaluate.distances import KernelDistance, frechet_distances, whitened
from vesuvius.generate.evaluate.patches import PatchSet, RealPatches, share_voxels
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
_POSITIONS, _CHUNK = 2**19, 2**13  # positions in the training volume to compare, roughly, and positions at a time
_POINTS, _CANDIDATES = 256, 32
_LEAST_STD = 0.05  # standard deviation in model values below which a patch has no texture
_DARKEST = 1.2  # limit of |model value|; air far below the material would dominate


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
    generated: PatchSet, real: RealPatches, augment: AugmentConfig, classifier_steps: Sequence[int]
) -> Comparison:
    """Measure all metrics; copies are searched in the symmetries of `augment`.

    The classifiers learn real patches from the first of `real.sides` and are tested on the second: held-out patches may
    show other structures, so that the AUC of a perfect model would not be 0.5.
    """
    held_out = real.held_out
    sets = {"generated": generated, "held_out": held_out, "training": real.training}
    every = sets | {"side 0": real.sides[0], "side 1": real.sides[1]}
    # samples with held-out conditions are compared with the held-out patches
    train_real, test_real = (real.sides[0], held_out) if generated.is_conditional else real.sides
    # One thread per core with its own small tensors is twice as fast as torch's threads.
    with one_thread():
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            compared = test_real, train_real, generated
            nearest = [
                pool.submit(nearest_distances, real.searched, each.values, augment) for each in (generated, held_out)
            ]
            measured = {name: pool.map(measure_patch, each.values) for name, each in sets.items()}
            described = {name: pool.map(patch_features, each.values) for name, each in every.items()}
            train = partial(two_sample_scores, efforts=classifier_steps)
            named = [(f"auc_{steps}" if n else "auc", f"classifier AUC, {steps} steps")
                     for n, steps in enumerate(classifier_steps)]  # fmt: skip
            aucs = classifier_auc(*compared, [each.values for each in compared], train, named, pool.map)
            features = {name: np.stack(list(each)) for name, each in described.items()}
            parts = {name: list(each) for name, each in measured.items()}
        shown = [features["held_out"] if generated.is_conditional else features["side 1"], features["side 0"]]
        aucs += classifier_auc(
            *compared, [*shown, features["generated"]], kernel_scores, [("features_auc", "AUC of fixed features")]
        )
        metrics = _textures(parts, generated.groups(), real.training.groups())
        metrics += _feature_distances(sets, features)
    copies = _copies(nearest[0].result(), nearest[1].result(), generated.groups(), held_out.groups())
    return Comparison((*metrics, *aucs, copies), {name: combine_textures(each) for name, each in parts.items()})


def permutations(one: Ints, other: Ints) -> Iterator[NDArray[np.bool_]]:
    """Swap the groups of two sets at random, with as many groups on each side as before.

    `one` and `other` have the group of each patch.  Yields which patches are on the first side, bool [len(one) +
    len(other)]; nothing if there are too few groups for significance at `LEVEL`.
    """
    first = np.unique(one, return_inverse=True)[1]
    count = int(first.max()) + 1
    group = np.concatenate([first, np.unique(other, return_inverse=True)[1] + count])
    total, rng = int(group.max()) + 1, np.random.default_rng(0)
    if math.comb(total, count) * LEVEL > 2:
        for _ in range(_EXCHANGES):
            yield rng.permutation(total)[group] < count


def family_p(found: Sequence[float], by_chance: Sequence[Sequence[float]]) -> list[float]:
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
    return [
        float((smallest <= chance + 1e-9).mean()) if is_known else math.nan
        for chance, is_known in zip(chances[0], known, strict=True)
    ]


def _textures(parts: dict[str, list[PatchTexture]], generated: Ints, training: Ints) -> list[Metric]:
    """Return the texture metrics; `generated` and `training` are the groups of these patches."""
    whole = {name: combine_textures(each) for name, each in parts.items()}
    real, pooled = whole["held_out"], [*parts["generated"], *parts["training"]]
    swapped = [
        tuple(combine_textures([pooled[row] for row in np.flatnonzero(rows)]) for rows in (side, ~side))
        for side in permutations(generated, training)
    ]
    metrics, names, fars = [], [name for name, _ in _TEXTURES.values()], [far for _, far in _TEXTURES.values()]
    distances = [(far(whole["generated"], real), far(whole["training"], real)) for far in fars]
    chances = family_p(
        [distance - floor for distance, floor in distances],
        [[far(one, real) - far(other, real) for far in fars] for one, other in swapped],
    )
    for key, name, (distance, floor), p in zip(_TEXTURES, names, distances, chances, strict=True):
        values = {of: float(getattr(each, key)) for of, each in whole.items()} if hasattr(real, key) else {}
        metrics.append(Metric(key, name, values, distance, floor, p))
    return metrics


def _feature_distances(sets: dict[str, PatchSet], features: dict[str, Floats]) -> list[Metric]:
    """Return KID and Frechet distance of fixed features, in components of the training patches of both sides."""
    reference = np.concatenate([features["side 0"], features["side 1"]])
    generated, held_out, training = whitened([features[name] for name in sets], reference)
    pooled, count = np.concatenate([generated, training]), len(generated)
    within = np.zeros((len(pooled), len(pooled)), np.bool_)
    within[:count, :count] = share_voxels(sets["generated"], sets["generated"])
    within[count:, count:] = share_voxels(sets["training"], sets["training"])
    real = sets["held_out"]
    across = np.concatenate([share_voxels(sets[name], real) for name in ("generated", "training")])
    kid = KernelDistance(pooled, held_out, (within, share_voxels(real, real), across))
    groups = [sets[name].groups() for name in sets]
    sides = np.stack([np.arange(len(pooled)) < count, *permutations(groups[0], groups[2])])
    far = np.stack([[kid(each), frechet_distances(pooled, each > 0, held_out)] for each in (1.0 * sides, 1.0 * ~sides)])
    found = far[0] - far[1]  # [metrics, permutations]
    chances = family_p(found[:, 0].tolist(), found[:, 1:].T.tolist())
    interval = kid.interval(groups[0], groups[1])
    notes = ["95 % interval of the distance {:.2g} to {:.2g}".format(*interval), ""]
    metrics = []
    for row, (key, name) in enumerate((("kid", "kernel distance (KID)"), ("frechet", "Frechet distance"))):
        distance, floor = far[:, row, 0].tolist()
        note = notes[row] if math.isfinite(chances[row]) else "too few patches"
        metrics.append(Metric(key, name, {}, distance, floor, chances[row], note, None if row else interval))
    return metrics


def classifier_auc(
    real: PatchSet,
    training: PatchSet,
    other: PatchSet,
    shown: Sequence[NDArray[Any]],
    scores: Callable[[tuple[NDArray[Any], NDArray[Any]], tuple[NDArray[Any], ...]], tuple[Floats, ...]],
    named: Sequence[tuple[str, str]],
    run: Callable[..., Iterable[Any]] = map,
) -> list[Metric]:
    """Train two classifiers, each on one side of `other`, and test each on the other side and on `real` patches.

    An AUC is the mean of both; p is the smaller one, corrected for two tests.  NaN if `other` has no two sides that
    share no voxel.  `real` shares none with `training`.  `shown` is the classifier's input for each set; `scores`
    trains on real and other patches and scores how real each test patch looks: [N], or [efforts, N] for a family of
    metrics.  `named` are their keys and names.
    """
    areas, chances, tests = [], [], folds(other, real)
    trains = [(shown[1], shown[2][train]) for train, _, _ in tests]
    inputs = [(shown[0][rows], shown[2][test]) for _, test, rows in tests]
    for (_, test, rows), found in zip(tests, run(scores, trains, inputs), strict=True):
        efforts = list(zip(*map(np.atleast_2d, found), strict=True))
        pooled = [np.concatenate(each) for each in efforts]
        # Wider groups, because overlapping patches on both sides of a border have similar scores: of equal sets cut
        # from two volumes, 3 % differ significantly with groups of three patches, 8 % with groups of two.
        groups = real.groups(3)[rows], other.groups(3)[test]
        by_chance = [[area_under_curve(p[side], p[~side]) for p in pooled] for side in permutations(*groups)]
        areas.append([area_under_curve(*each) for each in efforts])
        chances.append(family_p(areas[-1], by_chance))
    metrics, weak = [], "" if len(other) >= _ENOUGH else f"; {len(other)} samples are a weak test"
    for column, (key, name) in enumerate(named):
        area = float(np.mean([each[column] for each in areas])) if areas else math.nan
        known = [each[column] for each in chances if math.isfinite(each[column])]
        note = f"a lower bound{weak}" if known else "too few disjoint patches"
        p = min(1.0, len(known) * min(known)) if known else math.nan
        metrics.append(Metric(key, name, {}, area, 0.5, p, note))
    return metrics


def folds(other: PatchSet, real: PatchSet) -> list[tuple[Ints, Ints, Ints]]:
    """Return rows of `other` to train on, rows of `other` to test on, and real rows to test on, for each fold.

    Test rows, also real ones, share no voxel with training rows: a patch generated from held-out labels shows the same
    structures as the real patch.
    """
    found = []
    for k in (0, 1):
        train, test = np.flatnonzero(other.side == k), np.flatnonzero(other.side == 1 - k)
        rows = np.flatnonzero(~share_voxels(real, other.rows(train)).any(1))
        if min(len(train), len(test), len(rows)) >= _LEAST_TEST:
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


def nearest_distances(regions: Sequence[Voxels], patches: Voxels, augment: AugmentConfig) -> Floats:
    """Return the share of each patch's variance that the most similar part of the training volume leaves unexplained.

    Compares at every shift and in every symmetry of training, regardless of brightness and contrast: all positions at
    some points of a downsampled copy, then the best ones at points of the voxels, at nearby shifts.  `regions` are
    boxes of training voxels, no smaller than a patch.  Returns [N]; 0 = a copy, NaN = the patch has no texture.
    """
    regions, patches = [region.clip(-_DARKEST, _DARKEST) for region in regions], patches.clip(-_DARKEST, _DARKEST)
    rng, shape, found = np.random.default_rng(0), patches.shape[1:], np.full(len(patches), math.nan)
    coarse = next((c for c in range(1, 8) if sum(region.size for region in regions) <= _POSITIONS * c**3), 8)
    factors = [max(1, min(coarse, size // 4)) for size in shape]
    window = [size // factor for size, factor in zip(shape, factors, strict=True)]
    fine_points = rng.integers(0, np.array(shape)[:, None], (3, _POINTS))
    coarse_points = rng.permutation(np.indices(window).reshape(3, -1), axis=1)[:, :_POINTS]
    flips = [axes for n in range(4) for axes in itertools.combinations((0, 1, 2), n)] if augment.flip else [()]
    turns = range(4 if augment.rot90 else 1)  # two quarter turns mirror y and x
    symmetries = [(axes, turn) for axes in flips for turn in turns if not (2 in axes and augment.rot90)]

    def turned(patch: Voxels) -> list[Voxels]:
        """Return the patch in every symmetry, as views: copies would take gigabytes."""
        return [np.rot90(np.flip(patch, axes), turn, (1, 2)) for axes, turn in symmetries]

    textured = [row for row, patch in enumerate(patches) if patch.std() >= _LEAST_STD]
    wanted = [each for row in textured for each in turned(_pooled(patches[row], factors))]
    # Keep the best of each chunk of positions: layers look alike along their length, so one global best may be wrong.
    runs = list[tuple[int, Tensor, Ints]]()  # region, fit and position of the best
    for number, picture in enumerate(_pooled(region, factors) for region in regions if wanted):
        every = _positions([(0, size - part + 1) for size, part in zip(picture.shape, window, strict=True)])
        for first in range(0, len(every), _CHUNK):
            best = _fits(picture, every[first : first + _CHUNK], coarse_points, wanted).max(0)
            runs.append((number, best.values, every[first + best.indices.numpy()]))
    for n, row in enumerate(textured):
        shown, columns = turned(patches[row]), slice(n * len(symmetries), (n + 1) * len(symmetries))
        fits = torch.stack([values[columns] for _, values, _ in runs])
        nearest = 0.0
        for flat in fits.flatten().topk(min(_CANDIDATES, fits.numel())).indices.tolist():
            run, way = divmod(flat, len(symmetries))
            number, _, places = runs[run]
            last = np.subtract(regions[number].shape, shape)
            low = np.clip(places[columns][way] * factors - factors, 0, last)
            high = np.minimum((places[columns][way] + 1) * factors, last) + 1
            around = _positions(list(zip(low, high, strict=True)))
            nearest = max(nearest, float(_fits(regions[number], around, fine_points, [shown[way]]).max()))
        found[row] = 1 - nearest**2
    return found


def _pooled(voxels: Voxels, factors: list[int]) -> Voxels:
    return avg_pool3d(torch.from_numpy(voxels)[None], factors)[0].numpy()


def _positions(ends: Sequence[tuple[int, int]]) -> Ints:
    """Return all positions in the half-open ranges `ends`: [N, 3]."""
    return np.stack(np.meshgrid(*(np.arange(*pair) for pair in ends), indexing="ij"), -1).reshape(-1, 3)


def _fits(voxels: Voxels, places: Ints, points: Ints, wanted: Sequence[Voxels]) -> Tensor:
    """Return the correlation of voxels at `points` relative to each position with each wanted patch: [N, wanted]."""

    def standardized(rows: Tensor) -> Tensor:
        """Subtract the mean and scale to length 1; rows with hardly any texture become 0."""
        rows = rows - rows.mean(1, keepdim=True)
        length = rows.norm(dim=1, keepdim=True)
        return torch.where(length < _LEAST_STD * math.sqrt(rows.shape[1]) / 2, 0.0, rows / length.clamp(min=1e-9))

    starts, offsets = (torch.from_numpy(np.ravel_multi_index(tuple(p), voxels.shape)) for p in (places.T, points))
    found = standardized(torch.from_numpy(voxels.ravel())[starts[:, None] + offsets])
    return found @ standardized(torch.from_numpy(np.stack([part[tuple(points)] for part in wanted]))).T
