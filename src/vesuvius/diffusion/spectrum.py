"""Second-order statistics of the data: mean, standard deviation and power spectrum of patches.

They determine the noise levels and the stationary Wiener filter, the baseline of the validation error.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

AXES = (-3, -2, -1)
LEAST_POWER = 1e-6  # lower bound on the power of a frequency; avoids divisions by 0 for constant patches


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Second moments of patches of one size, treated as periodic."""

    # over all voxels of all patches, in model values
    mean: float
    std: float
    # float32 [Z, Y, X // 2 + 1], on the host: the expectation of |FFT|^2 / voxels of a standardized patch, at the
    # frequencies of `rfftn`.  White noise of variance 1 has power 1 everywhere; the mean over all frequencies is the
    # variance, 1.  The power at frequency 0 is the variance of the patch means times the number of voxels.
    power: NDArray[np.float32]
    size_x: int  # X; cannot be derived from the last axis of `power`

    @classmethod
    def of(cls, patches: Tensor) -> Self:
        """Measure patches [N, Z, Y, X] of model values, N >= 2; std is 1 if all voxels are equal.  Pure."""
        mean = float(patches.double().mean())
        std = float(patches.double().std(correction=0)) or 1.0
        power = torch.zeros((*patches.shape[1:-1], patches.shape[-1] // 2 + 1), dtype=torch.float64)
        for patch in patches:  # one at a time: a batched FFT would take several times the memory
            power += torch.fft.rfftn((patch.double() - mean) / std).abs().square()
        return cls(mean, std, (power / patches.numel()).float().numpy(), patches.shape[-1])

    def augmented(self, flip: bool, rot90: bool) -> Self:
        """Return the spectrum of the same patches with the flips and rotations of `plan.augmentation_of`.

        They act on the periodic covariance about its origin, so the mean over the group is taken there.
        """
        covariance = torch.fft.irfftn(torch.from_numpy(self.power).double(), s=(*self.power.shape[:-1], self.size_x))
        if rot90:  # by 180 degrees, then by 90
            covariance = (covariance + _mirrored(_mirrored(covariance, -1), -2)) / 2
            covariance = (covariance + _mirrored(covariance.transpose(-1, -2), -1)) / 2
        for axis in AXES if flip else ():
            covariance = (covariance + _mirrored(covariance, axis)) / 2
        power = torch.fft.rfftn(covariance).real.clamp(min=0) * self.std**2
        std = math.sqrt(float(torch.fft.irfftn(power, s=covariance.shape)[0, 0, 0])) or 1.0
        return replace(self, std=std, power=(power / std**2).float().numpy())

    @classmethod
    def white(cls) -> Self:
        """Return the spectrum of uncorrelated voxels, for patches of any size."""
        return cls(0.0, 1.0, np.ones((1, 1, 1), np.float32), 1)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "std": self.std, "power": torch.from_numpy(self.power), "size_x": self.size_x}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """Inverse of `state_dict`.  Raises KeyError, TypeError, ValueError: no spectrum."""
        power, size_x, std = state["power"].float().numpy().copy(), int(state["size_x"]), float(state["std"])
        fits = power.ndim == 3 and power.shape[-1] == size_x // 2 + 1
        if not (fits and 0 <= power.min() <= power.max() < math.inf and std > 0):
            raise ValueError(f"a power spectrum of {power.shape} for x = {size_x} and a standard deviation of {std}")
        return cls(float(state["mean"]), std, power, size_x)

    @property
    def peak(self) -> float:
        return float(self.power.max())

    def modes(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the power of each frequency of `rfftn` and the number of modes it represents: float64, both flat."""
        power = self.power.astype(np.float64)
        return power.ravel(), np.broadcast_to(self.counts_x(), power.shape).ravel()

    def counts_x(self) -> NDArray[np.float64]:
        """Return the modes per frequency along the last axis: 2 where `rfftn` omits the conjugate, else 1."""
        counts = np.full(self.power.shape[-1], 2.0)
        counts[0] = 1.0
        if self.size_x % 2 == 0:
            counts[-1] = 1.0
        return counts

    def wiener_filter(self, x_t: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """Estimate standardized x_0 from x_t = alpha x_0 + sigma eps with the stationary Wiener filter.

        It scales each frequency by alpha P / (alpha^2 P + sigma^2). x_t and the result are float32 [B, C, Z, Y, X];
        alpha and sigma are [B, 1, 1, 1, 1].
        """
        power = _power_on(self, x_t.device)
        gain = alpha * power / (alpha.square() * power + sigma.square())
        estimate: Tensor = torch.fft.irfftn(gain * torch.fft.rfftn(x_t, dim=AXES), s=x_t.shape[-3:], dim=AXES)
        return estimate


@lru_cache(maxsize=2)
def _power_on(spectrum: Spectrum, device: torch.device) -> Tensor:
    """Return the power on a device, copied only once: a copy from pageable memory makes the host wait for the GPU."""
    return torch.from_numpy(spectrum.power).to(device)


def _mirrored(covariance: Tensor, axis: int) -> Tensor:
    """Return the covariance with the offsets along an axis negated, modulo its size."""
    return covariance.flip(axis).roll(1, axis)
