"""Sets of patches -> metrics, each beside its floor: the metric of training patches in place of generated ones.

A model that has learned the distribution perfectly comes out at the floor.  Whether a metric is beyond it is a
permutation test: how often is it as far if patches change places at random?  Patches that share voxels change places
together.  What cannot be measured is NaN, and then the reading of the metric is "unknown".  Pure.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
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
from vesuvius.generate.evaluate.features import kernel_scores, patch_features
from vesuvius.generate.evaluate.patches import PatchSet, RealPatches, disjoint_from
from vesuvius.generate.evaluate.two_sample import area_under_curve, two_sample_scores
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
"""How often some texture metric of a perfect model is said to be beyond the floor."""
_EXCHANGES = 499
_LEAST_TEST = 8
_ENOUGH = 256  # samples that a classifier needs, about, to learn what is wrong with them
COPIES = "copies"
_NEAR = 0.5
_PLACES, _RUN = 2**19, 2**13  # places of training that are compared, about, and how many of them at a time
_POINTS, _CANDIDATES = 256, 32
_LEAST_STD = 0.05  # of model values: below it there is no texture to compare
_DARKEST = 1.2  # air far below the material would decide alone


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
    """One line of the table; NaN = not known."""

    key: str
    name: str
    values: dict[str, float]  # of `generated`, `held_out` and `training` patches, where each set has one
    distance: float  # of generated from held-out patches
    floor: float | None  # of training from held-out patches; None = generated are compared with held-out ones directly
    p: float  # how often the metric is as far by chance; of a texture metric, some of all of them
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
class Comparison:
    """All metrics of an evaluation."""

    metrics: tuple[Metric, ...]
    textures: dict[str, Texture]  # of each set, for the curves


def compare(generated: PatchSet, real: RealPatches, augment: AugmentConfig, classifier_steps: int) -> Comparison:
    """Measure everything.

    Args:
        real: `training` takes the place of generated patches in the floor; of `sides` the classifier learns real
            patches from the first, and is tested on the other.  (Held-out patches may show other things, and the AUC of
            a perfect model would not be 0.5.)
        augment: the symmetries that training draws, in which copies are looked for.
    """
    held_out = real.held_out
    sets = {"generated": generated, "held_out": held_out, "training": real.training}
    # samples under held-out conditions are compared with what is there
    taught, unseen = (real.sides[0], held_out) if generated.is_conditional else real.sides
    # One thread per core, each with small tensors of its own, is twice as fast as torch's threads.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            compared = unseen, taught, generated
            train = partial(two_sample_scores, steps=classifier_steps)
            auc = pool.submit(classifier_auc, *compared, [each.values for each in compared], train)
            nearest = [
                pool.submit(nearest_distances, real.searched, each.values, augment) for each in (generated, held_out)
            ]
            parts = {name: list(pool.map(measure_patch, each.values)) for name, each in sets.items()}
            features = [np.stack(list(pool.map(patch_features, each.values))) for each in compared]
        second = classifier_auc(*compared, features, kernel_scores, ("features_auc", "AUC of fixed features"))
        metrics = _textures(parts, generated.groups(), real.training.groups())
    finally:
        torch.set_num_threads(threads)
    copies = _copies(nearest[0].result(), nearest[1].result(), generated.groups(), held_out.groups())
    return Comparison(
        (*metrics, auc.result(), second, copies), {name: combine_textures(each) for name, each in parts.items()}
    )


def permutations(one: Ints, other: Ints) -> Iterator[NDArray[np.bool_]]:
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


def permutation_p(found: float, by_chance: list[float]) -> float:
    """The share of permutations that come out as large as what was found; NaN where that is not known."""
    known = np.array(by_chance)[np.isfinite(by_chance)]
    if not math.isfinite(found) or 2 * len(known) < _EXCHANGES:
        return math.nan
    return float((1 + np.count_nonzero(known >= found)) / (1 + len(known)))


def _textures(parts: dict[str, list[PatchTexture]], generated: Ints, training: Ints) -> list[Metric]:
    """Metrics of patch textures.

    Args:
        generated, training: groups of these patches.
    """
    whole = {name: combine_textures(each) for name, each in parts.items()}
    real, pooled = whole["held_out"], [*parts["generated"], *parts["training"]]
    swapped = [
        tuple(combine_textures([pooled[row] for row in np.flatnonzero(rows)]) for rows in (side, ~side))
        for side in permutations(generated, training)
    ]
    metrics = []
    for key, (name, far) in _TEXTURES.items():
        distance, floor = far(whole["generated"], real), far(whole["training"], real)
        p = len(_TEXTURES) * permutation_p(
            distance - floor, [far(one, real) - far(other, real) for one, other in swapped]
        )
        values = {of: float(getattr(each, key)) for of, each in whole.items()} if hasattr(real, key) else {}
        metrics.append(Metric(key, name, values, distance, floor, min(p, 1.0) if math.isfinite(p) else p))
    return metrics


def classifier_auc(
    real: PatchSet,
    training: PatchSet,
    other: PatchSet,
    shown: Sequence[NDArray[Any]],
    scores: Callable[[tuple[NDArray[Any], NDArray[Any]], tuple[NDArray[Any], ...]], tuple[Floats, ...]],
    named: tuple[str, str] = ("auc", "classifier AUC"),
) -> Metric:
    """Two classifiers, each trained on one side of `other` and tested on the other side and on `real` patches.

    The AUC is the mean of both, and p that of the smaller one for two tries; NaN where `other` has no two sides that
    share no voxel.  `real` shares none with `training`.

    Args:
        shown: what the classifiers see of the patches of each set.
        scores: of real and other patches to train on, how real each of some tests looks.
        named: key and name of the metric.
    """
    areas, chances = [], []
    for train, test, rows in folds(other, real):
        found = scores((shown[1], shown[2][train]), (shown[0][rows], shown[2][test]))
        pooled = np.concatenate(found)
        # Wider groups, as patches that overlap across the border of two have like scores, too: of equal sets that are
        # cut from two volumes, 3 % are told apart with these, 8 % with those of twice a patch.
        groups = real.groups(3)[rows], other.groups(3)[test]
        by_chance = [area_under_curve(pooled[side], pooled[~side]) for side in permutations(*groups)]
        areas.append(area_under_curve(*found))
        chances.append(permutation_p(areas[-1], by_chance))
    area, known = float(np.mean(areas)) if areas else math.nan, [p for p in chances if math.isfinite(p)]
    if not known:
        return Metric(*named, {}, area, 0.5, math.nan, "too few patches share no voxel")
    note = "" if len(other) >= _ENOUGH else f"{len(other)} samples are a weak test"
    return Metric(*named, {}, area, 0.5, min(1.0, len(known) * min(known)), note)


def folds(other: PatchSet, real: PatchSet) -> list[tuple[Ints, Ints, Ints]]:
    """Rows of `other` to train on and to test on, and the real rows to test on; neither shares a voxel with the first.

    Patches that were drawn under conditions of held-out voxels show what is there: a classifier that has learned that
    as generated would take the real patch for generated, too.
    """
    found = []
    for k in (0, 1):
        train, test = np.flatnonzero(other.side == k), np.flatnonzero(other.side == 1 - k)
        rows = np.flatnonzero(disjoint_from(real, other.rows(train)))
        if min(len(train), len(test), len(rows)) >= _LEAST_TEST:
            found.append((train, test, rows))
    return found


def _copies(generated: Floats, held_out: Floats, groups: Ints, held_out_groups: Ints) -> Metric:
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
    p = permutation_p(distance, [share(pooled[s]) - share(pooled[~s]) for s in permutations(groups, held_out_groups)])
    return Metric(COPIES, "share of copies", values, distance, None, p)


def nearest_distances(regions: Sequence[Voxels], patches: Voxels, augment: AugmentConfig) -> Floats:
    """Of each patch, the share of its variance that the most similar place of training leaves unexplained.

    A place counts at every shift and in every symmetry that training draws, whatever its brightness and contrast.  All
    places are compared at some points of a coarse picture, and the best ones at points of the voxels, at shifts nearby.

    Args:
        regions: model values of boxes that training draws from, each [Z, Y, X] and no smaller than a patch.

    Returns:
        [N]; 0: the patch is a copy; 1: nothing is like it; NaN: it has no texture.
    """
    regions, patches = [region.clip(-_DARKEST, _DARKEST) for region in regions], patches.clip(-_DARKEST, _DARKEST)
    rng, shape, found = np.random.default_rng(0), patches.shape[1:], np.full(len(patches), math.nan)
    coarse = next((c for c in range(1, 8) if sum(region.size for region in regions) <= _PLACES * c**3), 8)
    factors = [max(1, min(coarse, size // 4)) for size in shape]
    window = [size // factor for size, factor in zip(shape, factors, strict=True)]
    fine_points = rng.integers(0, np.array(shape)[:, None], (3, _POINTS))
    coarse_points = rng.permutation(np.indices(window).reshape(3, -1), axis=1)[:, :_POINTS]
    flips = [axes for n in range(4) for axes in itertools.combinations((0, 1, 2), n)] if augment.flip else [()]
    turns = range(4 if augment.rot90 else 1)  # two quarter turns mirror y and x
    symmetries = [(axes, turn) for axes in flips for turn in turns if not (2 in axes and augment.rot90)]

    def turned(patch: Voxels) -> list[Voxels]:
        """The patch in every symmetry: views, because copies would take gigabytes."""
        return [np.rot90(np.flip(patch, axes), turn, (1, 2)) for axes, turn in symmetries]

    textured = [row for row, patch in enumerate(patches) if patch.std() >= _LEAST_STD]
    wanted = [each for row in textured for each in turned(_pooled(patches[row], factors))]
    # Of each run of places the best: layers look alike all along, and one best place of all would be a wrong one.
    runs = list[tuple[int, Tensor, Ints]]()  # region, fits and places of the best
    for number, picture in enumerate(_pooled(region, factors) for region in regions if wanted):
        every = _places([(0, size - part + 1) for size, part in zip(picture.shape, window, strict=True)])
        for first in range(0, len(every), _RUN):
            best = _fits(picture, every[first : first + _RUN], coarse_points, wanted).max(0)
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
            around = _places(list(zip(low, high, strict=True)))
            nearest = max(nearest, float(_fits(regions[number], around, fine_points, [shown[way]]).max()))
        found[row] = 1 - nearest**2
    return found


def _pooled(voxels: Voxels, factors: list[int]) -> Voxels:
    """Means of boxes; what is left over at the ends is dropped."""
    pooled: Voxels = avg_pool3d(torch.from_numpy(voxels)[None], factors)[0].numpy()
    return pooled


def _places(ends: Sequence[tuple[int, int]]) -> Ints:
    """[N, 3]: all places from the first of each pair to before the second."""
    return np.stack(np.meshgrid(*(np.arange(*pair) for pair in ends), indexing="ij"), -1).reshape(-1, 3)


def _fits(voxels: Voxels, places: Ints, points: Ints, wanted: Sequence[Voxels]) -> Tensor:
    """How the voxels at some points beside each place correlate with those of each wanted part: [places, wanted]."""

    def standardised(rows: Tensor) -> Tensor:
        """Without its mean and of length 1; 0 where it has hardly any texture."""
        rows = rows - rows.mean(1, keepdim=True)
        length = rows.norm(dim=1, keepdim=True)
        return torch.where(length < _LEAST_STD * math.sqrt(rows.shape[1]) / 2, 0.0, rows / length.clamp(min=1e-9))

    starts, offsets = (torch.from_numpy(np.ravel_multi_index(tuple(p), voxels.shape)) for p in (places.T, points))
    found = standardised(torch.from_numpy(voxels.ravel())[starts[:, None] + offsets])
    return found @ standardised(torch.from_numpy(np.stack([part[tuple(points)] for part in wanted]))).T
