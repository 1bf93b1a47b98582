"""The network of an experiment: its channels and how it is computed follow from the whole config."""

from __future__ import annotations

import torch

from vesuvius.config import Config, TrainingConfig
from vesuvius.diffusion.network.unet import Execution, UNet, build_unet


def execution(config: TrainingConfig) -> Execution:
    """How the network is computed; changes no number of weights and no result beyond rounding."""
    return Execution(config.recompute_norm, config.checkpoint_levels)


def build_network(config: Config, device: torch.device) -> UNet:
    """The network with the initial weights of `config.seed`, on `device`.  Raises ConfigError for torch 2.9."""
    network = build_unet(config.model, config.seed, config.input_channels, device, execution(config.training))
    if config.training.channels_last:
        network.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]  # torch declares channels_last only
    return network


def lay_out_network(config: Config) -> UNet:
    """The network without memory for its weights (on the meta device)."""
    with torch.device("meta"):
        return UNet(config.model, config.input_channels, execution(config.training))
