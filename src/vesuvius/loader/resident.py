"""Decides whether the decoded volumes stay in memory, and opens the one copy of the ranks of a machine."""

import logging
import os
from contextlib import suppress
from pathlib import Path

import torch

from vesuvius.errors import ConfigError
from vesuvius.monitor.memory.limits import MemoryLimit, MemoryPolicy, tightest
from vesuvius.monitor.probes.system_sample import sample_system
from vesuvius.runlog.units import GIB, format_size
from vesuvius.stream.options import local_ranks
from vesuvius.stream.reading.reader import ReaderJob
from vesuvius.stream.reading.resident import Resident

log = logging.getLogger(__name__)

RESIDENT_SHARE = 0.5  # of the free memory that decoded volumes may take


def ram_limit(configured_gib: float | None = None) -> MemoryLimit:
    limits = MemoryPolicy(configured_bytes=None if configured_gib is None else int(configured_gib * GIB))
    return tightest(sample_system(os.getpid()), limits)


def keeps_resident(job: ReaderJob, wanted: bool | float, empty: bool = False) -> bool:
    """Whether a loader keeps the volumes: `True` = in half of the free memory, a number = in up to that many GiB.

    With `empty`, all memory counts as free.  More than a number of GiB is read from the store instead, with a warning.
    Raises ConfigError: there is not enough memory.
    """
    need, limit = Resident.size_bytes(job), ram_limit()
    if wanted is not True and need > wanted * GIB:
        if wanted and not empty:
            log.warning(
                "%s of decoded volumes exceed cache_in_memory=%g (GiB): not kept in memory", format_size(need), wanted
            )
        return False
    free = limit.total_bytes - (0 if empty else limit.used_bytes)
    if need > (RESIDENT_SHARE * free if wanted is True else free):
        share = "half of the free memory" if wanted is True else "the free memory"
        raise ConfigError(
            f"cache_in_memory={wanted} needs {format_size(need)} for the decoded volumes, more than {share} "
            f"({format_size(free)}, {limit.name}); set cache_in_memory=False or choose a coarser level"
        )
    return True


def open_resident(job: ReaderJob, wanted: bool | float) -> Resident | None:
    """Open the copy of a loader: that of another rank on this machine or a new one; None if none is kept.

    The first rank offers its copy in the store of `torch.distributed`.  Raises as `keeps_resident`.
    """
    if not wanted:
        return None
    distributed, own = torch.distributed, None
    if job.world_size > 1 and distributed.is_initialized() and distributed.get_world_size() == job.world_size:
        boot, pids = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.stat("/proc/self/ns/pid").st_ino
        sharers = local_ranks()
        with suppress(OSError, RuntimeError):  # that copy has ended, or the store has
            own = Resident(job, sharers=sharers)  # takes no memory yet
            store = distributed.distributed_c10d._get_default_store()
            found = store.compare_set(f"vesuvius/{boot}/{pids}/{own.name}", "", own.address).decode()
            if found != own.address:
                other = Resident(job, found, sharers)
                own.close()
                return other
    if keeps_resident(job, wanted):
        return own or Resident(job)
    if own is not None:
        own.close()
    return None
