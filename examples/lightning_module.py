"""Lightning: the loader as the `train_dataloader` of a LightningDataModule, resumed through Lightning's checkpoint.

python examples/lightning_module.py SCAN.zarr [CHECKPOINT.ckpt]
"""

import sys
from typing import Any

import lightning
import torch
from torch import Tensor, nn

import vesuvius


class Patches(lightning.LightningDataModule):
    """Batches of a volume; each rank gets its own, as torch.distributed says."""

    def __init__(self, scan: str) -> None:
        super().__init__()
        self.scan, self.loader, self.saved = scan, None, None

    def train_dataloader(self) -> vesuvius.PatchLoader:
        # The loader has already moved batches to the device.
        self.loader = vesuvius.PatchLoader(
            self.scan, patch_size=(16, 32, 32), batch_size=4, num_workers=0, batches_per_epoch=10
        )
        if self.saved is not None:
            self.loader.load_state_dict(self.saved)
        return self.loader

    def state_dict(self) -> dict[str, Any]:
        return {"loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved = state["loader"]

    def teardown(self, stage: str) -> None:
        self.loader.close()


class Denoiser(lightning.LightningModule):
    """Learns to remove noise."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Conv3d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 1, 3, padding=1))
        self.seen: list[int] = []

    def training_step(self, batch: vesuvius.PatchBatch, _: int) -> Tensor:
        self.seen += [sample.index for sample in batch.samples]
        noisy = batch.image + 0.5 * torch.randn_like(batch.image)
        return nn.functional.mse_loss(self.network(noisy), batch.image)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(scan: str, checkpoint: str | None = None, epochs: int = 2) -> Denoiser:
    """Train up to `epochs` epochs, from a checkpoint if given; writes `denoiser.ckpt`."""
    denoiser = Denoiser()
    trainer = lightning.Trainer(max_epochs=epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(denoiser, datamodule=Patches(scan), ckpt_path=checkpoint, weights_only=False)
    trainer.save_checkpoint("denoiser.ckpt")
    return denoiser


if __name__ == "__main__":
    main(*sys.argv[1:])
