"""Error of a filter that is linear but not stationary, relative to the stationary Wiener filter's, by noise level.

    python tools/bench/pca_wiener.py volumes/demo.zarr --patch-size 8,32,32

The baseline is validation's: the stationary filter of the spectrum of 64 training patches.  A network below 1 has
learned more than the spectrum; below these ratios, more than the second moments of patches.  The filter is fitted to
training patches, augmented like a run's, and judged on held-out ones, with the same noise for both filters:

- The leading principal components of four fifths of the training patches each get their own Wiener gain.
- What they leave gets a stationary filter.
- The other fifth measures the variance of each component and the spectrum of what is left: of patches that components
  are fitted to, both would be too small.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vesuvius.config import DataConfig, VolumeConfig
from vesuvius.diffusion.spectrum import AXES, Spectrum
from vesuvius.stream.start.prepare import prepare_data
from vesuvius.training.validation.fixed_patches import read_fixed_patches, read_training_patches

OF_A_RUN = 64  # training patches of this size that `measure_spectrum` reads
SIGMAS = (0.3, 0.7, 2.0, 4.0, 8.0, 14.0, 25.0, 44.0, 80.0, 145.0, 262.0)


def stationary(power: Tensor, noised: Tensor, sigma: float) -> Tensor:
    """Return the Wiener estimate for a power per frequency: [N, Z, Y, X] like `noised`."""
    gain = power / (power + sigma**2)
    filtered: Tensor = torch.fft.irfftn(gain * torch.fft.rfftn(noised, dim=AXES), s=noised.shape[-3:], dim=AXES)
    return filtered


def augmented(patches: Tensor, flip: bool, rot90: bool) -> Tensor:
    """Return each patch of [N, Z, Y, X] in one of its orientations."""
    rng, out = np.random.default_rng(0), []
    for patch in patches:
        turned = torch.rot90(patch, int(rng.integers(4)), (1, 2)) if rot90 else patch
        out.append(turned.flip([axis for axis in range(3) if flip and rng.random() < 0.5]))
    return torch.stack(out)


class PcaWiener:
    """Gains for `components` principal components, and a stationary filter for the rest."""

    def __init__(self, patches: Tensor, components: int) -> None:
        """Fit to standardized patches [N, Z, Y, X]."""
        rows = patches.flatten(1)
        fitted, others = rows.split([len(rows) * 4 // 5, len(rows) - len(rows) * 4 // 5])
        variances, vectors = torch.linalg.eigh(fitted @ fitted.T)  # in ascending order
        leading = slice(-components, None)
        self._basis = fitted.T @ (vectors[:, leading] / variances[leading].sqrt())  # orthonormal [voxels, components]
        weights = others @ self._basis
        self._variance = weights.square().mean(dim=0)
        left = (others - weights @ self._basis.T).view(-1, *patches.shape[1:])
        self._power = torch.fft.rfftn(left, dim=AXES).abs().square().mean(dim=0) / rows.shape[1]

    def __call__(self, noised: Tensor, sigma: float) -> Tensor:
        """Estimate patches [N, Z, Y, X] from those plus sigma times white noise."""
        weights = noised.flatten(1) @ self._basis
        rest = noised - (weights @ self._basis.T).view(noised.shape)
        gain = self._variance / (self._variance + sigma**2)
        return ((gain * weights) @ self._basis.T).view(noised.shape) + stationary(self._power, rest, sigma)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("volume", type=Path)
    parser.add_argument("--level", type=int, default=0)
    parser.add_argument("--patch-size", type=lambda text: tuple(map(int, text.split(","))), default=(8, 32, 32))
    parser.add_argument("--patches", type=int, default=2500, help="of training")
    parser.add_argument("--held-out", type=int, default=384, help="patches to judge on")
    parser.add_argument("--components", type=lambda text: [*map(int, text.split(","))], default=[300])
    asked = parser.parse_args()
    volumes = (VolumeConfig(path=str(asked.volume), level=asked.level),)
    config = DataConfig(volumes=volumes, patch_size=asked.patch_size, validation={"fraction": 0.1})
    data = prepare_data(0, config)
    stored = read_training_patches(data, config, asked.patches).patches.astype(np.float32)
    augment = dict(data.plan.augment)
    spectrum = Spectrum.of(torch.from_numpy(stored[:OF_A_RUN])).augmented(**augment)
    train = augmented((torch.from_numpy(stored) - spectrum.mean) / spectrum.std, **augment)
    held_out = read_fixed_patches(data, config, asked.held_out).patches.astype(np.float32)
    x_0 = (torch.from_numpy(held_out) - spectrum.mean) / spectrum.std
    everything = torch.from_numpy(Spectrum.of(train).augmented(**augment).power)
    filters = [partial(stationary, everything), *(PcaWiener(train, components) for components in asked.components)]
    print(f"{len(train)} training and {len(x_0)} held-out patches of {asked.patch_size} of {asked.volume}")
    print(
        f"sigma  stationary of {len(train)}" + "".join(f"{components:>8} components" for components in asked.components)
    )
    power = torch.from_numpy(spectrum.power)
    for number, sigma in enumerate(SIGMAS):
        noised = x_0 + sigma * torch.randn(x_0.shape, generator=torch.Generator().manual_seed(number))
        baseline = (stationary(power, noised, sigma) - x_0).square().mean()
        ratios = [float((each(noised, sigma) - x_0).square().mean() / baseline) for each in filters]
        print(f"{sigma:5g} " + "".join(f"{ratio:19.3f}" for ratio in ratios), flush=True)


if __name__ == "__main__":
    main()
