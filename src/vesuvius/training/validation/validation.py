"""The fixed patches, and the error on those held out, per noise level and set of weights: does a run learn?

The headline is the error of x_0 over that of the best linear denoiser, the Wiener filter fitted to training patches,
as the geometric mean over the noise levels.  Below 1 the network has learned what the spectrum does not say; no level
counts more than another, so that it tells large structure as well as fine grain.

Patches, timesteps and noise are the same at every step of every run on the same data, so that curves compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.config import Config, DataConfig
from vesuvius.diffusion.estimate import Denoise
from vesuvius.diffusion.loss import loss_per_sample
from vesuvius.diffusion.preconditioning import Condition
from vesuvius.diffusion.randomness import Purpose, sample_noise, timestep_bins, validation_timesteps
from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.plan.plan import Augmentation
from vesuvius.stream.start.fixed_patches import FixedPatches, read_training_patches
from vesuvius.stream.start.prepare import GreyRanges, PreparedData
from vesuvius.training.step.device import model_values
from vesuvius.training.step.grey_values import Conditioner, grey_scales, to_device

RAW = "raw"
HEADLINE = "ema"
"""The set of weights whose loss stands for a validation: the one that samples are drawn with."""

_SEED = 0  # not the run's: runs that differ in seed alone are shown the same noise
_LEAST, _MOST, _VOXELS = 16, 64, 2**25  # of patches that the spectrum is measured of, and about how much they hold


class Reference:
    """Real patches that stay the same for a whole run; host memory holds them in their stored dtype.

    Rows are patch numbers 0 ... len - 1, in any order, repeated or not.  `device` is that of the conditioner.
    `held_out` says whether training never sees the patches.
    """

    def __init__(self, fixed: FixedPatches, greys: GreyRanges, conditioner: Conditioner, device: torch.device) -> None:
        self.held_out = fixed.held_out
        self._fixed = fixed
        self._scales = grey_scales(greys.volumes)
        self._conditioner = conditioner
        self._device = device

    def __len__(self) -> int:
        return len(self._fixed.patches)

    def x_0(self, rows: Sequence[int]) -> Tensor:
        """Model values of these patches: float32 [len(rows), 1, Z, Y, X] on the device.  Not clipped."""
        patches = self._raw(self._fixed.patches, rows)
        return model_values(patches, [Augmentation()] * len(rows), self._scales[self._volumes(rows)])

    def condition(self, rows: Sequence[int]) -> Condition:
        """What the network is shown beside these patches, on the device."""
        stored = self._fixed.conditions
        raw = None if stored is None else self._raw(stored, rows).unsqueeze(1)
        return self._conditioner(raw, self._volumes(rows))

    def condition_greys(self, row: int) -> NDArray[np.float32] | None:
        """The condition of a patch as a picture, [Z, Y, X] from -1 to 1: its greys, or its labels; None without one."""
        channels = self.condition([row])
        if channels is None:
            return None
        shown = channels[0, :-1]  # the last says that it is there
        greys = shown[0] if len(shown) == 1 else shown.argmax(0) * (2 / (len(shown) - 1)) - 1
        return greys.float().cpu().numpy()

    def _volumes(self, rows: Sequence[int]) -> list[int]:
        return [self._fixed.volumes[row] for row in rows]

    def _raw(self, stored: NDArray[np.generic], rows: Sequence[int]) -> Tensor:
        """[len(rows), Z, Y, X] in the stored dtype, on the device."""
        return to_device(torch.from_numpy(stored[list(rows)]), self._device)


def measure_spectrum(data: PreparedData, config: DataConfig, greys: GreyRanges) -> Spectrum:
    """The spectrum that training sees: of 16 to 64 patches, always the same for the same data, in every augmentation.

    Raises DataError where hardly any patch can be read.
    """
    count = min(max(_LEAST, _VOXELS // math.prod(config.patch_size)), _MOST)
    found = read_training_patches(data, config, count)
    scales = grey_scales(greys.volumes)[list(found.volumes)]
    values = model_values(torch.from_numpy(found.patches), [Augmentation()] * len(found.patches), scales)
    return Spectrum.of(values[:, 0]).augmented(**dict(config.augment))


@dataclass(frozen=True)
class Losses:
    """What a validation found of one set of weights."""

    loss: float  # that of training, over all patches and bins
    bins: tuple[float, ...]  # the same in each bin
    relative: tuple[float, ...]  # in each bin, the squared error of x_0 over that of the best linear denoiser

    @property
    def relative_error(self) -> float:
        """The geometric mean of `relative`; NaN if the linear denoiser makes no error, as of constant patches."""
        with np.errstate(divide="ignore"):
            return float(np.exp(np.mean(np.log(self.relative)))) if np.isfinite(self.relative).all() else math.nan


@dataclass(frozen=True)
class ValidationResult:
    """What a validation found of each set of weights; bin b holds the t with bin_edges[b] <= t < bin_edges[b + 1]."""

    patches: int
    bin_edges: tuple[int, ...]
    weights: Mapping[str, Losses]

    @property
    def relative_error(self) -> float:
        """The one by which the best checkpoint is chosen: of the averaged weights."""
        return self.weights[HEADLINE].relative_error

    def record(self) -> dict[str, Any]:
        """Plain data for metrics.jsonl."""
        return {
            "loss": self.weights[HEADLINE].loss,
            "relative_error": self.relative_error,
            "patches": self.patches,
            "bin_edges": list(self.bin_edges),
            "weights": {
                name: {
                    "loss": found.loss,
                    "bins": list(found.bins),
                    "relative_error": found.relative_error,
                    "relative_bins": list(found.relative),
                }
                for name, found in self.weights.items()
            },
        }

    def line(self, step: int, steps: int) -> str:
        """One line for the log: of further averages the mean alone."""
        figures = [f"loss_{name} {found.loss:.5f}" for name, found in self.weights.items()]
        for name in (RAW, HEADLINE):
            figures += [f"bins_{name}", *(f"{loss:.5f}" for loss in self.weights[name].bins)]
        figures += ["relative_error", _known(self.relative_error, 4), "relative_bins"]
        figures += [_known(ratio, 3) for ratio in self.weights[HEADLINE].relative]
        return f"Validation step {step}/{steps} {' '.join(figures)}"


class Validation:
    """Measures loss and error of x_0 on the first `training.validate_patches` patches of a reference.

    Every patch meets one timestep of each bin, with noise of its own and always with its condition.  The best linear
    denoiser follows from the spectrum of patches of training.
    """

    def __init__(
        self, config: Config, reference: Reference, schedule: Schedule, spectrum: Spectrum, device: torch.device
    ) -> None:
        self._spectrum = spectrum
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
        found: list[Tensor] = []
        for batch in batches:
            if stop():
                return None
            found.append(self._measured(denoisers, batch, timesteps))
        # float64 on the host: the mean of a bin does not depend on how the pairs were batched
        per_pair = np.array(torch.cat(found, dim=1).tolist()).reshape(-1, *timesteps.shape)
        means = per_pair.mean(axis=1)
        linear, bins, errors = means[0], means[1 : 1 + len(denoisers)], means[1 + len(denoisers) :]
        return ValidationResult(
            patches=self._patches,
            bin_edges=tuple(timestep_bins(self._schedule.timesteps)),
            weights={
                name: Losses(float(of_bins.mean()), tuple(of_bins.tolist()), tuple((error / linear).tolist()))
                for name, of_bins, error in zip(denoisers, bins, errors, strict=True)
            },
        )

    def _measured(
        self, denoisers: Mapping[str, Denoise], pairs: NDArray[np.int64], timesteps: NDArray[np.int64]
    ) -> Tensor:
        """Figures of each pair: float32 [1 + 2 len(denoisers), len(pairs)] on the device.

        The squared error of the linear denoiser, then the loss and then the squared error of each set of weights.
        """
        rows = (pairs // timesteps.shape[1]).tolist()
        x_0, condition = self._reference.x_0(rows), self._reference.condition(rows)
        eps = sample_noise(_SEED, pairs, (1, *x_0.shape[2:]), self._device, purpose=Purpose.VALIDATION)
        t = to_device(torch.from_numpy(timesteps.ravel()[pairs]), self._device)
        x_t = self._schedule.q_sample(x_0, eps, t)
        losses, errors = [], []
        for denoise in denoisers.values():
            prediction = denoise(x_t, t, condition)
            losses.append(loss_per_sample(prediction, x_0, eps, t, self._schedule, self._diffusion))
            guess, _ = self._schedule.x_0_and_eps(self._diffusion.prediction, prediction, x_t, t)
            errors.append(_squared_error(guess, x_0))
        linear = _squared_error(self._schedule.linear_x_0(self._spectrum, x_t, t), x_0)
        return torch.stack([linear, *losses, *errors])


def _squared_error(guess: Tensor, x_0: Tensor) -> Tensor:
    """Of each sample, over its voxels: float32 [B]."""
    return (guess - x_0).square().mean(dim=(1, 2, 3, 4))


def _known(figure: float, digits: int) -> str:
    return f"{figure:.{digits}f}" if math.isfinite(figure) else "unknown"
