"""What samples and volumes share: the request, its checks and record, the network, progress, an end on a signal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from vesuvius import __version__
from vesuvius.config import Config
from vesuvius.diffusion.estimate import Condition, NetworkEstimate
from vesuvius.diffusion.sampler import Estimate
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import ConfigError, GpuMemoryError, VesuviusError
from vesuvius.training.checkpoint.format import find_checkpoint
from vesuvius.training.checkpoint.trained import (
    CheckpointInfo,
    Denoiser,
    check_weights,
    read_checkpoint_info,
    voxel_settings,
)
from vesuvius.training.step.conditioner import Conditioner
from vesuvius.training.step.self_test import check_kernels, cudnn_problem
from vesuvius.training.step.setup import build_meta_network, choose_device, uses_channels_last
from vesuvius.training.stop import StopRequest

log = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int], None]
"""Called with what is counted ("sampling steps"), how many are done, and how many there are in all."""
T = TypeVar("T")


@dataclass(frozen=True)
class GenerateRequest:
    """What every drawing is asked for; picklable, because workers open the network from it."""

    checkpoint: Path  # as `find_checkpoint` takes it
    weights: str  # "ema", another average, or "model" for those of the last step
    overrides: tuple[str, ...]  # `key.path=value`, on top of the checkpoint's config: sampler and amp
    # seed, batch_size: what a result follows from, in addition to the network and its inputs
    seed: int
    batch_size: int
    volume_index: int  # training volume whose grey values and condition are used
    guide: Path | None = field(default=None, kw_only=True)  # directory of a checkpoint that knows less; None = none


def check_volume(info: CheckpointInfo, volume: int, option: str = "--volume") -> None:
    """Raises ConfigError where a checkpoint has no training volume of this number."""
    if volume >= len(info.data.volumes):
        raise ConfigError(
            f"{option} {volume} does not exist: the {len(info.data.volumes)} training volumes are numbered from 0"
        )


def checked_checkpoint(request: GenerateRequest) -> CheckpointInfo:
    """Find the checkpoint.  Raises ConfigError where there is none, or the volume or the batch does not fit it."""
    info = read_checkpoint_info(find_checkpoint(request.checkpoint), request.overrides)
    check_volume(info, request.volume_index)
    if request.guide is not None:
        _check_guide(info, read_checkpoint_info(request.guide, request.overrides))
        check_weights(request.guide, request.weights)
    elif (diffusion := info.config.diffusion).sampler_correction != 1 and diffusion.noise != "spectral":
        raise ConfigError(
            f"--correction has no effect: diffusion.noise={diffusion.noise} has no linear denoiser; add --guide"
        )
    try:
        build_meta_network(info.config).check_size(request.batch_size, info.config.data.patch_size)
    except ConfigError as error:
        raise ConfigError(f"{error}; here --batch-size replaces training.train_batch_size") from error
    return info


def _check_guide(info: CheckpointInfo, guide: CheckpointInfo) -> None:
    """Raises ConfigError for a guide that says something else of the same voxels, or makes no difference."""

    def of_levels(config: Config) -> dict[str, Any]:
        return {key: value for key, value in config.diffusion.model_dump().items() if not key.startswith("sampler")}

    ours, theirs = info.config, guide.config
    if voxel_settings(ours.data) != voxel_settings(theirs.data) or of_levels(ours) != of_levels(theirs):
        raise ConfigError(
            f"--guide {guide.checkpoint} was trained with other keys of data or diffusion than {info.checkpoint}; name "
            "an earlier checkpoint of the same run (training.keep_every keeps them)"
        )
    if guide.step >= info.step and guide.checkpoint.parent == info.checkpoint.resolve().parent:
        raise ConfigError(f"--guide {guide.checkpoint} is not earlier than {info.checkpoint}; name an earlier one")
    if ours.diffusion.sampler_correction == 1:
        raise ConfigError("--guide has no effect with a correction of 1; add --correction 1.5")


def run_of(checkpoint: Path) -> Path:
    """The run directory of a checkpoint; the current one for a checkpoint outside a run.  Pure."""
    parent = checkpoint.parent if checkpoint.parent.name else checkpoint.absolute().parent
    return parent.parent if parent.name == "checkpoints" else Path()


def described(info: CheckpointInfo, request: GenerateRequest) -> dict[str, Any]:
    """The part of the record that samples and volumes share.  Reads the weights to hash them."""
    diffusion, grey = info.config.diffusion, info.data.greys.volumes[request.volume_index]
    return {
        "seed": request.seed,
        "batch_size": request.batch_size,
        "step": info.step,
        "weights": request.weights,
        "weights_sha256": check_weights(info.checkpoint, request.weights),
        "sampler": diffusion.sampler,
        **{key: getattr(diffusion, f"sampler_{key}") for key in ("steps", "clip", "guidance")},
        "correction": None if diffusion.sampler_correction == 1 else diffusion.sampler_correction,
        "guide_sha256": check_weights(request.guide, request.weights) if request.guide else None,
        "volume": info.data.volumes[request.volume_index].name,
        "grey_low": grey.low,
        "grey_high": grey.high,
        "vesuvius": __version__,
        "torch": torch.__version__,
    }


class Network:
    """A trained network and all that turns its output into estimates.

    Args:
        request: with the directory of a checkpoint.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.info = read_checkpoint_info(request.checkpoint, request.overrides)
        self.device = choose_device()
        config, data = self.info.config, self.info.data
        self.schedule = Schedule.from_config(config.diffusion, data.spectrum).to(self.device)
        self.denoiser = Denoiser(self.info, request.weights, self.schedule, self.device)
        guide = request.guide and read_checkpoint_info(request.guide, request.overrides)
        self.guide = Denoiser(guide, request.weights, self.schedule, self.device) if guide else None
        if problem := cudnn_problem(self.device, self.denoiser.amp, uses_channels_last(config.training, self.device)):
            log.warning("sampling will be slow: %s", problem)
        check_kernels(config, request.batch_size, self.device, self.denoiser.amp, backward=False)
        self._volume = request.volume_index
        self._conditioner = Conditioner(config.data.labels, data.greys.conditions, self.device)

    def condition_of(self, stored: NDArray[Any] | None, count: int) -> Condition:
        """The network's condition of `count` samples, from its voxels, [B, 1, Z, Y, X] as they are stored."""
        raw = None if stored is None else torch.from_numpy(np.ascontiguousarray(stored))
        return self._conditioner(raw, [self._volume] * count)

    def estimate_for(self, stored: NDArray[Any] | None, tiles: int) -> Estimate:
        """The estimate for a batch of tiles.

        Args:
            stored: their condition voxels, [B, 1, Z, Y, X] in their dtype; None = the condition is dropped.
        """
        config = self.info.config
        if stored is None and config.has_condition:
            # Dropped as in training: zeros, the presence flag included.
            stored = np.zeros((tiles, 1, *config.data.patch_size), np.uint8)
        condition = self.condition_of(stored, tiles)
        return NetworkEstimate(self.denoiser, config.diffusion, condition, self.schedule, self.guide)


class SamplingStoppedError(VesuviusError):
    """A signal came before all was drawn and written."""


@dataclass
class Watch:
    """Reports progress, and raises SamplingStoppedError once a stop is wanted."""

    stop: StopRequest | None = None
    on_progress: OnProgress = lambda what, done, total: None
    resumable: bool = False  # the same command continues from what is done
    _progress: str = "before the first step"

    def check(self) -> None:
        """Raises SamplingStoppedError."""
        if self.stop is not None and (asked := self.stop.pending()):
            again = "what is done is kept: run the same command again to continue"
            anew = "nothing of them is kept: run the same command again"
            stopped = f"{asked[1]} stopped sampling {self._progress}; {again if self.resumable else anew}"
            error = SamplingStoppedError(stopped)
            error.exit_code = asked[0]
            raise error

    def tell(self, what: str, done: int, total: int) -> None:
        """Report progress."""
        self._progress = f"after {done} of {total} {what}"
        self.on_progress(what, done, total)

    def over(self, what: str, items: Iterable[T], total: int) -> Iterator[T]:
        """Yield so many items, and report each one when it is done."""
        for number, item in enumerate(items):
            self.check()
            yield item
            self.tell(what, number + 1, total)


@contextmanager
def gpu_memory(batch_size: int) -> Iterator[None]:
    """Turns torch's out-of-memory error into one with a remedy."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise GpuMemoryError(
            f"The GPU ran out of memory with --batch-size {batch_size} ({error}); lower --batch-size"
        ) from error
