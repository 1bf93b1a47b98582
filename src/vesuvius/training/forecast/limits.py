"""What a run needs of the limits that the system sets to processes, against what they leave."""

from __future__ import annotations

import os
import resource

from vesuvius.config import Config
from vesuvius.errors import ConfigError
from vesuvius.monitor.probes.task_limits import TaskLimit, task_limits
from vesuvius.runlog.units import size_text

# Tasks (processes and threads), rounded up from the peaks of pids cgroups on two cores: 20 without readers, 305, 335
# and 407 with 1, 2 and 4 of them.  Ray's daemons have 156, and each process that they start ahead, one a core, 22.
_ALONE, _ALONE_PER_CORE = 20, 2
_TRAINER = 75
_DAEMONS = 160
_PER_CORE = 25
_PER_READER = 35
_RANK = 110  # another trainer, in a process of Ray's


def tasks_needed(workers: int, ranks: int, cores: int) -> int:
    """Tasks of a run on this machine with a private Ray; fewer would end it sooner or later.  Pure.

    Args:
        workers: readers of a rank.
        ranks: here.
    """
    if workers == 0 and ranks == 1:
        return _ALONE + _ALONE_PER_CORE * cores
    return _TRAINER + _DAEMONS + _PER_CORE * cores + ranks * workers * _PER_READER + (ranks - 1) * _RANK


def task_problem(workers: int, ranks: int, cores: int, limits: list[TaskLimit]) -> tuple[str, str]:
    """What is wrong, and what helps, if the tightest limit is too low for a run; ('', '') otherwise.  Pure.

    Args:
        workers, ranks, cores: as `tasks_needed`.
        limits: as `task_limits`.
    """
    need = tasks_needed(workers, ranks, cores)
    if not limits or limits[0].left >= need:
        return "", ""
    tightest = limits[0]
    others = f", of which others use {tightest.others}" if tightest.others > 0 else ""
    fewer = next((w for w in range(workers - 1, -1, -1) if tasks_needed(w, ranks, cores) <= tightest.left), None)
    return (
        f"{tightest.name} allows {tightest.limit} processes and threads{others}, and this run needs about {need}",
        "raise it (`ulimit -u`, docker run --pids-limit)"
        + ("" if fewer is None else f" or set training.workers={fewer}"),
    )


def check_limits(config: Config, ranks: int, store_bytes: int) -> None:
    """Raises ConfigError where Ray would hang or die of a limit, without a word.

    Args:
        ranks: on this machine.
        store_bytes: of the object store that is yet to be made; 0 = none.
    """
    workers = config.training.workers if config.cluster.address is None else 0  # a cluster is there already
    problem, remedy = task_problem(workers, ranks, os.cpu_count() or 1, task_limits())
    if problem:
        raise ConfigError(f"{problem}; {remedy}")
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest != resource.RLIM_INFINITY and largest < store_bytes:
        raise ConfigError(
            f"`ulimit -f` allows files of {size_text(largest)}, and Ray's object store in /dev/shm is one of "
            f"{size_text(store_bytes)}; raise it (`ulimit -f unlimited`) or set training.workers=0"
        )
