"""Two ranks with torchrun and DistributedDataParallel: each reads its share of one sample order.

torchrun --nproc-per-node 2 examples/torchrun_ranks.py SCAN.zarr
"""

import os
import sys

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import vesuvius


def main(scan: str, steps: int = 10) -> None:
    """Train, and print the samples that each rank has read."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group("nccl" if cuda else "gloo")
    network = nn.Sequential(nn.Conv3d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 1, 3, padding=1))
    network = DistributedDataParallel(network.cuda() if cuda else network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    seen = []
    # rank and world_size are those of torch.distributed; batch_size is that of a rank
    with vesuvius.PatchLoader(
        scan, patch_size=(16, 32, 32), batch_size=4, num_workers=0, batches_per_epoch=steps
    ) as loader:
        for batch in loader:
            loss = nn.functional.mse_loss(network(batch.image + 0.5 * torch.randn_like(batch.image)), batch.image)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += [sample.index for sample in batch.samples]
    print(f"rank {distributed.get_rank()} read {seen}", flush=True)
    del network  # while the group lives: else its end waits for threads of the group that wait for Python's lock
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
