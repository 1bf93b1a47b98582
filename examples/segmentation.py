"""Segmentation in plain PyTorch: train on random patches, score on held-out voxels, predict the whole volume.

python examples/segmentation.py SCAN.zarr LABELS.zarr [CHECKPOINT.pt]

A stopped training is resumed exactly.  The predicted labels and a picture of them lie next to the checkpoint.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

import vesuvius

PATCH, STEPS_PER_EPOCH, EPOCHS = (16, 32, 32), 20, 2


def train(scan: str, labels: str, checkpoint: str) -> tuple[nn.Module, vesuvius.PatchLoader, list[float]]:
    """Train, save after each epoch, and return the network, its loader, and the loss of each step of this session."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv3d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 2, 3, padding=1)).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    losses = []
    with vesuvius.PatchLoader(
        scan,
        labels=labels,
        patch_size=PATCH,
        batch_size=4,
        num_workers=0,
        validation_fraction=0.2,
        device=device,
        batches_per_epoch=STEPS_PER_EPOCH,
    ) as loader:
        begin = 0
        if Path(checkpoint).exists():
            state = torch.load(checkpoint)
            network.load_state_dict(state["network"])
            optimizer.load_state_dict(state["optimizer"])
            loader.load_state_dict(state["loader"])
            begin = state["epoch"]
        for epoch in range(begin, EPOCHS):
            for batch in loader:
                target = (batch.label[:, 0] != 0).long()  # (B, Z, Y, X): 1 where there is a label
                loss = nn.functional.cross_entropy(network(batch.image), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"loader": loader.state_dict(), "epoch": epoch + 1}, checkpoint)
            print(f"epoch {epoch + 1}: loss {losses[-1]:.3f}")
    return network.eval(), loader, losses


def held_out_dice(network: nn.Module, loader: vesuvius.PatchLoader, scan: str, labels: str) -> float:
    """Return the Dice score over the held-out box, of which each voxel counts once."""
    box = loader.validation_boxes[0]
    grid = vesuvius.GridLoader(scan, labels=labels, box=box, patch_size=PATCH, batch_size=4, normalize=loader)
    predicted, truth = vesuvius.Aggregator(grid), vesuvius.Aggregator(grid, "crop")
    with torch.inference_mode():
        for batch in grid:
            predicted.add(batch, network(batch.image))
            truth.add(batch, batch.label != 0)
    a, b = predicted.result().argmax(0) == 1, truth.result()[0] == 1
    return float(2 * (a & b).sum() / (a.sum() + b.sum()))


def main(scan: str, labels: str, checkpoint: str = "segmentation.pt") -> float:
    """Train, predict the volume and draw scan, labels and prediction; return the Dice score of held-out voxels."""
    network, loader, _ = train(scan, labels, checkpoint)
    dice = held_out_dice(network, loader, scan, labels)
    print(f"Dice of held-out voxels: {dice:.3f}")
    out = str(Path(checkpoint).with_suffix(".zarr"))
    print(vesuvius.predict_volume(network, scan, out, patch_size=PATCH, activation="argmax", normalize=loader))
    slices = [volume[len(volume) // 2] for volume in map(vesuvius.open_volume, (scan, labels, out))]
    pictures = [slices[0] / slices[0].max(), *(each != 0 for each in slices[1:])]
    Image.fromarray((255 * np.hstack(pictures)).astype(np.uint8)).save(Path(checkpoint).with_suffix(".png"))
    return dice


if __name__ == "__main__":
    main(*sys.argv[1:])
