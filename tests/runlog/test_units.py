"""Figures as people read them."""

from __future__ import annotations

import time

import numpy as np
import pytest

from vesuvius.runlog.units import (
    DATE_FORMAT,
    GIB,
    format_duration,
    format_percent,
    format_time,
    gib,
    quantile,
    size_text,
)


def test_figures_are_read_at_a_glance_and_what_is_not_known_is_no_zero() -> None:
    durations = {0: "0s", 59.6: "1m00s", 750: "12m30s", 11100: "3h05m", 370800: "4d07h", 5.9e9: "187 years"}
    for seconds, text in durations.items():
        assert format_duration(seconds) == text
    for share, text in {0.15: "15 %", 0.0126: "1.3 %", 1.0: "100 %", -0.5: "-50 %"}.items():
        assert format_percent(share) == text
    for size, text in {1.234 * GIB: "1.23 GiB", 0.1 * GIB: "0.10 GiB", 2**24: "16 MiB", 4.7e15: "4.17 PiB"}.items():
        assert size_text(size) == text
    assert (gib(None), gib(0), gib(1.234 * GIB)) == ("-", "0.00", "1.23")


def test_a_time_is_the_one_that_the_log_would_show() -> None:
    noon = time.mktime((2026, 3, 29, 12, 5, 6, 0, 0, -1))
    assert format_time(noon) == "2026-03-29 12:05:06"
    assert time.strptime(format_time(noon), DATE_FORMAT)[:6] == (2026, 3, 29, 12, 5, 6)


def test_quantiles_are_those_of_numpy() -> None:
    values = np.random.default_rng(0).random(37).tolist()
    for share in (0.0, 0.05, 0.5, 0.95, 1.0):
        assert quantile(values, share) == pytest.approx(np.quantile(values, share), rel=1e-12)
    assert quantile([3.0], 0.95) == 3.0
