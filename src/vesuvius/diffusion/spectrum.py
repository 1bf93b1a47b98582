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

_AXES = (-3, -2, -1)


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Second moments of patches of one size, taken for periodic.

    Attributes:
        mean, std: over all voxels of all patches, in model values.
        power: float32 [Z, Y, X // 2 + 1], on the CPU: the expectation of |FFT|^2 / voxels of a standardised patch, at
            the frequencies of `rfftn`.  White noise of variance 1 has 1 everywhere, and the mean over all frequencies
            is the variance, 1.  At frequency 0 it is the variance of the patches' means times their voxels.
        size_x: X, which the last axis of `power` does not tell.
    """

    mean: float
    std: float
    power: Tensor
    size_x: int

    @classmethod
    def of(cls, patches: Tensor) -> Self:
        """Measure patches [N, Z, Y, X] of model values; N >= 2.  All equal, they have std 1.  Pure."""
        mean = float(patches.double().mean())
        std = float(patches.double().std(correction=0)) or 1.0
        power = torch.zeros((*patches.shape[1:-1], patches.shape[-1] // 2 + 1), dtype=torch.float64)
        for patch in patches:  # one after another: all at once would take several times their memory
            power += torch.fft.rfftn((patch.double() - mean) / std).abs().square()
        return cls(mean, std, (power / patches.numel()).float(), patches.shape[-1])

    def state_dict(self) -> dict[str, Any]:
        """All of it, as a tensor and plain data."""
        return {"mean": self.mean, "std": self.std, "power": self.power, "size_x": self.size_x}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Self:
        """What `state_dict` has returned."""
        return cls(float(state["mean"]), float(state["std"]), state["power"].clone(), int(state["size_x"]))

    @property
    def peak(self) -> float:
        """The largest power of any frequency."""
        return float(self.power.max())

    def modes(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Power of each frequency of `rfftn`, and how many modes of the patch it stands for: float64, both flat."""
        size_x, half = self.size_x, self.power.shape[-1]
        counts = np.full(half, 2.0)
        counts[0] = 1.0
        if size_x % 2 == 0:
            counts[-1] = 1.0
        power = self.power.double().numpy()
        return power.ravel(), np.broadcast_to(counts, power.shape).ravel()

    def linear_estimate(self, x_t: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        """The best linear guess of standardised x_0, from x_t = alpha x_0 + sigma eps: the Wiener filter.

        It scales each frequency by alpha P / (alpha^2 P + sigma^2).  Pure.

        Args:
            x_t: float32 [B, C, Z, Y, X].
            alpha, sigma: [B, 1, 1, 1, 1].
        """
        power = self.power.to(x_t.device)
        gain = alpha * power / (alpha.square() * power + sigma.square())
        estimate: Tensor = torch.fft.irfftn(gain * torch.fft.rfftn(x_t, dim=_AXES), s=x_t.shape[-3:], dim=_AXES)
        return estimate
