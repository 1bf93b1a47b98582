"""Histogram, radial power spectrum and planarity against closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vesuvius.training.validation.texture import (
    HISTOGRAM_EDGES,
    correlation_distance,
    histogram_distance,
    measure_texture,
    radial_power,
    shell_frequencies,
    spectrum_distance_db,
)

BIN = float(HISTOGRAM_EDGES[1] - HISTOGRAM_EDGES[0])


def planarity(patch: NDArray[Any]) -> float:
    return measure_texture([patch]).planarity


def noise(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 0.3, shape).astype(np.float32)


def test_white_noise_has_its_variance_at_every_frequency() -> None:
    shape = (9, 15, 13)
    powers = np.array([radial_power(patch) for patch in noise((1000, *shape))])
    standard_error = powers.std(0) / math.sqrt(len(powers))
    assert (standard_error < 0.03 * 0.3**2).all(), "or the next line could not fail"
    with_the_mean = np.array([0.03 * 0.3**2] + [0] * (powers.shape[1] - 1))  # of the lowest
    assert (np.abs(powers.mean(0) - 0.3**2) < 5 * standard_error + with_the_mean).all()


@pytest.mark.parametrize("wave", [(0.25, 0, 0), (0.125, 0.25, -0.25), (0, 0.3, 0.4)])
def test_a_sinusoid_peaks_at_its_frequency_in_any_direction(wave: tuple[float, float, float]) -> None:
    shape = (16, 32, 24)
    phase = sum(f * axis for f, axis in zip(wave, np.indices(shape), strict=True))
    power = radial_power(np.cos(2 * np.pi * phase))
    # A shell is 1/32 wide: the wave lies in it or at its edge.
    assert abs(shell_frequencies(shape)[power.argmax()] - math.hypot(*wave)) <= 0.5 / 32 + 1e-12


def test_a_histogram_sums_to_1_with_outliers_in_the_end_bins() -> None:
    patches = np.zeros((2, 4, 4, 4), np.float32)
    patches[0, 0], patches[0, 1], patches[1, 0] = -7, 2.9999, 1e30
    histogram = measure_texture(patches).histogram
    assert histogram.sum() == 1
    assert (histogram[0], histogram[-1]) == (16 / 128, 32 / 128)
    assert histogram[48] == 80 / 128


def test_distances_of_a_shift_and_of_twice_the_amplitude() -> None:
    patches = noise((3, 8, 16, 16)).clip(-0.7, 0.7)
    found = measure_texture(patches)
    for shift in (0.02, -0.7):
        shifted = measure_texture(patches + np.float32(shift))
        assert abs(histogram_distance(shifted, found) - abs(shift)) <= BIN
    assert math.isclose(spectrum_distance_db(measure_texture(2 * patches), found), 20 * math.log10(2))


@pytest.mark.filterwarnings("error")
def test_non_finite_values_are_counted_and_excluded_from_the_curves() -> None:
    patches = noise((3, 8, 16, 16))
    patches[0, 0, 0, :3] = math.nan, math.inf, -math.inf
    found = measure_texture(patches)
    assert found.nonfinite == 3
    assert np.array_equal(found.power, measure_texture(patches[1:]).power)
    finite = patches[np.isfinite(patches)].clip(-3, 3)
    assert np.allclose(found.histogram, np.histogram(finite, HISTOGRAM_EDGES)[0] / finite.size)
    nothing = measure_texture(np.full((2, 8, 16, 16), math.nan, np.float32))
    assert np.isnan(nothing.histogram).all()
    assert np.isnan(nothing.power).all()
    assert nothing.power.shape == nothing.frequency.shape


def waves(shape: tuple[int, int, int], *directions: tuple[float, float, float]) -> np.ndarray[Any, Any]:
    """Sum of plane waves with these wave vectors, in cycles per voxel."""
    z, y, x = np.indices(shape)
    return np.sum([np.sin(2 * np.pi * (a * z + b * y + c * x)) for a, b, c in directions], axis=0)


@pytest.mark.parametrize("direction", [(0.1, 0, 0), (0.06, 0.05, 0.06)])
def test_sheets_are_planar_in_any_orientation(direction: tuple[float, float, float]) -> None:
    assert planarity(waves((16, 32, 32), direction)) > 0.95


def test_fibres_grains_and_noise_are_not_planar() -> None:
    """A measure of mere anisotropy would call fibres planar."""
    shape = (24, 24, 24)
    sheets = planarity(waves(shape, (0, 0.1, 0)))
    fibres = planarity(waves(shape, (0, 0.1, 0), (0, 0, 0.1)))
    grains = planarity(waves(shape, (0.1, 0, 0), (0, 0.1, 0), (0, 0, 0.1)))
    assert planarity(noise(shape)) < 0.5
    assert max(fibres, grains) < 0.7
    assert sheets > 0.95
    assert 0 < planarity(noise((1, 24, 24))) < 1, "of one slice, too"


def test_planarity_of_patches_counts_each_place_by_its_contrast_and_of_none_is_unknown() -> None:
    sheets = waves((16, 16, 16), (0, 0.1, 0)).astype(np.float32)
    air = np.full_like(sheets, -1)
    assert measure_texture([sheets, air]).planarity == pytest.approx(planarity(sheets))
    assert math.isnan(planarity(air))


def test_the_spread_of_means_is_over_patches() -> None:
    patches = [np.full((4, 4, 4), intensity, np.float32) for intensity in (-1, 0, 1)]
    assert measure_texture(patches).means_std == pytest.approx(math.sqrt(2 / 3))
    patches[0][0, 0, 0] = np.nan
    assert measure_texture(patches).means_std == pytest.approx(0.5)


@pytest.mark.parametrize("intensity", [-2.16, -5])  # -5 is beyond the histogram, which counts it in its first bin
def test_air_is_what_is_darker_than_the_material(intensity: float) -> None:
    patch = np.linspace(-1.49, 1, 1000, dtype=np.float32).reshape(10, 10, 10)
    patch[:3] = intensity
    assert measure_texture([patch]).air == pytest.approx(0.3)


def test_the_two_point_correlation_of_a_process_whose_own_is_known() -> None:
    """First-order autoregression along x only: 0.8^distance there, none along z and y."""
    rng = np.random.default_rng(0)
    lines = rng.standard_normal((20, 16, 16, 64))
    for x in range(1, 64):
        lines[..., x] = 0.8 * lines[..., x - 1] + 0.6 * lines[..., x]
    z, y, x_axis = measure_texture(lines.astype(np.float32)).correlation
    assert (len(z), len(y), len(x_axis)) == (9, 9, 33)
    assert np.allclose(x_axis, 0.8 ** np.arange(33), atol=0.02)
    assert np.allclose(np.concatenate([z[1:], y[1:]]), 0, atol=0.02)


def test_brightness_that_differs_between_patches_correlates_far_apart() -> None:
    """Subtracting each patch's own mean would hide this correlation."""
    detail = noise((40, 8, 16, 16))
    brightness = np.random.default_rng(1).standard_normal((40, 1, 1, 1)).astype(np.float32) * 0.3
    found, expected = measure_texture(detail + brightness), brightness.var() / (brightness.var() + detail.var())
    assert all(along[-1] == pytest.approx(expected, abs=0.02) for along in found.correlation)
    assert correlation_distance(found, measure_texture(detail)) == pytest.approx(expected, abs=0.02)
    assert correlation_distance(found, found) == 0
