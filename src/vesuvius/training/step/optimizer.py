"""How a step moves the weights: AdamW, or Muon for kernels with it, and the moving averages that follow.

AdamW scales each number of a gradient by itself.  Muon (`training.optimizer: muon`) takes a kernel for the matrix that
it is, output channels by inputs, and steps by the momentum with all its singular values made about 1: directions that
rarely come up in the gradient are learned as fast as others.  It keeps one moment of a kernel instead of two.

A run is validated, sampled and published with the averages.  They count on the device, so that a step that was not
applied leaves them alone without a sync.  Gradients and losses are summed over the ranks by torch's DDP.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vesuvius.config import TrainingConfig
from vesuvius.training.ranks.ranks import SINGLE, Ranks
from vesuvius.training.ranks.share import RankShare
from vesuvius.training.step.muon import Muon

_BETAS, _KERNEL_AXES = (0.9, 0.999), 5


def make_optimizer(network: nn.Module, config: TrainingConfig, ranks: Ranks = SINGLE) -> torch.optim.AdamW:
    """Fused AdamW, or Muon with it; weight decay on matrices and kernels only, not on biases and norms."""
    weights, muon = dict(network.named_parameters()), config.optimizer == "muon"
    kernels, others, spared = ([weights[name] for name in names] for names in group_weights(weights, muon))
    decayed, undecayed = {"weight_decay": config.weight_decay}, {"weight_decay": 0.0}
    groups = [{"params": others, **decayed}, {"params": spared, **undecayed}]
    if not muon:
        return torch.optim.AdamW(groups, lr=config.lr, betas=_BETAS, fused=True)
    groups = [{"params": kernels, **decayed, "orthogonal": True}, *(group | {"orthogonal": False} for group in groups)]
    return Muon(groups, ranks, lr=config.lr, betas=_BETAS, fused=True)


def group_weights(weights: Mapping[str, Tensor], muon: bool) -> tuple[list[str], list[str], list[str]]:
    """Names of the kernels that Muon takes, of other weights that decay, and of biases and norms.

    Moments in a checkpoint are numbered in this order.  Pure.
    """
    spared = [name for name, weight in weights.items() if weight.ndim <= 1]
    kernels = [name for name, weight in weights.items() if muon and _is_kernel(weight)]
    taken = {*kernels, *spared}
    return kernels, [name for name in weights if name not in taken], spared


def num_saved_copies(weight: Tensor, config: TrainingConfig) -> int:
    """How often a checkpoint holds a tensor of the size of this weight: itself, its moments, its averages.  Pure."""
    moments = 1 if config.optimizer == "muon" and _is_kernel(weight) else 2
    return 1 + moments + len(average_decays(config))


def _is_kernel(weight: Tensor) -> bool:
    """Whether Muon takes this weight: a kernel of several output channels (that of one is a row)."""
    return weight.ndim == _KERNEL_AXES and len(weight) > 1


log = logging.getLogger(__name__)


class MovingAverage:
    """Exponential moving average of the weights in float32, with decay min(decay, (1 + n) / (10 + n)) at update n.

    Attributes:
        weights: by the names of the network's parameters.
        updates: how many steps have entered, a number on the device.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self._decay = decay
        parameters = dict(network.named_parameters())
        self.weights = {name: p.detach().clone().float() for name, p in parameters.items()}
        # Paired once: to walk the modules for their names costs more than a small network's update.
        self._pairs = [(self.weights[name], p.detach()) for name, p in parameters.items()]
        self.updates = torch.zeros((), device=self._pairs[0][0].device)

    @torch.no_grad()
    def update(self, applied: Tensor) -> None:
        """Take in the weights as they are now; nothing where `applied`, a flag on the device, is false.

        One `lerp_` a tensor: as fast as memory allows for large weights, a microsecond each for small ones.  torch's
        own foreach form wants the decay as a number of the host, or is private.
        """
        decay = torch.clamp((1 + self.updates) / (10 + self.updates), max=self._decay)
        keep = (1 - decay) * applied
        for average, parameter in self._pairs:
            average.lerp_(parameter, keep)
        self.updates += applied

    @torch.no_grad()
    def restart(self, weights: Mapping[str, Tensor]) -> None:
        """Forget what has entered; start from these weights."""
        for name, average in self.weights.items():
            average.copy_(weights[name])
        self.updates.zero_()

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restart(state["weights"])
        self.updates.copy_(state["updates"])


def average_decays(config: TrainingConfig) -> dict[str, float]:
    """The name and decay of each average: "ema" for the first, "ema_0.999" and the like for the others.  Pure."""
    return {"ema": config.ema_decay} | {f"ema_{decay}": decay for decay in config.extra_ema_decays}


def load_averages(
    averages: Mapping[str, MovingAverage], stored: Mapping[str, dict[str, Any]], weights: Mapping[str, Tensor]
) -> None:
    """Put stored averages back.  Lengths may have come and gone since: a new one starts from the stored `weights`."""
    for name, average in averages.items():
        if name in stored:
            average.load_state_dict(stored[name])
        else:
            log.warning("the checkpoint has no average %s: it starts from the weights of the last step", name)
            average.restart(weights)
    for name in stored.keys() - averages.keys():
        log.info("the average %s is no longer in training.extra_ema_decays and is dropped", name)


class GradientSync:
    """The gradient of a step over all ranks, summed while the last backward pass still runs.

    The network is on its device, with the same weights on all ranks; `forward` is to be called in its place.
    """

    def __init__(self, network: nn.Module, part: RankShare, ranks: Ranks) -> None:
        self._network, self._part, self._ranks = network, part, ranks
        self._pending: list[dist.Work] = []
        self._parallel: DistributedDataParallel | None = None
        self.forward: nn.Module = network
        if part.world > 1:
            self._parallel = DistributedDataParallel(network, gradient_as_bucket_view=True)
            self._parallel.register_comm_hook(None, lambda state, bucket: self._start_sum(bucket))
            self.forward = self._parallel

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Enter around forward and backward pass of a micro-batch; gradients travel in the last one of a step.

        Where none was the last, they do in `wait`: until then nothing is exchanged, and a rank may begin again.
        """
        return nullcontext() if last or self._parallel is None else self._parallel.no_sync()

    def wait(self) -> None:
        """Wait until the gradients are summed: on a GPU the device does, on a CPU the host.  Raises RankError."""
        if not self._pending:
            gradients = [p.grad for p in self._network.parameters() if p.grad is not None]
            # As they lie in memory: NCCL takes no tensor whose order of axes it does not know.
            self._pending = [self._sum(g.as_strided((g.numel(),), (1,))) for g in gradients]
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
