"""A rank's share of the global batch."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Config
from vesuvius.errors import ConfigError


def launched_world_size() -> int | None:
    """Number of ranks started by torchrun or Ray Train; None if neither started this process."""
    world = os.environ.get("WORLD_SIZE")
    return int(world) if world and "RANK" in os.environ and "MASTER_ADDR" in os.environ else None


@dataclass(frozen=True)
class RankShare:
    """The samples of one rank: positions `rank` modulo `world` of the global batch."""

    rank: int
    world: int
    global_batch: int  # samples per step over all ranks; independent of `world`
    micro_batch: int  # samples that this rank computes at a time
    accumulate_steps: int  # micro-batches per step of this rank

    @property
    def positions(self) -> NDArray[np.int64]:
        """Positions in the global batch, int64 [global_batch / world]."""
        return np.arange(self.rank, self.global_batch, self.world)


def rank_share(config: Config, rank: int, world: int) -> RankShare:
    """Return the share of a rank.

    The effective batch is the config's, however many ranks are running: if their number differs from `training.ranks`,
    each accumulates more or fewer micro-batches of at most `train_batch_size` samples.

    Raises ConfigError: the effective batch is not divisible by the number of ranks.
    """
    total = config.global_batch
    if total % world:
        fitting = [count for count in range(1, min(total, 2 * world) + 1) if total % count == 0]
        raise ConfigError(
            f"The effective batch of {total} samples is not divisible by {world} ranks; use "
            f"{' or '.join(map(str, fitting[-2:]))} ranks, or change training.train_batch_size or accumulate_steps"
        )
    each = total // world
    micro = next(size for size in range(min(config.training.micro_batch, each), 0, -1) if each % size == 0)
    return RankShare(rank, world, total, micro, each // micro)


def single_rank_config(config: Config) -> Config:
    """Config of one rank that does what each rank of `config` would."""
    cluster = config.cluster.model_copy(update={"min_ranks": None})
    return config.with_training(ranks=1).model_copy(update={"cluster": cluster})


def check_ranks(config: Config, least: int, most: int) -> None:
    """Raises ConfigError unless the effective batch is divisible by every number of ranks from `least` to `most`."""
    total = config.global_batch
    if uneven := [count for count in range(least, most + 1) if total % count]:
        raise ConfigError(
            f"The effective batch of {total} samples is not divisible by {', '.join(map(str, uneven))}, but "
            f"cluster.min_ranks={least} allows {least} to {most} ranks; raise cluster.min_ranks, or change "
            "training.train_batch_size or accumulate_steps"
        )
