"""What samples and volumes have in common: the request, its checks and its record."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vesuvius import __version__
from vesuvius.errors import ConfigError
from vesuvius.training.checkpoint.trained import CheckpointInfo, check_weights


@dataclass(frozen=True)
class DrawRequest:
    """What every drawing is asked for; picklable, because workers open the network from it."""

    checkpoint: Path  # as `find_checkpoint` takes it
    weights: str  # "ema", another average, or "model" for those of the last step
    overrides: tuple[str, ...]  # `key.path=value`, on top of the checkpoint's config: sampler and amp
    # seed, batch_size: what a result follows from, in addition to the network and its inputs
    seed: int
    batch_size: int
    volume: int  # number of the training volume whose grey values and condition are used


def check_volume(info: CheckpointInfo, volume: int, option: str = "--volume") -> None:
    """Raises ConfigError where a checkpoint has no training volume of this number."""
    if volume >= len(info.data.volumes):
        raise ConfigError(
            f"{option} {volume} does not exist: the {len(info.data.volumes)} training volumes are numbered from 0"
        )


def run_of(checkpoint: Path) -> Path:
    """The run directory of a checkpoint; the current one for a checkpoint outside a run.  Pure."""
    parent = checkpoint.parent if checkpoint.parent.name else checkpoint.absolute().parent
    return parent.parent if parent.name == "checkpoints" else Path()


def described(info: CheckpointInfo, request: DrawRequest) -> dict[str, Any]:
    """The part of the record that samples and volumes share.  Reads the weights to hash them."""
    diffusion, grey = info.config.diffusion, info.data.greys.volumes[request.volume]
    return {
        "seed": request.seed,
        "batch_size": request.batch_size,
        "step": info.step,
        "weights": request.weights,
        "weights_sha256": check_weights(info.checkpoint, request.weights),
        "sampler": diffusion.sampler,
        **{key: getattr(diffusion, f"sampler_{key}") for key in ("steps", "clip", "guidance")},
        "volume": info.data.volumes[request.volume].name,
        "grey_low": grey.low,
        "grey_high": grey.high,
        "vesuvius": __version__,
        "torch": torch.__version__,
    }
