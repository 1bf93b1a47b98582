"""Orders without tables: slots dealt to volumes by weight, permutations looked up by position, and the mixing.  Pure.

The plan of a 20 TB volume orders 38 million regions; readers and the trainer look up single positions.  Which region
sample i is cut from: a window of M regions slides over the regions in the order in which they are read.

    sample    0 ......... M-1 | M ......... 2M-1 | 2M ...
    round     0               | 1                | 2
    window    regions 0..M-1  | s..M+s-1         | 2s..M+2s-1       s = M / K

In each round every region of the window gives one sample, in a random order.  A region stays for K rounds, so it gives
K samples, and M / K regions come and go per round.  Everything has a closed form: nothing is walked through.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

_VOLUME = 2  # second word of the seed, beside those in plan.py
_SLOTS_PER_DRAW = 64
_SHUFFLED = 4096
_ROUNDS = 6
_MASK = 2**64 - 1


def volume_of_slot(seed: int, weights: tuple[float, ...], slot: int) -> tuple[int, int]:
    """The slot's volume, and how many earlier slots went to the same volume."""
    if len(weights) == 1:
        return 0, slot
    block, position = divmod(slot, _SLOTS_PER_DRAW)
    return _draw_volumes(seed, weights, block)[position]


@lru_cache(maxsize=32)
def _draw_volumes(seed: int, weights: tuple[float, ...], block: int) -> tuple[tuple[int, int], ...]:
    """For each slot of a block: its volume, and how many earlier slots (of all blocks) went to that volume.

    Slots are dealt in exact proportion to the weights, then shuffled within the block.  Counts have a closed form (a
    Beatty sequence per volume in fixed-point numbers), so block 10^6 costs as much as block 0.
    """
    first, stop = block * _SLOTS_PER_DRAW, (block + 1) * _SLOTS_PER_DRAW
    before = _dealt(seed, weights, first)
    counts = [b - a for a, b in zip(before, _dealt(seed, weights, stop), strict=True)]
    dealt = np.repeat(np.arange(len(weights)), counts)
    np.random.default_rng((seed, _VOLUME, block)).shuffle(dealt)
    used = list(before)
    slots = []
    for volume in dealt.tolist():
        slots.append((volume, used[volume]))
        used[volume] += 1
    return tuple(slots)


def _dealt(seed: int, weights: tuple[float, ...], slots: int) -> list[int]:
    """How many of the first `slots` slots each volume gets: within one of its share, summing to `slots`."""
    counts, rest_slots = [], slots
    for volume, share in enumerate(_shares(weights)):
        phase = int(np.random.default_rng((seed, _VOLUME, 2**32 + volume)).integers(2**40))
        counts.append((rest_slots * share + phase) >> 40)
        rest_slots -= counts[-1]
    return [*counts, rest_slots]


@lru_cache(maxsize=32)
def _shares(weights: tuple[float, ...]) -> list[int]:
    """The share of each volume but the last in what those before it leave, times 2^40.

    In fractions: sums of floats can overflow, and differences of them leave nothing of the small ones.
    """
    exact = [Fraction(weight) for weight in weights]
    return [round(weight / sum(exact[volume:]) * 2**40) for volume, weight in enumerate(exact[:-1])]


def permuted(position: int, count: int, seed: tuple[int, ...]) -> int:
    """Which of range(count) stands at `position` of the random order that belongs to `seed`.

    Up to 4096 things are shuffled.  More are ordered by a Feistel network, which permutes 2^bits numbers whatever its
    round function; results of at least `count` go through it again until they fall below (cycle walking, Black and
    Rogaway 2002), which leaves a permutation of range(count).  Takes about 7 microseconds.
    """
    assert 0 <= position < count
    if count <= _SHUFFLED:
        return _shuffled(count, seed)[position]
    half = ((count - 1).bit_length() + 1) // 2
    keys, low = _round_keys(seed), 2**half - 1
    while True:
        left, right = position >> half, position & low
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & low)
        position = left << half | right
        if position < count:
            return position


@lru_cache(maxsize=64)
def _shuffled(count: int, seed: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).permutation(count).tolist())


@lru_cache(maxsize=64)
def _round_keys(seed: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(key) for key in np.random.SeedSequence(seed).generate_state(_ROUNDS, np.uint64))


def _mix(value: int) -> int:
    """Scramble 64 bits (the finalizer of SplitMix64, Steele et al. 2014)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


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

    def patch_index_in_region(self, index: int) -> int:
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
