"""The noise at each timestep, the conversions between x_0, eps, v and x_t, and the loss of each sample.

The timestep `t` counts from 0, the least noisy, to `timesteps - 1`, almost pure noise.  A clean sample has no t.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vesuvius.config import DiffusionConfig, NoiseEmbedding, Prediction
from vesuvius.diffusion.spectrum import LEAST_POWER, Spectrum

Betas = npt.NDArray[np.float64]

COSINE_OFFSET = 0.008
MAX_BETA = 0.999
LINEAR_FIRST, LINEAR_LAST = 1e-4, 0.02  # for 1000 timesteps
# Sampling keeps the share sigma_max^2 / (sigma_max^2 + P) of the variance of a mode of power P; here at least 0.94.
_SIGMA_MAX_OVER_AMPLITUDE = 4.0
_POWERS = 256


def linear_betas(timesteps: int) -> Betas:
    """Return the betas of the linear schedule: float64 [timesteps], each in (0, 0.999].

    Source: Ho et al. 2020, section 4: 1e-4 to 0.02 in 1000 steps; with fewer they are scaled up to keep the last t as
    noisy.
    """
    scale = 1000 / timesteps
    return np.minimum(np.linspace(scale * LINEAR_FIRST, scale * LINEAR_LAST, timesteps), MAX_BETA)


def cosine_betas(timesteps: int) -> Betas:
    """Return the betas of the cosine schedule: float64 [timesteps], each in (0, 0.999].

    Source: Nichol & Dhariwal 2021, eq. 17; the paper's t = 1 is our t = 0.
    """
    angles = (np.arange(timesteps + 1) / timesteps + COSINE_OFFSET) / (1 + COSINE_OFFSET) * (math.pi / 2)
    return _betas_of(np.cos(angles) ** 2)


def spectral_betas(timesteps: int, sigma_min: float, sigma_max: float | None, spectrum: Spectrum) -> Betas:
    """Return the betas of noise levels matched to the spectrum of the data: float64 [timesteps].

    sigma = sqrt(1 - alpha_bar) / sqrt(alpha_bar) grows from sigma_min to sigma_max (None = four times the square root
    of the largest power) by a constant factor per t.
    """
    if sigma_max is None:
        sigma_max = max(_SIGMA_MAX_OVER_AMPLITUDE * math.sqrt(spectrum.peak), 10 * sigma_min)
    sigma = np.exp(np.linspace(math.log(sigma_min), math.log(sigma_max), timesteps))
    return _betas_of(np.concatenate([[1.0], 1 / (1 + sigma**2)]), limit=1.0)


def spectrum_weights(alpha_bar: Betas, spectrum: Spectrum) -> Betas:
    """Return the loss weight of a squared error in v at each noise level: float64 like `alpha_bar`.

    The error is divided by that of the Wiener filter and multiplied by sqrt(N).  N = (sum e)^2 / (modes sum e^2), e = P
    sigma^2 / (P + sigma^2), is the share of independent modes that carry the error: few at high noise, whose gradients
    would dominate.  The Wiener filter has a mean loss of 1.
    """
    power, modes = _power_histogram(spectrum)
    variance = alpha_bar[:, None] * power + (1 - alpha_bar)[:, None]
    error = power / variance  # of v; of x_0 it is this times 1 - alpha_bar
    mean = error @ modes / modes.sum()
    independent = (error @ modes) ** 2 / (error**2 @ modes) / modes.sum()
    weights: Betas = np.sqrt(independent) / mean / np.sqrt(independent).mean()
    return weights


def _power_histogram(spectrum: Spectrum) -> tuple[Betas, Betas]:
    """Return a histogram of the modes over power: the mean power and the number of modes of each bin."""
    power, counts = spectrum.modes()
    power = np.maximum(power, LEAST_POWER)
    logs = np.log(power)
    bins = np.digitize(logs, np.linspace(logs.min(), logs.max(), _POWERS))
    modes: Betas = np.bincount(bins, counts).astype(np.float64)
    sums = np.bincount(bins, counts * power).astype(np.float64)
    return sums[modes > 0] / modes[modes > 0], modes[modes > 0]


def _betas_of(alpha_bar: npt.NDArray[np.float64], limit: float = MAX_BETA) -> Betas:
    """Return beta_t = 1 - alpha_bar(t)/alpha_bar(t-1), at most `limit`; alpha_bar at 0 ... T, up to a factor."""
    return np.minimum(1 - alpha_bar[1:] / alpha_bar[:-1], limit)


def x_0_and_eps(
    kind: Prediction, prediction: Tensor, x_t: Tensor, alpha: Tensor | float, sigma: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Convert a prediction for `x_t` = alpha x_0 + sigma eps to (x_0, eps), in the dtype of its arguments.

    Sources: Salimans & Ho 2022, section 4 and appendix D; Liu et al. 2023 for flow, eps - x_0.
    """
    match kind:
        case "v":
            return alpha * x_t - sigma * prediction, sigma * x_t + alpha * prediction
        case "eps":
            return (x_t - sigma * prediction) / alpha, prediction
        case "x_0":
            return prediction, (x_t - alpha * prediction) / sigma
        case "flow":
            return (x_t - sigma * prediction) / (alpha + sigma), (x_t + alpha * prediction) / (alpha + sigma)


@dataclass(frozen=True, eq=False)
class Schedule:
    """Tables over t: float64 on the host, and float32 copies of them on one device, rounded once.

    Methods are pure.  Unless stated otherwise they take tensors BCZYX with `t` int64 [B] on the schedule's device and
    return float32 BCZYX, also inside an autocast region.  A `t` outside [0, timesteps) raises IndexError.
    """

    # float64 [timesteps], on the host; samplers compute their coefficients from it
    alpha_bar_64: npt.NDArray[np.float64]
    # sqrt_alpha_bar, sqrt_one_minus_alpha_bar, snr_table: float32 [timesteps]
    sqrt_alpha_bar: Tensor
    sqrt_one_minus_alpha_bar: Tensor
    snr_table: Tensor
    # Spectrum of the data if the noise levels are fitted to it (spectral), in which case x_0 is standardized before it
    # is noised.  Otherwise this and the next three fields are None.
    spectrum: Spectrum | None = None
    power: Tensor | None = None  # float32 [Z, Y, X // 2 + 1], per frequency of `rfftn`
    # float32 [X // 2 + 1], weight of a frequency in a mean over all modes of a patch
    mode_weight: Tensor | None = None
    loss_weight: Tensor | None = None  # float32 [timesteps], see `spectrum_weights`
    noise_embedding: NoiseEmbedding = "log_sigma"  # what `network_input` returns

    @classmethod
    def from_betas(cls, betas: Betas, spectrum: Spectrum | None = None) -> Self:
        """Build the tables on the CPU from float64 betas [timesteps], each in (0, 1)."""
        alpha_bar = np.cumprod(1 - betas, dtype=np.float64)

        def table(values: npt.NDArray[np.floating]) -> Tensor:
            return torch.from_numpy(values).to(torch.float32)

        spectral_tables: dict[str, Any] = {}
        if spectrum is not None:
            counts = spectrum.counts_x()
            spectral_tables = {
                "power": table(np.maximum(spectrum.power, LEAST_POWER)),
                "mode_weight": table(counts / counts.mean()),
                "loss_weight": table(spectrum_weights(alpha_bar, spectrum)),
            }
        return cls(
            alpha_bar_64=alpha_bar,
            sqrt_alpha_bar=table(np.sqrt(alpha_bar)),
            sqrt_one_minus_alpha_bar=table(np.sqrt(1 - alpha_bar)),
            snr_table=table(alpha_bar / (1 - alpha_bar)),
            spectrum=spectrum,
            **spectral_tables,
        )

    @classmethod
    def from_config(cls, config: DiffusionConfig, spectrum: Spectrum | None = None) -> Self:
        """Build the schedule of the config on the CPU; spectral noise without a spectrum is that of white data."""
        match config.noise:
            case "spectral":
                spectrum = spectrum or Spectrum.white()
                betas = spectral_betas(config.timesteps, config.sigma_min, config.sigma_max, spectrum)
            case "linear":
                betas, spectrum = linear_betas(config.timesteps), None
            case "cosine":
                betas, spectrum = cosine_betas(config.timesteps), None
        return replace(cls.from_betas(betas, spectrum), noise_embedding=config.noise_embedding or "log_sigma")

    @property
    def timesteps(self) -> int:
        return len(self.alpha_bar_64)

    @property
    def device(self) -> torch.device:
        return self.snr_table.device

    def to(self, device: torch.device | str) -> Self:
        """Return a copy whose float32 tables are on `device`."""
        moved: dict[str, Any] = {key: each.to(device) for key, each in vars(self).items() if isinstance(each, Tensor)}
        return replace(self, **moved)

    @property
    def mean(self) -> float:
        return self.spectrum.mean if self.spectrum else 0.0

    @property
    def std(self) -> float:
        return self.spectrum.std if self.spectrum else 1.0

    def standardized(self, x_0: Tensor) -> Tensor:
        """Convert model values to mean 0 and standard deviation 1 (by the spectrum), the x_0 of the equations."""
        return (x_0.float() - self.mean) / self.std

    def model_values(self, x_0: Tensor) -> Tensor:
        """Undo `standardized`, in the dtype of `x_0`."""
        return x_0 * self.std + self.mean

    def q_sample(self, x_0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Noise `x_0` to level `t`: x_t = sqrt(alpha_bar) x_0 + sqrt(1 - alpha_bar) eps (Ho et al. 2020, eq. 4)."""
        alpha, sigma = self.alpha_and_sigma(t)
        return alpha * self.standardized(x_0) + sigma * eps.float()

    def target(self, kind: Prediction, x_0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Return the training target of a prediction kind for x_t; v as in Salimans & Ho 2022, section 4."""
        match kind:
            case "v":
                alpha, sigma = self.alpha_and_sigma(t)
                return alpha * eps.float() - sigma * self.standardized(x_0)
            case "eps":
                return eps.float()
            case "x_0":
                return self.standardized(x_0)
            case "flow":
                return eps.float() - self.standardized(x_0)

    def x_0_and_eps(self, kind: Prediction, prediction: Tensor, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Convert a prediction for x_t to x_0, in model values, and eps, with the function of the same name."""
        x_0, eps = x_0_and_eps(kind, prediction.float(), x_t.float(), *self.alpha_and_sigma(t))
        return self.model_values(x_0), eps

    def wiener_x_0(self, spectrum: Spectrum, x_t: Tensor, t: Tensor) -> Tensor:
        """Return the estimate of x_0, in model values, by the stationary Wiener filter for data of this spectrum."""
        alpha, sigma = self.alpha_and_sigma(t)
        # x_t is standardized with this schedule's mean and std; the filter expects those of `spectrum`.
        shift, scale = (spectrum.mean - self.mean) / self.std, spectrum.std / self.std
        return spectrum.wiener_filter(x_t - alpha * shift, alpha * scale, sigma) * spectrum.std + spectrum.mean

    def snr(self, t: Tensor) -> Tensor:
        """Return the signal-to-noise ratio alpha_bar / (1 - alpha_bar) at `t`: float32 [B], decreasing in t."""
        return self.snr_table.index_select(0, t)

    def alpha_and_sigma(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return sqrt(alpha_bar) and sqrt(1 - alpha_bar) at `t`, each float32 [B, 1, 1, 1, 1].

        A float32 `t` may lie between two timesteps; log sigma/alpha is then interpolated, as in `rho_levels`.
        """
        if t.is_floating_point():
            log_snr = self._log_snr(t)
            alpha, sigma = torch.sigmoid(log_snr).sqrt(), torch.sigmoid(-log_snr).sqrt()
        else:  # index_select, not table[t]: with indexing a negative t would wrap to the noisy end
            alpha, sigma = (each.index_select(0, t) for each in (self.sqrt_alpha_bar, self.sqrt_one_minus_alpha_bar))
        return alpha.view(-1, 1, 1, 1, 1), sigma.view(-1, 1, 1, 1, 1)

    def network_input(self, t: Tensor) -> Tensor:
        """Return the level of `t`, int64 or float32 [B], in the form of `noise_embedding`: float32 [B], or t.

        log_sigma is log sigma/alpha on the scale of t: 100 per factor of e, 9 at sigma 0.02, 400 at 1, 959 at 267.  A
        t names another level for each spectrum and patch size (Karras et al. 2022, table 1: c_noise = ln(sigma) / 4).
        """
        return t if self.noise_embedding == "t" else 400 - 50 * self._log_snr(t)

    def _log_snr(self, t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return self.snr(t).log()
        below, above = t.floor().long(), t.ceil().long()
        return self.snr(below).log() * (1 - (t - below)) + self.snr(above).log() * (t - below)


def min_snr_weight(kind: Prediction, snr: Tensor, gamma: float) -> Tensor:
    """Return the min-SNR-gamma weight of a squared error in this kind of prediction, float32 like `snr`.

    Hang et al. 2023 define min(snr, gamma) for an error in x_0.  One in eps is sqrt(snr) times as large, one in v
    sqrt(snr + 1) and one in flow sqrt(snr) + 1 times. (diffusers #5654 is about a missing + 1.)
    """
    capped = snr.clamp(max=gamma)
    match kind:
        case "x_0":
            return capped
        case "eps":
            return capped / snr
        case "v":
            return capped / (snr + 1)
        case "flow":
            return capped / (snr.sqrt() + 1).square()


def loss_per_sample(
    prediction: Tensor, x_0: Tensor, eps: Tensor, t: Tensor, schedule: Schedule, config: DiffusionConfig
) -> Tensor:
    """Return the weighted mean squared error of each sample over its voxels: float32 [B].

    The weight is the schedule's if it has one (spectral noise), else min-SNR by `config.min_snr_gamma` (None: 1).
    `prediction` is the network output for `schedule.q_sample(x_0, eps, t)`, in any float dtype.  Float32 also inside an
    autocast region.
    """
    assert prediction.shape == x_0.shape == eps.shape, (prediction.shape, x_0.shape, eps.shape)
    target = schedule.target(config.prediction, x_0, eps, t)
    mean = (prediction.float() - target).square().mean(dim=(1, 2, 3, 4))
    if schedule.loss_weight is not None:
        return mean * schedule.loss_weight.index_select(0, t)
    if config.min_snr_gamma is None:
        return mean
    return mean * min_snr_weight(config.prediction, schedule.snr(t), config.min_snr_gamma)
