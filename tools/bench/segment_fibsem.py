"""Segments electron microscopy: a small U-Net learns boundaries of cells in one half of a volume, predicts the other.

    vesuvius volume import data/fibsem/grayscale_maps scan.zarr --voxel-size-um 0.01,0.01,0.01
    vesuvius volume import data/fibsem/groundtruth.h5:/bodies bodies.zarr --voxel-size-um 0.01,0.01,0.01 --labels
    python tools/bench/segment_fibsem.py scan.zarr bodies.zarr boundaries.zarr --picture prediction.png

Cells are the connected components of voxels with a boundary probability below a threshold, grown into the rest in order
of probability.  The thresholds are those that suit the training half best.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from torch import Tensor, nn

import vesuvius
from vesuvius.volumes.box import Box

PATCH = (32, 64, 64)
SEED_THRESHOLDS = (0.01, 0.02, 0.03, 0.05, 0.1)
GROWN_IN_STEPS = (0.2, 0.4, 0.6, 0.8, 1.0)
LEAST_SEED_VOXELS = 300
Labels = NDArray[np.int32]


class UNet(nn.Module):
    """Maps (B, 1, Z, Y, X) to logits of boundaries of the same shape; sizes are multiples of 4."""

    def __init__(self, widths: tuple[int, ...] = (12, 24, 48)) -> None:
        super().__init__()
        self.down = nn.ModuleList(_convolutions(i, o) for i, o in zip((1, *widths), widths, strict=False))
        self.up = nn.ModuleList(_convolutions(i + o, o) for i, o in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.out = nn.Conv3d(widths[0], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for depth, convolutions in enumerate(self.down):
            x = convolutions(nn.functional.max_pool3d(x, 2) if depth else x)
            kept.append(x)
        for convolutions, skip in zip(self.up, kept[-2::-1], strict=True):
            x = convolutions(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), skip], 1))
        return self.out(x)


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    pairs = ((inputs, outputs), (outputs, outputs))
    return nn.Sequential(
        *(nn.Sequential(nn.Conv3d(i, o, 3, padding=1), nn.BatchNorm3d(o), nn.ReLU()) for i, o in pairs)
    )


def boundaries(bodies: Tensor) -> Tensor:
    """Return 1 at voxels with a neighbor in another body along an axis: float32, in the shape of (..., Z, Y, X)."""
    found = torch.zeros_like(bodies, dtype=torch.bool)
    for axis in (-3, -2, -1):
        pairs = bodies.shape[axis] - 1
        differ = bodies.narrow(axis, 0, pairs) != bodies.narrow(axis, 1, pairs)
        found.narrow(axis, 0, pairs).logical_or_(differ)
        found.narrow(axis, 1, pairs).logical_or_(differ)
    return found.float()


def train(loader: vesuvius.PatchLoader, steps: int) -> UNet:
    torch.manual_seed(0)
    network = UNet()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    for step, batch in zip(range(steps), loader, strict=False):
        loss = nn.functional.binary_cross_entropy_with_logits(network(batch.image), boundaries(batch.label))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 25 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {time.process_time():.0f} CPU s", flush=True)
    return network.eval()


def predict(network: UNet, scan: str, bodies: str, box: Box, loader: vesuvius.PatchLoader) -> tuple[Tensor, Labels]:
    """Return the boundary probability and the bodies over a box."""
    grid = vesuvius.GridLoader(scan, labels=bodies, patch_size=PATCH, box=box, normalize=loader)
    probability, truth = vesuvius.Aggregator(grid), vesuvius.Aggregator(grid, "crop")
    with torch.inference_mode():
        for batch in grid:
            probability.add(batch, network(batch.image))
            truth.add(batch, batch.label)
    return torch.from_numpy(probability.result()[0]).sigmoid(), truth.result()[0].astype(np.int32)


def _neighbors(axis: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    whole = (slice(None),) * axis
    return (*whole, slice(1, None)), (*whole, slice(-1))


def components(values: NDArray[np.generic]) -> Labels:
    """Number the connected components of equal values, from 1; 0 stays 0."""
    index, pairs = np.arange(values.size, dtype=np.int32).reshape(values.shape), []
    for here, there in map(_neighbors, range(3)):
        same = (values[here] == values[there]) & (values[here] != 0)
        pairs.append(np.stack([index[here][same], index[there][same]]))
    a, b = np.concatenate(pairs, 1)
    root = index.ravel().copy()
    while len(a):
        low, high = np.minimum(root[a], root[b]), np.maximum(root[a], root[b])
        differ = low != high
        a, b = a[differ], b[differ]
        np.minimum.at(root, high[differ], low[differ])
        while not np.array_equal(higher := root[root], root):
            root = higher
    return np.where(values != 0, root.reshape(values.shape) + 1, 0)


def segment(probability: NDArray[np.float32], threshold: float) -> Labels:
    """Return cells: components of low boundary probability, grown by steps in the order of probability."""
    labels = components((probability < threshold).astype(np.uint8))
    sizes = np.bincount(labels.ravel())
    labels[sizes[labels] < LEAST_SEED_VOXELS] = 0
    for level in GROWN_IN_STEPS:
        reachable, before = probability <= level, -1
        while (left := int(np.count_nonzero(labels == 0))) != before:
            before = left
            for here, there in map(_neighbors, range(3)):
                for into, source in ((here, there), (there, here)):
                    labels[into] = np.where((labels[into] == 0) & reachable[into], labels[source], labels[into])
    return labels


def overlaps(truth: Labels, found: Labels) -> list[NDArray[np.float64]]:
    """Return voxels of each overlap of a true and a found body, each true body and each found one; without body 0."""
    rows, columns = (np.unique(each[truth != 0], return_inverse=True)[1].astype(np.int64) for each in (truth, found))
    counts = map(np.bincount, (rows * (columns.max() + 1) + columns, rows, columns))
    return [each[each > 0].astype(np.float64) for each in counts]


def adapted_rand_error(truth: Labels, found: Labels) -> float:
    """Return 1 - F of the pairs of voxels in one cell, 0 to 1; voxels of body 0 do not count (SNEMI3D, 2013)."""
    both, true, predicted = (float((each**2).sum()) for each in overlaps(truth, found))
    return 1 - 2 * both / (true + predicted)


def variation_of_information(truth: Labels, found: Labels) -> tuple[float, float]:
    """Return H(found | truth), the splits, and H(truth | found), the merges, in bits (Meila 2003); without body 0."""
    both, true, predicted = (-float((p * np.log2(p)).sum()) for p in (n / n.sum() for n in overlaps(truth, found)))
    return both - true, both - predicted


def fusions(truth: Labels, found: Labels, within: int) -> list[tuple[int, int]]:
    """Return (fused, all) pairs of bodies with 0, 1, ... `within` free voxels between them at their nearest approach.

    `found` numbers the components between walls, which are 0.  A pair is fused if most of what is found of both is one
    component.  Bodies without a voxel inside of their boundary do not count.
    """
    inside = boundaries(torch.from_numpy(truth)).numpy() == 0
    ids, mostly = [int(each) for each in np.unique(truth[inside]) if each], dict[int, int]()
    for body in ids:
        counts = np.bincount(found[truth == body], minlength=2)[1:]
        mostly[body] = int(counts.argmax()) + 1 if counts.any() else -body
    pairs = np.zeros((within + 1, 2), int)
    for number, body in enumerate(ids):
        gaps = ndimage.distance_transform_cdt(truth != body, "taxicab") - 1
        nearest = ndimage.minimum(gaps, truth, ids[number + 1 :]) if ids[number + 1 :] else []
        for other, gap in zip(ids[number + 1 :], nearest, strict=True):
            if gap <= within:
                pairs[int(gap)] += (mostly[body] == mostly[other], 1)
    return [(int(fused), int(count)) for fused, count in pairs]


def dice(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> float:
    return float(2 * np.count_nonzero(a & b) / (np.count_nonzero(a) + np.count_nonzero(b)))


def colored(cells: Labels, bodies: Labels) -> NDArray[np.uint8]:
    """Return a slice (Y, X, 3) in which each cell has the color of the body under most of it, and a black outline."""
    colors, picture = np.random.default_rng(0).integers(60, 256, (997, 3)), np.zeros((*cells.shape, 3), np.uint8)
    for cell in np.unique(cells):
        picture[cells == cell] = colors[np.bincount(bodies[cells == cell]).argmax() % len(colors)]
    picture[boundaries(torch.from_numpy(cells[None]))[0].numpy() > 0] = 0
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("scan", "bodies", "out"):
        parser.add_argument(name)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--picture")
    args = parser.parse_args()
    with vesuvius.PatchLoader(
        args.scan,
        labels=args.bodies,
        patch_size=PATCH,
        batch_size=2,
        num_workers=0,
        device="cpu",
        validation_fraction=0.5,
    ) as loader:
        network = train(loader, args.steps)
        held_out = loader.validation_boxes[0]
        assert held_out is not None
        start, stop = held_out
        trained: Box = ((0, 0, 0), (start[0] - PATCH[0], *stop[1:]))  # without the gap between the halves
        probability, truth = predict(network, args.scan, args.bodies, trained, loader)
        edges, cells = boundaries(torch.from_numpy(truth)).numpy() > 0, components(truth)
        edge = max(np.arange(0.2, 0.7, 0.05), key=lambda level: dice(probability.numpy() > level, edges))
        seed = min(SEED_THRESHOLDS, key=lambda low: adapted_rand_error(cells, segment(probability.numpy(), low)))
        print(f"thresholds: boundary {edge:.2f}, seeds {seed}; {time.process_time():.0f} CPU s", flush=True)

        done = vesuvius.predict_volume(
            network, args.scan, args.out, patch_size=PATCH, box=held_out, activation="sigmoid", normalize=loader
        )
        print(done)
    predicted, truth = vesuvius.open_volume(args.out)[:], vesuvius.open_volume(args.bodies)[start[0] : stop[0]]
    edges, cells, found = boundaries(torch.from_numpy(truth)).numpy() > 0, components(truth), segment(predicted, seed)
    print(
        f"held-out half: Dice of boundaries {dice(predicted > edge, edges):.3f}, adapted Rand error "
        f"{adapted_rand_error(cells, found):.3f}; {time.process_time():.0f} CPU s"
    )
    if args.picture:
        shown = len(truth) * 4 // 5  # a slice with cells of many sizes
        gray = vesuvius.open_volume(args.scan)[start[0] + shown], (255 * predicted[shown]).astype(np.uint8)
        colors = (colored(each[shown], truth[shown]) for each in (found, truth))
        panels = (*(np.repeat(each[..., None], 3, 2) for each in gray), *colors)
        Image.fromarray(np.hstack([np.pad(each, ((0, 0), (0, 4), (0, 0))) for each in panels])).save(args.picture)


if __name__ == "__main__":
    main()
