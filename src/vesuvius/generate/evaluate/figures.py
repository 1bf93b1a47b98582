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
from dataclasses import dataclass

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
Floats = NDArray[np.float64]

LEVEL = 0.05
"""How often some texture figure of a perfect model is said to be beyond the floor."""
_EXCHANGES = 499
_LEAST_TEST = 8
_ENOUGH = 256  # samples that a classifier needs, about, to learn what is wrong with them
_NEAR = 0.5
COPIES = "copies"


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
            nearest = [pool.submit(search.distances, list(each.values)) for each in (generated, held_out)]
            parts = {name: list(pool.map(measure_patch, each.values)) for name, each in sets.items()}
        figures = _textures(parts, generated.groups, training.groups)
    finally:
        torch.set_num_threads(threads)
    distances = {"generated": nearest[0].result(), "held_out": nearest[1].result()}
    copies = _copies(distances["generated"], distances["held_out"], generated.groups, held_out.groups)
    textures = {name: joint_texture(each) for name, each in parts.items()}
    return Judgement((*figures, auc.result(), copies), textures, distances)


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
    for key, (name, far) in _TEXTURES.items():
        distance, floor = far(whole["generated"], real), far(whole["training"], real)
        p = len(_TEXTURES) * chance(distance - floor, [far(one, real) - far(other, real) for one, other in swapped])
        values = {of: float(getattr(each, key)) for of, each in whole.items()} if hasattr(real, key) else {}
        figures.append(Figure(key, name, values, distance, floor, min(p, 1.0) if math.isfinite(p) else p))
    return figures


def classifier_auc(real: PatchSet, training: PatchSet, other: PatchSet, *, steps: int) -> Figure:
    """Two classifiers, each trained on one side of `other` and tested on the other side and on `real` patches.

    The AUC is the mean of both, and p that of the smaller one for two tries; NaN where `other` has no two sides that
    share no voxel.  `real` shares none with `training`.
    """
    areas, chances = [], []
    for train, test, rows in folds(other, real):
        tests = (real.values[rows], other.values[test])
        scores = two_sample_scores((training.values, other.values[train]), tests, steps=steps)
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


def _copies(generated: Floats, held_out: Floats, groups: Ints, held_out_groups: Ints) -> Figure:
    """The share of patches whose nearest place of training is so near that they are copies of it, by distances.

    A copy is below half of what 5 % of held-out patches are below.
    """
    known, pooled = held_out[np.isfinite(held_out)], np.concatenate([generated, held_out])
    limit = _NEAR * float(np.quantile(known, 0.05)) if len(known) else math.nan

    def share(found: Floats) -> float:
        textured = found[np.isfinite(found)]
        return float((textured < limit).mean()) if len(textured) and len(known) else math.nan

    values = {"generated": share(generated), "held_out": share(held_out)}
    distance = values["generated"] - values["held_out"]
    p = chance(distance, [share(pooled[s]) - share(pooled[~s]) for s in exchanges(groups, held_out_groups)])
    return Figure(COPIES, "share of copies", values, distance, None, p)
