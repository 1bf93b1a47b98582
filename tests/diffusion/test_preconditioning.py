"""A network around the stationary Wiener filter: what it is shown, what it corrects, and how its levels are weighed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from vesuvius.config import DiffusionConfig
from vesuvius.diffusion.estimate import mask_condition, predict, split_signal_noise
from vesuvius.diffusion.sampler import rho_levels
from vesuvius.diffusion.schedule import Schedule, loss_per_sample
from vesuvius.diffusion.spectrum import AXES, Spectrum

Noise = Literal["spectral", "cosine", "linear"]
SHAPE = (6, 8, 9)
MEAN, STD = 5.0, 3.0
SPECTRAL = DiffusionConfig(noise="spectral")
COUNT = 600


@pytest.fixture(scope="module")
def spectrum() -> Spectrum:
    """Red, over five decades: as of CT."""
    z, y, x = (torch.fft.fftfreq(SHAPE[0]), torch.fft.fftfreq(SHAPE[1]), torch.fft.rfftfreq(SHAPE[2]))
    radius = (z[:, None, None] ** 2 + y[:, None] ** 2 + x**2).sqrt().double()
    power = ((radius + 0.01) ** -4).numpy()
    found = Spectrum(MEAN, STD, power.astype(np.float32), SHAPE[2])
    powers, counts = found.modes()
    return replace(found, power=found.power / np.float32(np.average(powers, weights=counts)))


@pytest.fixture(scope="module")
def x_0(spectrum: Spectrum) -> Tensor:
    """Gaussian patches of that spectrum, in model values."""
    white = torch.randn((COUNT, 1, *SHAPE), generator=torch.Generator().manual_seed(0))
    amplitude = torch.from_numpy(spectrum.power).sqrt()
    return MEAN + STD * torch.fft.irfftn(torch.fft.rfftn(white, dim=AXES) * amplitude, s=SHAPE, dim=AXES)


def silent(x: Tensor, t: Tensor) -> Tensor:
    return torch.zeros_like(x[:, :1])


def noise(seed: int = 1) -> Tensor:
    return torch.randn((COUNT, 1, *SHAPE), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("t", [0, 300, 700, 999])
def test_a_network_that_returns_0_is_the_wiener_filter(spectrum: Spectrum, x_0: Tensor, t: int) -> None:
    schedule, times = Schedule.from_config(SPECTRAL, spectrum), torch.full((COUNT,), t)
    x_t = schedule.q_sample(x_0, noise(), times)
    found, _ = schedule.x_0_and_eps("v", predict(silent, schedule, x_t, times), x_t, times)
    torch.testing.assert_close(found, schedule.wiener_x_0(spectrum, x_t, times), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("t", [0, 300, 700, 999])
def test_network_input_and_target_have_variance_1_at_every_level(spectrum: Spectrum, x_0: Tensor, t: int) -> None:
    """For data of this spectrum; a program that scaled by voxels instead of modes would be far off."""
    schedule, times = Schedule.from_config(SPECTRAL, spectrum), torch.full((COUNT,), t)
    eps = noise()
    shown, v, deviation = split_signal_noise(schedule, *_noised(schedule, x_0, eps, times))
    wanted = (schedule.target("v", x_0, eps, times) - v) / deviation
    # 0.12: at much noise all of it is a handful of modes, of which 600 patches tell the variance to 4 %.
    for part in (shown[:, 0], shown[:, 1], wanted):
        assert float(part.square().mean()) == pytest.approx(1, abs=0.12)


def _noised(schedule: Schedule, x_0: Tensor, eps: Tensor, times: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return schedule.q_sample(x_0, eps, times), *schedule.alpha_and_sigma(times)


def test_x_t_can_be_recovered_from_the_two_channels(spectrum: Spectrum, x_0: Tensor) -> None:
    schedule, times = Schedule.from_config(SPECTRAL, spectrum), torch.full((COUNT,), 200)
    x_t, alpha, sigma = _noised(schedule, x_0, noise(), times)
    shown, _, _ = split_signal_noise(schedule, x_t, alpha, sigma)
    basis = shown.transpose(0, 1).flatten(1)
    weights = torch.linalg.lstsq(basis.T.double(), x_t.flatten().double()[:, None]).solution
    left = x_t.flatten().double() - (basis.T.double() @ weights)[:, 0]
    assert float(left.square().mean()) < 1e-9 * float(x_t.square().mean())


def test_the_network_sees_condition_and_level_and_its_output_is_scaled_and_added(
    spectrum: Spectrum, x_0: Tensor
) -> None:
    schedule, times = Schedule.from_config(SPECTRAL, spectrum), torch.arange(COUNT)
    x_t = schedule.q_sample(x_0, noise(), times)
    condition = torch.rand((COUNT, 2, *SHAPE))
    seen = []

    def network(*arguments: Tensor) -> Tensor:
        seen.append(arguments)
        return torch.full((COUNT, 1, *SHAPE), 2.0, dtype=torch.bfloat16)

    found = predict(network, schedule, x_t, times, condition)
    shown, v, deviation = split_signal_noise(schedule, x_t, *schedule.alpha_and_sigma(times))
    torch.testing.assert_close(found, v + 2 * deviation)
    ((x, t),) = seen
    assert torch.equal(t, schedule.network_input(times))
    assert torch.equal(x, torch.cat([shown, condition], dim=1))


def _told(config: DiffusionConfig, spectrum: Spectrum, t: Tensor) -> Tensor:
    """What the network is told at t, with and without a spectrum."""
    seen: list[Tensor] = []

    def network(x: Tensor, level: Tensor) -> Tensor:
        seen.append(level)
        return x[:, :1]

    predict(network, Schedule.from_config(config, spectrum), torch.zeros((len(t), 1, *SHAPE)), t)
    return seen[0]


@pytest.mark.parametrize("noise", ["spectral", "cosine", "linear"])
def test_the_network_is_told_sigma_whatever_spectrum_and_schedule_give_it(spectrum: Spectrum, noise: Noise) -> None:
    """Of t, a network of another volume or patch size would be told another number for the same sigma."""
    other = replace(spectrum, power=spectrum.power * np.float32(40))
    for config, of in ((DiffusionConfig(noise=noise), spectrum), (DiffusionConfig(noise=noise, timesteps=77), other)):
        table = Schedule.from_config(config, of).alpha_bar_64
        sigma = torch.from_numpy(np.sqrt((1 - table) / table))
        t = torch.arange(len(table))
        # 0.01: alpha_bar of the clean end of linear and cosine is near 1 - float32's epsilon / 1e-4
        torch.testing.assert_close(_told(config, of, t).double(), 100 * (sigma.log() + 4), rtol=0, atol=0.01)
        assert torch.equal(_told(config, of, t.float()), _told(config, of, t))
        told = _told(config, of, t[:-1] + 0.25)
        expected = 100 * (0.75 * sigma[:-1].log() + 0.25 * sigma[1:].log() + 4)
        torch.testing.assert_close(told.double(), expected, rtol=0, atol=0.01)


def test_with_noise_embedding_t_the_network_is_told_t_itself(spectrum: Spectrum) -> None:
    for t in (torch.tensor([3, 999]), torch.tensor([3.25, 998.5])):
        assert _told(DiffusionConfig(noise_embedding="t"), spectrum, t) is t


def test_a_masked_condition_is_zero_even_if_it_holds_nan() -> None:
    condition = torch.randn(3, 2, *SHAPE)
    condition[:, -1], condition[1, 0] = 1, float("nan")  # voxels of a float volume may be NaN
    found = mask_condition(condition, torch.tensor([True, False, True]))
    assert torch.equal(found[[0, 2]], condition[[0, 2]])
    assert not found[1].any(), "also where it says that it is there"


def test_without_a_spectrum_the_network_sees_x_t_and_predicts_v() -> None:
    schedule, x_t = Schedule.from_config(DiffusionConfig(noise="cosine")), torch.randn((2, 1, *SHAPE))
    assert torch.equal(predict(lambda x, t: 3 * x, schedule, x_t, torch.tensor([3, 4])), 3 * x_t)


def test_sampler_levels_equal_the_levels_at_their_t(spectrum: Spectrum) -> None:
    """The network is told t, the sampler computes with alpha and sigma: they must not say two things."""
    schedule = Schedule.from_config(SPECTRAL, spectrum)
    levels = rho_levels(schedule, 33)[:-1]
    alpha, sigma = schedule.alpha_and_sigma(torch.tensor([level.t for level in levels], dtype=torch.float32))
    np.testing.assert_allclose(alpha.flatten(), [level.alpha for level in levels], rtol=1e-3)
    np.testing.assert_allclose(sigma.flatten(), [level.sigma for level in levels], rtol=1e-3)
    whole = torch.tensor([0, 500, 999])
    for exact, close in zip(schedule.alpha_and_sigma(whole), schedule.alpha_and_sigma(whole.float()), strict=True):
        torch.testing.assert_close(exact, close, rtol=1e-4, atol=1e-6)


def test_the_wiener_filter_has_a_mean_loss_of_1(spectrum: Spectrum, x_0: Tensor) -> None:
    schedule = Schedule.from_config(SPECTRAL, spectrum)
    times = torch.arange(COUNT) * 999 // (COUNT - 1)
    eps = noise(2)
    v = predict(silent, schedule, schedule.q_sample(x_0, eps, times), times)
    loss = loss_per_sample(v, x_0, eps, times, schedule, SPECTRAL)
    assert float(loss.mean()) == pytest.approx(1, rel=0.05)


def test_levels_are_weighted_by_the_root_of_the_number_of_modes_of_their_error() -> None:
    """One strong mode among many weak ones: at much noise the error is in that one, at little noise in all."""
    power = np.full((4, 4, 3), 0.01, np.float32)
    power[0, 0, 0] = 10_000.0
    schedule = Schedule.from_config(
        DiffusionConfig(noise="spectral", sigma_min=0.01, sigma_max=1000.0), Spectrum(0, 1, power, 4)
    )
    assert schedule.loss_weight is not None
    counts = np.array([1.0, 2.0, 1.0])
    error = np.stack([power / (a * power + (1 - a)) for a in schedule.alpha_bar_64])
    mean = (error * counts).sum((1, 2, 3)) / 64
    relative = schedule.loss_weight.numpy() * mean  # what a level counts once its error is that of the Wiener filter
    assert relative[-1] / relative[0] == pytest.approx(math.sqrt(1 / 64), rel=0.2)
    assert np.all(np.diff(relative) <= 1e-3)


def test_patches_without_power_cause_no_division_by_0() -> None:
    flat = Spectrum.of(torch.full((2, *SHAPE), 3.0))
    schedule, times = Schedule.from_config(SPECTRAL, flat), torch.tensor([0, 999])
    x_0, eps = torch.full((2, 1, *SHAPE), 3.0), noise()[:2]
    x_t = schedule.q_sample(x_0, eps, times)
    v = predict(lambda x, t: x[:, :1], schedule, x_t, times)
    assert torch.isfinite(loss_per_sample(v, x_0, eps, times, schedule, SPECTRAL)).all()
