"""Mean, deviation and power spectrum of patches, and the noise levels and the Wiener filter that follow from them."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from vesuvius.config import DiffusionConfig
from vesuvius.diffusion.sampler import CLEAN, NoiseLevel, rho_levels, sample, sampling_levels
from vesuvius.diffusion.schedule import Schedule
from vesuvius.diffusion.spectrum import Spectrum
from vesuvius.loader.device import apply_symmetries
from vesuvius.loader.intensity import normalized
from vesuvius.plan.plan import Augmentation

SHAPE = (12, 16, 15)
AXES = (-3, -2, -1)


def radius(shape: tuple[int, int, int]) -> Tensor:
    z, y, x = shape
    axes = torch.fft.fftfreq(z)[:, None, None], torch.fft.fftfreq(y)[:, None], torch.fft.rfftfreq(x)
    return (axes[0] ** 2 + axes[1] ** 2 + axes[2] ** 2).sqrt()


def red(shape: tuple[int, int, int] = SHAPE) -> Tensor:
    """Power that falls over three decades, with the mean 1 over all modes."""
    power = (1 / (0.03 + radius(shape)) ** 3).double()
    found = Spectrum(0.0, 1.0, power.numpy(), shape[2]).modes()
    return power / float((found[0] * found[1]).sum() / found[1].sum())


def patches_of(power: Tensor, count: int, shape: tuple[int, int, int] = SHAPE, seed: int = 0) -> Tensor:
    """Gaussian patches whose modes have this power."""
    white = torch.randn((count, *shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.fft.irfftn(torch.fft.rfftn(white, dim=AXES) * power.sqrt(), s=shape, dim=AXES)


def test_the_power_of_each_mode_is_measured() -> None:
    power = red()
    found = Spectrum.of(7 + 3 * patches_of(power, 1000))
    assert found.mean == pytest.approx(7, abs=0.2)
    assert found.std == pytest.approx(3, rel=0.03)
    ratio = torch.from_numpy(found.power).double() / power
    assert float(ratio.mean()) == pytest.approx(1, abs=0.02)
    assert float(ratio.std()) < 0.05, "each of 1000 patches has one or two draws of a mode"


@pytest.mark.parametrize("shape", [(4, 6, 8), (4, 6, 7), (1, 1, 1), (3, 2, 1)])
def test_the_mean_power_of_all_modes_is_the_variance(shape: tuple[int, int, int]) -> None:
    found = Spectrum.of(torch.randn((5, *shape), generator=torch.Generator().manual_seed(1)))
    power, counts = found.modes()
    assert counts.sum() == math.prod(shape)
    assert (power * counts).sum() / counts.sum() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("sigma", [0.05, 0.5, 5.0])
def test_no_other_frequency_filter_is_better_than_the_linear_estimate(sigma: float) -> None:
    power = red()
    spectrum = Spectrum(0.0, 1.0, power.float().numpy(), SHAPE[2])
    x_0 = patches_of(power, 400)[:, None].float()
    level = NoiseLevel(0, 1 / math.sqrt(1 + sigma**2), sigma / math.sqrt(1 + sigma**2))
    eps = torch.randn(x_0.shape, generator=torch.Generator().manual_seed(2))
    x_t = level.alpha * x_0 + level.sigma * eps
    factors = torch.full((2, len(x_0), 1, 1, 1, 1), level.alpha)
    factors[1] = level.sigma
    guess = spectrum.wiener_filter(x_t, *factors)
    error = float((guess - x_0).square().mean())
    noise = sigma**2
    per_mode = (power * noise / (power + noise)).numpy().ravel()
    counts = spectrum.modes()[1]
    assert error == pytest.approx(float((per_mode * counts).sum() / counts.sum()), rel=0.05), "the closed form"
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        gains = 1 + 0.2 * torch.randn(power.shape, generator=generator)
        other = torch.fft.irfftn(gains * torch.fft.rfftn(guess, dim=AXES), s=SHAPE, dim=AXES)
        assert float((other - x_0).square().mean()) > error


def spectrum_up_to(peak: float) -> Spectrum:
    power = np.ones((4, 4, 3), np.float32)
    power[0, 0, 0] = peak
    return Spectrum(0.0, 1.0, power, 4)


def share_of_variance(power: float, levels: tuple[NoiseLevel, ...], config: DiffusionConfig) -> float:
    """Of a Gaussian mode, as it comes out of the sampler with the exact denoiser.  All is linear in the first noise."""

    def exact(x: Tensor, level: NoiseLevel) -> tuple[Tensor, Tensor]:
        alpha, sigma = level.alpha, level.sigma
        x_0 = alpha * power / (alpha**2 * power + sigma**2) * x
        return x_0, (x - alpha * x_0) / sigma

    drawn = sample(exact, levels, torch.ones(1, dtype=torch.float64), config.sampler)
    return float(drawn**2) / power


@pytest.mark.parametrize("exponent", [-2, 0, 3, 5])
def test_spectral_sampling_reproduces_the_variance_of_every_mode(exponent: int) -> None:
    """A sampler whose first step is too long, or whose noise ends too low, loses what is large."""
    config = DiffusionConfig()
    levels = sampling_levels(Schedule.from_config(config, spectrum_up_to(max(10.0**exponent, 1.0))), config)
    assert 0.9 < share_of_variance(10.0**exponent, levels, config) < 1.1
    to_the_largest = sampling_levels(Schedule.from_config(config, spectrum_up_to(1e5)), config)
    assert 0.9 < share_of_variance(10.0**exponent, to_the_largest, config) < 1.1


def test_levels_decrease_in_equal_steps_of_the_seventh_root() -> None:
    config = DiffusionConfig(noise="spectral", sigma_max=80.0, sigma_min=0.02)
    schedule = Schedule.from_config(config, spectrum_up_to(100.0))
    *levels, last = rho_levels(schedule, 20)
    assert last == CLEAN
    noise = np.array([level.sigma / level.alpha for level in levels])
    assert noise[[0, -1]] == pytest.approx([80.0, 0.02])
    np.testing.assert_allclose(np.diff(noise ** (1 / 7)), (0.02 ** (1 / 7) - 80 ** (1 / 7)) / 19, rtol=1e-9)
    assert (levels[0].t, levels[-1].t) == (999, 0)
    assert all(a.sigma > b.sigma for a, b in pairwise([*levels, last]))


def test_sigma_max_follows_from_the_largest_amplitude() -> None:
    config = DiffusionConfig(noise="spectral")
    most = [
        math.sqrt(1 / Schedule.from_config(config, spectrum_up_to(peak)).alpha_bar_64[-1] - 1) for peak in (1e2, 1e6)
    ]
    assert most == pytest.approx([40, 4000], rel=1e-6)
    given = Schedule.from_config(DiffusionConfig(noise="spectral", sigma_max=77.0), spectrum_up_to(1e6))
    assert math.sqrt(1 / given.alpha_bar_64[-1] - 1) == pytest.approx(77)


def test_only_the_spectral_schedule_standardizes() -> None:
    spectrum = Spectrum.of(7 + 3 * patches_of(red(), 20))
    schedule = Schedule.from_config(DiffusionConfig(noise="spectral"), spectrum)
    x_0, t = 7 + 3 * torch.randn((2, 1, 4, 4, 4)), torch.tensor([0, 999])
    torch.testing.assert_close(schedule.model_values(schedule.standardized(x_0)), x_0)
    eps = torch.zeros_like(x_0)
    alpha = schedule.sqrt_alpha_bar[t].view(-1, 1, 1, 1, 1)
    torch.testing.assert_close(schedule.q_sample(x_0, eps, t), alpha * (x_0 - spectrum.mean) / spectrum.std)
    target = schedule.target("v", x_0, eps, t)
    found, _ = schedule.x_0_and_eps("v", target, schedule.q_sample(x_0, eps, t), t)
    torch.testing.assert_close(found, x_0, rtol=1e-4, atol=1e-4)
    cosine = Schedule.from_config(DiffusionConfig(noise="cosine"), spectrum)
    assert (cosine.mean, cosine.std) == (0.0, 1.0)


@pytest.mark.parametrize(("flip", "rot90"), [(True, False), (False, True), (True, True)])
def test_the_augmented_spectrum_is_that_of_all_augmented_patches(flip: bool, rot90: bool) -> None:
    """Patches tilted against all axes: a mean over too few symmetries, or about another origin, is not that of all."""
    white = patches_of(red((4, 6, 6)), 2, (4, 6, 6))
    patches = 2 + white + white.roll((1, 1), (1, 2)) + white.roll((1, 2), (2, 3))
    flips = list(itertools.product((False, True), repeat=3)) if flip else [(False,) * 3]
    every = [Augmentation(*one) for one in itertools.product(flips, range(4 if rot90 else 1))]
    values = [normalized(apply_symmetries(patches, [one] * 2), np.array([[-1.0, 1.0]] * 2)) for one in every]
    expected, found = Spectrum.of(torch.cat(values)), Spectrum.of(patches).augmented(flip=flip, rot90=rot90)
    assert (found.mean, found.std) == pytest.approx((expected.mean, expected.std), rel=1e-5)
    np.testing.assert_allclose(found.power, expected.power, rtol=1e-4, atol=1e-6)
    assert np.abs(Spectrum.of(patches).power / found.power - 1).max() > 0.1, "these patches have a direction"
