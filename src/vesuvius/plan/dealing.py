"""Deals slots to volumes in proportion to their weights.  Pure."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

_VOLUME = 2  # second word of the seed, beside those in plan.py
_SLOTS_PER_DRAW = 64


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
    counts = []
    rest_slots, rest_weight = slots, sum(weights)
    for volume, weight in enumerate(weights[:-1]):
        share = round(weight / rest_weight * 2**40)
        phase = int(np.random.default_rng((seed, _VOLUME, 2**32 + volume)).integers(2**40))
        counts.append((rest_slots * share + phase) >> 40)
        rest_slots -= counts[-1]
        rest_weight -= weight
    return [*counts, rest_slots]
