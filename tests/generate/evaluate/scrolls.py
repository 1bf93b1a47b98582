"""A volume of smooth random texture with grain, and patches of it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from vesuvius.generate.evaluate.patches import PatchSet

PATCH = (8, 16, 16)

Voxels = NDArray[np.float32]


def scroll(seed: int, shape: tuple[int, int, int] = (40, 64, 64), *, air: bool = True) -> Voxels:
    """Model values; about a fifth of the voxels are air, at -3."""
    rng = np.random.default_rng(seed)
    squares = sum(np.meshgrid(*[np.fft.fftfreq(size) ** 2 for size in shape], indexing="ij"))

    def field(length: float) -> Voxels:
        power = np.exp(-squares * (2 * np.pi * length) ** 2 / 2)
        values = np.fft.ifftn(np.fft.fftn(rng.standard_normal(shape)) * power).real
        return (values / values.std()).astype(np.float32)

    values = 0.5 * field(1.5) + 0.1 * rng.standard_normal(shape)
    return np.where(air & (field(4.0) < -0.8), -3.0, values).astype(np.float32)


def patches(volume: Voxels, count: int, seed: int) -> Voxels:
    """Cut at random places."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, np.subtract(volume.shape, PATCH), (count, 3), endpoint=True)
    return np.stack([volume[z : z + 8, y : y + 16, x : x + 16] for z, y, x in starts])


def patch_set(values: Voxels) -> PatchSet:
    return PatchSet(values, side=np.arange(len(values)) % 2)


def within_chance(hits: int, trials: int, rate: float) -> bool:
    """Whether a count of hits lies where a binomial distribution of this rate has 99.9 % of its counts."""
    chances = [math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(trials + 1)]
    return min(sum(chances[: hits + 1]), sum(chances[hits:])) > 0.0005
