"""Whether a small CNN can tell generated patches from real ones, also by properties that no texture metric measures.

Source: Lopez-Paz & Oquab 2017, classifier two-sample tests.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from numpy.typing import NDArray
from torch import Tensor, nn

Patches = NDArray[np.float32]  # [N, Z, Y, X]

_LAYERS = ((16, 2), (32, 2), (32, 1), (64, 2))
_BATCH = 32
_VIEWS = 8
_VIEW_VOXELS = 2**13


def two_sample_scores(
    train: tuple[Patches, Patches], tests: tuple[Patches, ...], *, steps: int = 200
) -> tuple[NDArray[np.float64], ...]:
    """Train a small 3D CNN to tell real from generated patches, and score how real each patch of `tests` looks.

    Patches are flipped, and rotated in the y-x plane if Y = X.  Of patches of more than 2^13 voxels the CNN sees a
    random part at full resolution and all of it at a lower one.  `train` and `tests` must share no voxel.  Does not use
    the global generator; reproducible on one machine.

    Args:
        train: real and generated patches, any number of each.
        steps: training steps, each with 16 real and 16 generated patches.
    """
    mean, std = float(train[0].mean()), float(train[0].std()) or 1.0
    real, generated, *others = (_Views(patches, mean, std) for patches in (*train, *tests))
    random = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        branches = nn.ModuleList(_classifier() for _ in real.scales)
    optimizer = torch.optim.AdamW(branches.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    answers = torch.cat([torch.ones(_BATCH // 2), torch.zeros(_BATCH // 2)])
    for _ in range(steps):
        half = (_BATCH // 2,)
        rows = [torch.randint(len(seen), half, generator=random).tolist() for seen in (real, generated)]
        views = zip(real.views(rows[0], random), generated.views(rows[1], random), strict=True)
        logits = sum(branch(torch.cat(pair)) for branch, pair in zip(branches, views, strict=True))
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(logits[:, 0], answers).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    branches.eval()
    return tuple(_scores(branches, seen, random) for seen in others)


def area_under_curve(higher: NDArray[np.floating], lower: NDArray[np.floating]) -> float:
    """Return the probability that the first is larger, ties counting half (Mann & Whitney 1947).  Pure."""
    values, counts = np.unique(np.concatenate([higher, lower]), return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    total = float(ranks[np.searchsorted(values, higher)].sum())
    return (total - len(higher) * (len(higher) + 1) / 2) / (len(higher) * len(lower))


class _Views:
    """Patches as the classifier sees them; `scales` holds one tensor [N, 1, Z, Y, X] per branch."""

    def __init__(self, patches: Patches, mean: float, std: float) -> None:
        self._mean, self._std = mean, std
        full = torch.from_numpy(patches).unsqueeze(1)
        self._part = _part_of(patches.shape[1:])
        self.scales = [full]
        if self._part != patches.shape[1:]:
            pooled = [F.adaptive_avg_pool3d(full[row : row + 1], self._part) for row in range(len(full))]
            self.scales.append(torch.cat(pooled))

    def __len__(self) -> int:
        return len(self.scales[0])

    def views(self, rows: list[int], random: torch.Generator) -> list[Tensor]:
        """Return random views of these patches, one tensor per scale: flipped, rotated and cropped."""
        return [torch.stack([self._view(scale[row], random) for row in rows]) for scale in self.scales]

    def _view(self, patch: Tensor, random: torch.Generator) -> Tensor:
        sizes = zip(patch.shape[1:], self._part, strict=True)
        starts = [int(torch.randint(size - part + 1, (), generator=random)) for size, part in sizes]
        z, y, x = (slice(start, start + part) for start, part in zip(starts, self._part, strict=True))
        patch = (patch[:, z, y, x] - self._mean) / self._std
        mirrored = [axis for axis in (1, 2, 3) if torch.rand((), generator=random) < 0.5]
        turns = int(torch.randint(4, (), generator=random)) if patch.shape[2] == patch.shape[3] else 0
        return torch.rot90(patch.flip(mirrored), turns, (2, 3))


def _part_of(shape_zyx: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the shape with its longest edges cropped to at most 2^13 voxels."""
    edge = max(shape_zyx)
    while math.prod(min(size, edge) for size in shape_zyx) > _VIEW_VOXELS:
        edge -= 1
    z, y, x = (min(size, edge) for size in shape_zyx)
    return z, y, x


def _classifier() -> nn.Sequential:
    """[B, 1, Z, Y, X] -> [B, 1]: convolutions, some with stride 2, global mean, linear layer.

    Batch norm, because a norm per sample would hide brightness and contrast.  A first layer at full resolution would
    take three times as long.
    """
    parts: list[nn.Module] = []
    width = 1
    for channels, stride in _LAYERS:
        parts += [nn.Conv3d(width, channels, 3, stride, padding=1), nn.BatchNorm3d(channels), nn.SiLU()]
        width = channels
    return nn.Sequential(*parts, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(width, 1))


@torch.no_grad()
def _scores(branches: nn.ModuleList, seen: _Views, random: torch.Generator) -> NDArray[np.float64]:
    """Score how real each patch looks: the mean over several random views."""
    total = np.zeros(len(seen))
    for _ in range(_VIEWS):
        for first in range(0, len(seen), _BATCH):
            rows = list(range(first, min(first + _BATCH, len(seen))))
            views = seen.views(rows, random)
            for branch, view in zip(branches, views, strict=True):
                total[rows] += branch(view)[:, 0].double().numpy()
    return total / _VIEWS
