"""Segmentation in plain PyTorch: scan and labels are cut, mirrored and rotated together; a stop is resumed exactly.

python examples/segmentation.py SCAN.zarr LABELS.zarr [CHECKPOINT.pt]
"""

import sys
from pathlib import Path

import torch
from torch import nn

import vesuvius

STEPS_PER_EPOCH, EPOCHS = 20, 2


def main(scan: str, labels: str, checkpoint: str = "segmentation.pt") -> list[float]:
    """Train, save after each epoch, and return the loss of each step of this session."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv3d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 2, 3, padding=1)).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    losses = []
    with vesuvius.PatchLoader(
        scan,
        labels=labels,
        patch_size=(16, 32, 32),
        batch_size=4,
        num_workers=0,
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
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
