"""A rank's share of the global batch."""

import math
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Config
from vesuvius.errors import ConfigError

_REMEDY = "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun does, or unset them to train as one rank"


def launched_world_size() -> int | None:
    """Number of ranks started by torchrun or Ray Train; None if neither started this process.

    Raises ConfigError: a variable is missing, no integer or out of range.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not os.environ.get(name)]
    if sum(name in missing for name in names[:3]) >= 2:  # such as the WORLD_SIZE of a script for SLURM
        return None
    world = _integer("WORLD_SIZE", 1, 2**31) if "WORLD_SIZE" not in missing else 0
    if missing and world != 1:
        found = ", ".join(f"{name}={os.environ[name]}" for name in names if name not in missing)
        raise ConfigError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set, but {found}; {_REMEDY}"
        )
    _integer("RANK", 0, world)
    _integer("LOCAL_RANK", 0, world)
    _integer("LOCAL_WORLD_SIZE", int(os.environ.get("LOCAL_RANK") or 0) + 1, world + 1)
    _integer("MASTER_PORT", 1, 2**16)
    return world


def _integer(name: str, least: int, below: int) -> int:
    """Value of a variable; `least` if it is not set.  Raises ConfigError."""
    text = os.environ.get(name) or str(least)
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value < below:
        of = f"; WORLD_SIZE={os.environ['WORLD_SIZE']}" if below < 2**16 else ""
        raise ConfigError(f"{name}={text} is not an integer from {least} to {below - 1}{of}; {_REMEDY}")
    return value


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


def batch_advice(config: Config, before: Config) -> str:
    """Usual changes if `config` has another effective batch than `before`, but the same learning rate; else ''.

    For AdamW the learning rate grows with the square root of the batch (Malladi et al. 2022).  For Muon the same was
    derived while the noise of the gradient dominates (Su 2025, "Rethinking learning rate and batch size 3").  Pure.
    """
    now, then, training = config.global_batch, before.global_batch, config.training
    if now == then or training.lr != before.training.lr:
        return ""
    scaled = training.lr * (now / then) ** 0.5
    text = f"at the same training.lr={training.lr:g}; the square-root rule gives training.lr={scaled:.3g}"
    each = then * training.micro_batch * training.accumulate_steps / now  # per rank
    if each.is_integer():
        micro = math.gcd(int(each), training.micro_batch)
        sizes = f"training.train_batch_size={micro} training.accumulate_steps={int(each) // micro}"
        text += f", or keep {then} samples with {sizes}"
    return text


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
