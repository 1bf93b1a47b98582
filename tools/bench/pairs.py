"""Turns, ratios and spreads of benchmarks: systems take turns, so that drift of the machine cancels."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Round and name; every other round is in reverse order."""
    for number in range(rounds):
        for name in names[:: -1 if number % 2 else 1]:
            yield number, name


def spread(values: Sequence[float], form: str = ".3g") -> str:
    """Median, and in brackets the extremes."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def ratios(values: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Ratio of each round."""
    return [value / other for value, other in zip(values, reference, strict=True)]
