"""What samples and volumes follow from alike: what it must be, and how it is recorded."""

from __future__ import annotations

from typing import Any

import torch

from vesuvius import __version__
from vesuvius.config import ArrayConfig
from vesuvius.errors import ConfigError
from vesuvius.training.checkpoint.trained import CheckpointInfo, check_weights


def check_volume(info: CheckpointInfo, volume: int, option: str = "--volume") -> None:
    """Raises ConfigError where a checkpoint has no training volume of this number."""
    if volume >= len(info.data.volumes):
        raise ConfigError(
            f"{option} numbers the {len(info.data.volumes)} training volumes from 0; got {volume}; lower it"
        )


def check_condition(info: CheckpointInfo, condition: ArrayConfig | None) -> None:
    """Raises ConfigError where a condition is given to a model that was trained without."""
    if condition is not None and not info.config.has_condition:
        raise ConfigError(
            f"--condition needs a model that was trained with conditions; got {condition.path} and "
            f"{info.checkpoint}, which has none; remove --condition"
        )


def described(info: CheckpointInfo, weights: str, volume: int, seed: int, batch_size: int) -> dict[str, Any]:
    """What samples and volumes follow from alike."""
    diffusion, grey = info.config.diffusion, info.data.greys.volumes[volume]
    return {
        "seed": seed,
        "batch_size": batch_size,
        "step": info.step,
        "weights": weights,
        "weights_sha256": check_weights(info.checkpoint, weights),
        "sampler": diffusion.sampler,
        **{key: getattr(diffusion, f"sampler_{key}") for key in ("steps", "eta", "clip", "quantile", "guidance")},
        "volume": info.data.volumes[volume].name,
        "grey_low": grey.low,
        "grey_high": grey.high,
        "vesuvius": __version__,
        "torch": torch.__version__,
    }
