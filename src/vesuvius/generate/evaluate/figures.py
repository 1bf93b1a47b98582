"""Sets of patches -> figures, each with an interval and a floor: the figure of training patches in place of generated.

A model that has learned the distribution perfectly comes out at the floor.  Intervals are of 95 %, from 200 sets drawn
with replacement (bootstrap); patches that share voxels are drawn together.  Pure.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from vesuvius.generate.evaluate.diversity import ms_ssim, scales_of
from vesuvius.generate.evaluate.memorisation import TrainingSearch
from vesuvius.generate.evaluate.patches import PatchSet
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

_DRAWS = 200
_LEAST_TEST = 8
_PARTNERS = 3
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
    beyond: bool  # whether the distance is farther than the floor, by more than both intervals allow
    note: str = ""


@dataclass(frozen=True, eq=False)
class Judgement:
    """All figures of an evaluation."""

    figures: tuple[Figure, ...]
    textures: dict[str, Texture]  # of each set, for the curves
    # nearest distance of each generated and each held-out patch; NaN without texture
    distances: dict[str, NDArray[np.float64]]
    # share of generated and of held-out patches that are so near to a place of training
    copies: dict[str, float] = field(default_factory=dict)

    @property
    def memorised(self) -> bool:
        """Whether more patches repeat training voxels than chance allows."""
        return self.copies.get("generated", 0.0) > max(_COPIES, 2 * self.copies.get("held_out", 0.0))


def judge(generated: PatchSet, held_out: PatchSet, training: PatchSet, beside: PatchSet, search: TrainingSearch,
          classifier_steps: int) -> Judgement:  # fmt: skip
    """Measure everything.

    Args:
        training: what the classifier learns real patches from; `beside`: shares no voxel with it, and takes the place
            of generated patches in the floor.
        search: finds nearest places of training.
    """
    sets = {"generated": generated, "held_out": held_out, "training": beside}
    draws = {
        name: [_drawn(each.groups, place * _DRAWS + n) for n in range(_DRAWS)]
        for place, (name, each) in enumerate(sets.items())
    }
    auc = partial(_auc, held_out, training, steps=classifier_steps)
    # One thread per core, each with small tensors of its own, is twice as fast as torch's threads.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            aucs = [pool.submit(auc, each) for each in (generated, beside)]
            nearest = pool.submit(_nearest, search, sets, draws)
            diversity = pool.submit(_diversity, sets, draws)
            parts = {name: list(pool.map(measure_patch, each.values)) for name, each in sets.items()}
        found, floor = (each.result() for each in aucs)
    finally:
        torch.set_num_threads(threads)
    near, distances, copies = nearest.result()
    note = "" if len(generated) >= _ENOUGH else f"{len(generated)} samples are a weak test"
    classifier = Figure("auc", "classifier AUC", {}, found, floor, found.low > floor.high, note)
    figures = [*_textures(parts, draws), diversity.result(), classifier, near]
    return Judgement(tuple(figures), {n: joint_texture(each) for n, each in parts.items()}, distances, copies)


def estimate(value: float, draws: Sequence[float]) -> Estimate:
    """The value with the spread of the draws around it.

    Distances grow by the chance that each draw adds, so the draws' own median is taken off.
    """
    known = np.array([each for each in draws if np.isfinite(each)])
    if not len(known):
        return Estimate(value, float("nan"), float("nan"))
    low, middle, high = np.quantile(known, [0.025, 0.5, 0.975])
    return Estimate(value, float(value + low - middle), float(value + high - middle))


def _drawn(groups: NDArray[np.int64], number: int) -> Weights:
    """How often each patch is in a set that is drawn with replacement, group by group."""
    count, rng = int(groups.max()) + 1, np.random.default_rng((0, number, len(groups)))
    times: Weights = rng.multinomial(count, np.full(count, 1 / count))[groups]
    return times if times.any() else np.ones_like(groups)


def _textures(parts: dict[str, list[PatchTexture]], draws: dict[str, list[Weights]]) -> list[Figure]:
    whole = {name: joint_texture(each) for name, each in parts.items()}
    again = {
        name: [joint_texture([each[i] for i in np.repeat(np.arange(len(each)), weights)]) for weights in draws[name]]
        for name, each in parts.items()
    }
    figures = []
    for key, name in (("air", "share of air"), ("means_std", "std of patch means"), ("planarity", "planarity")):
        values = {of: getattr(texture, key) for of, texture in whole.items()}
        drawn = {of: [getattr(texture, key) for texture in textures] for of, textures in again.items()}
        figures.append(_levels(key, name, values, drawn))
    distances: dict[str, tuple[str, Callable[[Texture, Texture], float]]] = {
        "histogram_distance": ("histogram distance", histogram_distance),
        "spectrum_distance_db": ("spectrum distance, dB", spectrum_distance_db),
        "correlation_distance": ("correlation distance", correlation_distance),
    }
    for key, (name, far) in distances.items():
        both = []
        for of in ("generated", "training"):
            spread = [far(a, b) for a, b in zip(again[of], again["held_out"], strict=True)]
            found = estimate(far(whole[of], whole["held_out"]), spread)
            both.append(replace(found, low=max(0.0, found.low)))
        figures.append(Figure(key, name, {}, both[0], both[1], both[0].low > both[1].high))
    return figures


def _levels(key: str, name: str, values: dict[str, float], drawn: dict[str, list[float]], note: str = "") -> Figure:
    """A figure that each set has: the difference of generated and held-out patches is its distance."""
    real, draws = values["held_out"], np.array(drawn["held_out"])
    distance = estimate(values["generated"] - real, list(np.array(drawn["generated"]) - draws))
    floor = None
    beyond = distance.low > 0 or distance.high < 0
    if "training" in values:
        floor = estimate(values["training"] - real, list(np.array(drawn["training"]) - draws))
        beyond = beyond and (distance.low > floor.high or distance.high < floor.low)
    estimates = {of: estimate(value, drawn[of]) for of, value in values.items()}
    return Figure(key, name, estimates, distance, floor, beyond, note)


def _diversity(sets: dict[str, PatchSet], draws: dict[str, list[Weights]]) -> Figure:
    """Mean similarity of random pairs, each patch with a few other ones."""
    values, drawn = {}, {}
    for name, each in sets.items():
        order = np.random.default_rng(1).permutation(len(each))
        pairs = np.hstack([np.stack([order, np.roll(order, shift)]) for shift in range(1, _PARTNERS + 1)])
        scales = [scales_of(patch) for patch in each.values]
        alike = np.array([ms_ssim(scales[a], scales[b]) for a, b in pairs.T])
        values[name] = float(alike.mean())
        weights = [np.prod(times[pairs], axis=0) for times in draws[name]]
        drawn[name] = [float(alike @ w / w.sum()) if w.any() else float("nan") for w in weights]
    return _levels("ms_ssim", "MS-SSIM of two patches", values, drawn, "higher: less diverse")


def _auc(held_out: PatchSet, training: PatchSet, other: PatchSet, *, steps: int) -> Estimate:
    """Two classifiers, each trained on one half of `other` and tested on the other half and on held-out patches."""
    folds = []
    for train, test, real in _folds(other, held_out):
        tests = (held_out.values[real], other.values[test])
        scores = two_sample_scores((training.values, other.values[train]), tests, steps=steps)
        folds.append((real, test, pairs_in_order(*scores)))

    def auc(real_weights: Weights, other_weights: Weights) -> float:
        found = []
        for real, test, pairs in folds:
            a, b = real_weights[real], other_weights[test]
            found.append(a @ pairs @ b / (a.sum() * b.sum()) if a.any() and b.any() else np.nan)
        return float(np.mean(found))

    drawn = [auc(_drawn(held_out.groups, n), _drawn(other.groups, _DRAWS + n)) for n in range(_DRAWS)]
    return estimate(auc(np.ones_like(held_out.groups), np.ones_like(other.groups)), drawn)


def _folds(other: PatchSet, held_out: PatchSet) -> list[tuple[Weights, Weights, Weights]]:
    """Rows of `other` to train on and to test on, and the held-out rows to test on.

    Patches that were drawn under conditions of held-out voxels show what is there: a classifier that has learned that
    as generated would take the real patch for generated, too.  It is tested on the other half of those voxels.
    """
    if other.half is None or held_out.half is None:
        rows, half = np.arange(len(other)), np.arange(len(other)) % 2
        return [(rows[half == k], rows[half != k], np.arange(len(held_out))) for k in (0, 1)]
    folds = []
    for k in (0, 1):
        train, test = np.flatnonzero(other.half == k), np.flatnonzero(other.half == 1 - k)
        real = np.flatnonzero(held_out.half == 1 - k)
        if min(len(train), len(test), len(real)) >= _LEAST_TEST:
            folds.append((train, test, real))
    return folds or _folds(PatchSet(other.values, other.groups), held_out)


def _nearest(
    search: TrainingSearch, sets: dict[str, PatchSet], draws: dict[str, list[Weights]]
) -> tuple[Figure, dict[str, NDArray[np.float64]], dict[str, float]]:
    """Median distance of generated and of held-out patches to the nearest place of training."""
    distances = {name: search.distances(list(sets[name].values)) for name in ("generated", "held_out")}
    values, drawn, copies = {}, {}, {}
    known = distances["held_out"][np.isfinite(distances["held_out"])]
    limit = _NEAR * float(np.quantile(known, 0.05)) if len(known) else 0.0
    for of, found in distances.items():
        rows = [np.repeat(found, times) for times in (np.ones(len(found), int), *draws[of])]
        medians = [float(np.nanmedian(row)) if np.isfinite(row).any() else float("nan") for row in rows]
        values[of], drawn[of] = medians[0], medians[1:]
        textured = found[np.isfinite(found)]
        copies[of] = float((textured < limit).mean()) if len(textured) else 0.0
    note = f"copies: {copies['generated']:.0%}, of held-out ones {copies['held_out']:.0%}"
    return _levels("nearest", "nearest training place", values, drawn, note), distances, copies
