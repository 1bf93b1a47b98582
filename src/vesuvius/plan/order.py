"""Orders without tables: slots dealt to volumes by weight, and permutations of n things looked up by position.  Pure.

The plan of a 20 TB volume orders 38 million regions; readers and the trainer look up single positions.
"""

from __future__ import annotations

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
