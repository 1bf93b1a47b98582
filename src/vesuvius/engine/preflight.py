"""What is checked before a run writes anything: `train` goes on from here, `--dry-run` prints it and stops."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vesuvius.config import Config
from vesuvius.data.prepare import GreyRanges, PreparedData, prepare_data
from vesuvius.data.store import check_cache
from vesuvius.data.stream_options import StreamOptions, check_store, check_store_need
from vesuvius.diffusion.unet import check_torch_version
from vesuvius.engine.checkpoint import newest_checkpoint
from vesuvius.engine.conditioning import volume_scalars
from vesuvius.engine.network import lay_out_network
from vesuvius.engine.resume import read_state, stored_greys, stored_scalars
from vesuvius.engine.run_dir import RunDir, refuse_existing, run_dir
from vesuvius.engine.step import parameter_count
from vesuvius.errors import StorageError
from vesuvius.observe.memory import GIB

# float32: weights, their average (in the state and exported), two moments of AdamW.
_CHECKPOINT_BYTES_PER_PARAMETER = 5 * 4


@dataclass(frozen=True)
class Preflight:
    """A run that may start.

    Attributes:
        directory: where it will write; exists only when it is resumed.
        checkpoint: the one it goes on from, or None to start at step 0.
        state: what that checkpoint holds.
        drift: config keys that have changed since, a line each.
        scalars: what the network is told of each volume, float32 [volumes, n].
        parameters: trainable weights of the network.
        checkpoint_bytes: size of one checkpoint on disk, estimated.
        free_bytes: free space where the run directory is or will be.
    """

    directory: RunDir
    data: PreparedData
    greys: GreyRanges
    scalars: NDArray[np.float32]
    checkpoint: Path | None
    state: dict[str, Any] | None
    drift: list[str]
    parameters: int
    checkpoint_bytes: int
    free_bytes: int


def preflight(config: Config, resume: bool) -> Preflight:
    """Check config, torch, volumes, split, plan, grey values, memory sizes and disk space.  Writes nothing.

    Raises:
        ConfigError: the run exists and `resume` is false, it was another experiment, or sizes do not fit.
        DataError: a volume cannot be used.
        StorageError: checkpoints are damaged, the place is not writable or too small.
    """
    check_torch_version()
    directory = run_dir(config)
    if not resume:
        refuse_existing(directory)
    parameters = _check_network(config)
    data = prepare_data(config.seed, config.data)
    options = StreamOptions.from_config(config.training, config.cluster)
    check_store_need(data.job, options)
    check_store(data.job, options)
    check_cache(config.data.store)
    checkpoint = newest_checkpoint(directory.checkpoints) if resume else None
    state, drift = read_state(checkpoint, config, data) if checkpoint else (None, [])
    greys = stored_greys(state) if state else data.grey_ranges(config.data)
    checkpoint_bytes = parameters * _CHECKPOINT_BYTES_PER_PARAMETER
    free_bytes = _check_disk(directory.path, checkpoint_bytes, config.training.keep_last)
    scalars = stored_scalars(state) if state else None
    if scalars is None:
        scalars = volume_scalars(config, data)
    return Preflight(
        directory, data, greys, scalars, checkpoint, state, drift, parameters, checkpoint_bytes, free_bytes
    )


def doubts(config: Config) -> list[str]:
    """Settings that are allowed and seldom meant, a line each.  Pure."""
    diffusion, found = config.diffusion, []
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


def _check_network(config: Config) -> int:
    """Lay the network out without memory; returns its number of weights."""
    network = lay_out_network(config)
    network.check_size(config.training.train_batch_size, config.data.patch_size)
    return parameter_count(network)


def _check_disk(path: Path, checkpoint_bytes: int, keep_last: int) -> int:
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
