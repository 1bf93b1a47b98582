"""Formatting of figures."""

from __future__ import annotations

import numpy as np
import pytest

from vesuvius.runlog.units import (
    GIB,
    format_count,
    format_duration,
    format_gib,
    format_percent,
    format_rate,
    format_size,
    format_speed,
    quantile,
)


def test_figures_are_formatted_for_people_and_unknown_is_not_zero() -> None:
    durations = {
        0: "0 s",
        0.0209: "20.9 ms",
        1.17: "1.17 s",
        45.2: "45 s",
        59.6: "1m00s",
        750: "12m30s",
        11100: "3h05m",
        370800: "4d07h",
        5.9e9: "187 years",
    }
    for seconds, text in durations.items():
        assert format_duration(seconds) == text
    for share, text in {0.15: "15 %", 0.0126: "1.3 %", 1.0: "100 %", -0.5: "-50 %"}.items():
        assert format_percent(share) == text
    for size, text in {1.234 * GIB: "1.23 GiB", 0.1 * GIB: "0.10 GiB", 2**24: "16 MiB", 4.7e15: "4.17 PiB"}.items():
        assert format_size(size) == text
    for rate, text in {36_900: "37 kB/s", 1.17e6: "1.2 MB/s", 1.76e9: "1.8 GB/s"}.items():
        assert format_rate(rate) == text
    speeds = {(0.869,): "13 % slower", (0.85, 0.9): "15 to 10 % slower", (0.99, 1.05): "1 % slower to 5 % faster"}
    for ratios, text in (speeds | {(2.2,): "2.20 times as fast"}).items():
        assert format_speed(*ratios) == text
    assert [format_count(n, noun) for n, noun in ((1, "reader"), (0, "reader"), (2, "patch"))] == [
        "1 reader", "0 readers", "2 patches",
    ]  # fmt: skip
    assert (format_gib(None), format_gib(0), format_gib(1.234 * GIB)) == ("-", "0.00", "1.23")


def test_quantiles_equal_numpy_s() -> None:
    values = np.random.default_rng(0).random(37).tolist()
    for share in (0.0, 0.05, 0.5, 0.95, 1.0):
        assert quantile(values, share) == pytest.approx(np.quantile(values, share), rel=1e-12)
    assert quantile([3.0], 0.95) == 3.0


def test_negative_figures_have_the_unit_of_their_size() -> None:
    for size in (1.0, 5e3, 3e6, 5e9, 7e12, 2e15):
        assert format_size(-size) == f"-{format_size(size)}"
        assert format_rate(-size) == f"-{format_rate(size)}"
    for seconds in (0.02, 5.0, 45.0, 100.0, 4e5, 1e10):
        assert format_duration(-seconds) == f"-{format_duration(seconds)}"
