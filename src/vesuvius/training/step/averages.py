"""Moving averages of the weights: what a run is validated, sampled and published with, one for each length.

They live on the device and count there, so that a step that was not applied leaves them alone without a sync.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vesuvius.config import TrainingConfig

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
