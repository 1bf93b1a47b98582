"""Sets of patches -> figures, each with an interval and a floor: the figure of training patches in place of generated.

A model that has learned the distribution perfectly comes out at the floor.  Whether a figure is beyond it is a
permutation test: would it be as far from held-out patches if generated and training patches changed places?  Intervals
are of 95 %, from 200 sets drawn with replacement (bootstrap).  In both, patches that share voxels stay together.  What
cannot be measured is NaN, and then the reading of the figure is "unknown".  Pure.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from vesuvius.generate.evaluate.memorisation import TrainingSearch
from vesuvius.generate.evaluate.patches import PatchSet, disjoint_sides
from vesuvius.generate.evaluate.two_sample import pairs_in_order, two_sample_scores
from vesuvius.training.validation.texture import (
    PatchTexture,
    Texture,
    correlation_distance,
    histogram_distance,
    joint_texture,
    measure_patch,
    spectrum_distance_db,
)

Weights = NDArray[np.int64]
Scores = Callable[..., tuple[NDArray[np.float64], ...]]

_DRAWS, _EXCHANGES = 200, 499
LEVEL = 0.05
"""How often some texture figure of a perfect model is said to be beyond the floor."""
_LEAST_TEST = 8
_NARROW = 6  # by this over the number of groups the drawn sets vary too little (measured, 20 to 60 groups)
_UNKNOWN = float("nan")
_ENOUGH = 256  # samples that a classifier needs, about, to learn what is wrong with them
_NEAR = 0.5
"""A patch counts as a copy below this share of the distance that 5 % of held-out patches are below."""
_COPIES = 0.05


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    key: str
    name: str
    values: dict[str, Estimate]  # of `generated`, `held_out` and `training` patches, where each set has one
    distance: Estimate  # of generated from held-out patches: a difference where sets have values
    floor: Estimate | None  # of training patches from held-out ones; None where there is none
    note: str = ""
    # of a texture figure, how often one of all of them is as far beyond the floor by chance; NaN = not known
    p: float | None = None

    @property
    def beyond(self) -> bool | None:
        """Whether the distance is farther than the floor, by p or by both intervals; None = not known."""
        if self.p is not None:
            return None if math.isnan(self.p) else self.p < LEVEL
        floor = self.floor or Estimate(0.0, 0.0, 0.0)
        if not all(map(math.isfinite, (self.distance.low, self.distance.high, floor.low, floor.high))):
            return None
        return self.distance.low > max(0.0, floor.high) or self.distance.high < min(0.0, floor.low)

    @property
    def reading(self) -> str:
        """In words: of the table and of the summary alike."""
        if self.beyond is None:
            return "unknown"
        if self.floor is None:
            return "unlike held out" if self.beyond else "as held out"
        return "beyond the floor" if self.beyond else "at the floor"


@dataclass(frozen=True, eq=False)
class Judgement:
    """All figures of an evaluation."""

    figures: tuple[Figure, ...]
    textures: dict[str, Texture]  # of each set, for the curves
    # nearest distance of each generated and each held-out patch; NaN without texture
    distances: dict[str, NDArray[np.float64]]
    # share of generated and of held-out patches that are so near to a place of training; NaN without texture
    copies: dict[str, float] = field(default_factory=dict)

    @property
    def memorised(self) -> bool | None:
        """Whether more patches repeat training voxels than chance allows; None = not known."""
        generated, held_out = (self.copies.get(of, _UNKNOWN) for of in ("generated", "held_out"))
        if math.isnan(generated) or math.isnan(held_out):
            return None
        return generated > max(_COPIES, 2 * held_out)


def judge(
    generated: PatchSet,
    held_out: PatchSet,
    training: PatchSet,
    sides: tuple[PatchSet, PatchSet],
    search: TrainingSearch,
    classifier_steps: int,
) -> Judgement:
    """Measure everything.

    Args:
        training: takes the place of generated patches in the floor.
        sides: patches of training that share no voxel: what the classifier learns real patches from, and what it is
            tested on.  (Held-out patches may show other things, and the AUC of a perfect model would not be 0.5.)
        search: finds nearest places of training.
    """
    sets = {"generated": generated, "held_out": held_out, "training": training}
    draws = {
        name: [_drawn(each.groups, place * _DRAWS + n) for n in range(_DRAWS)]
        for place, (name, each) in enumerate(sets.items())
    }
    # samples under held-out conditions are compared with what is there
    taught, unseen = (sides[0], held_out) if generated.half is not None else sides
    # One thread per core, each with small tensors of its own, is twice as fast as torch's threads.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            auc = pool.submit(_auc, unseen, taught, generated, steps=classifier_steps)
            nearest = pool.submit(_nearest, search, sets, draws)
            parts = {name: list(pool.map(measure_patch, each.values)) for name, each in sets.items()}
        found = auc.result()
    finally:
        torch.set_num_threads(threads)
    near, distances, copies = nearest.result()
    note = "" if len(generated) >= _ENOUGH else f"{len(generated)} samples are a weak test"
    if math.isnan(found.value):
        note = "too few patches share no voxel"
    classifier = Figure("auc", "classifier AUC", {}, found, Estimate(0.5, 0.5, 0.5), note)
    groups = [generated.groups, training.groups]
    figures = [*_textures(parts, draws, groups), classifier, near]
    return Judgement(tuple(figures), {n: joint_texture(each) for n, each in parts.items()}, distances, copies)


def estimate(value: float, draws: Sequence[float]) -> Estimate:
    """The value with the spread of the draws around it; NaN where it is not finite, or hardly any draw is."""
    known = np.array([each for each in draws if np.isfinite(each)])
    if not math.isfinite(value) or 2 * len(known) < len(draws):
        return Estimate(_UNKNOWN, _UNKNOWN, _UNKNOWN)
    low, middle, high = np.quantile(known, [0.025, 0.5, 0.975])
    return Estimate(value, float(value + low - middle), float(value + high - middle))


def distance_estimate(value: float, draws: Sequence[float]) -> Estimate:
    """A distance without what chance adds to it, so that sets of few and of many patches can be compared.

    The square of the distance of two means grows by their variances, in expectation; drawing with replacement adds the
    same once more, and so says how much that is.
    """
    squares = np.square([each for each in draws if np.isfinite(each)])
    added = squares.mean() - value**2 if len(squares) else _UNKNOWN
    found = estimate(value**2 - added, np.square(draws).tolist())
    return Estimate(*(math.sqrt(max(each, 0.0)) if math.isfinite(each) else each for each in vars(found).values()))


def _drawn(groups: NDArray[np.int64], number: int) -> Weights:
    """How often each patch is in a set that is drawn with replacement, group by group."""
    count, rng = int(groups.max()) + 1, np.random.default_rng((0, number, len(groups)))
    times: Weights = rng.multinomial(count, np.full(count, 1 / count))[groups]
    return times if times.any() else np.ones_like(groups)


def _textures(
    parts: dict[str, list[PatchTexture]], draws: dict[str, list[Weights]], groups: Sequence[NDArray[np.int64]]
) -> list[Figure]:
    """Figures of patch textures.

    Args:
        groups: of generated and of training patches.
    """
    whole = {name: joint_texture(each) for name, each in parts.items()}
    again = {
        name: [joint_texture([each[i] for i in np.repeat(np.arange(len(each)), weights)]) for weights in draws[name]]
        for name, each in parts.items()
    }
    real = whole["held_out"]
    swapped = list(_exchanges(parts["generated"], parts["training"], groups))
    names = {
        "air": "share of air",
        "means_std": "std of patch means",
        "planarity": "planarity",
        "histogram_distance": "histogram distance",
        "spectrum_distance_db": "spectrum distance, dB",
        "correlation_distance": "correlation distance",
    }
    distances: dict[str, Callable[[Texture, Texture], float]] = {
        "histogram_distance": histogram_distance,
        "spectrum_distance_db": spectrum_distance_db,
        "correlation_distance": correlation_distance,
    }
    figures = []
    for key, name in names.items():
        far = distances.get(key) or partial(_difference, key)
        farther = np.array([far(one, real) - far(other, real) for one, other in swapped])
        p = _chance(far(whole["generated"], real) - far(whole["training"], real), farther)
        if key in distances:
            both = []
            for of in ("generated", "training"):
                spread = [far(a, b) for a, b in zip(again[of], again["held_out"], strict=True)]
                both.append(distance_estimate(far(whole[of], real), spread))
            figures.append(Figure(key, name, {}, both[0], both[1]))
        else:
            values = {of: getattr(texture, key) for of, texture in whole.items()}
            drawn = {of: [getattr(texture, key) for texture in textures] for of, textures in again.items()}
            figures.append(_levels(key, name, values, drawn))
        figures[-1] = replace(figures[-1], p=min(1.0, len(names) * p) if math.isfinite(p) else p)
    return figures


def _difference(key: str, one: Texture, other: Texture) -> float:
    return abs(float(getattr(one, key)) - float(getattr(other, key)))


def _exchanges(
    generated: list[PatchTexture], training: list[PatchTexture], groups: Sequence[NDArray[np.int64]]
) -> Iterator[tuple[Texture, Texture]]:
    """Two sets of as many groups of patches, but each with groups of both, at random."""
    pooled, rng = [*generated, *training], np.random.default_rng(0)
    first = int(groups[0].max()) + 1
    group = np.concatenate([groups[0], groups[1] + first])
    for _ in range(_EXCHANGES):
        place = rng.permutation(int(group.max()) + 1)[group]
        one, other = ([pooled[row] for row in np.flatnonzero(side)] for side in (place < first, place >= first))
        if one and other:
            yield joint_texture(one), joint_texture(other)


def _chance(found: float, by_chance: NDArray[np.float64]) -> float:
    """The share of draws that are as large; NaN where it is not finite, or most draws are not."""
    known = by_chance[np.isfinite(by_chance)]
    if not math.isfinite(found) or 2 * len(known) < _EXCHANGES:
        return _UNKNOWN
    return float((1 + np.count_nonzero(known >= found)) / (1 + len(known)))


def _levels(key: str, name: str, values: dict[str, float], drawn: dict[str, list[float]], note: str = "") -> Figure:
    """A figure that each set has: the difference of generated and held-out patches is its distance."""
    real, draws = values["held_out"], np.array(drawn["held_out"])
    distance = estimate(values["generated"] - real, list(np.array(drawn["generated"]) - draws))
    floor = None
    if "training" in values:
        floor = estimate(values["training"] - real, list(np.array(drawn["training"]) - draws))
    estimates = {of: estimate(value, drawn[of]) for of, value in values.items()}
    return Figure(key, name, estimates, distance, floor, note)


def _auc(
    real: PatchSet, training: PatchSet, other: PatchSet, *, steps: int, scores_of: Scores = two_sample_scores
) -> Estimate:
    """Two classifiers, each trained on one half of `other` and tested on the other half and on `real` patches.

    The mean of both; NaN where `other` has no two halves that share no voxel.  `real` shares none with `training`.
    """
    folds = []
    for train, test, rows in _folds(other, real):
        tests = (real.values[rows], other.values[test])
        scores = scores_of((training.values, other.values[train]), tests, steps=steps)
        folds.append((rows, test, pairs_in_order(*scores)))
    if not folds:
        return Estimate(_UNKNOWN, _UNKNOWN, _UNKNOWN)

    def auc(real_weights: Weights, other_weights: Weights) -> float:
        found = []
        for rows, test, pairs in folds:
            a, b = real_weights[rows], other_weights[test]
            found.append(a @ pairs @ b / (a.sum() * b.sum()) if a.any() and b.any() else np.nan)
        return float(np.mean(found))

    drawn = [auc(_drawn(real.groups, n), _drawn(other.groups, _DRAWS + n)) for n in range(_DRAWS)]
    found = estimate(auc(np.ones_like(real.groups), np.ones_like(other.groups)), drawn)
    wider = 1 + _NARROW / min(len(np.unique(each.groups)) for each in (real, other))
    low, high = (found.value + wider * (end - found.value) for end in (found.low, found.high))
    return Estimate(found.value, low, high)


def _folds(other: PatchSet, real: PatchSet) -> list[tuple[Weights, Weights, Weights]]:
    """Rows of `other` to train on and to test on, which share no voxel, and the real rows to test on.

    Patches that were drawn under conditions of held-out voxels show what is there: a classifier that has learned that
    as generated would take the real patch for generated, too.  It is tested on the other half of those voxels.
    """
    conditional = other.half is not None and real.half is not None
    side = other.half if conditional else disjoint_sides(other.places, other.values.shape[1:], len(other))
    assert side is not None
    folds = []
    for k in (0, 1):
        train, test = np.flatnonzero(side == k), np.flatnonzero(side == 1 - k)
        rows = np.flatnonzero(real.half == 1 - k) if conditional else np.arange(len(real))
        if min(len(train), len(test), len(rows)) >= _LEAST_TEST:
            folds.append((train, test, rows))
    return folds


def _nearest(
    search: TrainingSearch, sets: dict[str, PatchSet], draws: dict[str, list[Weights]]
) -> tuple[Figure, dict[str, NDArray[np.float64]], dict[str, float]]:
    """Median distance of generated and of held-out patches to the nearest place of training."""
    distances = {name: search.distances(list(sets[name].values)) for name in ("generated", "held_out")}
    values, drawn, copies = {}, {}, {}
    known = distances["held_out"][np.isfinite(distances["held_out"])]
    limit = _NEAR * float(np.quantile(known, 0.05)) if len(known) else _UNKNOWN
    for of, found in distances.items():
        rows = [np.repeat(found, times) for times in (np.ones(len(found), int), *draws[of])]
        medians = [float(np.nanmedian(row)) if np.isfinite(row).any() else float("nan") for row in rows]
        values[of], drawn[of] = medians[0], medians[1:]
        textured = found[np.isfinite(found)]
        copies[of] = float((textured < limit).mean()) if len(textured) and math.isfinite(limit) else _UNKNOWN
    shown = {of: "unknown" if math.isnan(share) else f"{share:.0%}" for of, share in copies.items()}
    note = f"copies: {shown['generated']}, of held-out ones {shown['held_out']}"
    return _levels("nearest", "nearest training place", values, drawn, note), distances, copies
