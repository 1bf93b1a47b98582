"""Which region sample i is cut from: a window of M regions slides over the regions in the order in which they are read.

    sample    0 ......... M-1 | M ......... 2M-1 | 2M ...
    round     0               | 1                | 2
    window    regions 0..M-1  | s..M+s-1         | 2s..M+2s-1       s = M / K

In each round every region of the window gives one sample, in a random order.  A region stays for K rounds, so it gives
K samples, and M / K regions come and go per round.  Everything has a closed form: nothing is walked through.  Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_ROUND = 6  # second word of the seed, beside those in plan.py
GROUPS = 8
"""Regions form so many groups, and sample i always comes from group i mod 8: a rank that takes the samples i = r mod W
reads regions of its own where W divides 8."""


@dataclass(frozen=True)
class Mixing:
    """The order in which regions give samples.  A region's slot 0, 1, 2, ... is its place in the order of reading."""

    seed: int
    regions: int  # M, those in flight at any time
    patches: int  # K, samples of each; those of the first window give fewer

    @property
    def groups(self) -> int:
        """Samples i and slots s go together where they are equal modulo this."""
        return math.gcd(GROUPS, self.regions)

    def slot_of(self, index: int) -> int:
        """The slot that sample `index` is cut from."""
        number, place = divmod(index, self.regions)
        first = self.first_slot(number)
        return first + (_order(self.seed, self.regions, self.groups, number)[place] - first) % self.regions

    def first_slot(self, number: int) -> int:
        """The first of the M slots in flight in round `number`."""
        return number * self.regions // self.patches

    def rounds_of(self, slot: int) -> range:
        """The rounds in which a slot is in flight."""
        first = -(-(slot - self.regions + 1) * self.patches // self.regions)
        stop = -(-(slot + 1) * self.patches // self.regions)
        return range(max(first, 0), stop)

    def turn_of(self, index: int) -> int:
        """How many samples its slot gives before this one, counting those that the first window leaves out."""
        number = index // self.regions
        slot = self.slot_of(index)
        return number - -(-(slot - self.regions + 1) * self.patches // self.regions)

    def samples_of(self, slot: int) -> Iterator[int]:
        """The samples that are cut from a slot, rising."""
        lane = slot % self.regions
        for number in self.rounds_of(slot):
            order = _order(self.seed, self.regions, self.groups, number)
            yield number * self.regions + order.index(lane)

    def slots(self, first: int, stop: int) -> range:
        """Slots that samples first <= i < stop may be cut from; some at either end may not be needed."""
        if first >= stop:
            return range(0)
        last_window = self.first_slot((stop - 1) // self.regions)
        return range(self.first_slot(first // self.regions), last_window + self.regions)


@lru_cache(maxsize=512)
def _order(seed: int, regions: int, groups: int, number: int) -> tuple[int, ...]:
    """The order in which the slots of a window, modulo M, give their samples in round `number`.

    In the first round it is that of reading, so that the first batch needs only the first regions.
    """
    rows = np.arange(regions).reshape(-1, groups)
    if number > 0:
        np.random.default_rng((seed, _ROUND, number)).permuted(rows, axis=0, out=rows)
    return tuple(rows.ravel().tolist())
