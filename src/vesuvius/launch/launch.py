"""Trains as one rank in this process, as a rank that torchrun started, or with ranks that Ray Train starts.

torch takes seconds to import, so only a process that trains imports it.
"""

import logging
from dataclasses import replace

import yaml

from vesuvius.config import Config
from vesuvius.errors import ConfigError
from vesuvius.runlog.run_dir import run_dir
from vesuvius.training.ranks.share import launched_world_size
from vesuvius.training.request import Request

log = logging.getLogger(__name__)


def launch(request: Request) -> int:
    """Train with `training.ranks` ranks.  Returns the exit code; raises the errors of `train_as_rank`."""
    launched = launched_world_size()
    request = resolve_ranks(request, launched)
    if launched is None and request.config.training.ranks != 1:
        from vesuvius.launch.ray_train import train_with_ray

        return train_with_ray(request)
    from vesuvius.training.run import train_as_rank

    return train_as_rank(request)


def resolve_ranks(request: Request, launched: int | None) -> Request:
    """Replace `training.ranks: auto` with a number; `launched` is the number of ranks that torchrun started, if any.

    A resumed run keeps its number, and so its effective batch.  Raises ConfigError: GPUs of a cluster are not counted.
    """
    config = request.config
    if config.training.ranks != "auto":
        return request
    count = (_ranks_so_far(config) if request.resume else None) or launched
    if count is None:
        if config.cluster.address is not None:
            raise ConfigError(
                "training.ranks=auto counts the GPUs of this machine and does not work with cluster.address="
                f"{config.cluster.address}; set training.ranks to a number (see `ray status`)"
            )
        import torch

        count = max(torch.accelerator.device_count(), 1)
    log.info("training.ranks=auto: %d", count)
    return replace(request, config=config.with_training(ranks=count))


def _ranks_so_far(config: Config) -> int | None:
    try:
        stored = yaml.safe_load((run_dir(config).path / "config.resolved.yaml").read_text(encoding="utf-8"))
        return int(stored["training"]["ranks"])
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError):
        return None
