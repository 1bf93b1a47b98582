"""Sets of patches -> figures, each beside its floor: the figure of training patches in place of generated ones.

A model that has learned the distribution perfectly comes out at the floor.  Whether a figure is beyond it is a
permutation test: how often is it as far if patches change places at random?  Patches that share voxels change places
together.  What cannot be measured is NaN, and then the reading of the figure is "unknown".  Pure.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from vesuvius.generate.evaluate.memorisation import TrainingSearch
from vesuvius.generate.evaluate.patches import PatchSet, apart_from, cells
from vesuvius.generate.evaluate.two_sample import area_under_curve, two_sample_scores
from vesuvius.training.validation.texture import (
    PatchTexture,
    Texture,
    correlation_distance,
    histogram_distance,
    joint_texture,
    measure_patch,
    spectrum_distance_db,
)

Ints = NDArray[np.int64]
Scores = Callable[..., tuple[NDArray[np.float64], ...]]

LEVEL = 0.05
"""How often some texture figure of a perfect model is said to be beyond the floor."""
_EXCHANGES = 499
_LEAST_TEST = 8
_ENOUGH = 256  # samples that a classifier needs, about, to learn what is wrong with them
_NEAR, _COPIES = 0.5, 0.05
"""A patch counts as a copy below this share of the distance that 5 % of held-out patches are below."""
_TEXTURES = {
    "air": "share of air",
    "means_std": "std of patch means",
    "planarity": "planarity",
    "histogram_distance": "histogram distance",
    "spectrum_distance_db": "spectrum distance, dB",
    "correlation_distance": "correlation distance",
}
_DISTANCES: dict[str, Callable[[Texture, Texture], float]] = {
    "histogram_distance": histogram_distance,
    "spectrum_distance_db": spectrum_distance_db,
    "correlation_distance": correlation_distance,
}


@dataclass(frozen=True)
class Figure:
    """One line of the table; NaN = not known."""

    key: str
    name: str
    values: dict[str, float]  # of `generated`, `held_out` and `training` patches, where each set has one
    distance: float  # of generated from held-out patches
    floor: float | None  # of training from held-out patches; None = generated are compared with held-out ones directly
    p: float  # how often the figure is as far by chance; of a texture figure, some of all of them
    note: str = ""

    @property
    def beyond(self) -> bool | None:
        """Whether the distance is farther than chance allows; None = not known."""
        return None if math.isnan(self.p) else self.p < LEVEL

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
        generated, held_out = (self.copies.get(of, math.nan) for of in ("generated", "held_out"))
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
    # samples under held-out conditions are compared with what is there
    taught, unseen = (sides[0], held_out) if generated.is_conditional else sides
    # One thread per core, each with small tensors of its own, is twice as fast as torch's threads.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            auc = pool.submit(classifier_auc, unseen, taught, generated, steps=classifier_steps)
            nearest = pool.submit(_nearest, search, generated, held_out)
            parts = {name: list(pool.map(measure_patch, each.values)) for name, each in sets.items()}
        figures = (*_textures(parts, generated.groups, training.groups), auc.result())
    finally:
        torch.set_num_threads(threads)
    near, distances, copies = nearest.result()
    return Judgement((*figures, near), {n: joint_texture(each) for n, each in parts.items()}, distances, copies)


def exchanges(one: Ints, other: Ints) -> Iterator[NDArray[np.bool_]]:
    """Two sets whose groups change places at random, as many groups on each side as before.

    Args:
        one, other: the group of each patch of a set; those of a group stay together.

    Yields:
        bool [len(one) + len(other)]: which patches of both are on the first side.  Nothing where there are too few
        groups for any of it to be rarer than `LEVEL`.
    """
    first = np.unique(one, return_inverse=True)[1]
    count = int(first.max()) + 1
    group = np.concatenate([first, np.unique(other, return_inverse=True)[1] + count])
    total, rng = int(group.max()) + 1, np.random.default_rng(0)
    if math.comb(total, count) * LEVEL > 2:
        for _ in range(_EXCHANGES):
            yield rng.permutation(total)[group] < count


def chance(found: float, by_chance: list[float]) -> float:
    """The share of exchanges that come out as large as what was found; NaN where that is not known."""
    known = np.array(by_chance)[np.isfinite(by_chance)]
    if not math.isfinite(found) or 2 * len(known) < _EXCHANGES:
        return math.nan
    return float((1 + np.count_nonzero(known >= found)) / (1 + len(known)))


def _textures(parts: dict[str, list[PatchTexture]], generated: Ints, training: Ints) -> list[Figure]:
    """Figures of patch textures.

    Args:
        generated, training: groups of these patches.
    """
    whole = {name: joint_texture(each) for name, each in parts.items()}
    real, pooled = whole["held_out"], [*parts["generated"], *parts["training"]]
    swapped = [
        tuple(joint_texture([pooled[row] for row in np.flatnonzero(rows)]) for rows in (side, ~side))
        for side in exchanges(generated, training)
    ]
    figures = []
    for key, name in _TEXTURES.items():
        far = _DISTANCES.get(key) or partial(_difference, key)
        distance, floor = far(whole["generated"], real), far(whole["training"], real)
        p = len(_TEXTURES) * chance(distance - floor, [far(one, real) - far(other, real) for one, other in swapped])
        values = {} if key in _DISTANCES else {of: float(getattr(each, key)) for of, each in whole.items()}
        figures.append(Figure(key, name, values, distance, floor, min(p, 1.0) if math.isfinite(p) else p))
    return figures


def _difference(key: str, one: Texture, other: Texture) -> float:
    return abs(float(getattr(one, key)) - float(getattr(other, key)))


def classifier_auc(
    real: PatchSet, training: PatchSet, other: PatchSet, *, steps: int, scores_of: Scores = two_sample_scores
) -> Figure:
    """Two classifiers, each trained on one side of `other` and tested on the other side and on `real` patches.

    The AUC is the mean of both, and p that of the smaller one for two tries; NaN where `other` has no two sides that
    share no voxel.  `real` shares none with `training`.
    """
    areas, chances = [], []
    for train, test, rows in folds(other, real):
        tests = (real.values[rows], other.values[test])
        scores = scores_of((training.values, other.values[train]), tests, steps=steps)
        pooled = np.concatenate(scores)
        by_chance = [
            area_under_curve(pooled[side], pooled[~side]) for side in exchanges(_wide(real)[rows], _wide(other)[test])
        ]
        areas.append(area_under_curve(*scores))
        chances.append(chance(areas[-1], by_chance))
    area, known = float(np.mean(areas)) if areas else math.nan, [p for p in chances if math.isfinite(p)]
    if not known:
        return Figure("auc", "classifier AUC", {}, area, 0.5, math.nan, "too few patches share no voxel")
    note = "" if len(other) >= _ENOUGH else f"{len(other)} samples are a weak test"
    return Figure("auc", "classifier AUC", {}, area, 0.5, min(1.0, len(known) * min(known)), note)


def _wide(patches: PatchSet) -> Ints:
    """Wider groups, as patches that overlap across the border of two have like scores, too.

    Of equal sets that are cut from two volumes, 3 % are told apart with these, 8 % with those of twice a patch.
    """
    if patches.places is None:
        return patches.groups
    return cells(patches.places, [3 * size for size in patches.values.shape[1:]])


def folds(other: PatchSet, real: PatchSet) -> list[tuple[Ints, Ints, Ints]]:
    """Rows of `other` to train on and to test on, and the real rows to test on; neither shares a voxel with the first.

    Patches that were drawn under conditions of held-out voxels show what is there: a classifier that has learned that
    as generated would take the real patch for generated, too.
    """
    found = []
    for k in (0, 1):
        train, test = np.flatnonzero(other.side == k), np.flatnonzero(other.side == 1 - k)
        rows = np.flatnonzero(apart_from(real, other.rows(train)))
        if min(len(train), len(test), len(rows)) >= _LEAST_TEST:
            found.append((train, test, rows))
    return found


def _nearest(
    search: TrainingSearch, generated: PatchSet, held_out: PatchSet
) -> tuple[Figure, dict[str, NDArray[np.float64]], dict[str, float]]:
    """Median distance of generated and of held-out patches to the nearest place of training."""
    sets = {"generated": generated, "held_out": held_out}
    distances = {of: search.distances(list(each.values)) for of, each in sets.items()}
    copies = dict.fromkeys(sets, math.nan)
    known = distances["held_out"][np.isfinite(distances["held_out"])]
    if len(known):
        limit = _NEAR * float(np.quantile(known, 0.05))
        for of, found in distances.items():
            textured = found[np.isfinite(found)]
            copies[of] = float((textured < limit).mean()) if len(textured) else math.nan
    values = {of: _median(found) for of, found in distances.items()}
    distance, pooled = values["generated"] - values["held_out"], np.concatenate(list(distances.values()))
    p = chance(
        abs(distance),
        [abs(_median(pooled[s]) - _median(pooled[~s])) for s in exchanges(generated.groups, held_out.groups)],
    )
    shown = {of: "unknown" if math.isnan(share) else f"{share:.0%}" for of, share in copies.items()}
    note = f"copies: {shown['generated']}, of held-out ones {shown['held_out']}"
    return Figure("nearest", "nearest training place", values, distance, None, p, note), distances, copies


def _median(found: NDArray[np.float64]) -> float:
    known = found[np.isfinite(found)]
    return float(np.median(known)) if len(known) else math.nan
