"""Checks before a run writes anything: `train` continues from here, `--dry-run` prints the results and stops."""

import math
import os
import resource
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from vesuvius.config import Config
from vesuvius.config.describe import OTHER_VOXELS
from vesuvius.errors import ConfigError, StorageError, broken_link
from vesuvius.monitor.probes.cores import task_limits
from vesuvius.runlog.files import free_disk_bytes, nearest_existing
from vesuvius.runlog.held import where
from vesuvius.runlog.run_dir import RunDir, refuse_existing, run_dir
from vesuvius.runlog.trackers import check_trackers
from vesuvius.runlog.units import format_size
from vesuvius.stream.options import (
    AUTO_THREADS_MAX,
    StreamOptions,
    check_cluster,
    check_store,
    is_ray_connected,
    store_bytes,
)
from vesuvius.stream.start.prepare import PreparedData, amplified_reads, prepare_data
from vesuvius.training.checkpoint.download import local_checkpoint
from vesuvius.training.checkpoint.format import load_checkpoint
from vesuvius.training.checkpoint.start import (
    check_initial_weights,
    compare_initial,
    read_initial_weights,
    read_resume_point,
)
from vesuvius.training.checkpoint.trained import CheckpointInfo, DataFacts, trained_volumes
from vesuvius.training.forecast.plan import checkpoint_sizes, fixed_count, plan_resident
from vesuvius.training.step.setup import build_meta_network
from vesuvius.training.validation.fixed_patches import FixedPatches, read_fixed_patches
from vesuvius.training.validation.validation import measure_spectrum
from vesuvius.volumes.store.cache import open_cache

READERS_PER_CORE = 4
"""Upper limit for remote stores, whose readers mostly wait."""

# Tasks (processes and threads), rounded up from peaks of pids cgroups on two cores: 24 without readers, of which each
# reader thread has 6 (it fetches ahead on five); 305, 335 and 407 with 1, 2 and 4 readers.  Ray's daemons have 156
# tasks, each prestarted worker (one per core) 22.
_ALONE, _ALONE_PER_CORE, _PER_READER_THREAD = 14, 1, 6
_TRAINER = 75
_DAEMONS = 160
_PER_CORE = 25
_PER_READER = 35
_RANK = 110  # another trainer, in a Ray worker


@dataclass(frozen=True)
class Preflight:
    """A checked run, ready to start."""

    directory: RunDir  # exists only for a resumed run
    data: PreparedData
    facts: DataFacts  # measured facts about the data; of a resumed run, those it began with
    resumed: CheckpointInfo | None  # None = start at step 0
    # at step 0: weights of `training.init_from`, on rank 0 and emptied once loaded, their file, and what differs there
    initial: tuple[dict[str, Tensor], Path, list[str]] | None
    fixed: FixedPatches | None  # for validation and previews; None = neither is configured
    resident: tuple[int, str]  # bytes of decoded volumes kept in memory, and why none are
    can_halve: bool = False  # with `train_batch_size: auto` a smaller micro-batch is tried after an OOM


def for_other_ranks(checked: Preflight) -> Preflight:
    """Return what other ranks need: without open volumes and tensors, which `of_rank` reads again."""
    resumed = replace(checked.resumed, state={}) if checked.resumed else None
    data = replace(checked.data, arrays=())
    return replace(checked, data=data, resumed=resumed, initial=None, fixed=None)


def of_rank(checked: Preflight, rank: int, world: int) -> Preflight:
    """Return the preflight of one rank: its directory, its samples, and the state that it continues from."""
    resumed = checked.resumed
    if resumed is not None and not resumed.state:
        resumed = replace(resumed, state=load_checkpoint(where(resumed.checkpoint), verified=True))
    data = replace(checked.data, job=replace(checked.data.job, rank=rank, world_size=world))
    return replace(checked, directory=checked.directory.of_rank(rank), data=data, resumed=resumed)


def preflight(
    config: Config,
    resume: bool,
    checkpoint: Path | None,
    allow_drift: bool = False,
    caches: bool = True,
    ranks_here: int = 1,
    known: DataFacts | None = None,
    directory: RunDir | None = None,
) -> Preflight:
    """Check config, torch, volumes, split, plan, intensities, memory and disk space; writes to the disk cache only.

    Args:
        resume: the run may exist.
        checkpoint: verified checkpoint to continue from, if any.
        caches: use the configured disk cache and read the fixed patches; a dry run does neither.
        ranks_here: ranks on this machine, each with its readers.
        known: facts that another run measured; ignored if the data differ.
        directory: run directory; None = that of the config's name.

    Raises:
        ConfigError: the run exists and `resume` is false, it was another experiment and not `allow_drift`, sizes do not
            fit, `training.init_from` names weights of another network, or a tracker's package is missing.
        DataError: a volume cannot be used.
        StorageError: the run directory is not writable, the disk is too small, or initial weights are damaged.
    """
    check_trackers(config.monitor.trackers)
    directory = directory or run_dir(config)
    if not resume:
        refuse_existing(directory)
    network = build_meta_network(config)
    network.check_size(config.training.micro_batch, config.data.patch_size)
    if config.training.workers and config.cluster.address is not None:
        check_cluster(config.cluster.address)
    data_config = config.data if caches else config.data.with_store(cache_dir=None)
    data = prepare_data(config.seed, data_config, world_size=ranks_here)
    options = StreamOptions.from_config(config.training, config.cluster)
    if not is_ray_connected():
        check_store(data.job, options, ranks_here)
        check_limits(config, ranks_here, 0 if config.cluster.address else store_bytes(data.job, options))
    if cache := open_cache(config.data.store):
        cache.check()
    resumed = read_resume_point(checkpoint, config, data, allow_drift) if checkpoint else None
    facts = known if known and known.volumes == trained_volumes(data) else None
    if resumed:
        facts = None if resumed.other_data else resumed.data
    intensities = facts.intensities if facts else data.intensity_ranges(config.data)
    spectrum = facts.spectrum if facts else measure_spectrum(data, config.data, intensities)
    # Read before the run starts, so that nothing fails weeks later.  A dry run only plans their positions.
    count = fixed_count(config.training, data)
    fixed = read_fixed_patches(data, config.data, count if caches else 0) if count else None
    facts = DataFacts(trained_volumes(data), intensities, spectrum, fixed.fingerprint if fixed and caches else ())
    before, now = resumed.data.fixed_patches if resumed else (), facts.fixed_patches
    if resumed and before != now and before[:1] == now[:1]:
        resumed.drift.append(OTHER_VOXELS)
    initial = None
    if config.training.init_from is not None and not resumed:
        given = config.training.init_from
        found = given if os.path.exists(given) else getattr(given, "written", given)
        weights, source = read_initial_weights(local_checkpoint(found))
        check_initial_weights(network, weights)
        initial = weights, source, compare_initial(source, config, facts)
    _check_disk(directory.path, sum(checkpoint_sizes(config)))
    resident = plan_resident(config, data, resumed.step if resumed else 0)
    return Preflight(directory, data, facts, resumed, initial, fixed, resident)


def config_warnings(config: Config, data: PreparedData, world: int, cores: float) -> list[str]:
    """Permitted but probably unintended settings, one line each, for `world` ranks and `cores` for readers.  Pure."""
    diffusion, plan, workers, found = config.diffusion, data.plan, config.training.workers, []
    if config.cluster.address is None and workers > READERS_PER_CORE * cores:
        found.append(
            f"training.workers={workers} workers on {cores:g} cores read no faster than a few; set "
            f"training.workers={math.ceil(cores)}, or at most {math.floor(READERS_PER_CORE * cores)} for a remote store"
        )
    if diffusion.prediction == "eps" and diffusion.sampler_clip is None:
        found.append(
            "diffusion.prediction=eps without diffusion.sampler_clip: near pure noise, small errors of eps become "
            "large errors of x_0, and samples may be useless; set diffusion.sampler_clip=1.5"
        )
    found += amplified_reads(plan, world)
    if plan.repeats_cells:
        found.append(
            f"the volumes hold fewer patch positions than data.regions_in_flight={plan.regions_in_flight}: batches "
            "repeat patches; use larger volumes, a smaller data.patch_size or a smaller data.validation.gap"
        )
    return found


def tasks_needed(workers: int, ranks: int, cores: int) -> int:
    """Processes and threads of a run with a private Ray: `ranks` on this machine, each with `workers`.  Pure."""
    if workers == 0 and ranks == 1:
        return _ALONE + _ALONE_PER_CORE * cores + _PER_READER_THREAD * min(cores, AUTO_THREADS_MAX)
    return _TRAINER + _DAEMONS + _PER_CORE * cores + ranks * workers * _PER_READER + (ranks - 1) * _RANK


def check_limits(config: Config, ranks: int, store_bytes: int, cores: int | None = None) -> None:
    """Raises ConfigError if a process or file size limit would make Ray hang or die silently.

    `ranks` and `cores` (if known) are those of this machine, `store_bytes` is the size of the object store to create.
    """
    cores = cores or os.cpu_count() or 1
    workers = config.training.workers if config.cluster.address is None else 0  # a cluster is there already
    need, limits = tasks_needed(workers, ranks, cores), task_limits()
    if limits and limits[0].left < need:
        tightest = limits[0]
        others = f", {tightest.others} of them in use" if tightest.others > 0 else ""
        fewer = next((n for n in range(workers - 1, -1, -1) if tasks_needed(n, ranks, cores) <= tightest.left), None)
        raise ConfigError(
            f"{tightest.name} allows {tightest.limit} processes and threads{others}, but this run needs about {need}; "
            "raise it (`ulimit -u`, docker run --pids-limit)"
            + ("" if fewer is None else f" or set training.workers={fewer}")
        )
    largest, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if largest != resource.RLIM_INFINITY and largest < store_bytes:
        raise ConfigError(
            f"`ulimit -f` limits files to {format_size(largest)}, but Ray's object store in /dev/shm needs "
            f"{format_size(store_bytes)}; raise it (`ulimit -f unlimited`) or set training.workers=0"
        )


def _check_disk(path: Path, checkpoint_bytes: int) -> None:
    """Raises StorageError: the run directory cannot be created, or a checkpoint does not fit."""
    if link := broken_link(path):
        raise StorageError(f"Cannot create {path}: {link}")
    there = nearest_existing(path)
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise StorageError(f"Cannot write to {there} to create {path}; choose another directory")
    if checkpoint_bytes > (free := free_disk_bytes(there)):
        raise StorageError(
            f"A checkpoint of {format_size(checkpoint_bytes)} does not fit on the disk of {path} "
            f"({format_size(free)} free); free some space, lower model.channels or link runs/ to a larger disk"
        )
