"""Slopes compared with closed forms and random noise; series of 20 minutes with and without a trend."""

import numpy as np
import pytest

from tests.monitor.memory.simulated import MB, healthy_series
from vesuvius.monitor.memory.risk import PeakSeries, slope_of


def _fed(values, begin_s: float = 1e9) -> PeakSeries:
    series = PeakSeries()
    for second, value in enumerate(values):
        series.add(begin_s + second, float(value))
    return series


def test_nine_outliers_of_sixty_barely_change_the_slope():
    """Theil-Sen breaks down at 29 % of outliers; a least-squares line is off by a factor here."""
    points = [(float(i), 2.0 * i + (1e4 if i in {0, 3, 5, 9, 17, 23, 30, 33, 52} else 0)) for i in range(60)]
    assert slope_of(points).bytes_per_s == pytest.approx(2.0, rel=0.02)
    assert abs(np.polyfit(*zip(*points, strict=True), 1)[0] - 2.0) > 2.0


@pytest.mark.parametrize("count", [6, 12, 60])
def test_the_interval_contains_the_true_slope_in_19_of_20_draws(count: int):
    """At least 93 %: 400 draws have a standard deviation of 1.1 %; rounding ranks outwards only widens the interval."""
    times = 5.0 * np.arange(count)
    held = 0
    for draw in range(400):
        values = 2.0 * times + np.random.default_rng((6, count, draw)).normal(0, 30, count)
        trend = slope_of(list(zip(times.tolist(), values.tolist(), strict=True)))
        held += trend.low <= 2.0 <= trend.high
    assert held >= 372


@pytest.mark.parametrize("rate", [50 * MB, 1 * MB])
@pytest.mark.parametrize("noise", [0, 5 * MB])
def test_a_leak_is_measured_at_its_true_rate(rate: float, noise: float):
    """From second 600 of a flat series; after six minutes the trend is that of the last five."""
    t = np.arange(960)
    values = 1e9 + rate * np.maximum(t - 600, 0) + np.random.default_rng((6, 1)).normal(0, noise, 960)
    trend = _fed(values).trend
    assert trend.bytes_per_s == pytest.approx(rate, rel=0.05)
    assert 0 < trend.low <= trend.bytes_per_s <= trend.high
    assert trend.seen_s == 295.0


@pytest.mark.sample(3)
@pytest.mark.parametrize("noise", [0, 50 * MB])
@pytest.mark.parametrize("begin_s", [600, 601, 602, 603, 604])
def test_a_fast_leak_is_detected_within_45_s_after_a_long_flat_time(begin_s: int, noise: float):
    t = np.arange(begin_s + 45)
    values = 1e9 + 50 * MB * np.maximum(t - begin_s, 0) + np.random.default_rng((6, 2)).normal(0, noise, len(t))
    assert _fed(values[:begin_s]).trend is None
    assert _fed(values).trend.bytes_per_s == pytest.approx(50 * MB, rel=0.25)


@pytest.mark.sample(7)
@pytest.mark.parametrize("at_s", range(60, 1100, 37))
@pytest.mark.parametrize("shape", ["up", "down"])
def test_a_single_step_is_never_a_trend(at_s: int, shape: str):
    sign = 1 if shape == "up" else -1
    series = PeakSeries()
    for second in range(1200):
        series.add(second, 3e9 + sign * 1e9 * (second >= at_s))
        assert series.trend is None


def test_a_buffer_that_refills_to_its_old_level_is_no_growth():
    """Only the first filling, at 15 MB/s, may look like a leak; later noise is at most a third of that."""
    series = PeakSeries()
    for second, value in enumerate(healthy_series()["sawtooth of 100 s"]):
        series.add(second, value)
        assert second < 200 or series.trend is None or series.trend.bytes_per_s < 5 * MB


@pytest.mark.parametrize("jump_s", [-3600, 3600])
def test_a_clock_jump_restarts_the_series(jump_s: int):
    series = _fed(1e9 + 50 * MB * np.arange(120.0), begin_s=1e6)
    assert series.trend is not None
    series.add(1e6 + 120 + jump_s, 1e9)
    assert series.trend is None
    for second in range(1, 40):
        series.add(1e6 + 120 + jump_s + second, 1e9 + 50 * MB * second)
    assert series.trend.bytes_per_s == pytest.approx(50 * MB)
