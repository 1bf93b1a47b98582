"""The segmenter of `real_labels.py`: a small U-Net that finds walls, and the watershed of what it finds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import segment_fibsem as fibsem
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch import nn

PATCH = 32  # edge of the patches of both networks and of a generated tile; the gap between the parts
BATCH, WIDTHS, RATE = 2, (8, 32, 64), 4e-3
LEAST_SEED_VOXELS = 300  # of a body

Floats = NDArray[np.float32]
Labels = NDArray[np.int32]
Source = tuple[Floats, Floats]  # scaled scan and walls


def patch(sources: Sequence[Source], rng: np.random.Generator, augment: bool, least: float = 0) -> Source:
    """Cut a random patch with a least share of walls; `augment` mirrors, turns, jitters contrast, offset and noise."""
    for _ in range(1000):  # the last one may have fewer
        whole, all_walls = sources[rng.integers(len(sources))]
        at = tuple(slice(start, start + PATCH) for start in (rng.integers(size - PATCH + 1) for size in whole.shape))
        scan, walls = whole[at], all_walls[at]
        if walls.mean() >= least:
            break
    if augment:
        order, mirrored = rng.permutation(3), tuple(np.flatnonzero(rng.random(3) < 0.5))
        scan, walls = (np.flip(each.transpose(order), mirrored) for each in (scan, walls))
        gain, offset, noise = rng.normal(0, (0.25, 0.3, 0.15))
        scan = scan * (1 + gain) + offset + abs(noise) * rng.standard_normal(scan.shape)
    return scan.astype(np.float32), walls.astype(np.float32)


def train_segmenter(
    real: Sequence[Source], drawn: Sequence[Source], steps: int, seed: int, arm: str, drawn_first: bool = False
) -> fibsem.UNet:
    """Train a U-Net; if there are drawn sources, every other patch is from them, or those of the first half are."""
    torch.manual_seed(seed)
    rng, least = np.random.default_rng((seed, 1)), float(real[0][1].mean()) if arm == "all" else 0.0
    network = fibsem.UNet(WIDTHS).to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for step in range(steps):
        drawn_now = [step < steps / 2] * BATCH if drawn_first else [n % 2 > 0 for n in range(BATCH)]
        cut = [patch(drawn if drawn and now else real, rng, arm != "real", least) for now in drawn_now]
        scan, walls = (torch.from_numpy(np.stack(each))[:, None] for each in zip(*cut, strict=True))
        logits = network(scan.to(memory_format=torch.channels_last_3d))
        found = logits.sigmoid()
        overlap = (2 * (found * walls).sum() + 1) / (found.sum() + walls.sum() + 1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, walls) + 1 - overlap
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return network.eval()


def predict(network: nn.Module, scan: Floats) -> Floats:
    """Return the probability of walls over a part, in one piece."""
    padded = np.pad(scan, [(0, -size % 4) for size in scan.shape], mode="reflect")
    with torch.inference_mode():
        found = network(torch.from_numpy(padded)[None, None].to(memory_format=torch.channels_last_3d)).sigmoid()
    return found[0, 0][tuple(slice(size) for size in scan.shape)].numpy()


def best_edge(probability: Floats, walls: Floats) -> float:
    """Return the threshold of walls with the highest Dice."""
    return max(np.arange(0.1, 0.91, 0.05), key=lambda level: fibsem.dice(probability > level, walls > 0))


def segment(probability: Floats, threshold: float) -> Labels:
    """Return bodies from 1 on: components below a threshold, and the watershed of the probability from them."""
    labels, count = ndimage.label(probability < threshold)
    large = np.bincount(labels.ravel(), minlength=count + 1) >= LEAST_SEED_VOXELS
    large[0] = False
    seeds = np.where(large, np.cumsum(large), 0).astype(np.int32)[labels]
    return ndimage.watershed_ift((255 * probability).astype(np.uint8), seeds)
