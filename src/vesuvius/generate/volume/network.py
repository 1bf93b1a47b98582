"""The trained network in one process, on its GPU: what samples and the work on a volume call."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vesuvius.diffusion.estimate import NetworkEstimate
from vesuvius.diffusion.preconditioning import Condition
from vesuvius.diffusion.sampler import Estimate
from vesuvius.diffusion.schedule import Schedule
from vesuvius.generate.described import DrawRequest
from vesuvius.generate.volume.work import VolumeJob, Work
from vesuvius.training.checkpoint.trained import Denoiser, read_checkpoint_info
from vesuvius.training.step.grey_values import Conditioner
from vesuvius.training.step.self_test import check_kernels, cudnn_problem
from vesuvius.training.step.step import choose_device

log = logging.getLogger(__name__)


class Network:
    """A trained network and all that turns its output into estimates.

    Args:
        request: with the directory of a checkpoint.
    """

    def __init__(self, request: DrawRequest) -> None:
        self.info = read_checkpoint_info(request.checkpoint, request.overrides)
        self.device = choose_device()
        config, data = self.info.config, self.info.data
        self.schedule = Schedule.from_config(config.diffusion, data.spectrum).to(self.device)
        self.denoiser = Denoiser(self.info, request.weights, self.schedule, self.device)
        if problem := cudnn_problem(self.device, self.denoiser.amp, config.training.channels_last):
            log.warning("sampling will be slow: %s", problem)
        check_kernels(config, request.batch_size, self.device, self.denoiser.amp, backward=False)
        self._volume = request.volume
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
        return NetworkEstimate(self.denoiser, config.diffusion, condition, self.schedule.mean, self.schedule.std)


def open_network_work(job: VolumeJob, folder: Path, request: DrawRequest) -> Work:
    """Open the network in a worker and return what does the work with it."""
    torch.set_num_threads(1)  # sums are rounded in the same order wherever a tile is computed
    network = Network(request)
    return Work(job, folder, lambda stored: network.estimate_for(stored, job.batch_size), network.device)
