"""How well the most similar place of the training voxels matches a patch: this shows a model that repeats its data.

A place counts at every shift and in every symmetry that training draws, whatever its brightness and contrast.  All
places are compared at some points of a coarse picture, and the best ones at points of the voxels, at shifts nearby.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import avg_pool3d

from vesuvius.config import AugmentConfig, Triple

Voxels = NDArray[np.float32]

_PLACES, _RUN = 2**19, 2**13  # places that are compared, about, and how many of them at a time
_POINTS, _CANDIDATES = 256, 32
_LEAST_STD = 0.05  # of model values: below it there is no texture to compare
_DARKEST = 1.2  # air far below the material would decide alone


class TrainingSearch:
    """Finds the nearest place in parts of the training voxels.

    Args:
        regions: model values of boxes that training draws from, each [Z, Y, X] and no smaller than a patch.
        augment: the symmetries that training draws.

    Attributes:
        voxels: how many are searched.
    """

    def __init__(self, regions: Sequence[Voxels], patch_zyx: Triple, augment: AugmentConfig) -> None:
        self.voxels = sum(region.size for region in regions)
        coarse = next((c for c in range(1, 8) if self.voxels <= _PLACES * c**3), 8)
        self._factors = [max(1, min(coarse, size // 4)) for size in patch_zyx]
        self._regions = [region.clip(-_DARKEST, _DARKEST) for region in regions]
        self._coarse = [_pooled(region, self._factors) for region in self._regions]
        rng, window = np.random.default_rng(0), [s // f for s, f in zip(patch_zyx, self._factors, strict=True)]
        self._fine_points = rng.integers(0, np.array(patch_zyx)[:, None], (3, _POINTS))
        self._coarse_points = rng.permutation(np.indices(window).reshape(3, -1), axis=1)[:, :_POINTS]
        flips = [axes for n in range(4) for axes in itertools.combinations((0, 1, 2), n)] if augment.flip else [()]
        # Two quarter turns mirror y and x.
        self._symmetries = [(axes, turns) for axes in flips for turns in range(4 if augment.turn else 1)
                            if not (2 in axes and augment.turn)]  # fmt: skip

    def distances(self, patches: Sequence[Voxels]) -> NDArray[np.float64]:
        """Of each patch, the share of its variance that the nearest place leaves unexplained.

        0: the patch is a copy; 1: nothing is like it; NaN: it has no texture.
        """
        found, clipped = np.full(len(patches), math.nan), [patch.clip(-_DARKEST, _DARKEST) for patch in patches]
        rows = [row for row, patch in enumerate(clipped) if patch.std() >= _LEAST_STD]
        turned = [each for row in rows for each in self._turned(_pooled(clipped[row], self._factors))]
        # Of each run of places the best: layers look alike all along, and one best place of all would be a wrong one.
        fits, places, regions = [], [], []
        for number, coarse in enumerate(self._coarse if rows else []):
            every = _places([(0, size - part + 1) for size, part in zip(coarse.shape, turned[0].shape, strict=True)])
            for first in range(0, len(every), _RUN):
                run = every[first : first + _RUN]
                best = _fits(coarse, run, self._coarse_points, turned).max(0)
                fits.append(best.values.numpy())
                places.append(run[best.indices.numpy()])
                regions.append(number)
        for n, row in enumerate(rows):
            shown = self._turned(clipped[row])
            mine = np.stack(fits)[:, n * len(shown) : (n + 1) * len(shown)]
            order = np.argsort(-mine, axis=None, kind="stable")[:_CANDIDATES]
            nearest = 0.0
            for run, way in zip(*np.unravel_index(order, mine.shape), strict=True):
                place, region = places[run][n * len(shown) + way], self._regions[regions[run]]
                last = np.subtract(region.shape, clipped[row].shape)
                near = [(min(max(0, p * f - f), end), min((p + 1) * f, end) + 1)
                        for p, f, end in zip(place, self._factors, last, strict=True)]  # fmt: skip
                nearest = max(nearest, float(_fits(region, _places(near), self._fine_points, [shown[way]]).max()))
            found[row] = 1 - nearest**2
        return found

    def _turned(self, patch: Voxels) -> list[Voxels]:
        """The patch in every symmetry: views, because copies would take gigabytes."""
        return [np.rot90(np.flip(patch, axes), turns, (1, 2)) for axes, turns in self._symmetries]


def _pooled(voxels: Voxels, factors: list[int]) -> Voxels:
    """Means of boxes; what is left over at the ends is dropped."""
    pooled: Voxels = avg_pool3d(torch.from_numpy(voxels)[None], factors)[0].numpy()
    return pooled


def _places(ends: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """[N, 3]: all places from the first of each pair to before the second."""
    return np.stack(np.meshgrid(*(np.arange(*pair) for pair in ends), indexing="ij"), -1).reshape(-1, 3)


def _fits(voxels: Voxels, places: NDArray[np.int64], points: NDArray[np.int64], wanted: Sequence[Voxels]) -> Tensor:
    """How the voxels at some points beside each place correlate with those of each wanted part: [places, wanted]."""
    starts, offsets = (torch.from_numpy(np.ravel_multi_index(tuple(p), voxels.shape)) for p in (places.T, points))
    found = _standardised(torch.from_numpy(voxels.ravel())[starts[:, None] + offsets])
    return found @ _standardised(torch.from_numpy(np.stack([part[tuple(points)] for part in wanted]))).T


def _standardised(rows: Tensor) -> Tensor:
    """Each row without its mean and of length 1; 0 where it has hardly any texture."""
    rows = rows - rows.mean(1, keepdim=True)
    length = rows.norm(dim=1, keepdim=True)
    return torch.where(length < _LEAST_STD * math.sqrt(rows.shape[1]) / 2, 0.0, rows / length.clamp(min=1e-9))
