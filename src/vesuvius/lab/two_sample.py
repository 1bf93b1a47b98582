"""Whether a classifier can tell generated patches from real ones: what no chosen figure of texture can overlook.

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

_CHANNELS = (16, 32, 64)
_BATCH = 32
_VIEWS = 8


def two_sample_auc(
    real: tuple[Patches, Patches], generated: tuple[Patches, Patches], *, steps: int = 400, seed: int = 0
) -> float:
    """Train a small 3D CNN on the first of each pair; return its area under the ROC curve on the second.

    0.5: it cannot tell them apart; 1: every generated patch looks less real to it than any real one.  Patches are seen
    mirrored, and turned in the y-x plane where Y = X, as in training.  The two of a pair must have no voxel in common,
    or the classifier knows the real ones by heart.  Moves no global generator; the same numbers on the same machine.

    Args:
        real, generated: for training and for the figure, each [N, Z, Y, X]; N may differ.
        steps: of the classifier, each of 16 real and 16 generated patches.
    """
    mean, std = float(real[0].mean()), float(real[0].std()) or 1.0
    (real_train, real_test), (generated_train, generated_test) = (
        tuple(torch.from_numpy((patches - mean) / std).unsqueeze(1) for patches in pair) for pair in (real, generated)
    )
    random = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _classifier()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    answers = torch.arange(_BATCH, dtype=torch.float32) % 2
    for _ in range(steps):
        rows = [
            patches[int(torch.randint(len(patches), (), generator=random))]
            for _ in range(_BATCH // 2)
            for patches in (generated_train, real_train)
        ]
        logits = network(torch.stack([_seen(row, random) for row in rows]))[:, 0]
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(logits, answers).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    network.eval()
    return area_under_curve(_scores(network, real_test, random), _scores(network, generated_test, random))


def area_under_curve(higher: NDArray[np.floating], lower: NDArray[np.floating]) -> float:
    """The share of pairs in which `higher` has the larger score; equal ones count half (Mann & Whitney 1947).  Pure."""
    pairs = np.asarray(higher)[:, None] - np.asarray(lower)[None]
    return float((pairs > 0).mean() + 0.5 * (pairs == 0).mean())


def _classifier() -> nn.Sequential:
    """[B, 1, Z, Y, X] -> [B, 1]: convolutions that halve each axis, the mean over voxels, a linear map.

    Norms over the batch: those of each sample would hide its brightness and contrast.
    """
    parts: list[nn.Module] = []
    inside = 1
    for channels in _CHANNELS:
        parts += [nn.Conv3d(inside, channels, 3, padding=1), nn.BatchNorm3d(channels), nn.SiLU()]
        parts += [nn.Conv3d(channels, channels, 3, stride=2, padding=1), nn.BatchNorm3d(channels), nn.SiLU()]
        inside = channels
    return nn.Sequential(*parts, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(inside, 1))


def _seen(patch: Tensor, random: torch.Generator) -> Tensor:
    """A patch [1, Z, Y, X], mirrored and turned at random."""
    mirrored = [axis for axis in (1, 2, 3) if torch.rand((), generator=random) < 0.5]
    turns = int(torch.randint(4, (), generator=random)) if patch.shape[2] == patch.shape[3] else 0
    return torch.rot90(patch.flip(mirrored), turns, (2, 3))


@torch.no_grad()
def _scores(network: nn.Module, patches: Tensor, random: torch.Generator) -> NDArray[np.float64]:
    """How real each patch looks, the mean over some of its views."""
    total = np.zeros(len(patches))
    for _ in range(_VIEWS):
        for first in range(0, len(patches), _BATCH):
            batch = patches[first : first + _BATCH]
            logits = network(torch.stack([_seen(patch, random) for patch in batch]))[:, 0]
            total[first : first + len(batch)] += logits.double().numpy()
    if not math.isfinite(total.sum()):
        raise ValueError("patches must be finite; got some that are not")
    return total / _VIEWS
