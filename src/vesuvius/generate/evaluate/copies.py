"""Patches -> how far they are from the most similar part of the training volume: memorized voxels.  Pure."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import avg_pool3d

from vesuvius.config import AugmentConfig

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Voxels = NDArray[np.float32]

_POSITIONS, _CHUNK = 2**19, 2**13  # positions in the training volume to compare, roughly, and positions at a time
_POINTS, _CANDIDATES = 256, 32
_LEAST_STD = 0.05  # standard deviation in model values below which a patch has no texture
_DARKEST = 1.2  # limit of |model value|; air far below the material would dominate


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
