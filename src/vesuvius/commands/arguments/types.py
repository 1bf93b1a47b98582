"""Types of command-line arguments; each raises argparse's error with the value and what is needed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole(least: int) -> Callable[[str], int]:
    """A whole number of at least so much."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse


natural, positive = whole(0), whole(1)


def naturals(text: str) -> tuple[int, ...]:
    """Whole numbers, separated by commas."""
    return tuple(natural(part.strip()) for part in text.split(","))


def triple(least: int, example: str) -> Callable[[str], tuple[int, int, int]]:
    """Three whole numbers z,y,x of at least so much."""

    def parse(text: str) -> tuple[int, int, int]:
        sizes = [int(part) if part.strip().isdecimal() else -1 for part in text.split(",")]
        if len(sizes) != 3 or min(sizes) < least:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not three whole numbers z,y,x of at least {least}; try {example}"
            )
        z, y, x = sizes
        return z, y, x

    return parse


def positive_number(text: str) -> float:
    """A number above 0."""
    if (number := number_from_0(text)) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def number_from_0(text: str) -> float:
    """A number of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return number
