"""The loss on held-out patches, per noise level and for each set of weights: whether a run learns what it has not seen.

Patches, timesteps and noise are the same at every step of every run on the same data, so that curves compare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.config import Config
from vesuvius.diffusion.estimate import Denoise
from vesuvius.diffusion.loss import loss_per_sample
from vesuvius.diffusion.randomness import Purpose, sample_noise, timestep_bins, validation_timesteps
from vesuvius.diffusion.schedule import Schedule
from vesuvius.engine.reference import Reference
from vesuvius.engine.transfer import to_device

RAW = "raw"
HEADLINE = "ema"
"""The set of weights whose loss stands for a validation: the one that samples are drawn with."""

_SEED = 0  # not the run's: runs that differ in seed alone are shown the same noise


@dataclass(frozen=True)
class Losses:
    """The validation loss of one set of weights: over all patches and bins, and over all patches in each bin."""

    loss: float
    bins: tuple[float, ...]


@dataclass(frozen=True)
class ValidationResult:
    """What a validation came to.

    Attributes:
        patches: how many were looked at, each once in every bin.
        bin_edges: bin b holds the timesteps bin_edges[b] <= t < bin_edges[b + 1].
        weights: for each name of a set of weights.
    """

    patches: int
    bin_edges: tuple[int, ...]
    weights: Mapping[str, Losses]

    @property
    def loss(self) -> float:
        """The one by which the best checkpoint is chosen: of the averaged weights."""
        return self.weights[HEADLINE].loss

    def record(self) -> dict[str, Any]:
        """Plain data for metrics.jsonl."""
        weights = {name: {"loss": found.loss, "bins": list(found.bins)} for name, found in self.weights.items()}
        return {"loss": self.loss, "patches": self.patches, "bin_edges": list(self.bin_edges), "weights": weights}

    def line(self, step: int, steps: int) -> str:
        """One line for the log: of further averages the mean alone."""
        figures = [f"loss_{name} {found.loss:.5f}" for name, found in self.weights.items()]
        for name in (RAW, HEADLINE):
            figures += [f"bins_{name}", *(f"{loss:.5f}" for loss in self.weights[name].bins)]
        return f"Validation step {step}/{steps} {' '.join(figures)}"


class Validation:
    """Measures the loss that training minimises, on the first `training.validate_patches` patches of a reference.

    Every patch meets one timestep of each bin, with noise of its own and always with its condition.
    """

    def __init__(self, config: Config, reference: Reference, schedule: Schedule, device: torch.device) -> None:
        self._patches = config.training.validate_patches
        self._batch_size = config.training.train_batch_size  # what is known to fit the memory
        self._diffusion = config.diffusion
        self._reference = reference
        self._schedule = schedule.to(device)
        self._device = device

    @torch.no_grad()
    def run(self, denoisers: Mapping[str, Denoise], stop: Callable[[], bool]) -> ValidationResult | None:
        """Measure every set of weights on the same inputs; None where `stop()` came true between two batches.

        Moves no global generator.  The host draws the noise of a batch while the device computes the one before, and
        waits for the device at the end only.

        Args:
            denoisers: name of a set of weights -> the network with them; `HEADLINE` is one of the names.
        """
        assert HEADLINE in denoisers, list(denoisers)
        assert len(self._reference) >= self._patches, (len(self._reference), self._patches)
        timesteps = validation_timesteps(self._patches, self._schedule.timesteps)
        pairs = np.arange(timesteps.size)  # patch p at bin b is pair p * bins + b
        batches = np.split(pairs, range(self._batch_size, len(pairs), self._batch_size))
        losses: list[Tensor] = []
        for batch in batches:
            if stop():
                return None
            losses.append(self._losses(denoisers, batch, timesteps))
        # float64 on the host: the mean of a bin does not depend on how the pairs were batched
        per_pair = np.array(torch.cat(losses, dim=1).tolist()).reshape(len(denoisers), *timesteps.shape)
        bins = per_pair.mean(axis=1)
        return ValidationResult(
            patches=self._patches,
            bin_edges=tuple(timestep_bins(self._schedule.timesteps)),
            weights={
                name: Losses(float(of_bins.mean()), tuple(of_bins.tolist()))
                for name, of_bins in zip(denoisers, bins, strict=True)
            },
        )

    def _losses(
        self, denoisers: Mapping[str, Denoise], pairs: NDArray[np.int64], timesteps: NDArray[np.int64]
    ) -> Tensor:
        """The loss of each set of weights at each pair: float32 [len(denoisers), len(pairs)] on the device."""
        rows = (pairs // timesteps.shape[1]).tolist()
        x_0, condition = self._reference.x_0(rows), self._reference.condition(rows)
        eps = sample_noise(_SEED, pairs, (1, *x_0.shape[2:]), self._device, purpose=Purpose.VALIDATION)
        t = to_device(torch.from_numpy(timesteps.ravel()[pairs]), self._device)
        x_t = self._schedule.q_sample(x_0, eps, t)
        return torch.stack(
            [
                loss_per_sample(denoise(x_t, t, condition), x_0, eps, t, self._schedule, self._diffusion)
                for denoise in denoisers.values()
            ]
        )
