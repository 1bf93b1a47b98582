"""MONAI: its transforms on the batches of the loader, its U-Net and its Dice loss.

python examples/monai_network.py SCAN.zarr LABELS.zarr
"""

import sys

import torch
from monai.losses import DiceCELoss
from monai.networks.nets import UNet
from monai.transforms import Compose, RandAdjustContrastd, RandGaussianNoised, ScaleIntensityRanged

import vesuvius


def main(scan: str, labels: str, steps: int = 20) -> list[float]:
    """Train and return the loss of each step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    network = UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2)).to(device)
    optimizer, loss_of = torch.optim.AdamW(network.parameters(), lr=3e-3), DiceCELoss(to_onehot_y=True, softmax=True)
    # The loader mirrors and rotates; MONAI changes intensities, patch by patch, on the device.
    changed = Compose(
        [
            ScaleIntensityRanged("image", -1, 1, 0, 1, clip=True),
            RandAdjustContrastd("image", prob=0.3),
            RandGaussianNoised("image", prob=0.3, std=0.05),
        ]
    ).set_random_state(seed=0)
    losses = []
    with vesuvius.PatchLoader(
        scan,
        labels=labels,
        patch_size=(16, 32, 32),
        batch_size=4,
        num_workers=0,
        device=device,
        batches_per_epoch=steps,
    ) as loader:
        for batch in loader:
            pairs = [changed({"image": a, "label": b}) for a, b in zip(batch.image, batch.label != 0, strict=True)]
            image, label = (torch.stack([pair[key] for pair in pairs]) for key in ("image", "label"))
            loss = loss_of(network(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
