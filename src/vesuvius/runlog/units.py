"""Format sizes, rates, durations, speeds and times for people; quantiles without numpy, for memcheck."""

import math
import time
from collections.abc import Iterable, Sequence

GIB = 2**30
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"

_MIB = 2**20


def format_gib(size_bytes: float | None) -> str:
    """GiB with two decimals, without the unit; '-' if None."""
    return "-" if size_bytes is None else f"{size_bytes / GIB:.2f}"


def format_size(size_bytes: float | None) -> str:
    """'64 MiB', '1.25 GiB', '-4.71 PiB'; '-' if None.  From 0.1 GiB on in GiB."""
    if size_bytes is None:
        return "-"
    if size_bytes < 0:
        return f"-{format_size(-size_bytes)}"
    for unit, name in ((2**50, "PiB"), (2**40, "TiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.2f} {name}"
    if size_bytes >= 0.1 * GIB:
        return f"{format_gib(size_bytes)} GiB"
    return f"{size_bytes / _MIB:.3g} MiB" if size_bytes >= 0.1 * _MIB else f"{size_bytes / 1024:.3g} KiB"


def format_rate(bytes_per_s: float) -> str:
    """'37 kB/s', '1.2 MB/s', '1.8 GB/s'."""
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if abs(bytes_per_s) >= u), (1e3, "kB"))
    return f"{_two_digits(bytes_per_s / unit)} {name}/s"


def _two_digits(value: float) -> str:
    return f"{value:.2g}" if abs(value) < 10 else f"{value:.0f}"


def format_percent(share: float | None) -> str:
    """'15 %', '1.3 %'; '-' if None."""
    return "-" if share is None else f"{100 * share:.1f}".removesuffix(".0") + " %"


def format_speed(*ratios: float) -> str:
    """Speed relative to 1: '13 % slower', '2.20 times as fast'; of an interval '1 % slower to 5 % faster'."""
    *first, last = map(_speed, ratios)
    unit = last.partition(" ")[2]
    return " to ".join((*(each.removesuffix(f" {unit}") for each in first), last))


def _speed(ratio: float) -> str:
    if ratio >= 2:
        return f"{format_number(ratio)} times as fast"
    return f"{_two_digits(100 * abs(ratio - 1))} % {'faster' if ratio >= 1 else 'slower'}"


def format_count(count: int, noun: str) -> str:
    """'1 reader', '2 readers', '3 patches'."""
    plural = "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{count} {noun}{'' if count == 1 else plural}"


def format_sizes(sizes: Iterable[object]) -> str:
    """'96x512x512'."""
    return "x".join(map(str, sizes))


def format_number(value: float | None) -> str:
    """Three significant digits; '-' if None."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def format_duration(seconds: float) -> str:
    """'20.9 ms', '1.17 s', '45 s', '12m30s', '3h05m', '4d07h', '187 years'."""
    if abs(seconds) < 9.995:
        return f"{1000 * seconds:.3g} ms" if 0 < abs(seconds) < 0.9995 else f"{seconds:.3g} s"
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days > 365:
        return f"{days / 365.25:.3g} years"
    if days:
        return f"{days}d{h:02d}h"
    if hours:
        return f"{hours}h{m:02d}m"
    return f"{minutes}m{s:02d}s" if minutes else f"{s} s"


def format_time(time_s: float) -> str:
    """Local date and time, as in the log; `time_s`: seconds since 1970."""
    return time.strftime(DATE_FORMAT, time.localtime(time_s))


def quantile(values: Sequence[float], share: float) -> float:
    """Quantile (`share` 0 to 1) of at least one value, with linear interpolation."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])
