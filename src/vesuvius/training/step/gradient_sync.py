"""Sums gradients and losses over the ranks of a run, by torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vesuvius.training.ranks.part import Part
from vesuvius.training.ranks.ranks import Ranks


class GradientSync:
    """The gradient of a step over all ranks, summed while the last backward pass still runs.

    The network is on its device, with the same weights on all ranks; `forward` is to be called in its place.
    """

    def __init__(self, network: nn.Module, part: Part, ranks: Ranks) -> None:
        self._part, self._ranks = part, ranks
        self._pending: list[dist.Work] = []
        self._parallel: DistributedDataParallel | None = None
        self.forward: nn.Module = network
        if part.world > 1:
            self._parallel = DistributedDataParallel(network, gradient_as_bucket_view=True)
            self._parallel.register_comm_hook(None, lambda state, bucket: self._start_sum(bucket))
            self.forward = self._parallel

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Enter around forward and backward pass of a micro-batch; gradients travel in the last one of a step."""
        return nullcontext() if last or self._parallel is None else self._parallel.no_sync()

    def wait(self) -> None:
        """Wait until the gradients are summed: on a GPU the device does, on a CPU the host.  Raises RankError."""
        for work in self._pending:
            self._ranks.wait_for(work)
        self._pending.clear()

    @property
    def parallel(self) -> bool:
        """Whether there are other ranks."""
        return self._part.world > 1

    def gather(self, losses: Sequence[Tensor]) -> Tensor:
        """Return the losses of all samples in the order of the global batch, float32 [G], from those of this rank."""
        own = torch.cat(list(losses))
        gathered = own.new_zeros(self._part.global_batch)
        gathered[self._part.rank :: self._part.world] = own
        self._ranks.wait_for(self._sum(gathered))
        return gathered

    def _sum(self, tensor: Tensor) -> dist.Work:
        work: dist.Work = dist.all_reduce(tensor, async_op=True)
        return work

    def _start_sum(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Start the sum of a bucket in place, and call it done.

        DDP would wait at the end of the backward pass, where the clock could not tell waiting from computing; the
        gradients are views of the buckets, so they are complete once `wait` returns.
        """
        self._pending.append(self._sum(bucket.buffer()))
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done
