"""What is checked before a run writes anything: `train` goes on from here, `--dry-run` prints it and stops."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Config, DataConfig
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.diffusion.unet import check_torch_version
from vesuvius.engine.conditioning import volume_scalars
from vesuvius.engine.data_spectrum import measure_spectrum
from vesuvius.engine.network import lay_out_network
from vesuvius.engine.resume import Resumption, read_resumption, stored_greys, stored_scalars, stored_spectrum
from vesuvius.engine.run_dir import RunDir, refuse_existing, run_dir
from vesuvius.engine.step import check_initial_weights, parameter_count, saved_copies
from vesuvius.engine.trained import InitialWeights, read_initial_weights
from vesuvius.errors import StorageError
from vesuvius.observe.units import GIB
from vesuvius.stream.fixed_patches import FixedPatches, read_fixed_patches
from vesuvius.stream.options import StreamOptions, check_store, check_store_need
from vesuvius.stream.prepare import GreyRanges, PreparedData, prepare_data
from vesuvius.stream.start_reads import StartReads
from vesuvius.volumes.object_store import check_cache


@dataclass(frozen=True)
class Preflight:
    """A run that may start.

    Attributes:
        directory: where it will write; exists only when it is resumed.
        resumed: the checkpoint it goes on from, or None to start at step 0.
        initial: the weights it starts from, for `training.init_from` at step 0.
        fixed: patches for validation and previews, or None where the config wants neither.
        spectrum: of the data; that which the run began with.
        scalars: what the network is told of each volume, float32 [volumes, n].
        parameters: trainable weights of the network.
        checkpoint_bytes: size of one checkpoint on disk, estimated.
        free_bytes: free space where the run directory is or will be.
    """

    directory: RunDir
    data: PreparedData
    greys: GreyRanges
    spectrum: Spectrum
    scalars: NDArray[np.float32]
    resumed: Resumption | None
    initial: InitialWeights | None
    fixed: FixedPatches | None
    parameters: int
    checkpoint_bytes: int
    free_bytes: int


def preflight(
    config: Config, resume: bool, checkpoint: Path | None, allow_drift: bool = False, caches: bool = True
) -> Preflight:
    """Check config, torch, volumes, split, plan, grey values, memory sizes and disk space.

    Writes nothing, but for chunks that it reads into the disk cache.

    Args:
        resume: the run may exist.
        checkpoint: the whole one to go on from, if there is one.
        allow_drift: go on though the data or what the weights mean have changed.
        caches: read by way of the disk cache, where one is configured, and leave notes of what is read with the run
            that is resumed; a dry run does neither.

    Raises:
        ConfigError: the run exists and `resume` is false, it was another experiment and not `allow_drift`, sizes do
            not fit, or `training.init_from` names weights of another network.
        DataError: a volume cannot be used.
        StorageError: the place is not writable or too small, or weights to start from are damaged.
    """
    check_torch_version()
    directory = run_dir(config)
    if not resume:
        refuse_existing(directory)
    network = lay_out_network(config)
    network.check_size(config.training.train_batch_size, config.data.patch_size)
    data_config = config.data if caches else _without_cache(config.data)
    notes = directory.reading if caches and resume and directory.exists() else None
    with StartReads(data_config, notes) as reads:
        data = prepare_data(config.seed, data_config, foreground=reads.foreground_map)
        options = StreamOptions.from_config(config.training, config.cluster)
        check_store_need(data.job, options)
        check_store(data.job, options)
        check_cache(config.data.store)
        resumed = read_resumption(checkpoint, config, data, allow_drift) if checkpoint else None
        keeps_data = resumed is not None and not resumed.other_data
        greys = stored_greys(resumed.state) if resumed and keeps_data else data.grey_ranges(config.data, reads.read)
        spectrum = stored_spectrum(resumed.state) if resumed and keeps_data else None
        if spectrum is None:
            spectrum = measure_spectrum(data, config.data, greys, reads.read)
        fixed = _fixed_patches(config, data, reads)
    scalars = stored_scalars(resumed.state) if resumed and keeps_data else volume_scalars(config, data)
    initial = None if resumed else _initial_weights(config)
    checkpoint_bytes = sum(
        weight.numel() * 4 * saved_copies(weight, config.training) for weight in network.parameters()
    )
    free_bytes = _check_disk(directory.path, checkpoint_bytes)
    return Preflight(
        directory,
        data,
        greys,
        spectrum,
        scalars,
        resumed,
        initial,
        fixed,
        parameter_count(network),
        checkpoint_bytes,
        free_bytes,
    )


def _without_cache(config: DataConfig) -> DataConfig:
    return config.model_copy(update={"store": config.store.model_copy(update={"cache_dir": None})})


def _initial_weights(config: Config) -> InitialWeights | None:
    """The weights that `training.init_from` names; None where it names none."""
    if config.training.init_from is None:
        return None
    initial = read_initial_weights(Path(config.training.init_from))
    check_initial_weights(lay_out_network(config), initial.weights)
    return initial


def _fixed_patches(config: Config, data: PreparedData, reads: StartReads) -> FixedPatches | None:
    """Patches that validations and previews use: read once, before a run starts, so that nothing fails weeks later."""
    training = config.training
    validates = training.validate_every > 0 and any(split.validation for split in data.splits)
    if not validates and training.preview_every == 0:
        return None
    count = max(training.validate_patches if validates else 0, training.preview_count if training.preview_every else 0)
    return read_fixed_patches(data, config.data, count, reads.read)


def doubts(config: Config) -> list[str]:
    """Settings that are allowed and seldom meant, a line each.  Pure."""
    diffusion, training, found = config.diffusion, config.training, []
    if training.keep_every and training.keep_every % training.save_every:
        found.append(
            f"training.keep_every {training.keep_every} is no multiple of save_every {training.save_every}: only "
            "checkpoints at multiples of both are sure to be kept"
        )
    if diffusion.prediction == "eps" and diffusion.sampler_clip is None:
        found.append(
            "diffusion.prediction eps without diffusion.sampler_clip: near pure noise x_0 is what eps leaves over, "
            "divided by almost 0, and samples may be useless; set diffusion.sampler_clip=1.5"
        )
    if diffusion.zero_terminal_snr and diffusion.min_snr_gamma is not None:
        found.append(
            "diffusion.zero_terminal_snr with diffusion.min_snr_gamma: the last timestep has weight 0 and is learned "
            "from its neighbours only; set diffusion.min_snr_gamma=null to train it"
        )
    return found


def _check_disk(path: Path, checkpoint_bytes: int) -> int:
    """Free bytes where the run directory is or will be."""
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise StorageError(f"the run directory must be writable; got {path}, but {there} is not; choose another place")
    free = shutil.disk_usage(there).free
    if checkpoint_bytes > free:
        raise StorageError(
            f"one checkpoint must fit on the disk; got {checkpoint_bytes / GIB:.2f} GiB needed and {free / GIB:.2f} "
            f"GiB free for {path}; free some space, lower model.channels or link runs/ to a larger disk"
        )
    return free
