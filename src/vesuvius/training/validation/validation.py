"""Fixed patches, and the validation error per noise level and set of weights: does the run learn?

The headline is the error of x_0 relative to the stationary Wiener filter (fitted to training patches), the best filter
with one gain per frequency, as the geometric mean over the noise levels where a network can learn more than the
spectrum.  They count equally, so it reflects large structures as well as fine grain; the record has all levels.

Patches, timesteps and noise are the same at every step of every run on the same data, so curves are comparable.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vesuvius.config import Config, DataConfig
from vesuvius.diffusion.estimate import Condition, Denoise
from vesuvius.diffusion.randomness import Purpose, sample_noise, timestep_bins, validation_timesteps
from vesuvius.diffusion.schedule import Schedule, loss_per_sample
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.errors import one_line
from vesuvius.loader.intensity import intensity_scales, normalized, to_device
from vesuvius.monitor.probes.vram import is_gpu_memory_error
from vesuvius.stream.start.prepare import IntensityRanges, PreparedData
from vesuvius.training.ranks.ranks import SINGLE, Ranks
from vesuvius.training.step.feed import Conditioner, Windows
from vesuvius.training.validation.fixed_patches import FixedPatches, read_training_patches

log = logging.getLogger(__name__)

BEST_BY_WEIGHTS = "ema"
"""Set of weights for the headline figure: the one used for sampling."""

# The levels that the headline is the mean of.  Below them lies grain; above, little can be learned beyond the spectrum:
# a filter that is linear but not stationary gains 2 % (docs/model.md).
JUDGED_SIGMA = 0.3, 80.0

_SEED = 0  # not the run's seed, so that runs with different seeds get the same noise
_LEAST, _MOST, _VOXELS = 16, 64, 2**25  # patches for the spectrum, and their approximate total


@dataclass(eq=False)
class ValidationPatches:
    """Real patches that stay fixed for a run, held in host memory in their stored dtype.

    Rows are patch indices in any order, possibly repeated: 0 to len - 1, or those of a rank's share.
    """

    fixed: FixedPatches
    intensities: IntensityRanges
    conditioner: Conditioner
    device: torch.device  # of the conditioner
    condition_noise: float = 0.0  # standard deviation of the noise on conditions with context

    def __post_init__(self) -> None:
        self.held_out, ranges = self.fixed.held_out, self.intensities.volumes
        self._scales = intensity_scales(ranges)
        self.intensity = ranges[0] if len(set(ranges)) == 1 else None  # of all volumes, or None if they differ

    def __len__(self) -> int:
        return len(self.fixed.patches)

    def x_0(self, rows: Sequence[int]) -> Tensor:
        """Model values of these patches: float32 [len(rows), 1, Z, Y, X] on the device.  Not clipped."""
        patches = self._raw(self.fixed.patches, rows).unsqueeze(1)
        return normalized(patches, self._scales[self._volumes(rows)])

    def condition(self, rows: Sequence[int]) -> Condition:
        stored = self.fixed.conditions
        raw = None if stored is None else self._raw(stored, rows).unsqueeze(1)
        windows = None
        if self.fixed.windows:
            shape, places = (
                (1, *self.fixed.patches.shape[1:]),
                [self.fixed.windows[n - self.fixed.first] for n in rows],
            )
            noise = sample_noise(_SEED, rows, shape, self.device, purpose=Purpose.CONDITION_NOISE)
            windows = Windows(places, noise, [self.condition_noise] * len(rows))
        return self.conditioner(raw, self._volumes(rows), windows)

    def condition_intensities(self, row: int) -> NDArray[np.float32] | None:
        """A condition as a picture, [Z, Y, X] from -1 to 1: its intensities, or its labels; None without one."""
        channels = self.condition([row])
        if channels is None:
            return None
        shown = channels[0, : self.conditioner.channels]
        intensities = shown[0] if len(shown) == 1 else shown.argmax(0) * (2 / (len(shown) - 1)) - 1
        return intensities.float().cpu().numpy()

    def _volumes(self, rows: Sequence[int]) -> list[int]:
        return [self.fixed.volumes[row - self.fixed.first] for row in rows]

    def _raw(self, stored: NDArray[np.generic], rows: Sequence[int]) -> Tensor:
        """[len(rows), Z, Y, X] in the stored dtype, on the device."""
        return to_device(torch.from_numpy(stored[[row - self.fixed.first for row in rows]]), self.device)


def measure_spectrum(data: PreparedData, config: DataConfig, intensities: IntensityRanges) -> Spectrum:
    """Spectrum that training sees: of 16 to 64 patches, the same for the same data, in all augmentations.

    Raises DataError: too few patches can be read.
    """
    found = read_training_patches(data, config, min(max(_LEAST, _VOXELS // math.prod(config.patch_size)), _MOST))
    scales = intensity_scales(intensities.volumes)[list(found.volumes)]
    return Spectrum.of(normalized(torch.from_numpy(found.patches), scales)).augmented(**dict(data.plan.augment))


@dataclass(frozen=True)
class Losses:
    """Validation result of one set of weights."""

    loss: float  # training loss over all patches and bins
    bins: tuple[float, ...]  # the same in each bin
    relative_bins: tuple[float, ...]  # squared error of x_0 relative to the stationary Wiener filter, per bin
    relative_error: float  # `judged_error` of them


def judged_error(relative_bins: Sequence[float], sigmas: Sequence[float]) -> float:
    """Return the geometric mean of the bins with a sigma in JUDGED_SIGMA, of all if there are none; NaN if one of all
    is not finite, because the Wiener filter makes no error, as for constant patches.  Pure.
    """
    low, high = JUDGED_SIGMA
    judged = [error for error, sigma in zip(relative_bins, sigmas, strict=True) if low <= sigma <= high]
    with np.errstate(divide="ignore"):
        mean = float(np.exp(np.mean(np.log(judged or relative_bins))))
    return mean if np.isfinite(relative_bins).all() else math.nan


def bin_sigmas(schedule: Schedule) -> tuple[float, ...]:
    """Return the geometric mean of sigma/alpha over each bin of `timestep_bins`, in standard deviations.  Pure."""
    logs = np.log(1 / schedule.alpha_bar_64 - 1) / 2
    edges = timestep_bins(schedule.timesteps)
    return tuple(float(np.exp(logs[a:b].mean())) for a, b in pairwise(edges))


@dataclass(frozen=True)
class ValidationResult:
    """Validation results by set of weights; bin b holds the t with bin_edges[b] <= t < bin_edges[b + 1]."""

    patches: int
    bin_edges: tuple[int, ...]
    bin_sigmas: tuple[float, ...]
    weights: Mapping[str, Losses]

    @property
    def relative_error(self) -> float:
        """Criterion for the best checkpoint: the error of the averaged weights."""
        return self.weights[BEST_BY_WEIGHTS].relative_error

    def record(self) -> dict[str, Any]:
        weights = {name: vars(of) for name, of in self.weights.items()}
        headline = {key: weights[BEST_BY_WEIGHTS][key] for key in ("loss", "relative_error")}
        return headline | vars(self) | {"weights": weights}

    def line(self, step: int, steps: int) -> str:
        """Log line; the losses per bin are only in the record."""
        losses = " ".join(f"loss_{name} {found.loss:.5f}" for name, found in self.weights.items())
        bins = " ".join(_known(ratio, 3) for ratio in self.weights[BEST_BY_WEIGHTS].relative_bins)
        error = _known(self.relative_error, 4)
        return f"Validation step {step}/{steps} {losses} relative_error {error} relative_bins {bins}"


def batches_of_rank(config: Config, rank: int, world: int) -> list[NDArray[np.int64]]:
    """Batches of a validation for one rank: those of a single rank, divided in order.  Pure.

    They hold pairs of a patch and a bin: patch p at bin b is pair p * bins + b.
    """
    pairs = np.arange(config.training.validate_patches * (len(timestep_bins(config.diffusion.timesteps)) - 1))
    size = config.training.micro_batch  # known to fit into memory
    batches = np.split(pairs, range(size, len(pairs), size))
    return [batches[number] for number in np.array_split(np.arange(len(batches)), world)[rank]]


def patches_of_rank(config: Config, fixed: FixedPatches | None, rank: int, world: int) -> FixedPatches | None:
    """Patches that a rank other than 0 (which has all of them) needs for its batches.  Pure."""
    if fixed is None or not fixed.held_out or not config.training.validate_every:
        return None
    batches, bins = batches_of_rank(config, rank, world), len(timestep_bins(config.diffusion.timesteps)) - 1
    return fixed.rows(batches[0][0] // bins, batches[-1][-1] // bins + 1) if batches else fixed.rows(0, 0)


@torch.no_grad()
def validate(
    config: Config,
    reference: ValidationPatches,
    schedule: Schedule,
    spectrum: Spectrum,
    denoisers: Mapping[str, Denoise],
    stop: Callable[[], bool],
    ranks: Ranks = SINGLE,
) -> ValidationResult | None:
    """Measure loss and error of x_0 on the first `training.validate_patches` patches of a reference.

    Each patch is evaluated at one timestep per bin, with its own noise and always with its condition; all sets of
    weights get the same inputs.  Touches no global generator.  The host draws the noise of a batch while the device
    computes the previous one, and waits for the device only at the end.

    If memory runs out, all ranks log an error and all figures are NaN; a training step of as many patches needs more.

    Args:
        spectrum: of training patches; determines the stationary Wiener filter.
        denoisers: by set of weights; includes `BEST_BY_WEIGHTS`.
        stop: polled before each batch; None is returned if it becomes true on any rank.
        ranks: share the batches; all call this and get the same result, bit-identical to one rank's.

    Raises RankError: another rank failed.
    """
    patches = config.training.validate_patches
    assert BEST_BY_WEIGHTS in denoisers, list(denoisers)
    assert not ranks.is_main or len(reference) >= patches, (len(reference), patches)
    device, diffusion = schedule.device, config.diffusion
    timesteps = validation_timesteps(patches, schedule.timesteps)
    count, bins = timesteps.shape
    why = "on another rank"
    # A row per loss and error; the last column counts ranks that stop, and is NaN if memory ran out.
    found = torch.zeros(2 * len(denoisers) + 1, count * bins + 1, device=device)
    for pairs in batches_of_rank(config, ranks.rank, ranks.world):
        if stop():
            found[:, -1] = 1
            break
        rows = (pairs // bins).tolist()
        try:
            x_0, condition = reference.x_0(rows), reference.condition(rows)
            eps = sample_noise(_SEED, pairs, (1, *x_0.shape[2:]), device, purpose=Purpose.VALIDATION)
            t = to_device(torch.from_numpy(timesteps.ravel()[pairs]), device)
            x_t = schedule.q_sample(x_0, eps, t)
            losses, errors = [], [_squared_error(schedule.wiener_x_0(spectrum, x_t, t), x_0)]
            for denoise in denoisers.values():
                prediction = denoise(x_t, t, condition)
                losses.append(loss_per_sample(prediction, x_0, eps, t, schedule, diffusion))
                guess, _ = schedule.x_0_and_eps(diffusion.prediction, prediction, x_t, t)
                errors.append(_squared_error(guess, x_0))
            found[:, pairs[0] : pairs[-1] + 1] = torch.stack([*losses, *errors])
        except Exception as error:
            if not is_gpu_memory_error(error):
                raise
            found[:], why = math.nan, one_line(error, 100)  # on all ranks, by the sum
            break
    ranks.sum(found)  # one rank's figures plus zeros
    # float64 on the host: the mean of a bin does not depend on how the pairs were batched
    figures = np.array(found.tolist())
    ranks.check_sums()
    if figures[0, -1] > 0:
        return None
    if math.isnan(figures[0, -1]):
        log.error("no validation: out of memory (%s); lower training.train_batch_size", why)
    means = figures[:, :-1].reshape(-1, count, bins).mean(axis=1)
    of_bins, of_filter, of_x_0 = np.split(means, [len(denoisers), len(denoisers) + 1])
    weights, sigmas = {}, bin_sigmas(schedule)
    for name, loss, of_network in zip(denoisers, of_bins, of_x_0, strict=True):
        relative = tuple((of_network / of_filter[0]).tolist())
        weights[name] = Losses(float(loss.mean()), tuple(loss.tolist()), relative, judged_error(relative, sigmas))
    return ValidationResult(patches, tuple(timestep_bins(schedule.timesteps)), sigmas, weights)


def _squared_error(guess: Tensor, x_0: Tensor) -> Tensor:
    """Mean over the voxels of each sample: float32 [B]."""
    return (guess - x_0).square().mean(dim=(1, 2, 3, 4))


def _known(figure: float, digits: int) -> str:
    return f"{figure:.{digits}f}" if math.isfinite(figure) else "unknown"
