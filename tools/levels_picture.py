"""Draw docs/levels.svg: the share of a mode's variance that sampling returns, by power, and the powers of patches.

Closed form, with the exact denoiser of a Gaussian mode: it judges only noise levels and sampler.

vesuvius volume synth volumes/demo.zarr --shape 128,256,256
python tools/levels_picture.py volumes/demo.zarr docs/levels.svg
"""

from __future__ import annotations

import sys

import matplotlib
import numpy as np
import torch
import zarr

matplotlib.use("svg")
import matplotlib.pyplot as plt
from torch import Tensor

from vesuvius.config import DiffusionConfig
from vesuvius.diffusion.sampler import NoiseLevel, sample, sampling_levels
from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.spectrum import Spectrum

PATCH, COUNT = (72, 136, 136), 16
SAMPLERS = {
    "cosine, trailing, DDIM, 50 steps": DiffusionConfig(noise="cosine", sampler="ddim", sampler_steps=50),
    "spectral, rho = 7, DPM-Solver++(2M), 40 steps": DiffusionConfig(),
}


def main() -> None:
    """Measure the volume and write the picture to the path on the command line."""
    spectrum = measured(sys.argv[1])
    powers = np.logspace(-3, np.log10(spectrum.peak) + 0.5, 100)
    matplotlib.rcParams.update(
        {"svg.hashsalt": "levels", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}
    )
    figure, (shares, variance) = plt.subplots(2, 1, figsize=(7.5, 5), sharex=True, layout="constrained")
    for name, config in SAMPLERS.items():
        levels = sampling_levels(Schedule.from_config(config, spectrum), config)
        # The sampler is linear in the first noise, so one tensor holds all powers.
        drawn = sample(exact(torch.from_numpy(powers)), levels, torch.ones(len(powers)).double(), config.sampler)
        shares.semilogx(powers, drawn.numpy() ** 2 / powers, label=name)
    shares.axhline(1, color="grey", linewidth=0.5)
    shares.set_ylabel("share of a mode's variance\nthat sampling returns")
    shares.legend()
    power, modes = spectrum.modes()
    variance.hist(power, np.logspace(-3, np.log10(powers[-1]), 60), weights=power * modes / (power @ modes))
    variance.set_ylabel("share of the variance of\n72x136x136 patches")
    variance.set_xlabel("power P of a mode (white noise of the same variance: 1)")
    figure.savefig(sys.argv[2], metadata={"Date": None})


def measured(volume: str) -> Spectrum:
    """The spectrum of patches at random positions of a volume, including all augmentations of the default config."""
    found = zarr.open(volume, mode="r")
    array = found if isinstance(found, zarr.Array) else found["0"]
    starts = np.random.default_rng(0).integers(0, np.array(array.shape) - PATCH + 1, (COUNT, 3))
    cut = [array[tuple(slice(at, at + size) for at, size in zip(start, PATCH, strict=True))] for start in starts]
    return Spectrum.of(torch.from_numpy(np.stack(cut)).float()).augmented(True, True)


def exact(power: Tensor):
    """The best denoiser of Gaussian modes, as a sampler's `Estimate`."""

    def estimate(x: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor]:
        x_0 = level.alpha * power / (level.alpha**2 * power + level.sigma**2) * x
        return x_0, (x - level.alpha * x_0) / level.sigma

    return estimate


if __name__ == "__main__":
    main()
