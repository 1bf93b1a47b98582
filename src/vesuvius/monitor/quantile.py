"""Quantiles of a few hundred figures, without numpy: memcheck asks for them too.  Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


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
