"""Finds the rank of a loader, and compares where the ranks begin."""

import os
from collections import Counter
from contextlib import suppress

from torch import distributed

from vesuvius.errors import ConfigError
from vesuvius.stream.options import to_integer
from vesuvius.stream.reading.reader import ReaderJob

_WORLD_VARIABLES = "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"  # torchrun, mpirun
_OF_STEP = "SLURM_STEP_NUM_TASKS", "PMI_SIZE"  # srun
_checked = Counter[str]()  # comparisons of the positions of all ranks so far, by plan


def given_rank(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    """Return the rank and the number of ranks of the arguments.  Raises ConfigError for one without the other."""
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise ConfigError(f"rank={rank} and world_size={world_size} are incomplete; pass both or neither")
    rank, world_size = to_integer("rank", rank, 0), to_integer("world_size", world_size, 1)
    if rank >= world_size:
        raise ConfigError(f"rank {rank} does not exist with world_size={world_size}; pass 0 to {world_size - 1}")
    return rank, world_size


def launched_rank(known: tuple[int, int] | None) -> tuple[int, int]:
    """Return the rank that torch.distributed gives now, or else the `known` one, or else 0 of 1.

    Raises ConfigError: a launcher has started several processes, and torch.distributed is not initialized.
    """
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    of_step = () if "SLURM_PTY_PORT" in os.environ else _OF_STEP  # the one shell of `srun --pty` knows of all tasks
    for variable in () if known else (*_WORLD_VARIABLES, *of_step):
        if (value := os.environ.get(variable, "").strip()) not in ("", "1"):
            raise ConfigError(
                f"The rank of this process is unknown although {variable}={value}, and processes without ranks read "
                "the same samples; call torch.distributed.init_process_group before the first loop, or pass rank and "
                "world_size (0 and 1 for a loader that is alone)"
            )
    return known or (0, 1)


def compare_positions(job: ReaderJob, sample_index: int) -> None:
    """Raise ConfigError if the first rank that began this loop began elsewhere.  Waits for no other rank."""
    if job.world_size == 1 or not distributed.is_initialized() or distributed.get_world_size() != job.world_size:
        return
    _checked[job.plan.hash] += 1
    key = f"vesuvius/{job.plan.hash}/{_checked[job.plan.hash]}"
    with suppress(RuntimeError):  # the store has ended with the process that holds it
        first = distributed.distributed_c10d._get_default_store().compare_set(key, "", str(sample_index))
        if int(first) != sample_index:
            raise ConfigError(
                f"Rank {job.rank} starts at sample {sample_index}, but another rank at {int(first)}; load the same "
                "state on all ranks; for a loader on one rank alone pass rank=0 and world_size=1"
            )
