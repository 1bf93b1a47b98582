"""Orders without tables: slots dealt to volumes by weight, permutations computed by position, and mixing.  Pure.

Sample i is cut from one of the M regions of a window that slides over the regions in reading order.

    sample    0 ......... M-1 | M ......... 2M-1 | 2M ...
    round     0               | 1                | 2
    window    regions 0..M-1  | s..M+s-1         | 2s..M+2s-1       s = M / K

In each round every region of the window gives one sample; M / K regions enter and leave per round.  Sample i comes
from the slot that equals i modulo M, so if M is a multiple of the number of ranks, each region belongs to one rank.
Everything has a closed form: the plan of a 20 TB volume orders 38 million regions.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

_VOLUME = 2  # second word of the seed; plan.py has the others
_SLOTS_PER_DRAW = 64
_SHUFFLED = 4096
_ROUNDS = 6
_MASK = 2**64 - 1


def volume_of_slot(seed: int, weights: tuple[float, ...], slot: int) -> tuple[int, int]:
    """Return the index of a slot's volume, and how many earlier slots went to the same volume."""
    if len(weights) == 1:
        return 0, slot
    block, position = divmod(slot, _SLOTS_PER_DRAW)
    return _draw_volumes(seed, weights, block)[position]


@lru_cache(maxsize=32)
def _draw_volumes(seed: int, weights: tuple[float, ...], block: int) -> tuple[tuple[int, int], ...]:
    """Return, for each slot of a block, its volume and how many earlier slots (of all blocks) went to that volume.

    Slots are dealt in exact proportion to the weights, then shuffled within the block.  Counts have a closed form (a
    Beatty sequence per volume in fixed-point arithmetic), so block 10^6 costs as much as block 0.
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
    """Return how many of the first `slots` slots each volume gets: its share to within one; they sum to `slots`."""
    counts, rest_slots = [], slots
    for volume, share in enumerate(_shares(weights)):
        phase = int(np.random.default_rng((seed, _VOLUME, 2**32 + volume)).integers(2**40))
        counts.append((rest_slots * share + phase) >> 40)
        rest_slots -= counts[-1]
    return [*counts, rest_slots]


@lru_cache(maxsize=32)
def _shares(weights: tuple[float, ...]) -> list[int]:
    """Return the share of each volume but the last in what the earlier ones leave, times 2^40.

    Uses fractions: sums of floats can overflow, and their differences lose small weights.
    """
    exact = [Fraction(weight) for weight in weights]
    return [round(weight / sum(exact[volume:]) * 2**40) for volume, weight in enumerate(exact[:-1])]


def permuted(position: int, count: int, seed: tuple[int, ...]) -> int:
    """Return the element at `position` of the random permutation of range(count) that `seed` defines.

    Up to 4096 elements are shuffled.  Longer ranges use a Feistel network, which permutes 2^bits numbers for any round
    function; results of at least `count` pass through it again until they are smaller (cycle walking, Black and Rogaway
    2002), which leaves a permutation of range(count).  Takes about 7 microseconds.
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


@dataclass(frozen=True)
class Mixing:
    """The order in which regions give samples.  A region's slot 0, 1, 2, ... is its position in reading order."""

    regions: int  # M: in flight at any time
    patches: int  # K: samples per region; fewer for those of the first window

    def slot_of(self, index: int) -> int:
        """Return the slot that sample `index` is cut from: that of the window which equals it modulo M."""
        first = self.first_slot(index // self.regions)
        return first + (index - first) % self.regions

    def first_slot(self, round_index: int) -> int:
        return round_index * self.regions // self.patches

    def rounds_of(self, slot: int) -> range:
        first = -(-(slot - self.regions + 1) * self.patches // self.regions)
        stop = -(-(slot + 1) * self.patches // self.regions)
        return range(max(first, 0), stop)

    def patch_index_in_region(self, index: int) -> int:
        """Return how many samples its slot gives before this one, counting those that the first window omits."""
        slot = self.slot_of(index)
        return index // self.regions - -(-(slot - self.regions + 1) * self.patches // self.regions)

    def samples_of(self, slot: int) -> range:
        """Return the samples that are cut from a slot."""
        rounds, lane = self.rounds_of(slot), slot % self.regions
        return range(rounds.start * self.regions + lane, rounds.stop * self.regions + lane, self.regions)

    def slots(self, first: int, stop: int) -> range:
        """Return the slots that samples first <= i < stop may be cut from; some at either end may not be needed."""
        if first >= stop:
            return range(0)
        last_window = self.first_slot((stop - 1) // self.regions)
        return range(self.first_slot(first // self.regions), last_window + self.regions)
