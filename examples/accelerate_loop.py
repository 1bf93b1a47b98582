"""Hugging Face Accelerate: network and optimizer are prepared; the loader gets its rank, and is saved with them.

accelerate launch examples/accelerate_loop.py SCAN.zarr FOLDER
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

import vesuvius


def main(scan: str, folder: str, steps: int = 10) -> list[int]:
    """Train for `steps` steps, from the state in a folder if it exists; returns the samples of all ranks."""
    accelerator = Accelerator()
    network = nn.Sequential(nn.Conv3d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 1, 3, padding=1))
    network, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters(), lr=1e-3))
    loader = vesuvius.PatchLoader(
        scan,
        patch_size=(16, 32, 32),
        batch_size=4,
        num_workers=0,
        device=accelerator.device,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        batches_per_epoch=steps,
    )
    accelerator.register_for_checkpointing(loader)  # not prepare(): each rank gets its own batches, on the device
    if Path(folder).exists():
        accelerator.load_state(folder)
    seen = []
    with loader:
        for batch in loader:
            loss = nn.functional.mse_loss(network(batch.image + 0.5 * torch.randn_like(batch.image)), batch.image)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            indices = torch.tensor([sample.index for sample in batch.samples], device=accelerator.device)
            seen += accelerator.gather(indices).tolist()
        accelerator.save_state(folder)
    accelerator.print(f"{len(seen)} samples, loss {loss.item():.3f}")
    return seen


if __name__ == "__main__":
    main(*sys.argv[1:])
