"""How much noise there is at each timestep, and the conversions between x_0, eps, v and x_t that follow from it.

The timestep `t` counts from 0, the least noisy, to `timesteps - 1`, almost pure noise.  A clean sample has no t.
`Schedule` stands between the batch and the network in training, and around the network in sampling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vesuvius.config import DiffusionConfig

COSINE_OFFSET = 0.008
MAX_BETA = 0.999


def cosine_betas(timesteps: int) -> npt.NDArray[np.float64]:
    """Return the betas of the cosine schedule: float64 [timesteps], each in (0, 0.999].

    Source: Nichol & Dhariwal 2021, eq. 17: alpha_bar(t) = f(t)/f(0), f(t) = cos^2((t/T + s)/(1 + s) pi/2), s = 0.008,
    with beta_t = 1 - alpha_bar(t)/alpha_bar(t-1) clipped at 0.999.  The paper's t = 1 is our t = 0.  Pure.
    """
    angles = (np.arange(timesteps + 1) / timesteps + COSINE_OFFSET) / (1 + COSINE_OFFSET) * (math.pi / 2)
    f = np.cos(angles) ** 2
    betas: npt.NDArray[np.float64] = np.minimum(1 - f[1:] / f[:-1], MAX_BETA)
    return betas


@dataclass(frozen=True, eq=False)
class Schedule:
    """Tables over t, float32 [timesteps], rounded once from float64, all on one device.

    All methods are pure, take tensors BCZYX with `t` int64 [B] on the schedule's device, and return float32 BCZYX.
    They cast their inputs to float32 and use no operation that autocast touches, so that they can stand inside an
    autocast region: in bf16, alpha_bar rounds to 1 at small t.  A `t` outside [0, timesteps) raises an error of
    torch, a negative one too: it never wraps.
    """

    betas: Tensor
    alpha_bar: Tensor
    sqrt_alpha_bar: Tensor
    sqrt_one_minus_alpha_bar: Tensor
    snr_table: Tensor

    @classmethod
    def from_betas(cls, betas: npt.NDArray[np.float64]) -> Self:
        """Build the tables on the CPU from float64 betas [timesteps], each in (0, 1)."""
        alpha_bar = np.cumprod(1 - betas, dtype=np.float64)

        def table(values: npt.NDArray[np.floating]) -> Tensor:
            return torch.from_numpy(values).to(torch.float32)

        return cls(
            betas=table(betas),
            alpha_bar=table(alpha_bar),
            sqrt_alpha_bar=table(np.sqrt(alpha_bar)),
            sqrt_one_minus_alpha_bar=table(np.sqrt(1 - alpha_bar)),
            snr_table=table(alpha_bar / (1 - alpha_bar)),
        )

    @classmethod
    def from_config(cls, config: DiffusionConfig) -> Self:
        """Build the schedule that the config names, on the CPU."""
        match config.schedule:
            case "cosine":
                return cls.from_betas(cosine_betas(config.timesteps))

    @property
    def timesteps(self) -> int:
        """Number of noise levels, T."""
        return len(self.betas)

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self.betas.device

    def to(self, device: torch.device | str) -> Schedule:
        """Return a copy whose tables are on `device`."""
        return Schedule(
            betas=self.betas.to(device),
            alpha_bar=self.alpha_bar.to(device),
            sqrt_alpha_bar=self.sqrt_alpha_bar.to(device),
            sqrt_one_minus_alpha_bar=self.sqrt_one_minus_alpha_bar.to(device),
            snr_table=self.snr_table.to(device),
        )

    def q_sample(self, x_0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Noise `x_0` to level `t`: x_t = sqrt(alpha_bar) x_0 + sqrt(1 - alpha_bar) eps (Ho et al. 2020, eq. 4)."""
        signal, noise = self._levels(t)
        return signal * x_0.float() + noise * eps.float()

    def velocity(self, x_0: Tensor, eps: Tensor, t: Tensor) -> Tensor:
        """Return v = sqrt(alpha_bar) eps - sqrt(1 - alpha_bar) x_0 (Salimans & Ho 2022, section 4)."""
        signal, noise = self._levels(t)
        return signal * eps.float() - noise * x_0.float()

    def x_0_from_v(self, x_t: Tensor, v: Tensor, t: Tensor) -> Tensor:
        """Return x_0 = sqrt(alpha_bar) x_t - sqrt(1 - alpha_bar) v (Salimans & Ho 2022, section 4)."""
        signal, noise = self._levels(t)
        return signal * x_t.float() - noise * v.float()

    def eps_from_v(self, x_t: Tensor, v: Tensor, t: Tensor) -> Tensor:
        """Return eps = sqrt(1 - alpha_bar) x_t + sqrt(alpha_bar) v (Salimans & Ho 2022, appendix D)."""
        signal, noise = self._levels(t)
        return noise * x_t.float() + signal * v.float()

    def eps_from_x_0(self, x_t: Tensor, x_0: Tensor, t: Tensor) -> Tensor:
        """Return the eps that leads from `x_0` to `x_t`; divides by sqrt(1 - alpha_bar), so errors grow at small t."""
        signal, noise = self._levels(t)
        return (x_t.float() - signal * x_0.float()) / noise

    def snr(self, t: Tensor) -> Tensor:
        """Return the signal-to-noise ratio alpha_bar / (1 - alpha_bar) at `t`: float32 [B], falling with t."""
        return self.snr_table.index_select(0, t)

    def _levels(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """sqrt(alpha_bar) and sqrt(1 - alpha_bar) at `t`, each [B, 1, 1, 1, 1]."""
        # index_select, not table[t]: indexing lets a negative t wrap to the noisy end.
        signal = self.sqrt_alpha_bar.index_select(0, t)
        noise = self.sqrt_one_minus_alpha_bar.index_select(0, t)
        return signal.view(-1, 1, 1, 1, 1), noise.view(-1, 1, 1, 1, 1)
