"""Accounting of torch's CUDA caching allocator, without memory: what a card of a given size would hold.

Rules as documented in c10/cuda/CUDACachingAllocator.cpp, with default settings (no expandable segments, no limit on
splitting): sizes are rounded up to 512 B; requests of at most 1 MiB are cut from segments of 2 MiB, those below 10 MiB
from segments of 20 MiB, larger ones get a segment of their own size rounded up to 2 MiB.  The smallest free block that
is large enough is reused and split if the rest is useful; freed neighbors are merged; each stream has its own blocks.
If the card is full, all segments without a used block are returned, and the request is repeated once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

import torch

MIB = 2**20
_ROUNDED_TO, _SMALL = 512, MIB
_SMALL_SEGMENT, _MEDIUM_SEGMENT, _LARGE, _LARGE_ROUNDED_TO = 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB


@dataclass(eq=False)
class Block:
    """A part of a segment."""

    size: int
    pool: tuple[bool, int]  # small or large, and the stream
    address: int
    previous: Block | None = field(default=None, repr=False)
    next: Block | None = field(default=None, repr=False)
    used: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.address


class CachingAllocator:
    """Allocates blocks of a card with `capacity` bytes, CUDA's own share excluded."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.retries = 0
        self._free: dict[tuple[bool, int], list[tuple[tuple[int, int], Block]]] = {}
        self._next_address = 0

    def allocate(self, size: int, stream: int = 0) -> Block:
        """Raises torch.OutOfMemoryError."""
        size = -(-max(size, 1) // _ROUNDED_TO) * _ROUNDED_TO
        pool = size <= _SMALL, stream
        block = self._reuse(size, pool) or self._new_segment(size, pool)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._new_segment(size, pool)
        if block is None:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / MIB:.2f} MiB. Of {self.capacity} bytes {self.reserved} "
                f"are reserved and {self.allocated} allocated"
            )
        rest = block.size - size
        if rest >= _ROUNDED_TO if pool[0] else rest > _SMALL:
            self._split(block, size)
        block.used = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        assert block.used
        block.used = False
        self.allocated -= block.size
        for neighbor in (block.previous, block.next):
            if neighbor is not None and not neighbor.used:
                self._take(neighbor)
                if neighbor is block.previous:
                    block.address, block.previous = neighbor.address, neighbor.previous
                else:
                    block.next = neighbor.next
                block.size += neighbor.size
        if block.previous is not None:
            block.previous.next = block
        if block.next is not None:
            block.next.previous = block
        self._add(block)

    def empty_cache(self) -> None:
        """Return all segments without a used block to the card."""
        for free in self._free.values():
            for _, block in free:
                if block.previous is None and block.next is None:
                    self.reserved -= block.size
            free[:] = [each for each in free if each[1].previous is not None or each[1].next is not None]

    def _reuse(self, size: int, pool: tuple[bool, int]) -> Block | None:
        free = self._free.setdefault(pool, [])
        at = bisect_left(free, (size, -1), key=lambda each: each[0])
        return free.pop(at)[1] if at < len(free) else None

    def _new_segment(self, size: int, pool: tuple[bool, int]) -> Block | None:
        if size <= _SMALL:
            size = _SMALL_SEGMENT
        else:
            size = _MEDIUM_SEGMENT if size < _LARGE else -(-size // _LARGE_ROUNDED_TO) * _LARGE_ROUNDED_TO
        if self.reserved + size > self.capacity:
            return None
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._next_address += 2 * size  # segments are not neighbors
        return Block(size, pool, self._next_address)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.size - size, block.pool, block.address + size, block, block.next)
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        self._add(rest)

    def _add(self, block: Block) -> None:
        insort(self._free.setdefault(block.pool, []), (block.key, block), key=lambda each: each[0])

    def _take(self, block: Block) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, block.key, key=lambda each: each[0])]

    def largest_free(self, stream: int = 0) -> int:
        free = self._free.get((False, stream))
        return free[-1][1].size if free else 0
