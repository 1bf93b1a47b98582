"""What the data are like to second order: mean, deviation and power spectrum of patches.

The noise levels follow from it, and the best linear denoiser, which a network must beat to have learned anything that
the spectrum does not say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

AXES = (-3, -2, -1)
# Where data have no power, as all-equal patches have not, this is taken: nothing is divided by 0.
LEAST_POWER = 1e-6


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Second moments of patches of one size, taken for periodic.

    Attributes:
        mean, std: over all voxels of all patches, in model values.
        power: float32 [Z, Y, X // 2 + 1], on the host: the expectation of |FFT|^2 / voxels of a standardised patch, at
            the frequencies of `rfftn`.  White noise of variance 1 has 1 everywhere, and the mean over all frequencies
            is the variance, 1.  At frequency 0 it is the variance of the patches' means times their voxels.
        size_x: X, which the last axis of `power` does not tell.
    """

    mean: float
    std: float
    power: NDArray[np.float32]
    size_x: int

    @classmethod
    def of(cls, patches: Tensor) -> Self:
        """Measure patches [N, Z, Y, X] of model values; N >= 2.  All equal, they have std 1.  Pure."""
        mean = float(patches.double().mean())
        std = float(patches.double().std(correction=0)) or 1.0
        power = torch.zeros((*patches.shape[1:-1], patches.shape[-1] // 2 + 1), dtype=torch.float64)
        for patch in patches:  # one after another: all at once would take several times their memory
            power += torch.fft.rfftn((patch.double() - mean) / std).abs().square()
        return cls(mean, std, (power / patches.numel()).float().numpy(), patches.shape[-1])

    @classmethod
    def white(cls) -> Self:
        """That of uncorrelated voxels with mean 0 and variance 1, for patches of any size."""
        return cls(0.0, 1.0, np.ones((1, 1, 1), np.float32), 1)

    def state_dict(self) -> dict[str, Any]:
        """All of it, as a tensor and plain data."""
        return {"mean": self.mean, "std": self.std, "power": torch.from_numpy(self.power), "size_x": self.size_x}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """What `state_dict` has returned."""
        return cls(float(state["mean"]), float(state["std"]), state["power"].numpy().copy(), int(state["size_x"]))

    @property
    def peak(self) -> float:
        """The largest power of any frequency."""
        return float(self.power.max())

    def modes(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Power of each frequency of `rfftn`, and how many modes of the patch it stands for: float64, both flat."""
        power = self.power.astype(np.float64)
        return power.ravel(), np.broadcast_to(self.counts_x(), power.shape).ravel()

    def counts_x(self) -> NDArray[np.float64]:
        """How many modes a frequency stands for, along the last axis: 2 where `rfftn` leaves out its conjugate."""
        counts = np.full(self.power.shape[-1], 2.0)
        counts[0] = 1.0
        if self.size_x % 2 == 0:
            counts[-1] = 1.0
        return counts

    def linear_estimate(self, x_t: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """The best linear guess of standardised x_0, from x_t = alpha x_0 + sigma eps: the Wiener filter.

        It scales each frequency by alpha P / (alpha^2 P + sigma^2).  Pure.

        Args:
            x_t: float32 [B, C, Z, Y, X].
            alpha, sigma: [B, 1, 1, 1, 1].
        """
        power = torch.from_numpy(self.power).to(x_t.device)
        gain = alpha * power / (alpha.square() * power + sigma.square())
        estimate: Tensor = torch.fft.irfftn(gain * torch.fft.rfftn(x_t, dim=AXES), s=x_t.shape[-3:], dim=AXES)
        return estimate
