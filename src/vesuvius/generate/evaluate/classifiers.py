"""Classifiers that tell generated patches from real ones, also by properties that no texture metric measures.  Pure.

A small CNN; and kernel ridge regression on fixed features, without positions and without randomness, for defects that
such a CNN misses.  Sources: Lopez-Paz & Oquab 2017, classifier two-sample tests; Hofmann et al. 2008.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from threading import Lock

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from numpy.typing import NDArray
from scipy.spatial.distance import cdist
from scipy.stats import rankdata
from torch import Tensor, nn

Patches = NDArray[np.float32]  # [N, Z, Y, X]
Floats = NDArray[np.float64]

_LAYERS = ((16, 2), (32, 2), (32, 1), (64, 2))
_BATCH = 32
_VIEWS = 8
_VIEW_VOXELS = 2**13
_SEEDING = Lock()  # torch's global generator initializes networks, and there is one for all threads

_INTENSITIES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
_EDGES = (0.1, 0.5, 0.9)
_BLOCK = 4  # voxels along each axis over which the structure tensor is averaged
_LEAST_SQUARE = 1e-6  # squared difference of model values below which a block counts as flat
_RIDGE = 0.1


def two_sample_scores(
    train: tuple[Patches, Patches], tests: tuple[Patches, ...], *, efforts: Sequence[int] = (200,)
) -> tuple[Floats, ...]:
    """Train a small 3D CNN to tell real from generated patches, and score how real each patch of `tests` looks.

    Patches are flipped, and rotated in the y-x plane if Y = X.  Of large ones the CNN sees a random part at full
    resolution and all of it at a lower one.  `train` has real and generated patches, which share no voxel with
    `tests`.  `efforts` are numbers of training steps, ascending: each continues the network of the one before with a
    one-cycle schedule (Smith & Topin 2018) of its own, so the first does not depend on the others.  Returns the scores
    of each of `tests`, [efforts, N].  Does not use the global generator; reproducible on one machine.
    """
    mean, std = float(train[0].mean()), float(train[0].std()) or 1.0
    real, generated, *others = (_Views(patches, mean, std) for patches in (*train, *tests))
    random = torch.Generator().manual_seed(0)
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        branches = nn.ModuleList(_classifier() for _ in real.scales)
    optimizer = torch.optim.AdamW(branches.parameters(), lr=2e-3, weight_decay=0.05)
    answers = torch.cat([torch.ones(_BATCH // 2), torch.zeros(_BATCH // 2)])
    scores = []
    for done, effort in pairwise((0, *efforts)):
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=effort - done)
        branches.train()
        for _ in range(effort - done):
            half = (_BATCH // 2,)
            rows = [torch.randint(len(seen), half, generator=random).tolist() for seen in (real, generated)]
            views = zip(real.views(rows[0], random), generated.views(rows[1], random), strict=True)
            logits = sum(branch(torch.cat(pair)) for branch, pair in zip(branches, views, strict=True))
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(logits[:, 0], answers).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        branches.eval()
        scores.append([_scores(branches, seen, random) for seen in others])
    return tuple(map(np.stack, zip(*scores, strict=True)))


def area_under_curve(higher: NDArray[np.floating], lower: NDArray[np.floating]) -> float:
    """Return the probability that the first is larger, ties counting half (Mann & Whitney 1947).  Pure."""
    total = float(rankdata(np.concatenate([higher, lower]))[: len(higher)].sum())
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
    edge = max(shape_zyx)
    while math.prod(min(size, edge) for size in shape_zyx) > _VIEW_VOXELS:
        edge -= 1
    z, y, x = (min(size, edge) for size in shape_zyx)
    return z, y, x


def _classifier() -> nn.Sequential:
    """[B, 1, Z, Y, X] -> [B, 1].  Batch norm, because a norm per sample would hide brightness and contrast."""
    parts: list[nn.Module] = []
    width = 1
    for channels, stride in _LAYERS:
        parts += [nn.Conv3d(width, channels, 3, stride, padding=1), nn.BatchNorm3d(channels), nn.SiLU()]
        width = channels
    return nn.Sequential(*parts, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(width, 1))


@torch.no_grad()
def _scores(branches: nn.ModuleList, seen: _Views, random: torch.Generator) -> Floats:
    total = np.zeros(len(seen))
    for _ in range(_VIEWS):
        for first in range(0, len(seen), _BATCH):
            rows = list(range(first, min(first + _BATCH, len(seen))))
            views = seen.views(rows, random)
            for branch, view in zip(branches, views, strict=True):
                total[rows] += branch(view)[:, 0].double().numpy()
    return total / _VIEWS


def patch_features(patch: NDArray[np.float32]) -> Floats:
    """Return the features of a patch [Z, Y, X]: float64 [F], where F depends on the shape only.

    Quantiles of the intensities; then, at each scale, logarithms of the mean eigenvalues of the structure tensor
    (Foerstner 1986) and of quantiles of the largest one: strength and direction of edges.
    """
    scale, features = torch.from_numpy(patch)[None, None], [torch.from_numpy(np.quantile(patch, _INTENSITIES))]
    while min(scale.shape[2:]) > 1:
        eigenvalues = _structure(scale[0, 0])
        strongest = eigenvalues[:, -1].quantile(torch.tensor(_EDGES, dtype=torch.float64))
        features.append((torch.cat([eigenvalues.mean(0), strongest]) + _LEAST_SQUARE).log())
        scale = F.avg_pool3d(scale, 2)
    return torch.cat(features).numpy()


def _structure(values: Tensor) -> Tensor:
    """Return the eigenvalues of the structure tensor of each block, ascending: float64 [blocks, 3]."""
    inner = [slice(size - 1) for size in values.shape]
    slopes = torch.stack([values.diff(dim=axis)[tuple(inner)] for axis in range(3)])
    block = [min(_BLOCK, size) for size in slopes.shape[1:]]
    tensor = F.avg_pool3d((slopes[:, None] * slopes).flatten(0, 1), block).reshape(3, 3, -1)
    eigenvalues: Tensor = torch.linalg.eigvalsh(tensor.permute(2, 0, 1).double())
    return eigenvalues.clamp(min=0)


def kernel_scores(train: tuple[Floats, Floats], tests: tuple[Floats, ...]) -> tuple[Floats, ...]:
    """Score how real each row of `tests` looks, by kernel ridge regression; a row is the features of a patch.

    The kernel is Gaussian in standardized features; its width is the median distance.  Both sets of `train`, real and
    generated, have the same total weight.
    """
    rows = np.concatenate(train)
    mean, std = rows.mean(0), rows.std(0) + 1e-9
    counts = [len(each) for each in train]
    signs = np.repeat([1.0, -1.0], counts)
    weights = np.repeat([len(rows) / (2 * count) for count in counts], counts)
    standardized = (rows - mean) / std
    distances = cdist(standardized, standardized, "sqeuclidean")
    width = float(np.median(distances)) or 1.0
    solved = np.linalg.solve(np.exp(-distances / width) + np.diag(_RIDGE / weights), signs)
    shown = (cdist((test - mean) / std, standardized, "sqeuclidean") for test in tests)
    return tuple(np.exp(-each / width) @ solved for each in shown)
