"""Optimizers (AdamW, or Muon for kernels), moving averages of the weights, and gradient sums over ranks.

Runs are validated, sampled and published with the averages.  Their update counts live on the device, so a step that was
not applied leaves them unchanged without a sync.
"""

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
from vesuvius.training.step.muon import Muon

log = logging.getLogger(__name__)

_BETAS, _KERNEL_AXES = (0.9, 0.999), 5


def make_optimizer(network: nn.Module, config: TrainingConfig, ranks: Ranks = SINGLE) -> torch.optim.AdamW:
    """Fused AdamW or Muon; weight decay applies to matrices and kernels, not to biases and norms."""
    weights, muon = dict(network.named_parameters()), config.optimizer == "muon"
    kernels, others, no_decay = ([weights[name] for name in names] for names in group_weights(weights, muon))
    decayed, undecayed = {"weight_decay": config.weight_decay}, {"weight_decay": 0.0}
    groups = [{"params": others, **decayed}, {"params": no_decay, **undecayed}]
    if not muon:
        return torch.optim.AdamW(groups, lr=config.lr, betas=_BETAS, fused=True)
    groups = [{"params": kernels, **decayed, "orthogonal": True}, *(group | {"orthogonal": False} for group in groups)]
    return Muon(groups, ranks, lr=config.lr, betas=_BETAS, fused=True)


def group_weights(weights: Mapping[str, Tensor], muon: bool) -> tuple[list[str], list[str], list[str]]:
    """Names of the kernels that Muon updates, of the other weights with decay, and of biases and norms.

    Checkpoints number the moments in this order.  Pure.
    """
    no_decay = [name for name, weight in weights.items() if weight.ndim <= 1]
    kernels = [name for name, weight in weights.items() if muon and _is_kernel(weight)]
    taken = {*kernels, *no_decay}
    return kernels, [name for name in weights if name not in taken], no_decay


def num_saved_copies(weight: Tensor, config: TrainingConfig) -> int:
    """Number of tensors of this weight's size in a checkpoint: the weight, its moments, its averages.  Pure."""
    moments = 1 if config.optimizer == "muon" and _is_kernel(weight) else 2
    return 1 + moments + len(average_decays(config))


def _is_kernel(weight: Tensor) -> bool:
    """Whether Muon updates this weight: a kernel with several output channels."""
    return weight.ndim == _KERNEL_AXES and len(weight) > 1


class MovingAverage:
    """Exponential moving average of the weights in float32, with decay min(decay, (1 + n) / (10 + n)) at update n.

    `weights` are by parameter name; `updates`, their number so far, is on the device.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self._decay = decay
        parameters = dict(network.named_parameters())
        self.weights = {name: p.detach().clone().float() for name, p in parameters.items()}
        # Paired once: walking the modules by name costs more than updating a small network.
        self._pairs = [(self.weights[name], p.detach()) for name, p in parameters.items()]
        self.updates = torch.zeros((), device=self._pairs[0][0].device)

    @torch.no_grad()
    def update(self, applied: Tensor) -> None:
        """Add the current weights, unless `applied`, a flag on the device, is false.

        One `lerp_` per tensor: torch's foreach variant needs the decay on the host or is private.
        """
        decay = torch.clamp((1 + self.updates) / (10 + self.updates), max=self._decay)
        keep = (1 - decay) * applied
        for average, parameter in self._pairs:
            average.lerp_(parameter, keep)
        self.updates += applied

    @torch.no_grad()
    def restart(self, weights: Mapping[str, Tensor]) -> None:
        """Reset the average to these weights."""
        for name, average in self.weights.items():
            average.copy_(weights[name])
        self.updates.zero_()

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restart(state["weights"])
        self.updates.copy_(state["updates"])


def average_decays(config: TrainingConfig) -> dict[str, float]:
    """Name and decay of each average: "ema" for the first, "ema_0.999" and so on for the others.  Pure."""
    return {"ema": config.ema_decay} | {f"ema_{decay}": decay for decay in config.extra_ema_decays}


def load_averages(
    averages: Mapping[str, MovingAverage], stored: Mapping[str, dict[str, Any]], weights: Mapping[str, Tensor]
) -> None:
    """Restore averages from a checkpoint.  An average that the checkpoint lacks starts from `weights`."""
    for name, average in averages.items():
        if name in stored:
            average.load_state_dict(stored[name])
        else:
            log.warning("the checkpoint has no average %s: starting it from the weights of the last step", name)
            average.restart(weights)
    for name in stored.keys() - averages.keys():
        log.info("dropping the average %s: it is no longer in training.extra_ema_decays", name)


class GradientSync:
    """Sums gradients over all ranks while the last backward pass of a step is running.

    The network is on its device with the same weights on all ranks; call `forward` in its place.
    """

    def __init__(self, network: nn.Module, global_batch: int, ranks: Ranks) -> None:
        self._global_batch, self._ranks = global_batch, ranks
        self._pending: list[dist.Work] = []
        self.parallel: DistributedDataParallel | None = None
        self.forward: nn.Module = network
        if ranks.world > 1:
            self.parallel = DistributedDataParallel(network, gradient_as_bucket_view=True)
            self.parallel.register_comm_hook(None, lambda state, bucket: self._start_sum(bucket))
            self.forward = self.parallel

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:
        """Context for the passes of a micro-batch; in the `last` of a step gradients are exchanged."""
        return nullcontext() if last or self.parallel is None else self.parallel.no_sync()

    def wait(self) -> None:
        """Wait until the gradients are summed: on a GPU the device waits, on a CPU the host.  Raises RankError."""
        for work in self._pending:
            self._ranks.wait_for(work)
        self._pending.clear()

    def gather(self, losses: Sequence[Tensor]) -> Tensor:
        """Losses of all samples in the order of the global batch, float32 [G], given those of this rank."""
        own = torch.cat(list(losses))
        gathered = own.new_zeros(self._global_batch)
        gathered[self._ranks.rank :: self._ranks.world] = own
        self._ranks.sum(gathered)
        return gathered

    def _start_sum(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Start summing a bucket in place and report it as done: gradients are views of it, complete after `wait`.

        DDP would wait at the end of the backward pass, where the clock cannot tell waiting from computing.
        """
        self._pending.append(dist.all_reduce(bucket.buffer(), async_op=True))
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done
