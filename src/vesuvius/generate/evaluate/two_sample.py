"""Whether a classifier can tell generated patches from real ones, also by what no texture metric measures.

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
_SEEN_VOXELS = 2**13


def two_sample_scores(
    train: tuple[Patches, Patches], tests: tuple[Patches, ...], *, steps: int = 200
) -> tuple[NDArray[np.float64], ...]:
    """Train a small 3D CNN to tell real from generated patches; how real it finds each patch of `tests`.

    Patches are seen mirrored, and turned in the y-x plane where Y = X, as in training.  Of patches of more than 2^13
    voxels it sees a random part in full resolution and all of it in a lower one.  No voxel may be both in `train` and
    in `tests`, or the classifier knows it by heart.  Moves no global generator; the same numbers on the same machine.

    Args:
        train: real and generated patches, as many of each as there are.
        steps: of the training, each of 16 real and 16 generated patches.
    """
    mean, std = float(train[0].mean()), float(train[0].std()) or 1.0
    real, generated, *others = (_Seen(patches, mean, std) for patches in (*train, *tests))
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
    """How often the first is larger, equal ones half (Mann & Whitney 1947); 0.5: they cannot be told apart.  Pure."""
    values, counts = np.unique(np.concatenate([higher, lower]), return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    total = float(ranks[np.searchsorted(values, higher)].sum())
    return (total - len(higher) * (len(higher) + 1) / 2) / (len(higher) * len(lower))


class _Seen:
    """Patches as the classifier sees them; `scales` holds one tensor [N, 1, Z, Y, X] per branch."""

    def __init__(self, patches: Patches, mean: float, std: float) -> None:
        self._mean, self._std = mean, std
        whole = torch.from_numpy(patches).unsqueeze(1)
        self._part = _part_of(patches.shape[1:])
        self.scales = [whole]
        if self._part != patches.shape[1:]:
            pooled = [F.adaptive_avg_pool3d(whole[row : row + 1], self._part) for row in range(len(whole))]
            self.scales.append(torch.cat(pooled))

    def __len__(self) -> int:
        return len(self.scales[0])

    def views(self, rows: list[int], random: torch.Generator) -> list[Tensor]:
        """Of each scale, those patches, mirrored and turned at random, and cut."""
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
    """The shape with its longest edges cut until it has no more voxels than are seen at once."""
    edge = max(shape_zyx)
    while math.prod(min(size, edge) for size in shape_zyx) > _SEEN_VOXELS:
        edge -= 1
    z, y, x = (min(size, edge) for size in shape_zyx)
    return z, y, x


def _classifier() -> nn.Sequential:
    """[B, 1, Z, Y, X] -> [B, 1]: convolutions, some of which halve each axis, the mean over voxels, a linear map.

    Norms over the batch: those of each sample would hide its brightness and contrast.  A first layer in full resolution
    would take three times as long.
    """
    parts: list[nn.Module] = []
    inside = 1
    for channels, stride in _LAYERS:
        parts += [nn.Conv3d(inside, channels, 3, stride, padding=1), nn.BatchNorm3d(channels), nn.SiLU()]
        inside = channels
    return nn.Sequential(*parts, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(inside, 1))


@torch.no_grad()
def _scores(branches: nn.ModuleList, seen: _Seen, random: torch.Generator) -> NDArray[np.float64]:
    """How real each patch looks, the mean over some of its views."""
    total = np.zeros(len(seen))
    for _ in range(_VIEWS):
        for first in range(0, len(seen), _BATCH):
            rows = list(range(first, min(first + _BATCH, len(seen))))
            views = seen.views(rows, random)
            for branch, view in zip(branches, views, strict=True):
                total[rows] += branch(view)[:, 0].double().numpy()
    return total / _VIEWS
