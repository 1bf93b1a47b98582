"""How well the most similar place of the training voxels matches a patch: this shows a model that repeats its data.

A place counts at every shift and in every symmetry that training draws, whatever its brightness and contrast.  All
places are compared at a few hundred points of a coarse picture; the best ones then voxel by voxel, at shifts nearby.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vesuvius.config import AugmentConfig, Triple
from vesuvius.volumes.box import box_at, slices, triple

Float32 = NDArray[np.float32]

_PLACES = 2**19  # that are compared, about
_COARSEST, _LEAST_WINDOW = 8, 4
_POINTS, _RUN = 256, 2**13
_CANDIDATES = 32
_TOGETHER = 32  # patches that share the reading of places
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

    def __init__(self, regions: Sequence[Float32], patch_zyx: Triple, augment: AugmentConfig) -> None:
        self.voxels = sum(region.size for region in regions)
        coarse = next((c for c in range(1, _COARSEST) if self.voxels <= _PLACES * c**3), _COARSEST)
        self._factors = tuple(max(1, min(coarse, size // _LEAST_WINDOW)) for size in patch_zyx)
        self._patch_zyx = patch_zyx
        self._regions = [region.clip(-_DARKEST, _DARKEST) for region in regions]
        self._coarse = [_coarse(region, self._factors) for region in self._regions]
        window = [size // factor for size, factor in zip(patch_zyx, self._factors, strict=True)]
        every = np.indices(window).reshape(3, -1)
        rng = np.random.default_rng(0)
        self._points = every[:, rng.permutation(every.shape[1])[:_POINTS]]
        self._window = window
        # Mirrored axes and quarter turns; two turns mirror y and x.
        mirrored: list[tuple[int, ...]] = [(), (2,), (1,), (1, 2), (0,), (0, 2), (0, 1), (0, 1, 2)]
        mirrored, turns = mirrored if augment.flip else [()], range(4 if augment.turn else 1)
        self._symmetries = [(axes, t) for axes in mirrored for t in turns if not (2 in axes and augment.turn)]

    def distances(self, patches: Sequence[Float32]) -> NDArray[np.float64]:
        """Of each patch, the share of its variance that the nearest place leaves unexplained.

        0: the patch is a copy; 1: nothing is like it; NaN: it has no texture.
        """
        clipped = [patch.clip(-_DARKEST, _DARKEST) for patch in patches]
        textured = [row for row, patch in enumerate(clipped) if patch.std() >= _LEAST_STD]
        found = np.full(len(patches), math.nan)
        for first in range(0, len(textured), _TOGETHER):
            rows = textured[first : first + _TOGETHER]
            templates = [self._turned(clipped[row]) for row in rows]
            fits, regions, places = self._best_places([template for each in templates for template in each])
            for turned, row in enumerate(rows):
                mine = slice(turned * len(self._symmetries), (turned + 1) * len(self._symmetries))
                found[row] = self._distance(templates[turned], fits[:, mine], regions, places[:, mine])
        return found

    def _turned(self, patch: Float32) -> list[Float32]:
        """The patch in every symmetry: views, because copies would take gigabytes."""
        return [np.rot90(np.flip(patch, axes), turns, (1, 2)) for axes, turns in self._symmetries]

    def _distance(
        self,
        templates: Sequence[Float32],
        fits: NDArray[np.floating],
        regions: NDArray[np.int64],
        places: NDArray[np.int64],
    ) -> float:
        """Of one patch, in all symmetries: the unexplained share at the best of its candidates."""
        runs, turned = np.unravel_index(np.argsort(-fits, axis=None, kind="stable")[:_CANDIDATES], fits.shape)
        close = [
            (*self._close(templates[t], int(regions[run]), int(places[run, t])), templates[t])
            for run, t in zip(runs.tolist(), turned.tolist(), strict=True)
        ]
        _, number, start, template = max(close, key=lambda each: each[0])
        return self._unexplained(template, number, start)

    def _best_places(
        self, templates: Sequence[Float32]
    ) -> tuple[NDArray[np.floating], NDArray[np.int64], NDArray[np.int64]]:
        """Of each run of neighbouring places, the one where each template fits best.

        Layers look much alike all along them, so one best place of all would often be the wrong one.

        Returns:
            Correlations [runs, templates], the region of each run, and places [runs, templates].
        """
        points = tuple(self._points)
        wanted = _standardised(torch.from_numpy(np.stack([_coarse(t, self._factors)[points] for t in templates])))
        fits, regions, places = [], [], []
        for number, coarse in enumerate(self._coarse):
            counts = self._places_in(number)
            flat = torch.from_numpy(coarse.ravel())
            offsets = torch.from_numpy(np.ravel_multi_index(tuple(self._points), coarse.shape))
            for first in range(0, math.prod(counts), _RUN):
                run = np.arange(first, min(first + _RUN, math.prod(counts)))
                starts = np.ravel_multi_index(np.unravel_index(run, counts), coarse.shape)
                shown = _standardised(flat[torch.from_numpy(starts)[:, None] + offsets])
                best = (shown @ wanted.T).max(0)
                fits.append(best.values.numpy())
                places.append(first + best.indices.numpy())
                regions.append(number)
        return np.stack(fits), np.array(regions), np.stack(places)

    def _places_in(self, number: int) -> list[int]:
        shape = self._coarse[number].shape
        return [size - window + 1 for size, window in zip(shape, self._window, strict=True)]

    def _close(self, template: Float32, number: int, place: int) -> tuple[float, int, Triple]:
        """The best shift near a coarse place: its correlation at some points, the region and the start."""
        region, at = self._regions[number], np.unravel_index(place, self._places_in(number))
        ranges = []
        for index, factor, size, patch in zip(at, self._factors, region.shape, self._patch_zyx, strict=True):
            last = size - patch
            ranges.append(np.arange(min(max(0, index * factor - factor), last), min((index + 1) * factor, last) + 1))
        shifts = np.stack(np.meshgrid(*ranges, indexing="ij")).reshape(3, -1)
        points = np.random.default_rng(0).integers(0, np.array(self._patch_zyx)[:, None], (3, _POINTS))
        starts, offsets = (torch.from_numpy(np.ravel_multi_index(tuple(p), region.shape)) for p in (shifts, points))
        shown = _standardised(torch.from_numpy(region.ravel())[starts[:, None] + offsets])
        fits = shown @ _standardised(torch.from_numpy(template[tuple(points)])[None])[0]
        return float(fits.max()), number, triple(shifts[:, int(fits.argmax())].tolist())

    def _unexplained(self, template: Float32, number: int, start_zyx: Triple) -> float:
        there = self._regions[number][slices(box_at(start_zyx, self._patch_zyx))]
        if there.std() < _LEAST_STD:
            return 1.0
        return 1 - max(0.0, float(np.corrcoef(there.ravel(), template.ravel())[0, 1])) ** 2


def _coarse(voxels: Float32, factors: Sequence[int]) -> Float32:
    """Means of boxes; what is left over at the ends is dropped."""
    z, y, x = (size // factor for size, factor in zip(voxels.shape, factors, strict=True))
    fz, fy, fx = factors
    boxes = voxels[: z * fz, : y * fy, : x * fx].reshape(z, fz, y, fy, x, fx)
    found: Float32 = boxes.mean((1, 3, 5), dtype=np.float32)
    return found


def _standardised(rows: torch.Tensor) -> torch.Tensor:
    """Each row without its mean and of length 1; 0 where it has hardly any texture."""
    rows = rows - rows.mean(1, keepdim=True)
    length = rows.norm(dim=1, keepdim=True)
    return torch.where(length < _LEAST_STD * math.sqrt(rows.shape[1]) / 2, 0.0, rows / length.clamp(min=1e-9))
