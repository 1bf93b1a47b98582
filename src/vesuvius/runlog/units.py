"""Figures as people read them: sizes, spans of time, times of day; and quantiles without numpy, as memcheck needs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

GIB = 2**30
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"

_MIB = 2**20


def gib(size_bytes: float | None) -> str:
    """GiB with two decimals, without the unit; '-' = not known."""
    return "-" if size_bytes is None else f"{size_bytes / GIB:.2f}"


def size_text(size_bytes: float | None) -> str:
    """With its unit: '1.25 GiB', below a tenth of that '64 MiB', '1.25 TiB', '4.71 PiB'; '-' = not known."""
    if size_bytes is None:
        return "-"
    for unit, name in ((2**50, "PiB"), (2**40, "TiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{gib(size_bytes)} GiB" if size_bytes >= 0.1 * GIB else f"{size_bytes / _MIB:.3g} MiB"


def format_percent(share: float | None) -> str:
    """'15 %', '1.3 %'; '-' = not known."""
    return "-" if share is None else f"{100 * share:.1f}".removesuffix(".0") + " %"


def format_sizes(sizes: Iterable[object]) -> str:
    """'96x512x512'."""
    return "x".join(map(str, sizes))


def number(value: float | None) -> str:
    """Three significant digits, '-' for None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def format_duration(seconds: float) -> str:
    """'45s', '12m30s', '3h05m', '4d07h', '187 years'."""
    whole = round(seconds)
    minutes, s = divmod(whole, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days > 365:
        return f"{days / 365.25:.3g} years"
    if days:
        return f"{days}d{h:02d}h"
    if hours:
        return f"{hours}h{m:02d}m"
    return f"{minutes}m{s:02d}s" if minutes else f"{s}s"


def format_time(time_s: float) -> str:
    """Date and time of day here, as the run's log has them; `time_s`: seconds since 1970."""
    return time.strftime(DATE_FORMAT, time.localtime(time_s))


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies, between two of them in proportion.

    Args:
        values: at least one, in any order.
        share: 0 to 1.
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
