"""Shared by samples and volumes: the request, its checks and record, the network, progress, stop signals."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vesuvius import __version__
from vesuvius.accelerator import choose_device
from vesuvius.config import Config
from vesuvius.config.describe import DRAWS_SAMPLES
from vesuvius.diffusion.estimate import Condition, NetworkEstimate, generate, has_residual_guidance
from vesuvius.diffusion.sampler import sampling_levels
from vesuvius.diffusion.schedule import Schedule
from vesuvius.errors import ConfigError, GpuMemoryError
from vesuvius.training.checkpoint.format import find_checkpoint
from vesuvius.training.checkpoint.trained import (
    CheckpointInfo,
    Denoiser,
    check_weights,
    read_checkpoint_info,
    voxel_settings,
)
from vesuvius.training.step.feed import Conditioner, StoredCondition
from vesuvius.training.step.self_test import check_kernels, cudnn_problem
from vesuvius.training.step.setup import build_meta_network, is_compiled, uses_channels_last

log = logging.getLogger(__name__)

WORTH_COMPILING = 10_000
"""Evaluations of a patch from which on compiling the network takes less time than it saves: 30 to 60 s, against about
5 ms of memory traffic for a patch of the full model on an A100.  Estimated, not measured."""


@dataclass(frozen=True)
class GenerateRequest:
    """Arguments common to samples and volumes; picklable, because workers open the network from it."""

    checkpoint: Path  # any form that `find_checkpoint` accepts
    weights: str  # "ema", another average, or "model" for those of the last step
    overrides: tuple[str, ...]  # `key.path=value`, applied to the checkpoint's config: sampler and amp
    # the result depends on seed and batch_size, in addition to the network and its inputs
    seed: int
    batch_size: int
    volume_index: int  # training volume whose intensities and condition are used
    guide: Path | None = field(default=None, kw_only=True)  # directory of a weaker checkpoint; None = no guide


def check_volume(info: CheckpointInfo, volume_index: int, option: str = "--volume") -> None:
    if volume_index >= len(info.data.volumes):
        raise ConfigError(
            f"{option} {volume_index} does not exist: the {len(info.data.volumes)} training volumes are numbered from 0"
        )


def resolve_checkpoint(request: GenerateRequest) -> CheckpointInfo:
    """Find and check the checkpoint.  Raises ConfigError if there is none, or if it does not fit the request."""
    info = read_checkpoint_info(find_checkpoint(request.checkpoint), request.overrides)
    check_volume(info, request.volume_index)
    if request.guide is not None:
        _check_guide(info, read_checkpoint_info(request.guide, request.overrides))
        check_weights(request.guide, request.weights)
    _check_residual_guidance(info, request)
    try:
        build_meta_network(info.config).check_size(request.batch_size, info.config.data.patch_size)
    except ConfigError as error:
        raise ConfigError(f"{error} (--batch-size, when sampling)") from error
    return info


def _check_residual_guidance(info: CheckpointInfo, request: GenerateRequest) -> None:
    diffusion, option = info.config.diffusion, "residual_guidance_interval"
    if diffusion.residual_guidance == 1:
        if request.guide is not None:
            raise ConfigError("--guide has no effect with a residual guidance of 1; add --residual-guidance 1.5")
        if any(override.startswith(f"diffusion.{option}=") for override in request.overrides):
            raise ConfigError(
                "--residual-guidance-interval has no effect with a residual guidance of 1; add --residual-guidance 1.5"
            )
    elif request.guide is None and diffusion.noise != "spectral":
        raise ConfigError(
            f"--residual-guidance has no effect: diffusion.noise={diffusion.noise} has no Wiener filter; add --guide"
        )
    else:
        levels = sampling_levels(Schedule.from_config(diffusion, info.data.spectrum), diffusion)[:-1]
        if not any(has_residual_guidance(diffusion, level) for level in levels):
            low, high = diffusion.residual_guidance_interval or (0.0, math.inf)
            lowest, highest = (each(level.sigma / level.alpha for level in levels) for each in (min, max))
            raise ConfigError(
                f"--residual-guidance has no effect between {low:g} and {high:g}: the {len(levels)} noise levels lie "
                f"between {lowest:.3g} and {highest:.3g}, none of them there; change --residual-guidance-interval"
            )


def _check_guide(info: CheckpointInfo, guide: CheckpointInfo) -> None:
    def noise_keys(config: Config) -> dict[str, Any]:
        keys = config.diffusion.model_dump()
        keys["noise_embedding"] = keys["noise_embedding"] or "log_sigma"
        return {key: value for key, value in keys.items() if not f"diffusion.{key}".startswith(DRAWS_SAMPLES)}

    ours, theirs = info.config, guide.config
    if voxel_settings(ours.data) != voxel_settings(theirs.data) or noise_keys(ours) != noise_keys(theirs):
        raise ConfigError(
            f"--guide {guide.checkpoint} was trained with other data or diffusion settings than {info.checkpoint}; use "
            "an earlier checkpoint of the same run (training.keep_every keeps them)"
        )
    if guide.step >= info.step and guide.checkpoint.parent == info.checkpoint.resolve().parent:
        raise ConfigError(f"--guide {guide.checkpoint} is not earlier than {info.checkpoint}; use an earlier one")


def run_directory(checkpoint: Path) -> Path:
    """Return the run directory of a checkpoint, or the current directory for a checkpoint outside a run.  Pure."""
    parent = checkpoint.absolute().parent
    return parent.parent if parent.name == "checkpoints" else Path.cwd()


def base_record(info: CheckpointInfo, request: GenerateRequest) -> dict[str, Any]:
    """Return the part of the record that samples and volumes share.  Reads the sums of the weights."""
    diffusion, intensity = info.config.diffusion, info.data.intensities.volumes[request.volume_index]
    is_guided, interval = diffusion.residual_guidance != 1, diffusion.residual_guidance_interval
    return {
        "seed": request.seed,
        "batch_size": request.batch_size,
        "step": info.step,
        "weights": request.weights,
        "weights_sha256": check_weights(info.checkpoint, request.weights),
        "sampler": diffusion.sampler,
        **{key: getattr(diffusion, f"sampler_{key}") for key in ("steps", "clip", "guidance")},
        "condition_noise": diffusion.sampled_condition_noise or None,
        "residual_guidance": diffusion.residual_guidance if is_guided else None,
        "residual_guidance_interval": list(interval) if is_guided and interval else None,
        "guide_sha256": check_weights(request.guide, request.weights) if request.guide else None,
        "volume": info.data.volumes[request.volume_index].name,
        "intensity_low": intensity.low,
        "intensity_high": intensity.high,
        "vesuvius": __version__,
        "torch": torch.__version__,
    }


class Network:
    """The trained network of a request whose `checkpoint` is a directory or model file, its schedule and conditions."""

    def __init__(self, request: GenerateRequest, evaluations: int) -> None:
        """Load it, compiled (`training.compile`) if that pays for this number of evaluations of a patch."""
        self.info = read_checkpoint_info(request.checkpoint, request.overrides)
        self.device = choose_device()
        config, data = self.info.config, self.info.data
        compiled = is_compiled(config.training, self.device) and evaluations >= WORTH_COMPILING
        if compiled:
            log.info("%d evaluations of a patch: the network is compiled first, which takes a minute", evaluations)
        self.schedule = Schedule.from_config(config.diffusion, data.spectrum).to(self.device)
        arguments = request.weights, self.schedule, self.device, compiled
        self.denoiser = Denoiser(self.info, *arguments)
        guide = request.guide and read_checkpoint_info(request.guide, request.overrides)
        self.guide = Denoiser(guide, *arguments) if guide else None
        if problem := cudnn_problem(self.device, self.denoiser.amp, uses_channels_last(config.training, self.device)):
            log.warning("Sampling will be slow: %s", problem)
        check_kernels(config, request.batch_size, self.device, self.denoiser.amp, backward=False)
        self._volume = request.volume_index
        self._conditioner = Conditioner(config.data.class_values, data.intensities.conditions, self.device)

    def generate(
        self, seed: int, samples: Sequence[int], stored: StoredCondition | None, on_step: Callable[[int, Tensor], None]
    ) -> tuple[Tensor, int]:
        """Generate patches, [B, 1, Z, Y, X], from their conditions; also the network calls."""
        condition = self._condition(stored, len(samples))
        diffusion, shape = self.info.config.diffusion, (1, *self.info.config.data.patch_size)
        hooks: Any = {"guide": self.guide, "condition": condition, "on_step": on_step}
        return generate(self.denoiser, self.schedule, diffusion, seed, samples, shape, self.device, **hooks)

    def _condition(self, stored: StoredCondition | None, count: int) -> Condition:
        if stored is None:
            return None
        raw = torch.from_numpy(np.ascontiguousarray(stored.voxels))
        return self._conditioner(raw, [self._volume] * count, stored.windows)

    def estimate_for(self, stored: StoredCondition | None, tiles: int) -> NetworkEstimate:
        """Return the estimate for a batch of tiles with a condition; None = it is dropped."""
        config = self.info.config
        condition = self._condition(stored, tiles)
        if stored is None and config.has_condition:
            # As in training, a dropped condition is 0, including the presence flag.
            condition = torch.zeros(tiles, config.condition_channels, *config.data.patch_size, device=self.device)
        return NetworkEstimate(self.denoiser, config.diffusion, self.schedule, condition, self.guide)


@contextmanager
def translate_gpu_oom(batch_size: int) -> Iterator[None]:
    """Translate torch's out-of-memory error into one with a remedy."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise GpuMemoryError(
            f"The GPU ran out of memory with --batch-size {batch_size} ({error}); lower --batch-size"
        ) from error
