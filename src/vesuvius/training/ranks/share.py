"""What one rank computes of a global batch."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Config
from vesuvius.errors import ConfigError


def launched_world_size() -> int | None:
    """Number of ranks that torchrun or Ray Train has started; None where neither has."""
    world = os.environ.get("WORLD_SIZE")
    return int(world) if world and "RANK" in os.environ and "MASTER_ADDR" in os.environ else None


@dataclass(frozen=True)
class RankShare:
    """The samples of one rank: those of the global batch at the places that are `rank` modulo `world`."""

    rank: int
    world: int
    global_batch: int  # samples of a step, over all ranks; it follows from the config and not from `world`
    micro_batch: int  # samples that this rank computes at once
    accumulate_steps: int  # micro-batches of this rank in a step

    @property
    def positions(self) -> NDArray[np.int64]:
        """Places in the global batch, int64 [global_batch / world]."""
        return np.arange(self.rank, self.global_batch, self.world)


def rank_share(config: Config, rank: int, world: int) -> RankShare:
    """Return the part of a rank.

    The effective batch is the config's, whatever the number of ranks that are there: where it is not
    `training.ranks`, each of them accumulates more or fewer micro-batches, of at most `train_batch_size` samples.

    Raises:
        ConfigError: the effective batch does not divide by the number of ranks.
    """
    total = config.global_batch
    if total % world:
        fitting = [count for count in range(1, min(total, 2 * world) + 1) if total % count == 0]
        raise ConfigError(
            f"the effective batch must divide by the number of ranks; got {total} samples for {world} ranks; use "
            f"{' or '.join(map(str, fitting[-2:]))} ranks, or change training.train_batch_size or accumulate_steps"
        )
    each = total // world
    micro = next(size for size in range(min(config.training.micro_batch, each), 0, -1) if each % size == 0)
    return RankShare(rank, world, total, micro, each // micro)


def single_rank_config(config: Config) -> Config:
    """Return a config of one rank that does what each of its ranks would."""
    cluster = config.cluster.model_copy(update={"min_ranks": None})
    return config.with_training(ranks=1).model_copy(update={"cluster": cluster})


def check_ranks(config: Config, least: int, most: int) -> None:
    """Raises ConfigError where the effective batch does not divide by each number of ranks that may be at work."""
    total = config.global_batch
    if uneven := [count for count in range(least, most + 1) if total % count]:
        raise ConfigError(
            f"the effective batch of {total} samples does not divide by {', '.join(map(str, uneven))}, and "
            f"cluster.min_ranks={least} lets {least} to {most} ranks share it; raise cluster.min_ranks, or change "
            "training.train_batch_size or accumulate_steps"
        )
